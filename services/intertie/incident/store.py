"""What incident needs of its store: a narrow port, each verb one transaction. `pg` keeps it in PostgreSQL, `memory` is the twin.

The rules stay in `core`; a verb that changes an incident loads it under a lock, asks the core, and saves record, event and audit row together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol

from intertie.contracts.base import EventMeta
from intertie.contracts.identity import AuditQuery, AuditRow
from intertie.contracts.incident import IncidentRecord, IncidentsQuery, ReportIncident
from intertie.contracts.site import PoolRecord, SiteRecord
from intertie.ids import IncidentId
from intertie.trust.rights import Scope

RULE = "rule"
"""The actor of what no person asked for."""

Decide = Callable[[IncidentRecord], IncidentRecord]
"""The record as it is, locked → as it shall be; the same record means that nothing is written."""


class IncidentStore(Protocol):
    """All methods raise `Unavailable` when the store is away."""

    async def lift_versions(self, first: int) -> None:
        """No entity has a version below `first` from here on (`store.first_version`), and what is new begins with it; nothing else changes."""
        ...

    async def fold(self, report: ReportIncident, *, now: datetime, actor: str, meta: EventMeta | None = None) -> IncidentRecord | None:
        """Fold a report into the open incident of its key, opening one if need be. With `meta`, an event applied before changes nothing.

        None if nothing is open and nothing was opened.
        """
        ...

    async def apply_site(self, site: SiteRecord, *, now: datetime, meta: EventMeta | None = None) -> IncidentRecord | None:
        """Take a site's record, if its version is higher than the one held, and fold what its freshness says."""
        ...

    async def apply_pool(self, pool: PoolRecord, *, now: datetime, meta: EventMeta | None = None) -> IncidentRecord | None:
        """Take a pool's phase, if its version is higher than the one held, and fold what the site's freshness says now."""
        ...

    async def get(self, incident: IncidentId) -> IncidentRecord | None: ...

    async def find(self, query: IncidentsQuery, seen: Scope) -> Sequence[IncidentRecord]:
        """Newest first; only what `seen` covers, so that a limit counts what the caller may see (BR-147)."""
        ...

    async def change(self, incident: IncidentId, decide: Decide, *, actor: str, action: str, reason: str = "") -> IncidentRecord | None:
        """Decide under a lock, save with event and audit row. None if there is no such incident."""
        ...

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]: ...
