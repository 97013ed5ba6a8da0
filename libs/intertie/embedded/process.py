"""Child processes that can be told apart for ever: started in their own session, named by pid, start ticks and boot id on disk.

A pid alone is reused; together with the tick at which it started and the boot it belongs to it names one process beyond doubt. So a
supervisor that was killed can come back, recognise what it left behind, and stop exactly that. `postgres`, `nats` and `supervise` build
on this; nothing here knows what a child does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from intertie.clock import SystemClock, kernel_boot
from intertie.errors import Refused, Unavailable

# Enough of a log to hold the last error with its lines around; little enough for one message to a person.
LOG_TAIL_BYTES = 4_096
# A log that grows past this is set aside once at the next start, so that two files bound what a child can fill.
LOG_LIMIT_BYTES = 32 * 1024 * 1024

_clock = SystemClock()


@dataclass(frozen=True, slots=True)
class Account:
    """A local account that a child becomes."""

    name: str
    uid: int
    gid: int


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """One process, beyond pid reuse. `start_ticks` is field 22 of /proc/PID/stat (clock ticks since boot, see proc(5))."""

    pid: int
    start_ticks: int
    boot_id: str


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`run/<name>.json`: who runs, and since when it is ready (None until it is)."""

    pid: int
    start_ticks: int
    boot_id: str
    ready: str | None = None

    @property
    def identity(self) -> Identity:
        return Identity(pid=self.pid, start_ticks=self.start_ticks, boot_id=self.boot_id)


def identity_of(pid: int) -> Identity | None:
    """The identity of a living process; None if there is none (a zombie is gone)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command name may itself hold blanks and brackets: count from the last one.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in {"Z", "X"}:
        return None
    return Identity(pid=pid, start_ticks=int(fields[19]), boot_id=kernel_boot())


def is_running(identity: Identity) -> bool:
    """True if exactly this process lives."""
    return identity_of(identity.pid) == identity


def account_named(candidates: Iterable[str], *, avoid: Iterable[int] = ()) -> Account | None:
    """The first of `candidates` that this machine knows and whose uid is not in `avoid`."""
    refused = {0, *avoid}
    for name in candidates:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            if entry.pw_uid not in refused:
                return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    return None


def private_folder(path: Path, account: Account | None = None, mode: int = 0o700) -> Path:
    """`path` as a folder of `account` (or ours), with exactly this mode. Raises as `write_private` does."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if account is not None and os.geteuid() == 0:
            os.chown(path, account.uid, account.gid)
        path.chmod(mode)
    except OSError as err:
        raise disk_trouble(err, path) from err
    return path


