"""One per job; it outlives the agent. Standard library only, everything imported at start, copied into the job folder and run from there.

The folder is a contract with a version (`FORMAT`): the agent writes `spec.json`, `env.json` and, for leased work, `deadline.json`; this
process leaves `claimed` (a second supervisor of the same attempt ends there), `supervisor.json`, `started.json`, `alive` (a sign of life
every ten seconds) and `exit.json`. Room for every record is taken before the job starts, so that a full disk cannot swallow an exit code;
`started.json` is on disk before the job's first instruction, `exit.json` before we end. The job is stopped on SIGTERM, at its wall limit, or
when its lease has passed, which no later word takes back; it counts as gone only when the kernel says that no descendant is left (we are
their subreaper).
Run as `python -I -S supervisor.py JOB_FOLDER`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time

FORMAT = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
LIBC = ctypes.CDLL(None, use_errno=True)
PRCTL, MOUNT, UNSHARE = LIBC.prctl, LIBC.mount, LIBC.unshare  # Loaded before any fork and before the code on disk can change.
CLONE_NEWNS = 0x20000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1}

RECORD_BYTES = 4096
"""Room of a preallocated record; the largest (an exit with a long path in it) is cut to fit."""
ALIVE_S = 10.0
"""After a host reboot the end of a run is the last sign of life, so this is the most that can be lost."""
LEASE_S = 1.0
"""Between looks at a lease: what a stop can be late by, and a margin of the hub's counts."""
DISK_S = 1.0
"""Between tries to leave the exit record on a disk that refuses."""
SWEEP_S = 0.05
"""While a job is being stopped: soon enough to be felt as at once, seldom enough to cost nothing."""
FREEZE_ROUNDS = 200
"""Sweeps that stop new processes before the kill; a fork bomb is still after a few."""

EXIT_TWICE = 4
EXIT_DISK = 5
EXIT_NO_SUBREAPER = 6
EXIT_TOO_LATE = 7
EXIT_LIMITS = 8
TOO_LATE = "too late: "
"""Before the reason, on standard error: nothing of the job was started, and never will be."""


def boot_ns() -> int:
    """CLOCK_BOOTTIME in nanoseconds: counts suspend, restarts at boot."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def now() -> dict[str, int]:
    return {"utc_ns": time.time_ns(), "boot_ns": boot_ns()}


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        return f.read().strip()


def start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat; the name in field 2 may hold spaces and brackets, so count from its last bracket."""
    with open(f"/proc/{pid}/stat", "rb") as f:
        return int(f.read().rpartition(b")")[2].split()[19])


def identity(pid: int) -> dict[str, object]:
    return {"pid": pid, "start_ticks": start_ticks(pid), "boot_id": boot_id()}


def sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Record:
    """A file whose room is taken now and whose content comes later: `.NAME.part`, renamed to NAME when whole."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name = folder, name
        self.part = f"{folder}/.{name}.part"
        self.fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self.fd, 0, RECORD_BYTES)
        os.pwrite(self.fd, b" " * RECORD_BYTES, 0)  # Its blocks are its own now; what is in them need not be on disk yet.

    def write(self, value: dict[str, object]) -> None:
        """Overwrite in place; blanks after the JSON keep the length."""
        data = json.dumps(value).encode("ascii")
        if len(data) > RECORD_BYTES:
            data = json.dumps({k: v for k, v in value.items() if k != "refused"}).encode("ascii")
        os.pwrite(self.fd, data.ljust(RECORD_BYTES), 0)

    def show(self, value: dict[str, object]) -> None:
        """Write, then give it its name: a reader sees all of it or none. Enough where a power loss ends what it tells of, too."""
        self.write(value)
        os.rename(self.part, f"{self.folder}/{self.name}")

    def publish(self, value: dict[str, object]) -> None:
        """As `show`, and also after power loss; so are then the names of all that was shown before."""
        self.write(value)
        os.fsync(self.fd)
        os.rename(self.part, f"{self.folder}/{self.name}")
        sync_folder(self.folder)


def read_json(path: str) -> dict[str, object] | None:
    """A small file of the agent's; None if it is not there or not whole (it is renamed into place, so a bad one is as none)."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class Lease:
    """Until when the job may run: CLOCK_BOOTTIME of this boot or the wall clock, the earlier, in nanoseconds."""

    def __init__(self, told: dict[str, object]) -> None:
        """As the agent wrote it; whatever is missing or no number has passed."""
        self.boot_id = told.get("boot_id")
        self.boot_ns, self.utc_ns = nanoseconds(told.get("boot_s"), 0), nanoseconds(told.get("utc"), 0)
        self.said_boot_ns, self.said_utc_ns = (
            nanoseconds(told.get("said_boot_s"), boot_ns()),
            nanoseconds(told.get("said_utc"), time.time_ns()),
        )

    def over(self) -> bool:
        return self.boot_id != boot_id() or boot_ns() >= self.boot_ns or time.time_ns() >= self.utc_ns

    def takes(self, later: Lease) -> bool:
        """Whether `later` was said before this one had passed: we, or the whole host, may have slept meanwhile."""
        return later.boot_id == self.boot_id and later.said_boot_ns < self.boot_ns and later.said_utc_ns < self.utc_ns


