"""Work as processes of this machine, each under a supervisor of its own that outlives the agent.

The job folder `jobs/<attempt>/` is the contract between them (format 1, see `intertie.agent.supervisor`):

    attempt.json              0600, the agent's: all that it knew at the start but values of the environment, the signed offer with it: a lost journal
                              is made anew from these
    spec.json env.json        0600, the agent's: what to run, values of the environment
    deadline.json             0600, the agent's, renewed: until when leased work may run
    stop.json                 0600, the agent's: it is to end, with this grace; never taken back
    script                    0500, the job's account: what the user wrote
    work/ tmp/                0700, the job's account: where it runs
    log                       0600: stdout and stderr, the file itself, no pipe
    supervisor.py             a copy, so that an upgrade of the package changes nothing under it
    claimed supervisor.json started.json alive exit.json      left by the supervisor
    result.tar.gz             the packed outputs until the hub has them

Folders are 0711: passed through by the job's account, listed by nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from intertie.agent import accounts, procs, supervisor
from intertie.agent.accounts import LocalAccount
from intertie.agent.adapters.clear import clear
from intertie.agent.adapters.house import House
from intertie.agent.adapters.orphans import Orphan, Owed
from intertie.agent.adapters.port import Chunk, Presence
from intertie.agent.adapters.records import ExitFile, KeptFile, MomentFile, SpecFile, StartedFile, exit_of, record_of
from intertie.agent.core.attempts import Exit
from intertie.agent.core.leases import Deadline
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.agent.outputs import pack_outputs
from intertie.contracts.job import ResultRef
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId
from intertie.pack import unpack

# The supervisor's way to `started.json` is 24 ms at rest; a machine that needs longer than this is not going to start it well.
START_S = 30.0
# A new agent reads the formats that the two versions before it wrote.
FORMATS = tuple(range(max(1, supervisor.FORMAT - 2), supervisor.FORMAT + 1))
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_encode = msgspec.json.Encoder(decimal_format="string").encode


def find_cgroups() -> Path | None:
    """Where cgroup v2 is mounted, if we may make groups there; containment and kill by the kernel itself."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, kind, *_ = line.split()
        if kind != "cgroup2":
            continue
        home = Path(point) / "intertie"
        try:
            home.mkdir(exist_ok=True)
        except OSError:
            return None
        return home if (home / "cgroup.kill").exists() else None
    return None


def visible_npus(devices: Sequence[str]) -> dict[str, str]:
    """Ascend's runtime counts chips by the number that stands first in their id; the cards of others it does not know."""
    numbers = [device.split("-")[1] for device in devices if device.startswith("npu-")]
    return {"ASCEND_RT_VISIBLE_DEVICES": ",".join(numbers)} if numbers else {}