def write_private(path: Path, data: bytes, account: Account | None = None) -> None:
    """Write a 0600 file whole or not at all: a reader never sees half of it, and nobody sees it with wider rights."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if account is not None and os.geteuid() == 0:
                os.fchown(file.fileno(), account.uid, account.gid)
        temporary.replace(path)
    except OSError as err:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_trouble(err, path) from err


def disk_trouble(err: OSError, path: Path) -> Refused | Unavailable:
    """One sentence for a disk that refuses."""
    if err.errno in {errno.ENOSPC, errno.EDQUOT}:
        return Unavailable(
            "embedded.disk_full", f"the disk that holds {path.parent} is full", retry_after_s=30.0, next_step=f"free space at {path.parent}"
        )
    return Refused("embedded.disk", f"cannot write {path}: {err.strerror}", next_step=f"check the rights of {path.parent}")


def wait_until(true: Callable[[], bool], timeout_s: float, *, every_s: float = 0.02) -> bool:
    """Poll until `true()` or the deadline; what it said last."""
    deadline = _clock.monotonic_s() + timeout_s
    while not true():
        if _clock.monotonic_s() >= deadline:
            return true()
        time.sleep(every_s)
    return True


# --- children ----------------------------------------------------------------------------------------------------------------------------


class Child:
    """A child process that we started. `stop` and `kill` return when it is gone and reaped."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], record: RunRecord, record_file: Path, log_file: Path) -> None:
        self.name = name
        self.process = process
        self.record = record
        self.record_file = record_file
        self.log_file = log_file

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit code if it has ended (negative: the signal)."""
        return self.process.poll()

    def mark_ready(self) -> None:
        """Note on disk that it serves from now on."""
        self.record = msgspec.structs.replace(self.record, ready=_clock.now().isoformat())
        write_private(self.record_file, msgspec.json.encode(self.record))

    def stop(self, grace_s: float, stop_signal: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; kill it when `grace_s` is over. Its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(stop_signal)
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                return self.kill()
        return self._gone()

    def kill(self) -> int:
        """End it without asking."""
        if self.process.poll() is None:
            self.process.kill()
        return self._gone()

    def _gone(self) -> int:
        code = self.process.wait()
        self.record_file.unlink(missing_ok=True)
        return code

    def log_tail(self) -> str:
        """The end of what it wrote, at most `LOG_TAIL_BYTES`."""
        return tail(self.log_file)


def tail(log_file: Path) -> str:
    """The last `LOG_TAIL_BYTES` of a log; empty if there is none."""
    try:
        with log_file.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace").strip()
    except OSError:
        return ""


def start_child(
    name: str,
    argv: Sequence[str | Path],
    *,
    run_dir: Path,
    log_dir: Path,
    env: Mapping[str, str],
    account: Account | None = None,
) -> Child:
    """Start `argv` in a session of its own, its output appended to `log_dir/<name>.log`, its identity in `run_dir/<name>.json`.

    `account` counts only as root. `Refused('embedded.missing_binary')` if the file is not there or may not be executed.
    """
    log_file = log_dir / f"{name}.log"
    record_file = run_dir / f"{name}.json"
    become = account if account is not None and os.geteuid() == 0 else None
    try:
        if log_file.exists() and log_file.stat().st_size > LOG_LIMIT_BYTES:
            log_file.replace(log_file.with_suffix(".log.1"))
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise disk_trouble(err, log_file) from err
    try:
        process = subprocess.Popen(
            [os.fspath(part) for part in argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=dict(env),
            start_new_session=True,
            user=None if become is None else become.uid,
            group=None if become is None else become.gid,
            extra_groups=None if become is None else [],
        )
    except (FileNotFoundError, PermissionError) as err:
        who = "" if become is None else f" as {become.name}"
        raise Refused(
            "embedded.missing_binary", f"cannot start {name}: {argv[0]} cannot be executed{who}: {err.strerror}", next_step=INSTALL_HINT
        ) from err
    finally:
        os.close(log)
    identity = identity_of(process.pid)
    # A child that ended at once has no ticks left to read; the record then matches nothing, which is what it should.
    record = RunRecord(pid=process.pid, start_ticks=identity.start_ticks if identity else -1, boot_id=kernel_boot())
    child = Child(name, process, record, record_file, log_file)
    try:
        write_private(record_file, msgspec.json.encode(record))
    except BaseException:
        child.kill()
        raise
    return child


INSTALL_HINT = "install the embedded servers: pip install 'intertie[embedded]'"


def read_record(run_dir: Path, name: str) -> RunRecord | None:
    """Who ran last under this name; None if nobody, or if the file cannot be read as a record."""
    try:
        return msgspec.json.decode((run_dir / f"{name}.json").read_bytes(), type=RunRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def stop_leftover(run_dir: Path, name: str, *, grace_s: float, stop_signal: signal.Signals = signal.SIGTERM) -> bool:
    """Stop what an earlier supervisor left running under this name; True if there was such a process.

    The pidfd is opened first and the identity compared then: after that the number can no longer come to mean another process.
    """
    record = read_record(run_dir, name)
    if record is None:
        return False
    file = run_dir / f"{name}.json"
    try:
        handle = os.pidfd_open(record.pid)
    except OSError:
        file.unlink(missing_ok=True)
        return False
    try:
        if not is_running(record.identity):
            file.unlink(missing_ok=True)
            return False
        for number, wait_s in ((stop_signal, grace_s), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if select.select([handle], [], [], wait_s)[0]:
                file.unlink(missing_ok=True)
                return True
    finally:
        os.close(handle)
    raise Unavailable("embedded.leftover", f"{name} (pid {record.pid}) of an earlier run does not end, not even by SIGKILL")


# --- ports -------------------------------------------------------------------------------------------------------------------------------


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_free_port(host: str, port: int, what: str) -> None:
    """`Refused('embedded.port_in_use')` in one sentence that names the port and who holds it."""
    with socket.socket() as probe:
        # As the servers do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as err:
            if err.errno == errno.EADDRINUSE:
                raise port_in_use(port, what) from err
            raise Refused("embedded.address", f"{what} cannot listen on {host}:{port}: {err.strerror}") from err


def port_in_use(port: int, what: str) -> Refused:
    """The sentence for a taken port."""
    holder = port_holder(port)
    return Refused(
        "embedded.port_in_use",
        f"port {port}, wanted by {what}, is in use by {holder}",
        next_step=f"stop {holder}, or choose another port for {what}",
        details={"port": port},
    )


def port_holder(port: int) -> str:
    """`name (pid N)` of whoever listens on a TCP port, as far as we may see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for row in psutil.net_connections("tcp"):
            if row.status == psutil.CONN_LISTEN and row.laddr and row.laddr[1] == port and row.pid:
                return f"{psutil.Process(row.pid).name()} (pid {row.pid})"
    return "a process of another user"


def explain_end(child: Child, *, port: int | None, what: str) -> Refused | Unavailable:
    """One clear sentence for a child that ended when it should serve."""
    words = child.log_tail()
    if "no space left on device" in words.lower():
        return Unavailable(
            "embedded.disk_full", f"{what} ended: the disk that holds {child.log_file.parent.parent} is full", next_step="free space there"
        )
    if port is not None and "address already in use" in words.lower():
        return port_in_use(port, what)
    last = words.splitlines()[-1] if words else "it wrote nothing"
    return Refused("embedded.ended", f"{what} ended with code {child.poll()}: {last[:300]}", next_step=f"read {child.log_file}")
