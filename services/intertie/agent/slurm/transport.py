"""How a command reaches Slurm: on this machine (as a mapped account where the agent may become it), or on a login node by SSH.

No shell reads any word of ours, except the login node's, for which each word is quoted. Every command has an outer time limit and a bounded answer, and
runs in the C locale with times as seconds since the epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import selectors
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from intertie.agent import accounts
from intertie.agent.slurm.core.rules import SlurmRules, SlurmSsh
from intertie.clock import SystemClock
from intertie.errors import Refused, Unavailable

if TYPE_CHECKING:
    import asyncssh

CLOCK = SystemClock()
# A queue of 100,000 jobs is about 30 MB of text; what is longer is no queue.
ANSWER_BYTES = 128 * 1024 * 1024
ERROR_BYTES = 65_536
PART_BYTES = 1 << 18
# Commands at once, in threads of their own: results that move for an hour keep neither a look at the queue nor anything else of the agent's waiting.
AT_ONCE = 32
# Between looks whether a command was given up, and how long one that was killed is waited for: it may be somebody else's.
LOOK_S, REAP_S = 0.5, 1.0
# To reach a login node, key exchange included.
CONNECT_S = 15.0


class Unsure(Unavailable):
    """Nobody knows whether it was taken: look for the tag before anything else."""


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended. `code` is negative where a signal ended it."""

    code: int
    out: bytes
    error: bytes


