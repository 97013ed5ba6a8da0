"""A whole hub on one machine: PostgreSQL, nats-server and each service as its own process, started, watched and stopped by one supervisor.

The supervisor decides nothing about what the services do. It starts them in order, waits for their word that they are ready, starts again
what was killed, and ends with one clear sentence when that does not help. Killed itself, it leaves everything running; the next one
recognises what was left (pid, start ticks, boot id) and stops it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from intertie.clock import Clock, SystemClock
from intertie.embedded.hub import HubLayout, copy_name, environment
from intertie.embedded.nats import Nats
from intertie.embedded.postgres import Postgres
from intertie.embedded.process import Child, explain_end, require_free_port, start_child, stop_leftover
from intertie.errors import Conflict, IntertieError, Unavailable
from intertie.text import language
from intertie.text import say as words

# Imports of a service cost a second of CPU; seven of them on two busy cores, a first migration, and room.
READY_TIMEOUT_S = 60.0
# A service answers what it has begun and closes its connections.
STOP_GRACE_S = 10.0
# A new cluster takes 40 MB and its first WAL segments 32 MB; below this the first minutes would fill the disk.
MIN_FREE_BYTES = 200 * 1024 * 1024
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a part that ends is started again before the supervisor gives up."""

    first_s: float = 0.2
    most_s: float = 10.0
    calm_s: float = 60.0
    """A part that ran this long has recovered: its count starts anew."""
    limit: int = 8
    """Ends in a row without a calm time; with the pauses above half a minute of trying."""

    def pause_s(self, ends: int) -> float:
        """Before the start that follows the `ends`-th end in a row."""
        return min(self.first_s * 2.0 ** (ends - 1), self.most_s)


class ReadyMark(msgspec.Struct, frozen=True, kw_only=True):
    """What a service writes into `INTERTIE_READY_FILE`; other fields are its own."""

    pid: int


@dataclass(frozen=True, slots=True)
class Started:
    """One part that serves."""

    name: str
    pid: int
    ready_s: float
    """From its start to its word that it serves."""


