"""A keeper's quarantine in memory: the twin, on the rows of `intertie.lane.memory`."""

from __future__ import annotations

from intertie.contracts.link import Lane
from intertie.contracts.quarantine import QuarantinedEntry, Reinterpret
from intertie.ids import SiteName
from intertie.lane.memory import MemoryLaneTables
from intertie.quarantine import kind_of
from intertie.store import MemoryStore


class MemoryQuarantine:
    """`QuarantineStore` of a twin."""

    def __init__(self, store: MemoryStore, lanes: MemoryLaneTables) -> None:
        self._store, self._lanes = store, lanes

    async def entries(self, lane: Lane, site: SiteName | None, limit: int) -> tuple[list[QuarantinedEntry], int]:
        keys = [key for key in self._lanes.quarantined if key[0] is lane and site in (None, key[1])]
        found = [
            QuarantinedEntry(
                site=entry.site,
                journal=entry.journal,
                seq=entry.seq,
                kind=kind_of(entry.raw),
                error=self._lanes.quarantined[key],
                size=len(entry.raw),
                at=entry.received_at,
            )
            for key in keys[:limit]
            for entry in [self._lanes.entries[key]]
        ]
        return found, len(keys)

    async def reopen(self, lane: Lane, ask: Reinterpret, who: str) -> int:
        async with self._store.transaction() as tx:
            keys = [
                key for key in self._lanes.quarantined if key[:2] == (lane, ask.site) and (ask.journal, ask.seq) in ((None, None), key[2:])
            ]
            for key in keys:
                del self._lanes.quarantined[key]
                self._lanes.open.add(key)
            if keys:
                which = f"/{ask.journal}/{ask.seq}" if ask.journal else f": {len(keys)} entries"
                await tx.audit(actor=who, action="quarantine.retry", target=f"{ask.site}/{lane}{which}", reason=ask.reason)
        return len(keys)