def nanoseconds(seconds: object, otherwise: int) -> int:
    return int(seconds * 1e9) if isinstance(seconds, int | float) else otherwise


def groups_of(spec: dict[str, object]) -> list[dict[str, object]]:
    """The groups that limit the run, as the agent named them."""
    found = spec.get("limits")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def write_limit(folder: str, name: str, value: str) -> None:
    """A name that begins with `-` is one that not every kernel has."""
    try:
        with open(f"{folder}/{name.removeprefix('-')}", "w", encoding="ascii") as f:
            f.write(value)
    except OSError:
        if not name.startswith("-"):
            raise


def oom_kills(folder: str, name: str) -> int:
    """How often the kernel ended something in this group for want of memory; 0 if it does not say."""
    try:
        with open(f"{folder}/{name}", encoding="ascii") as f:
            counts = [line.split() for line in f]
    except OSError:
        return 0
    return sum(int(words[1]) for words in counts if len(words) == 2 and words[0] == "oom_kill" and words[1].isdigit())


def children(pid: int) -> list[int]:
    """Direct children of `pid`; empty if it has gone."""
    try:
        found: list[int] = []
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as f:
                found += [int(child) for child in f.read().split()]
        return found
    except (FileNotFoundError, ProcessLookupError):
        return []


def tree() -> dict[int, list[int]]:
    """Children by parent from a walk of /proc: for kernels that do not list children."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as f:
                found.setdefault(int(f.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    return found


def descendants() -> list[int]:
    """All below us: as their subreaper we keep every orphan, whatever session it made for itself."""
    walked = None if os.path.exists(f"/proc/self/task/{os.getpid()}/children") else tree()
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        pid = todo.pop()
        kids = children(pid) if walked is None else walked.get(pid, [])
        found += kids
        todo += kids
    return found


def tell(pids: list[int], sig: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, sig)


def kill_all(cgroup: str | None) -> None:
    """SIGKILL to everything of the job, at once where the kernel can (cgroup v2), else after holding all of it still."""
    if cgroup:
        with contextlib.suppress(OSError), open(f"{cgroup}/cgroup.kill", "w", encoding="ascii") as f:
            f.write("1")
    held: set[int] = set()
    for _ in range(FREEZE_ROUNDS):
        fresh = [pid for pid in descendants() if pid not in held]
        if not fresh:
            break
        tell(fresh, signal.SIGSTOP)
        held.update(fresh)
    tell(descendants(), signal.SIGKILL)


def call(doing: str, done: int) -> None:
    """A system call's answer; `OSError` that names what was done."""
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), doing)