@dataclass
class _Part:
    """One process to keep: `start` blocks until it serves (a server) or until it exists (a service)."""

    name: str
    start: Callable[[], Child]
    ready: Callable[[Child], Awaitable[None]]
    stop_signal: signal.Signals
    grace_s: float
    child: Child | None = None
    starting: asyncio.Future[Child] | None = None
    started_at_s: float = 0.0
    history: list[Started] = field(default_factory=list)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while somebody keeps it down on purpose."""

    def __post_init__(self) -> None:
        self.wanted.set()


def service_command(service: str) -> Sequence[str]:
    """How a service is started: as a module of this very Python."""
    return (sys.executable, "-m", f"intertie.{service}")


class HubSupervisor:
    """Use: `await start()`, then `await watch()` until cancelled, then `await stop()` (always; it also cleans up a start that failed).

    services: which, in starting order (the layout's). command: how to start one. extra_env: added to every service's environment.
    say: hears one sentence for each thing that a person should know. fast: PostgreSQL without fsync. copies: how many processes of each
    service; of what one at a time may do (planner, relay, chainer) they choose a leader, whose writes are fenced in the database.
    """

    def __init__(
        self,
        layout: HubLayout,
        *,
        command: Callable[[str], Sequence[str]] = service_command,
        extra_env: Mapping[str, str] | None = None,
        policy: RestartPolicy | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
        fast: bool = False,
        clock: Clock | None = None,
        say: Callable[[str], None] = lambda sentence: None,
        copies: int = 1,
    ) -> None:
        self.layout = layout
        self.policy = policy or RestartPolicy()
        self.ready_timeout_s = ready_timeout_s
        self._clock = clock or SystemClock()
        self._command = command
        self._extra_env = dict(extra_env or {})
        self._say = say
        self._lock: int | None = None
        # Servers block in their start; each part has at most one thread, plus one that stops.
        self._threads = ThreadPoolExecutor(len(layout.services) * copies + 3 + layout.settings.bus_nodes, thread_name_prefix="hub")
        self.postgres: Postgres = layout.postgres(fast=fast)
        self.bus: Nats = layout.bus()
        self.bus_nodes = [self.bus, *(layout.bus(node) for node in layout.bus_nodes[1:])]
        self._servers = [
            _Part("postgres", self._start_postgres, _at_once, signal.SIGINT, STOP_GRACE_S),
            *(_Part(node.name, node.start, _at_once, signal.SIGTERM, STOP_GRACE_S) for node in self.bus_nodes),
        ]
        self._copies = copies
        self._services = [self._service(name, copy) for copy in range(1, copies + 1) for name in layout.services]

    # --- life --------------------------------------------------------------------------------------------------------------------------

    async def start(self) -> list[Started]:
        """Start everything; who serves, in starting order. Raises one `IntertieError` that says what is in the way."""
        self._take_lock()
        require_space(self.layout)
        await self._in_thread(self._stop_leftovers)
        gateway_host, gateway_port = self.layout.settings.gateway_host, self.layout.settings.ports.gateway
        if "gateway" in self.layout.services:
            # Asked before anything starts; gateway's own words would be at the end of a log.
            for copy in range(self._copies):
                require_free_port(gateway_host, gateway_port + copy, "the gateway")
        await self._all(self._servers)
        await self._all(self._services)
        return self.started

    @property
    def started(self) -> list[Started]:
        """The latest start of each part that serves."""
        return [part.history[-1] for part in self._parts if part.history]

    async def watch(self) -> None:
        """Keep every part alive until cancelled. Raises when one part has ended `policy.limit` times in a row."""
        try:
            async with asyncio.TaskGroup() as group:
                for part in self._parts:
                    group.create_task(self._keep(part), name=f"keep {part.name}")
        except ExceptionGroup as errors:
            # One sentence: the first part that was given up; the others were only cancelled.
            first: Exception = next((each for each in errors.exceptions if isinstance(each, IntertieError)), errors.exceptions[0])
            raise first from errors

    async def kill(self, name: str) -> int:
        """Kill a part (no grace, as a crash would) and keep it down until `let` is called, for who rehearses that; its pid. Needs `watch`."""
        part = next(part for part in self._parts if part.name == name)
        child = part.child
        assert child is not None, f"{name} is not up"
        part.wanted.clear()
        await self._in_thread(child.kill)
        return child.pid

    async def let(self, name: str) -> None:
        """Start a part again that was killed on purpose; returns at once."""
        next(part for part in self._parts if part.name == name).wanted.set()

    async def stop(self) -> None:
        """Stop everything in reverse order, each with its grace; repeatable."""
        for part in reversed(self._parts):
            if part.starting is not None:
                await asyncio.wait([part.starting])
                if part.starting.exception() is None:
                    part.child = part.starting.result()
                part.starting = None
            if part.child is not None:
                child, part.child = part.child, None
                await self._in_thread(lambda child=child, part=part: child.stop(part.grace_s, part.stop_signal))  # type: ignore[misc]  # bound now
        for service in self._services:
            self.layout.ready_file(service.name).unlink(missing_ok=True)
        self._threads.shutdown(wait=False)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- one part ------------------------------------------------------------------------------------------------------------------------

    async def _all(self, parts: Sequence[_Part]) -> None:
        """Start these together; the first that cannot start is the reason."""
        results = await asyncio.gather(*(self._up(part) for part in parts), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _up(self, part: _Part) -> None:
        """Start one part and wait until it serves."""
        part.started_at_s = self._clock.monotonic_s()
        part.starting = asyncio.get_running_loop().run_in_executor(self._threads, part.start)
        # A start that is under way is waited for by `stop`, so that no process is left behind.
        part.child = await asyncio.shield(part.starting)
        part.starting = None
        await part.ready(part.child)
        part.history = [Started(part.name, part.child.pid, self._clock.monotonic_s() - part.started_at_s)]

    async def _keep(self, part: _Part) -> None:
        """Start it again whenever it ends, with growing pauses; raise when that has been in vain too often."""
        ends, last = 0, ""
        while True:
            if part.child is not None:
                await _end_of(part.child)
                if self._clock.monotonic_s() - part.started_at_s >= self.policy.calm_s:
                    ends = 0
                last = _how_it_ended(part.child)
                part.child.kill()
            if not part.wanted.is_set():
                await part.wanted.wait()
                ends = 0
            ends += 1
            if ends >= self.policy.limit:
                raise Unavailable(
                    "hub.gave_up",
                    f"{part.name} ended {ends} times in a row and is not started again: {last}",
                    retry_after_s=60.0,
                    next_step=f"read {self.layout.log / part.name}.log",
                )
            pause_s = self.policy.pause_s(ends)
            self._tell("again", name=part.name, last=last, pause=f"{pause_s:.1f}")
            await asyncio.sleep(pause_s)
            try:
                await self._up(part)
                self._tell("serves", name=part.name, pid=part.history[-1].pid)
            except IntertieError as error:
                last = f"cannot start: {error.text}"
                if part.child is not None:
                    part.child.kill()
                    part.child = None
                part.starting = None

    def _service(self, service: str, copy: int) -> _Part:
        name = copy_name(service, copy)
        mark = self.layout.ready_file(name)

        def start() -> Child:
            mark.unlink(missing_ok=True)
            return start_child(
                name,
                self._command(service),
                run_dir=self.layout.run,
                log_dir=self.layout.log,
                env=environment(self.layout, service, self._extra_env, copy=copy),
            )

        async def ready(child: Child) -> None:
            try:
                async with asyncio.timeout(self.ready_timeout_s):
                    while _marked_pid(mark.read_bytes() if mark.exists() else b"") != child.pid:
                        if child.poll() is not None:
                            port = self.layout.settings.ports.gateway + copy - 1 if service == "gateway" else None
                            raise explain_end(child, port=port, what=name)
                        await asyncio.sleep(POLL_S)
            except TimeoutError:
                raise Unavailable(
                    "hub.not_ready",
                    f"{name} (pid {child.pid}) is not ready after {self.ready_timeout_s:.0f} s",
                    next_step=f"read {child.log_file}",
                ) from None
            child.mark_ready()

        return _Part(name, start, ready, signal.SIGTERM, STOP_GRACE_S)

    def _start_postgres(self) -> Child:
        child = self.postgres.start()
        try:
            self.postgres.provision(self.layout.role_passwords())
        except BaseException:
            child.kill()
            raise
        return child

    # --- around ----------------------------------------------------------------------------------------------------------------------------

    def _tell(self, key: str, **values: object) -> None:
        self._say(words(f"hub.{key}", language(), **values))

    @property
    def _parts(self) -> list[_Part]:
        return [*self._servers, *self._services]

    def _stop_leftovers(self) -> None:
        """What an earlier supervisor left: services first, then the bus, then the database, as in any stop."""
        more = [file.stem for service in self.layout.services for file in sorted(self.layout.run.glob(f"{service}-[2-9].json"))]
        known = [(part.name, part.grace_s, part.stop_signal) for part in reversed(self._parts)]
        for name, grace_s, number in [*((name, STOP_GRACE_S, signal.SIGTERM) for name in more), *known]:
            if stop_leftover(self.layout.run, name, grace_s=grace_s, stop_signal=number):
                self._tell("leftover", name=name)

    def _take_lock(self) -> None:
        """One supervisor per folder; the kernel gives the lock back however it ends."""
        file = self.layout.run / "supervisor.lock"
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            holder = os.read(handle, 32).decode("ascii", errors="replace") or "unknown"
            os.close(handle)
            raise Conflict(
                "hub.running", f"the hub in {self.layout.data} is running already (pid {holder})", next_step="intertie hub status"
            ) from err
        os.truncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode("ascii"), 0)
        self._lock = handle

    async def _in_thread(self, work: Callable[[], object]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, work)


def require_space(layout: HubLayout) -> None:
    """`Unavailable('embedded.disk_full')` if the hub's disk has too little left to start on."""
    free = shutil.disk_usage(layout.data).free
    if free < MIN_FREE_BYTES:
        raise Unavailable(
            "embedded.disk_full",
            f"the disk that holds {layout.data} has {free // 2**20} MiB left, and a hub needs {MIN_FREE_BYTES // 2**20} MiB to start",
            retry_after_s=60.0,
            next_step=f"free space there, or choose another data folder than {layout.data}",
        )


async def _at_once(child: Child) -> None:
    """A server's start returns only when it serves."""


async def _end_of(child: Child) -> None:
    """Wait until it has ended, by pidfd: no thread per child, and no signal handler of the whole process."""
    try:
        handle = os.pidfd_open(child.pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(handle, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _how_it_ended(child: Child) -> str:
    code = child.poll()
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"(pid {child.pid}) was ended by {signal.Signals(-code).name}"
    words = child.log_tail()
    if "no space left on device" in words.lower():
        return f"(pid {child.pid}) ended: the disk is full"
    last = _reason(words.splitlines()[-1])[:300] if words else "it wrote nothing"
    return f"(pid {child.pid}) ended with code {code}: {last}"


class _LogLine(msgspec.Struct):
    """Of a service's log line, its reason."""

    reason: str = ""


def _reason(line: str) -> str:
    """What a log line says went wrong; the line itself if it is not one of ours."""
    try:
        return msgspec.json.decode(line, type=_LogLine).reason or line
    except msgspec.MsgspecError:
        return line


def _marked_pid(data: bytes) -> int | None:
    """The pid in a ready mark; None while it is absent or half written."""
    try:
        return msgspec.json.decode(data, type=ReadyMark).pid
    except msgspec.MsgspecError:
        return None