class Shell(Protocol):
    """Errors: `Unsure` (it was begun, and its end is not known), `Unavailable` (it was surely not begun)."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        account: str = "",
        stdin: Path | bytes = b"",
        out: Path | None = None,
        timeout_s: float,
        limit: int = ANSWER_BYTES,
    ) -> Done:
        """`account`: become it, where this transport can; empty: as ourselves. `out`: a file that takes its standard output."""
        ...

    async def close(self) -> None: ...


def environment(rules: SlurmRules) -> dict[str, str]:
    """All that a command of Slurm gets of us."""
    base = {"PATH": rules.path, "LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s", "TZ": os.environ.get("TZ", "")}
    if rules.conf:
        base["SLURM_CONF"] = rules.conf
    return {name: value for name, value in base.items() if value}


class LocalShell:
    """Processes of this machine."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="slurm")

    async def run(
        self,
        argv: Sequence[str],
        *,
        account: str = "",
        stdin: Path | bytes = b"",
        out: Path | None = None,
        timeout_s: float,
        limit: int = ANSWER_BYTES,
    ) -> Done:
        who = None
        if account:
            if why := accounts.why_not(account):
                raise Refused("slurm.account", why)
            who = accounts.by_name(account)
        job = _Process(argv, self._env, who, timeout_s, limit)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, job.run, stdin, out)
        except asyncio.CancelledError:
            job.kill()
            raise

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Process:
    """One command, waited for in a thread: the event loop that an agent runs on may not be able to start a process as somebody else."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], who: accounts.LocalAccount | None, timeout_s: float, limit: int
    ) -> None:
        self.argv, self.env, self.who, self.timeout_s, self.limit = list(argv), dict(env), who, timeout_s, limit
        self._process: subprocess.Popen[bytes] | None = None
        self._until_s = 0.0
        self._over = False
        if who is not None:
            self.env |= {"USER": who.name, "LOGNAME": who.name, "HOME": who.home}

    def kill(self) -> None:
        """What is below it in a session of its own, or somebody else's (sudo's), may live on: nobody waits for it."""
        self._over = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _left_s(self) -> float:
        return 0.0 if self._over else self._until_s - CLOCK.monotonic_s()

    def run(self, stdin: Path | bytes, out: Path | None = None) -> Done:
        with contextlib.ExitStack() as stack:
            fed: IO[bytes]
            if isinstance(stdin, Path):
                fed = stack.enter_context(stdin.open("rb"))
            else:
                fed = stack.enter_context(tempfile.TemporaryFile())
                fed.write(stdin)
                fed.seek(0)
            error = stack.enter_context(tempfile.TemporaryFile())
            told: IO[bytes] = stack.enter_context(out.open("wb")) if out is not None else io.BytesIO()
            self._until_s = CLOCK.monotonic_s() + self.timeout_s
            process = self._start(fed, error)
            self._process = process
            assert process.stdout is not None
            stack.enter_context(process.stdout)
            try:
                size = self._take(process.stdout.fileno(), told)
                if size > self.limit:
                    raise Unavailable("slurm.too_much", f"{self.argv[0]} answered with more than {self.limit} bytes")
                code = process.wait(max(0.0, self._left_s()))
            except (TimeoutError, subprocess.TimeoutExpired) as err:
                raise Unsure("slurm.no_answer", f"{self.argv[0]} had no answer within {self.timeout_s:g} s") from err
            finally:
                if process.poll() is None:
                    self.kill()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(REAP_S)
            error.seek(0)
            return Done(code, told.getvalue() if isinstance(told, io.BytesIO) else b"", error.read(ERROR_BYTES))

    def _take(self, stdout: int, told: IO[bytes]) -> int:
        """Its whole standard output, as far as the limit: how much it was. `TimeoutError` at the end of its time, whoever holds the pipe then."""
        size = 0
        with selectors.DefaultSelector() as ready:
            ready.register(stdout, selectors.EVENT_READ)
            while size <= self.limit:
                if (left_s := self._left_s()) <= 0:
                    raise TimeoutError
                # In steps: who cancels it meanwhile is noticed.
                if not ready.select(min(left_s, LOOK_S)):
                    continue
                part = os.read(stdout, PART_BYTES)
                if not part:
                    break
                size += len(part)
                told.write(part)
        return size

    def _start(self, fed: IO[bytes], error: IO[bytes]) -> subprocess.Popen[bytes]:
        who = self.who
        try:
            return subprocess.Popen(
                self.argv,
                env=self.env,
                stdin=fed,
                stdout=subprocess.PIPE,
                stderr=error,
                cwd="/",
                start_new_session=True,
                user=who.uid if who else None,
                group=who.gid if who else None,
                extra_groups=list(who.groups) if who else None,
                umask=0o077,
            )
        except FileNotFoundError as err:
            raise Refused(
                "slurm.not_installed", f"{self.argv[0]} is not on {self.env.get('PATH')}", next_step="set path in [slurm] of site.toml"
            ) from err
        except OSError as err:
            raise Unavailable("slurm.cannot_run", f"{self.argv[0]} cannot be run: {err.strerror}", retry_after_s=10) from err


class SshShell:
    """A login node. One connection, made again when it breaks; its host key must be in the owner's file."""

    def __init__(self, node: SlurmSsh, env: Mapping[str, str]) -> None:
        self._node, self._env = node, dict(env)
        self._connection: asyncssh.SSHClientConnection | None = None
        self._one = asyncio.Lock()

    async def run(
        self,
        argv: Sequence[str],
        *,
        account: str = "",
        stdin: Path | bytes = b"",
        out: Path | None = None,
        timeout_s: float,
        limit: int = ANSWER_BYTES,
    ) -> Done:
        assert not account, "a login node lets us be nobody else; the wrapper does"
        import asyncssh

        words = ["env", *[f"{name}={value}" for name, value in self._env.items() if name != "TZ"], *argv]
        data = await asyncio.to_thread(stdin.read_bytes) if isinstance(stdin, Path) else stdin
        begun = False
        try:
            connection = await self._connect()
            async with asyncio.timeout(timeout_s):
                process = await connection.create_process(shlex.join(words), encoding=None)
                begun = True
                try:
                    return await _talk(process, data, out, limit)
                finally:
                    process.close()
        except TimeoutError as err:
            await self._drop()
            kind = Unsure if begun else Unavailable
            raise kind("slurm.no_answer", f"{argv[0]} on {self._node.host} had no answer within {timeout_s:g} s") from err
        except (asyncssh.Error, OSError) as err:
            await self._drop()
            kind = Unsure if begun else Unavailable
            raise kind("slurm.ssh", f"{self._node.host}: {err}"[:300], retry_after_s=5) from err

    async def _connect(self) -> asyncssh.SSHClientConnection:
        import asyncssh

        async with self._one:
            held = self._connection
            if held is not None and not held.is_closed():
                return held
            node = self._node
            try:
                async with asyncio.timeout(CONNECT_S):
                    self._connection = await asyncssh.connect(
                        node.host,
                        node.port,
                        username=node.user,
                        client_keys=[node.key],
                        known_hosts=node.known_hosts,
                        agent_path=None,
                        agent_forwarding=False,
                        config=None,
                        keepalive_interval=15,
                    )
            except asyncssh.HostKeyNotVerifiable as err:
                raise Refused(
                    "slurm.host_key",
                    f"the host key of {node.host} is not the one in {node.known_hosts}",
                    next_step=f"if the owner changed it: ssh-keyscan {node.host}, compare it with them, put it there",
                ) from err
            except asyncssh.PermissionDenied as err:
                raise Unavailable("slurm.ssh_denied", f"{node.host} does not let {node.user} in with {node.key}", retry_after_s=60) from err
            except (OSError, ValueError, asyncssh.KeyImportError) as err:
                raise Unavailable("slurm.ssh", f"{node.host} cannot be reached: {err}"[:300], retry_after_s=10) from err
            return self._connection

    async def _drop(self) -> None:
        held, self._connection = self._connection, None
        if held is not None:
            held.abort()

    async def close(self) -> None:
        await self._drop()


async def _talk(process: asyncssh.SSHClientProcess[bytes], data: bytes, out: Path | None, limit: int) -> Done:
    """Feed it, read both its outputs within bounds, and wait."""
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr

    async def feed() -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            stdin.write(data)
            await stdin.drain()
            stdin.write_eof()

    async def take(stream: asyncssh.SSHReader[bytes], told: IO[bytes], most: int) -> None:
        size = 0
        while part := await stream.read(PART_BYTES):
            size += len(part)
            if size > most:
                raise Unavailable("slurm.too_much", f"a command answered with more than {most} bytes")
            told.write(part)

    with contextlib.ExitStack() as stack:
        told: IO[bytes] = stack.enter_context(out.open("wb")) if out is not None else io.BytesIO()
        error = io.BytesIO()
        both = [asyncio.ensure_future(one) for one in (feed(), take(stdout, told, limit), take(stderr, error, ERROR_BYTES))]
        try:
            await asyncio.gather(*both)
        finally:
            for one in both:
                one.cancel()
        ended = await process.wait()
        code = ended.exit_status if ended.exit_status is not None else -1
        return Done(code, told.getvalue() if isinstance(told, io.BytesIO) else b"", error.getvalue())