def furnish(mounts: object) -> None:
    """A mount namespace of its own, in which each declared folder is what this run may see of it. What is hidden or read-only stays so: the job
    has no right to undo it, and a user namespace of its own gets these mounts locked together."""
    if not isinstance(mounts, list) or not mounts:
        return
    call("data namespace", UNSHARE(CLONE_NEWNS))
    call("data namespace", MOUNT(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    for one in mounts:
        path, how = os.fsencode(str(one["path"])), one["how"]
        doing = f"data {one['path']}"
        if how == "hidden":
            call(doing, MOUNT(b"none", path, b"tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, b"size=4k,mode=000"))
            continue
        # What is mounted below a read-only folder would stay writable: it is not shown.
        call(doing, MOUNT(path, path, None, MS_BIND | (MS_REC if how == "rw" else 0), None))
        if how == "ro":
            call(doing, MOUNT(b"none", path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, None))


def become(spec: dict[str, object], env: dict[str, str], go: int, said: int, log: int) -> None:
    """After the fork: wait for the parent's record, drop rights, become the job. Never returns; a refusal is told through `said`."""
    doing = "start"
    try:
        os.setsid()
        if not os.read(go, 1):
            os._exit(125)
        cgroup = spec.get("cgroup")
        if cgroup:
            doing = str(cgroup)
            with open(f"{cgroup}/cgroup.procs", "w", encoding="ascii") as f:
                f.write(str(os.getpid()))
        for group in groups_of(spec):
            doing = str(group["folder"])
            with open(f"{doing}/cgroup.procs", "w", encoding="ascii") as f:
                f.write(str(os.getpid()))
        doing = "data"
        furnish(spec.get("mounts"))
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if "uid" in spec:
            doing = f"uid {spec['uid']}"
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as f:
                f.write("0")
            os.setgroups([int(g) for g in spec.get("groups", [])])  # type: ignore[attr-defined]  # a list by the contract
            os.setgid(int(str(spec["gid"])))
            os.setuid(int(str(spec["uid"])))
        PRCTL(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # Programs with set-uid bits give nothing back.
        os.umask(0o077)
        doing = str(spec["cwd"])
        os.chdir(doing)
        for number in (signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        argv = [str(word) for word in spec["argv"]]  # type: ignore[attr-defined]  # a list by the contract
        doing = argv[0]
        os.execve(argv[0], argv, env)
    except OSError as err:
        told = {"errno": err.errno, "file": str(err.filename or doing), "text": err.strerror}
        os.write(said, json.dumps(told).encode("utf-8")[:1024])
    except BaseException as err:
        os.write(said, json.dumps({"errno": 0, "file": doing, "text": repr(err)[:200]}).encode("utf-8"))
    os._exit(126)


class Supervisor:
    """The life of one job's processes, from fork to the last one seen gone."""

    def __init__(self, folder: str, spec: dict[str, object]) -> None:
        self.folder, self.spec = folder, spec
        self.cgroup = str(spec["cgroup"]) if spec.get("cgroup") else None
        self.wall_ns = int(float(str(spec["wall_s"])) * 1e9) if spec.get("wall_s") else None
        self.grace_ns = int(float(str(spec.get("grace_s", 10))) * 1e9)
        self.pid = 0
        self.began: dict[str, int] = {}
        self.main_ended: dict[str, int] | None = None
        self.status = 0
        self.usage = (0.0, 0.0, 0)
        self.stopping_since: int | None = None
        self.reason: str | None = None
        self.left_behind = 0
        self.refused = ""
        self.out_of_memory = False
        self.leased = bool(spec.get("leased"))
        self.lease: Lease | None = None

    def run(self) -> int:
        """Prepare all records, start the job, see it through, leave the exit record."""
        try:
            started, alive, self.exit = (Record(self.folder, name) for name in ("started.json", "alive", "exit.json"))
            self.log = os.open(f"{self.folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            alive.show({"format": FORMAT, **now()})
        except OSError as err:
            sys.stderr.write(f"records: {err}" + "\n")
            return EXIT_DISK
        if late := self.too_late():
            sys.stderr.write(f"{TOO_LATE}{late}" + "\n")
            return EXIT_TOO_LATE
        self.make_cgroup()
        try:
            self.make_limits()
        except OSError as err:
            sys.stderr.write(f"limits: {err}" + "\n")
            self.remove_groups()
            return EXIT_LIMITS
        self.start(started)
        gone = self.watch()
        self.out_of_memory = any(oom_kills(str(one["folder"]), str(one["oom"])) for one in groups_of(self.spec) if one.get("oom"))
        self.remove_groups()
        return self.tell_end(self.record(gone))

    def tell_end(self, record: dict[str, object]) -> int:
        """However long the disk refuses (read-only, a fault): nobody else saw this end. Only a folder that is gone has nobody to tell."""
        while True:
            try:
                self.exit.publish(record)
            except FileNotFoundError:
                return EXIT_DISK
            except OSError as err:
                sys.stderr.write(f"exit.json: {err}" + "\n")
                time.sleep(DISK_S)
            else:
                return 0

    def too_late(self) -> str:
        """Asked once, before anything of the job is there: between the agent's word and this line the host may have slept for a day."""
        by = self.spec.get("start_by")
        if isinstance(by, dict) and (by.get("boot_id") != boot_id() or boot_ns() >= nanoseconds(by.get("boot_s"), 0)):
            return "the time for its start had passed"
        if self.lease_over():
            return "its lease had passed"
        return ""

    def make_cgroup(self) -> None:
        """Its own cgroup if the spec names one and the kernel agrees; else the subreaper alone contains the job."""
        if not self.cgroup:
            return
        try:
            os.makedirs(self.cgroup, exist_ok=True)
            os.stat(f"{self.cgroup}/cgroup.kill")
        except OSError:
            self.cgroup = None
            self.spec.pop("cgroup", None)

    def make_limits(self) -> None:
        """The groups that hold the run to its limits; one that the kernel refuses refuses the run."""
        for group in groups_of(self.spec):
            folder, writes = str(group["folder"]), group.get("writes")
            os.makedirs(folder, exist_ok=True)
            for name, value in writes if isinstance(writes, list) else ():
                write_limit(folder, str(name), str(value))

    def remove_groups(self) -> None:
        for folder in {self.cgroup or "", *(str(one["folder"]) for one in groups_of(self.spec))} - {""}:
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def start(self, started: Record) -> None:
        env = read_json(f"{self.folder}/env.json") or {}
        go_read, go_write = os.pipe()
        said_read, said_write = os.pipe()  # Close-on-exec: an empty answer means that exec succeeded.
        self.pid = os.fork()
        if self.pid == 0:
            # The child must not hold the other ends: if we die before the go, it reads the end of the pipe and goes away too.
            os.close(go_write)
            os.close(said_read)
            become(self.spec, {k: str(v) for k, v in env.items()}, go_read, said_write, self.log)
        os.close(go_read)
        os.close(said_write)
        os.close(self.log)
        self.began = now()
        started.publish({"format": FORMAT, **identity(self.pid), **self.began, "cgroup": self.cgroup})
        os.write(go_write, b"1")
        os.close(go_write)
        self.refused = os.read(said_read, 4096).decode("utf-8", "replace")
        os.close(said_read)

    def watch(self) -> dict[str, int]:
        """Until nothing of the job is left; the moment when that was seen."""
        alive_at = boot_ns()
        while not self.reap():
            at = boot_ns()
            if at - alive_at >= ALIVE_S * 1e9:
                alive_at = at
                with contextlib.suppress(OSError):
                    self.alive_again()
            if self.stopping_since is None:
                self.look_for_an_end(at)
            elif at - self.stopping_since >= self.grace_ns:
                kill_all(self.cgroup)
            hit = signal.sigtimedwait(SIGNALS, self.patience_s(at))
            if hit and hit.si_signo == signal.SIGTERM and self.stopping_since is None:
                self.ask("asked")
        gone = now()
        if self.main_ended is not None and not self.left_behind:
            gone = self.main_ended
        return gone

    def alive_again(self) -> None:
        """The sign of life is overwritten in place: no room is needed for it."""
        with open(f"{self.folder}/alive", "r+b") as f:
            f.write(json.dumps({"format": FORMAT, **now()}).encode("ascii").ljust(RECORD_BYTES))
            f.flush()
            os.fsync(f.fileno())

    def reap(self) -> bool:
        """Collect all that ended, orphans that came to us too; True when the kernel knows no child of ours any more."""
        while True:
            try:
                got, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if got == 0:
                return False
            if got == self.pid:
                self.main_ended, self.status = now(), status
                self.usage = (usage.ru_utime, usage.ru_stime, usage.ru_maxrss)

    def look_for_an_end(self, at: int) -> None:
        if self.main_ended is not None:
            self.left_behind = max(1, len(descendants()))  # `reap` has just said that there is at least one.
            self.ask("left_behind")
        elif self.wall_ns is not None and at - self.began["boot_ns"] >= self.wall_ns:
            self.ask("wall_limit")
        elif self.lease_over():
            self.ask("lease_ended")

    def lease_over(self) -> bool:
        """Final: a lease that has passed is not replaced by a later one. Leased work whose lease cannot be read at all has none left."""
        told = read_json(f"{self.folder}/deadline.json")
        later = Lease(told) if told is not None else None
        if later is not None and (self.lease is None or self.lease.takes(later)):
            self.lease = later
        return self.lease.over() if self.lease is not None else self.leased

    def ask(self, reason: str) -> None:
        """TERM to everything; what is left after the grace is killed. Final: nothing takes a stop back."""
        asked = read_json(f"{self.folder}/stop.json") if reason == "asked" else None
        if asked and "grace_s" in asked:
            self.grace_ns = int(float(str(asked["grace_s"])) * 1e9)
        self.reason, self.stopping_since = reason, boot_ns()
        pids = descendants()
        tell(pids, signal.SIGTERM)
        tell(pids, signal.SIGCONT)  # A stopped process takes no TERM.

    def patience_s(self, at: int) -> float:
        """How long nothing can be due."""
        if self.stopping_since is not None:
            return SWEEP_S
        patience = ALIVE_S if self.lease is None else LEASE_S
        if self.wall_ns is not None:
            patience = min(patience, max(0.001, (self.began["boot_ns"] + self.wall_ns - at) / 1e9))
        return patience

    def record(self, gone: dict[str, int]) -> dict[str, object]:
        refused = json.loads(self.refused) if self.refused else None
        code = os.waitstatus_to_exitcode(self.status) if self.main_ended else None
        return {
            "format": FORMAT,
            "code": code if code is not None and code >= 0 and not refused else None,
            "signal": -code if code is not None and code < 0 else None,
            "refused": refused,
            "stopped_for": None if self.reason == "left_behind" else self.reason,
            "left_behind": self.left_behind,
            "out_of_memory": self.out_of_memory,
            "started": self.began,
            "main_ended": self.main_ended,
            "gone": gone,
            "ran_us": (gone["boot_ns"] - self.began["boot_ns"]) // 1000,
            "user_s": self.usage[0],
            "system_s": self.usage[1],
            "max_rss_kib": self.usage[2],
        }


def main(folder: str) -> int:
    os.chdir("/")
    spec = read_json(f"{folder}/spec.json")
    if spec is None or spec.get("format") != FORMAT:
        sys.stderr.write(f"spec.json of format {FORMAT} expected" + "\n")
        return 2
    try:
        os.close(os.open(f"{folder}/claimed", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return EXIT_TWICE
    except OSError as err:
        sys.stderr.write(f"claimed: {err}" + "\n")
        return EXIT_DISK
    if PRCTL(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        return EXIT_NO_SUBREAPER
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if os.geteuid() == 0:
        # Out of memory must take the job, not its only witness.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as f:
            f.write("-500")
    try:
        Record(folder, "supervisor.json").show({"format": FORMAT, **identity(os.getpid())})
    except OSError as err:
        sys.stderr.write(f"supervisor.json: {err}" + "\n")
        return EXIT_DISK
    return Supervisor(folder, spec).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
