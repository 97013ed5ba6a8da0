"""Work that comes round: jittered so that a hundred processes do not beat together, woken early by a hint, not ended by a known error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from intertie.errors import Stale, Unavailable
from intertie.observe import log, metrics

LOG = log.get("runtime.beat")
BEATS = metrics.Counter("intertie_beats_total", "Rounds of periodic work", ("room", "outcome"))

# A tenth each way: enough to drift apart, too little to be seen in a freshness limit.
_JITTER = 0.1
# Pause after the first `Unavailable`; doubled up to the interval.
_FIRST_RETRY_S = 0.2


class Beat:
    """One periodic work of a process. `hint()` asks for the next round at once; the slow round comes anyway.

    scale: `INTERTIE_BEAT_S`. rng: for tests and simulation.
    """

    def __init__(self, name: str, interval_s: float, *, scale: float = 1.0, rng: random.Random | None = None) -> None:
        self.name = name
        self.interval_s = interval_s * scale
        self._scale = scale
        # Drawn from the process' own generator: a simulation that seeds that one replays this one too.
        self._rng = rng or random.Random(random.getrandbits(64))
        self._hint = asyncio.Event()

    def hint(self) -> None:
        self._hint.set()

    async def run(self, work: Callable[[], Awaitable[object]]) -> None:
        """Call `work` for ever, first at once. `Unavailable` and `Stale` are logged and tried again, sooner; anything else ends the process."""
        failures = 0
        while True:
            self._hint.clear()
            try:
                await work()
            except (Unavailable, Stale) as error:
                failures += 1
                BEATS.inc(room=self.name, outcome="retried")
                LOG.warning("a round was put off", beat=self.name, code=error.code, text=error.text, failures=failures)
                # A hint does not shorten this: what is away is not there sooner for being asked.
                await asyncio.sleep(self._jittered(min(self.interval_s, _FIRST_RETRY_S * self._scale * 2 ** min(failures - 1, 10))))
                continue
            failures = 0
            BEATS.inc(room=self.name, outcome="done")
            await self._wait(self._jittered(self.interval_s))

    def _jittered(self, seconds: float) -> float:
        return seconds * self._rng.uniform(1 - _JITTER, 1 + _JITTER)

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._hint.wait()
        except TimeoutError:
            pass