class ProcessAdapter:
    """This machine. `folder` is `<data>/jobs`; `python` runs supervisors (they need the standard library alone)."""

    def __init__(
        self,
        folder: Path,
        *,
        python: str = sys.executable,
        cgroups: Path | None = None,
        boot: str | None = None,
        house: House | None = None,
    ) -> None:
        self.folder = folder
        self.python = python
        self.cgroups = cgroups
        self.house = house or House()
        self.boot = boot or supervisor.boot_id()
        self._spawned: dict[AttemptId, int] = {}
        self._orphans: dict[AttemptId, Orphan] = {}
        self._asked: dict[AttemptId, float] = {}
        """Stops that came to this agent: attempt → its grace, seconds."""
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        folder.chmod(0o711)

    @property
    def single_user(self) -> bool:
        return not accounts.is_root()

    @property
    def self_stop(self) -> bool:
        return True

    def may_run_as(self, account: str) -> str:
        return "" if self.single_user else accounts.why_not(account)

    def home(self, attempt: AttemptId) -> Path:
        return self.folder / attempt

    # --- prepare ---

    async def prepare(self, attempt: Attempt, pack: Path | None) -> None:
        try:
            await asyncio.to_thread(self._prepare, attempt, pack)
        except OSError as err:
            if err.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Unavailable("agent.disk_full", f"no room for {attempt.id} below {self.folder}", retry_after_s=10) from err
            if err.errno in (errno.EIO, errno.EROFS):
                text = f"the disk below {self.folder} cannot be written: {err.strerror}"
                raise Unavailable("agent.disk_broken", text, retry_after_s=60) from err
            raise Refused("agent.prepare", f"{attempt.id} cannot be prepared: {err}") from err

    def _account(self, attempt: Attempt) -> LocalAccount | None:
        """Who it runs as; None is the agent's own user."""
        if not accounts.is_root():
            return None
        if attempt.local is not None:
            # The owner's own use: as the caller, root included; the kernel told us who that is.
            who = accounts.by_uid(attempt.local.uid)
            return who or LocalAccount(str(attempt.local.uid), attempt.local.uid, attempt.local.uid, (), "/")
        if why := accounts.why_not(attempt.account):
            raise Refused("agent.account", why)
        return accounts.by_name(attempt.account)

    def _prepare(self, attempt: Attempt, pack: Path | None) -> None:
        home = self.home(attempt.id)
        who = self._account(attempt)
        home.mkdir(mode=0o711, exist_ok=True)
        home.chmod(0o711)
        for name in ("work", "tmp"):
            clear(home / name)
            (home / name).mkdir(mode=0o700)
        if pack is not None:
            unpack(pack, home / "work")
        script = home / "script"
        script.unlink(missing_ok=True)
        # Nothing here is worth an fsync: an attempt without `claimed` is prepared anew, and the supervisor syncs the folder before the job starts.
        _write(script, _script(attempt).encode("utf-8"), 0o500, sync=False)
        for path in (home / "work", home / "tmp", script):
            if who is not None:
                _give(path, who)
        shutil.copyfile(supervisor.__file__, home / "supervisor.py")
        cwd = attempt.local.cwd if attempt.local else str(home / "work")
        spec: dict[str, Any] = {
            "format": supervisor.FORMAT,
            **self.house.spec(attempt, [str(script), *attempt.spec.args], work=cwd, shown=[str(home)]),
            "cwd": cwd,
            "wall_s": attempt.spec.wall_s,
            "grace_s": 10,
            "cgroup": str(self.cgroups / attempt.id) if self.cgroups else None,
            "leased": attempt.lease_s > 0,
        }
        if attempt.local is None and attempt.go_boot_s is not None:
            spec["start_by"] = {"boot_id": attempt.kernel_boot, "boot_s": attempt.go_boot_s + attempt.start_by_s}
        if who is not None:
            spec |= {"uid": who.uid, "gid": who.gid, "groups": list(who.groups)}
        _write(home / "env.json", json.dumps(self._env(attempt, home, cwd, who)).encode("utf-8"), 0o600, sync=False)
        _write(home / "attempt.json", _encode(KeptFile(supervisor.FORMAT, msgspec.structs.replace(attempt, env={}))), 0o600, sync=False)
        _write(home / "spec.json", json.dumps(spec).encode("utf-8"), 0o600, sync=False)

    def _env(self, attempt: Attempt, home: Path, cwd: str, who: LocalAccount | None) -> dict[str, str]:
        """The job's whole environment: the user's values below ours, so that none of ours can be overruled."""
        gpus = attempt.devices if attempt.kind is DeviceKind.GPU else []
        user_home = who.home if who else os.path.expanduser("~")
        base = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": user_home if os.path.isdir(user_home) else cwd, "TMPDIR": str(home / "tmp")}
        if who is not None:
            base |= {"USER": who.name, "LOGNAME": who.name}
        ours = {
            # UUIDs name the same card whatever order a driver counts in; the empty string hides every card from a job of slots.
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            **visible_npus(gpus),
            "INTERTIE_JOB": attempt.job,
            "INTERTIE_ATTEMPT": attempt.id,
            "INTERTIE_DEVICES": ",".join(attempt.devices),
            "INTERTIE_WORK": cwd,
        }
        if attempt.traceparent:
            ours["TRACEPARENT"] = attempt.traceparent
        return base | dict(attempt.env) | ours

    # --- start ---

    async def start(self, attempt: Attempt) -> StartedRecord | Exit:
        home = self.home(attempt.id)
        if (home / "fenced").exists():
            return Exit(certain=True, refused_errno=errno.EEXIST, refused_file="supervisor", refused_text="given up before it started")
        if not (home / "claimed").exists():
            try:
                self._spawned[attempt.id] = procs.spawn(
                    [self.python, "-I", "-S", str(home / "supervisor.py"), str(home)], stderr=home / "supervisor.log", env={}
                )
            except OSError as err:
                return Exit(
                    certain=True, refused_errno=err.errno or errno.EAGAIN, refused_file=f"/sys/{self.python}", refused_text=str(err)
                )
        return await self._begun(attempt.id)

    async def _begun(self, attempt: AttemptId) -> StartedRecord | Exit:
        """The supervisor's record, as soon as it is there; an exit if its process went away without one."""
        loop = asyncio.get_running_loop()
        until = loop.time() + START_S
        pause = 0.004
        while True:
            if (started := self._started(attempt)) is not None:
                return record_of(started)
            if (self.home(attempt) / "fenced").exists():
                return Exit(certain=True, refused_errno=errno.EEXIST, refused_file="supervisor", refused_text="given up before it started")
            if self._exit(attempt) is None and not self._supervisor_lives(attempt):
                if (started := self._started(attempt)) is not None:
                    return record_of(started)
                why = self._complaint(attempt)
                number = errno.ETIME if why.startswith(supervisor.TOO_LATE) else errno.ENOSPC
                return Exit(certain=True, refused_errno=number, refused_file="supervisor", refused_text=why)
            if loop.time() > until:
                raise Unavailable("agent.start_slow", f"the supervisor of {attempt} left no record within {START_S:.0f} s")
            await asyncio.sleep(pause)
            # A look costs a tenth of a millisecond: as long as most starts take, often; then seldom.
            pause = min(0.05, pause * 1.15)

    def _supervisor_lives(self, attempt: AttemptId) -> bool:
        pid = self._spawned.get(attempt)
        if pid is not None:
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                done, status = pid, 0
            if done == 0:
                return True
            del self._spawned[attempt]
            if os.waitstatus_to_exitcode(status) != supervisor.EXIT_TWICE:
                return False
        who = self._supervisor(attempt)
        if who is not None:
            return procs.alive(who)
        # Claimed by one that has not yet written who it is: it does so within milliseconds.
        return (self.home(attempt) / "claimed").exists() and self._age_s(attempt) < START_S

    def _age_s(self, attempt: AttemptId) -> float:
        made = (self.home(attempt) / "claimed").stat().st_mtime
        return (supervisor.now()["utc_ns"] / 1e9) - made

    def _complaint(self, attempt: AttemptId) -> str:
        with contextlib.suppress(OSError):
            text = (self.home(attempt) / "supervisor.log").read_text(encoding="utf-8", errors="replace").strip()
            if text:
                return text[-500:]
        return "the supervisor went away before it started the job"

    # --- records ---

    def _json(self, attempt: AttemptId, name: str, kind: type[Any]) -> Any:
        try:
            data = (self.home(attempt) / name).read_bytes()
        except FileNotFoundError:
            return None
        try:
            value = msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError:
            return None
        if getattr(value, "format", 1) not in FORMATS:
            raise Refused("agent.job_format", f"{attempt}/{name} has format {value.format}; this agent reads {FORMATS}")
        return value

    def _started(self, attempt: AttemptId) -> StartedFile | None:
        found: StartedFile | None = self._json(attempt, "started.json", StartedFile)
        return found

    def _exit(self, attempt: AttemptId) -> ExitFile | None:
        found: ExitFile | None = self._json(attempt, "exit.json", ExitFile)
        return found

    def _supervisor(self, attempt: AttemptId) -> procs.Identity | None:
        found: procs.Identity | None = self._json(attempt, "supervisor.json", procs.Identity)
        return found

    # --- leases ---

    async def renew(self, attempt: AttemptId, until: Deadline) -> None:
        def write() -> None:
            # No fsync: a lease that a power loss took was over with that boot.
            _write(self.home(attempt) / "deadline.json", msgspec.json.encode(until), 0o600, sync=False)

        try:
            await asyncio.to_thread(write)
        except OSError as err:
            raise Unavailable("agent.lease_not_renewed", f"the lease of {attempt} stands as it was: {err.strerror}") from err

    async def deadline(self, attempt: AttemptId) -> Deadline | None:
        def read() -> Deadline | None:
            try:
                return msgspec.json.decode((self.home(attempt) / "deadline.json").read_bytes(), type=Deadline)
            except (OSError, msgspec.DecodeError):
                return None

        return await asyncio.to_thread(read)

    # --- what is there ---

    async def found(self) -> list[Attempt]:
        return await asyncio.to_thread(self._found)

    def _found(self) -> list[Attempt]:
        kept: list[Attempt] = []
        for home in sorted(self.folder.iterdir()):
            if (home / "fenced").exists() or not (home / "attempt.json").exists():
                continue
            try:
                record: KeptFile | None = self._json(AttemptId(home.name), "attempt.json", KeptFile)
            except Refused:
                continue  # Of a newer format: its own agent knows what to make of it.
            if record is not None and record.attempt.id == home.name:
                kept.append(record.attempt)
        return kept

    async def presence(self, attempt: AttemptId) -> Presence:
        home = self.home(attempt)
        if (home / "claimed").exists() and not (home / "fenced").exists():
            return Presence.BEGUN
        return Presence.PREPARED if home.exists() else Presence.ABSENT

    async def fence(self, attempt: AttemptId) -> bool:
        """`claimed` is the fence: whoever makes it first decides. A supervisor that finds it there ends at once.

        Also where there is no folder yet: it may be under way to being made, and what was fenced must not start in it."""
        home = self.home(attempt)
        if (home / "fenced").exists():
            return True
        try:
            home.mkdir(mode=0o711, exist_ok=True)
            os.close(os.open(home / "claimed", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError as err:
            if not home.exists():
                return True  # A disk that takes no fence takes no folder to start it from.
            raise Unavailable("agent.disk_error", f"{home} takes no fence: {err.strerror}", retry_after_s=10) from err
        _write(home / "fenced", b"", 0o600)
        return True

    # --- the end ---

    async def ended(self, attempt: Attempt) -> Exit:
        """By the exit record; if the supervisor was lost, by its processes, which are stopped here when they must be; after a reboot by the last
        sign of life."""
        name = attempt.id
        try:
            if self._exit(name) is None and (who := self._supervisor(name)) is not None and who.boot_id == self.boot:
                await procs.gone(who)
            self._reap(name)
            if (record := self._exit(name)) is not None:
                return exit_of(record)
            return await self._without_record(attempt)
        finally:
            self._reap(name)

    async def _without_record(self, attempt: Attempt) -> Exit:
        started = self._started(attempt.id)
        if started is None:
            return Exit(certain=False)
        if started.boot_id != self.boot:
            return Exit(certain=False, rebooted=True, ran_us=self._last_sign_us(attempt.id, started))
        # The supervisor is lost and the job may live: what is left of it is followed by identity, stopped when it must be, and seen gone.
        spec = self._json(attempt.id, "spec.json", SpecFile) or SpecFile()
        orphan = self._orphan(attempt.id, started, spec)
        try:
            why = await orphan.see_out(partial(self._owed, attempt, started, spec))
        finally:
            self._orphans.pop(attempt.id, None)
            self._asked.pop(attempt.id, None)
        ran_us = (supervisor.boot_ns() - started.boot_ns) // 1000
        if orphan.cgroup is not None:
            with contextlib.suppress(OSError):
                orphan.cgroup.rmdir()
        for group in spec.limits:
            with contextlib.suppress(OSError):
                os.rmdir(group.folder)
        # What we ended had lived until then: its end is known, if not its exit code.
        return Exit(certain=bool(why), stopped_for=why or None, ran_us=ran_us)

    def _orphan(self, attempt: AttemptId, started: StartedFile, spec: SpecFile) -> Orphan:
        cgroup = self.cgroups / attempt if self.cgroups is not None and (self.cgroups / attempt).exists() else None
        first = procs.Identity(started.pid, started.start_ticks, started.boot_id)
        self._orphans[attempt] = orphan = Orphan(attempt, first, os.geteuid() if spec.uid is None else spec.uid, cgroup, spec.grace_s)
        return orphan

    def _owed(self, attempt: Attempt, started: StartedFile, spec: SpecFile, at_ns: int) -> Owed | None:
        """What its supervisor would do now: the same reasons, from the same files, in the same order."""
        noted = supervisor.read_json(str(self.home(attempt.id) / "stop.json")) or {}
        grace_s = self._asked.get(attempt.id, noted.get("grace_s"))
        if isinstance(grace_s, int | float):
            return Owed("asked", grace_s)
        if at_ns - started.boot_ns >= attempt.spec.wall_s * 10**9:
            return Owed("wall_limit", spec.grace_s)
        told = supervisor.read_json(str(self.home(attempt.id) / "deadline.json"))
        over = supervisor.Lease(told).over() if told is not None else attempt.lease_s > 0
        return Owed("lease_ended", spec.grace_s) if over else None

    def _last_sign_us(self, attempt: AttemptId, started: StartedFile) -> int:
        sign: MomentFile | None = self._json(attempt, "alive", MomentFile)
        return max(0, (sign.boot_ns - started.boot_ns) // 1000) if sign is not None else 0

    def _reap(self, attempt: AttemptId) -> None:
        if (pid := self._spawned.get(attempt)) is not None:
            procs.reap(pid)
            if not Path(f"/proc/{pid}").exists():
                del self._spawned[attempt]

    async def alive(self, attempt: AttemptId) -> bool:
        who = self._supervisor(attempt)
        lives = who is not None and procs.alive(who)
        # In this order: what it recorded before it went is there to be read.
        return lives and self._started(attempt) is not None and self._exit(attempt) is None

    async def stop(self, attempt: AttemptId, grace_s: int) -> None:
        home = self.home(attempt)
        if not (home / "claimed").exists():
            return
        self._asked[attempt] = grace_s
        # A disk that refuses costs the stop nothing but its own grace: whoever follows the end knows of it, and asks again after a restart.
        with contextlib.suppress(OSError):
            _write(home / "stop.json", json.dumps({"grace_s": grace_s}).encode("ascii"), 0o600)
        if (who := self._supervisor(attempt)) is not None:
            procs.send(who, signal.SIGTERM)
        if (orphan := self._orphans.get(attempt)) is not None:
            orphan.asked()  # Its supervisor is lost: whoever waits for its end sees to it.

    # --- what it leaves ---

    async def pack(self, attempt: Attempt) -> ResultRef | None:
        if not attempt.spec.outputs or attempt.local is not None:
            return None
        home = self.home(attempt.id)
        who = self._account(attempt)
        owner = who.uid if who else None
        try:
            return await asyncio.to_thread(pack_outputs, home / "work", attempt.spec.outputs, self.result(attempt.id), owner)
        except OSError as err:
            raise Refused("agent.outputs", f"the outputs of {attempt.id} cannot be packed: {err}") from err

    def result(self, attempt: AttemptId) -> Path:
        return self.home(attempt) / "result.tar.gz"

    async def log(self, attempt: AttemptId, offset: int, limit: int) -> Chunk:
        def read() -> Chunk:
            try:
                with (self.home(attempt) / "log").open("rb") as f:
                    total = os.fstat(f.fileno()).st_size
                    at = min(offset, total)
                    f.seek(at)
                    return Chunk(f.read(limit), at, total)
            except FileNotFoundError:
                return Chunk(b"", 0, 0)

        return await asyncio.to_thread(read)

    async def trim(self, attempt: AttemptId) -> None:
        home = self.home(attempt)

        def remove() -> None:
            for name in ("work", "tmp"):
                clear(home / name)
            for name in ("attempt.json", "env.json", "script", "supervisor.py", "result.tar.gz"):
                (home / name).unlink(missing_ok=True)

        await asyncio.to_thread(remove)

    async def forget(self, attempt: AttemptId) -> None:
        await asyncio.to_thread(clear, self.home(attempt))

    def roots(self) -> dict[int, AttemptId]:
        found: dict[int, AttemptId] = {}
        for home in self.folder.iterdir():
            name = AttemptId(home.name)
            if (home / "exit.json").exists() or not (home / "supervisor.json").exists():
                continue
            for who in (self._supervisor(name), self._started(name)):
                if who is not None and who.boot_id == self.boot:
                    found[who.pid] = name
        return found


def _script(attempt: Attempt) -> str:
    """The user's script with a first line that the kernel can read; line ends of other systems are ours to mend (BR-044)."""
    text = attempt.spec.script.replace("\r\n", "\n")
    return text if text.startswith("#!") else f"#!/bin/sh\n{text}"


def _write(path: Path, data: bytes, mode: int, *, sync: bool = True) -> None:
    """Whole or not at all, readable by nobody else from its first moment; on disk if `sync`."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(fd, "wb") as f:
        f.write(data)
        f.flush()
        if sync:
            os.fsync(fd)
    part.rename(path)


def _give(path: Path, who: LocalAccount) -> None:
    """To the job's account, all below it too; links themselves, never what they point at."""
    os.chown(path, who.uid, who.gid, follow_symlinks=False)
    if not stat.S_ISDIR(path.lstat().st_mode):
        return
    for base, folders, files in os.walk(path):
        for name in (*folders, *files):
            os.chown(os.path.join(base, name), who.uid, who.gid, follow_symlinks=False)
