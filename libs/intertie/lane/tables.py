"""The port of a keeper's lane tables: what it needs of the disk. PostgreSQL in `pg`, a twin in `memory`, one suite for both.

An entry is first received (`turn`, by the keeper) and later interpreted by the service, which marks it in the transaction of its own change:

```python
async def claimed(self, entry: LaneEntry, said: Claimed) -> None:
    async with self.db.transaction() as tx:
        await self.lanes.mark_interpreted(tx, entry)      # first: raises Stale if somebody did it, or if an earlier one is still open
        await tx.run(Q.claim, said.attempt, …)
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from intertie.contracts.link import Lane
from intertie.ids import SiteName
from intertie.lane.ports import KeeperTables, LaneEntry, Turn, out_of_turn
from intertie.link.keeper import SiteRow
from intertie.store import StoreTx

__all__ = ["LaneEntry", "LaneTables", "Turn", "out_of_turn"]


class LaneTables(KeeperTables, Protocol):
    """A service's: what it says of an entry is marked in the transaction of its own change."""

    async def site(self, lane: Lane, site: SiteName) -> SiteRow | None: ...

    async def sites(self, lane: Lane) -> Sequence[SiteRow]:
        """Every site that ever spoke on this lane: for the judge of silence, which watches `heard` grow."""
        ...

    async def highest_epoch_told(self) -> int:
        """The highest epoch of this service that any site said it knows, on any lane; 0 if none spoke. `hub restored` goes above it."""
        ...

    async def mark_interpreted(self, tx: StoreTx, entry: LaneEntry) -> None:
        """In the service's own transaction, before its change. `Stale('lane.out_of_turn')` if the entry was marked before, or an earlier one of
        its journal is still open: so none is interpreted twice and order is kept, however many copies of a keeper there are."""
        ...

    async def read_again(self, tx: StoreTx, lane: Lane, site: SiteName, code: str) -> int:
        """In the service's own transaction: what was set aside of a site with this code stands open again, as if it had just come; how many."""
        ...

    async def let_go(self, tx: StoreTx, lane: Lane, site: SiteName, errors: Sequence[str]) -> int:
        """In the service's own transaction: what was set aside of a site with exactly these words waits for nobody any more, and is not read again;
        how many."""
        ...
