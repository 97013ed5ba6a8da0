"""Start, ready mark and orderly stop of a process."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import uvloop

from intertie.clock import SystemClock
from intertie.errors import IntertieError, Unavailable
from intertie.observe import log, tracing

LOG = log.get("runtime")

T = TypeVar("T")

# After SIGTERM every task has this long to put its things away; what hangs longer is left behind, and said.
STOP_LIMIT_S = 10.0


class _Stop(Exception):
    """Asked to stop; not a failure."""


async def serve(**tasks: Coroutine[object, object, object]) -> int:
    """Run named tasks until SIGTERM or SIGINT (0) or until one fails (1, each reason said in one line). A task may end; the others go on."""
    code = 0
    asked = asyncio.Event()
    stopping = _Stopping()
    _on_signal(asked.set)
    try:
        async with asyncio.TaskGroup() as group:
            for name, work in tasks.items():
                stopping.tasks.append(group.create_task(stopping.watch(work), name=name))
            stopping.tasks.append(group.create_task(stopping.watch(_until_asked(asked)), name="signals"))
    except* _Stop:
        LOG.info("stopped", reason="asked to")
    except* Exception as failures:
        for error in _leaves(failures):
            known = isinstance(error, IntertieError)
            LOG.error("stopped", reason=str(error) or type(error).__name__, kind=type(error).__name__, exc_info=None if known else error)
        code = 1
    finally:
        stopping.done()
        # From here on a second signal ends the process as it is.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
    return code


def _on_signal(do: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, do)


async def _until_asked(asked: asyncio.Event) -> None:
    await asked.wait()
    raise _Stop


class _Stopping:
    """From the first failure or signal on: libraries swallow a cancellation now and then, so it is repeated, and in the end not waited for."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[object]] = []
        self._timers: list[asyncio.TimerHandle] = []

    async def watch(self, work: Coroutine[object, object, object]) -> object:
        try:
            return await work
        except Exception:
            self._begin()
            raise

    def _begin(self) -> None:
        if not self._timers:
            loop = asyncio.get_running_loop()
            self._timers = [loop.call_later(STOP_LIMIT_S / 3, self._remind), loop.call_later(STOP_LIMIT_S, self._give_up)]

    def _remind(self) -> None:
        for task in self.tasks:
            task.cancel()

    def _give_up(self) -> None:
        waiting = sorted(task.get_name() for task in self.tasks if not task.done())
        LOG.error("stopped by force", reason=f"not put away within {STOP_LIMIT_S:g} s", tasks=waiting)
        sys.stderr.flush()
        os._exit(1)

    def done(self) -> None:
        for timer in self._timers:
            timer.cancel()


def _leaves(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    found: list[Exception] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found


async def reach(what: str, attempt: Callable[[], Awaitable[T]], *, limit_s: float = 30.0, next_step: str = "") -> T:
    """`attempt` until it works: for a bus or a database that may start after us. `what` names it and where it is, for the one sentence.

    `Unavailable`, `OSError` and timeouts are tried again for `limit_s` seconds, then `Unavailable('runtime.unreachable')`.
    """
    loop = asyncio.get_running_loop()
    give_up = loop.time() + limit_s
    pause, said = 0.05, False
    while True:
        try:
            return await attempt()
        except (Unavailable, OSError, TimeoutError) as error:
            reason = error.text if isinstance(error, IntertieError) else str(error) or type(error).__name__
            if loop.time() + pause >= give_up:
                raise Unavailable(
                    "runtime.unreachable",
                    f"{what} could not be reached within {limit_s:g} s: {reason}",
                    retry_after_s=5.0,
                    next_step=next_step or "see that it runs and that the address is right",
                ) from error
            if not said:
                LOG.info("waiting for a dependency", dependency=what, reason=reason)
                said = True
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 1.0)


@asynccontextmanager
async def ready(path: Path | None, service: str, facts: Mapping[str, object] | None = None) -> AsyncIterator[None]:
    """While inside, `path` says `{"pid", "service", "ready_at", …}`; written whole or not at all, and gone on leaving."""
    # What was imported and wired lives as long as the process: a full collection that walks all of it is a pause of tens of milliseconds.
    gc.collect()
    gc.freeze()
    if path is not None:
        _mark(path, {"pid": os.getpid(), "service": service, "ready_at": SystemClock().now().isoformat(), **(facts or {})})
    LOG.info("ready", **(facts or {}))
    try:
        yield
    finally:
        if path is not None:
            _unmark(path)


def _mark(path: Path, said: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(said) + "\n", encoding="utf-8")
    beside.replace(path)


def _unmark(path: Path) -> None:
    path.unlink(missing_ok=True)


def main(service: str, run: Callable[[Mapping[str, str]], Coroutine[object, object, int]], *, version: str = "0") -> int:
    """Run a service to its exit code: logs, traces, uvloop. `run(environ)` ends in `serve(…)`.

    A known error at start (bad settings, nothing at the database's address) is one line with what to do, code 1; ours is a traceback, code 70.
    """
    environ = dict(os.environ)
    log.setup(service, environ.get("INTERTIE_LOG_LEVEL", "INFO"))
    tracing.setup(service, version=version, environ=environ)
    try:
        return uvloop.run(_until_served(run, environ))
    except IntertieError as error:
        LOG.error("not started", code=error.code, reason=error.text, next_step=error.next_step)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception:
        LOG.exception("crashed")
        return 70
    finally:
        tracing.shutdown()


async def _until_served(run: Callable[[Mapping[str, str]], Coroutine[object, object, int]], environ: Mapping[str, str]) -> int:
    """A signal that comes before `serve` (while a database is waited for) ends the start in order, too."""
    me = asyncio.current_task()
    assert me is not None
    _on_signal(me.cancel)
    try:
        return await run(environ)
    except asyncio.CancelledError:
        LOG.info("stopped", reason="asked to, while starting")
        return 0
