"""Device use of running attempts: noted with every beat of telemetry, kept on disk now and then, told with the end.

A kill of the agent costs what was seen since the last row (half a minute at most), and that much is then said to be unseen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from intertie.agent.books import put_setting, together
from intertie.agent.core import use
from intertie.agent.core.model import Attempt, State, told_devices
from intertie.agent.journal import Also, Cursor
from intertie.agent.sources.reading import CardReading
from intertie.contracts.base import encode
from intertie.contracts.site import DeviceKind
from intertie.contracts.telemetry import DeviceUse
from intertie.errors import Unavailable
from intertie.ids import AttemptId, DeviceId
from intertie.observe import log

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.use")

# One small transaction for all running attempts together; what is lost by a kill is named as unseen.
KEEP_S = 30.0
ROW = "use/"
_row = msgspec.json.Decoder(use.Use).decode


class DeviceUses:
    """One site's. `look` is called after each look at the devices."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._uses: dict[AttemptId, use.Use] = {}
        self._changed: set[AttemptId] = set()
        self._kept_s = site.clock.boot_s()

    async def recover(self) -> None:
        def read(cursor: Cursor) -> list[tuple[str, str]]:
            return cursor.execute("SELECT key, value FROM setting WHERE key LIKE 'use/%'").fetchall()

        for key, value in await self._site.journal.read(read):
            attempt = AttemptId(key.removeprefix(ROW))
            held_by = self._site.books.attempts.get(attempt)
            if held_by is None or held_by.state is not State.RUNNING:
                await self._site.journal.write(self.ended(attempt))
                continue
            try:
                self._uses[attempt] = _row(value)
            except msgspec.MsgspecError as err:
                LOG.warning("what was seen of an attempt's devices cannot be read; it begins anew", attempt=attempt, why=str(err))

    async def look(self, cards: Mapping[DeviceId, CardReading], shared: frozenset[DeviceId], beat_s: float) -> None:
        """Count this look for every attempt that runs, then keep what was counted if it is time."""
        site, boot_us = self._site, int(self._site.clock.boot_s() * 1e6)
        for attempt in site.books.attempts.values():
            if attempt.state is State.RUNNING and attempt.kind is DeviceKind.GPU and attempt.started and attempt.kernel_boot == site.boot:
                before = self._uses.get(attempt.id, use.Use())
                at_us = boot_us - attempt.started.boot_ns // 1_000
                after = use.look(before, cards, shared, held(attempt), at_us=at_us, beat_us=max(1, int(beat_s * 1e6)))
                if after != before:
                    self._uses[attempt.id] = after
                    self._changed.add(attempt.id)
        if self._changed and site.clock.boot_s() - self._kept_s >= KEEP_S:
            await self.keep()

    async def keep(self) -> None:
        """On disk now; a disk that refuses costs nothing but a later try."""
        rows = [put_setting(f"{ROW}{name}", encode(self._uses[name]).decode()) for name in sorted(self._changed) if name in self._uses]
        self._kept_s = self._site.clock.boot_s()
        try:
            if rows:
                await self._site.journal.write(together(*rows))
            self._changed.clear()
        except Unavailable as err:
            LOG.warning("what was seen of devices is kept later", code=err.code)

    def told(self, attempt: Attempt, ran_us: int) -> list[DeviceUse]:
        """By the names that the hub knows of its devices, where a request's cards are the site's own affair."""
        found = use.told(self._uses.get(attempt.id), held(attempt), ran_us)
        if not attempt.offering:
            return found
        names = dict(zip(attempt.devices, told_devices(attempt), strict=False))
        return [msgspec.structs.replace(one, device=names[one.device]) for one in found if one.device in names]

    def ended(self, attempt: AttemptId) -> Also:
        """In the transaction of its end: the row goes."""

        def also(cursor: Cursor) -> None:
            cursor.execute("DELETE FROM setting WHERE key = ?", (f"{ROW}{attempt}",))

        return also

    def forget(self, attempt: AttemptId) -> None:
        """Its end is on disk."""
        self._uses.pop(attempt, None)
        self._changed.discard(attempt)


def held(attempt: Attempt) -> Sequence[DeviceId]:
    """The cards themselves: where its devices are rights of a queue, those that the queue gave it."""
    cards = attempt.started.held_devices if attempt.started is not None else []
    return [DeviceId(card) for card in cards] if cards else attempt.devices
