"""Call offerings at the registry: taken from the lane in one transaction with their mark and event, listed to those who may call or see them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import Any, Protocol

import msgspec

from intertie.bus.rpc import Caller, Serve
from intertie.contracts import endpoints
from intertie.contracts.base import decode, encode
from intertie.contracts.call_offerings import CallOfferingChanged, OfferingRecord, OfferingsQuery, OfferingsReply
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.link import OfferingsTold
from intertie.errors import Refused
from intertie.ids import OfferingName, SiteName
from intertie.observe import log
from intertie.registry.core import call_offerings as core
from intertie.registry.memory import MemoryRegistryStore
from intertie.registry.pg import PgRegistryStore, Q
from intertie.store import StoreTx, Tx
from intertie.trust.rights import Scope, scope

LOG = log.get("registry.offerings")
# An answer fits one message of the bus with room to spare.
ANSWER_BYTES = 512 * 1024
Mark = Callable[[StoreTx], Awaitable[None]]


class OfferingRows(Protocol):
    """One transaction's view; what is read of a site stays locked until its end."""

    @property
    def tx(self) -> StoreTx: ...

    async def of_site(self, site: SiteName) -> list[OfferingRecord]: ...

    async def find(self, site: SiteName | None, name: OfferingName | None) -> list[OfferingRecord]: ...

    async def save(self, record: OfferingRecord) -> None: ...

    async def add_revision(self, record: OfferingRecord, told_at: datetime) -> None: ...


class OfferingStore(Protocol):
    first_version: int

    async def lift_versions(self, first: int) -> None:
        """No record has a version below `first` from here on, and what is new begins with it."""
        ...

    def offerings(self, *, read_only: bool = False) -> AbstractAsyncContextManager[OfferingRows]: ...


class CallOfferings:
    """One copy of the registry's part in calls."""

    def __init__(self, store: OfferingStore) -> None:
        self._store = store

    def handlers(self) -> Mapping[Endpoint[Any, Any], Serve]:
        return {endpoints.CALL_OFFERINGS: self.listed}

    async def listed(self, query: OfferingsQuery, caller: Caller) -> OfferingsReply:
        """Offerings that the caller may call (by the offering's own list), or see: an owner's own, an operator's all."""
        seen = scope(caller.claims, "offering.read")
        async with self._store.offerings(read_only=True) as rows:
            found = await rows.find(query.site, query.name)
        shown = [one for one in found if (query.withdrawn or not one.withdrawn) and visible(one, seen)]
        return core.paged(shown, query.after, ANSWER_BYTES)

    async def told(self, site: SiteName, said: OfferingsTold, mark: Mark) -> None:
        """A site's word on all of its offerings. One that no rule can take is recorded as a fault, and what stood before stands."""
        async with self._store.offerings() as rows:
            await mark(rows.tx)
            known = {record.offering.name: record for record in await rows.of_site(site)}
            try:
                changed = core.take(known, said.offerings, site=site, at=said.at, version=self._store.first_version)
            except Refused as refusal:
                await rows.tx.fault(_refused(site, refusal))
                await rows.tx.audit(actor=f"site/{site}", action="offering.declare", target=site, reason=refusal.text, result=refusal.code)
                LOG.warning("call offerings were refused", site=site, code=refusal.code)
                return
            for record in changed:
                await rows.save(record)
                before = known.get(record.offering.name)
                if before is None or record.revision > before.revision:
                    await rows.add_revision(record, said.at)
                    await rows.tx.audit(actor=f"site/{site}", action="offering.declare", target=record.id, reason=f"rev {record.revision}")
                await rows.tx.emit(CallOfferingChanged(version=record.version, record=record))
            if any(known.get(record.offering.name) is None or record.revision > known[record.offering.name].revision for record in changed):
                await rows.tx.fault(_stands(site))


def visible(record: OfferingRecord, seen: Scope) -> bool:
    """Whether somebody with this reach may know of it: an offering that does not admit a tenant is no business of that tenant's."""
    if seen.everything or (seen.site is not None and seen.site == record.site):
        return True
    return record.offering.admits(seen.tenant)


def _refused(site: SiteName, refusal: Refused) -> ReportIncident:
    return ReportIncident(
        key=f"registry.offering/{site}",
        kind="registry.offering",
        severity=Severity.WARNING,
        title=f"Call offerings of site {site} were not taken",
        text=refusal.text,
        site=site,
    )


def _stands(site: SiteName) -> ReportIncident:
    return ReportIncident(
        key=f"registry.offering/{site}",
        kind="registry.offering",
        severity=Severity.WARNING,
        title=f"Call offerings of site {site} are taken",
        text="A later declaration was accepted.",
        site=site,
        recovered=True,
    )


class PgOfferings:
    """`OfferingStore` in the registry's schema."""

    def __init__(self, store: PgRegistryStore) -> None:
        self._store = store
        self.first_version = 1

    async def lift_versions(self, first: int) -> None:
        self.first_version = first
        if first > 1:
            async with self._store.db.transaction() as tx:
                await tx.run(Q.call_offering_versions_lift, first)

    @asynccontextmanager
    async def offerings(self, *, read_only: bool = False) -> AsyncIterator[OfferingRows]:
        async with self._store.db.transaction(read_only=read_only) as tx:
            yield PgOfferingRows(tx)


class PgOfferingRows:
    """`OfferingRows` of one transaction."""

    def __init__(self, tx: Tx) -> None:
        self.tx = tx

    async def of_site(self, site: SiteName) -> list[OfferingRecord]:
        return [decode(row["record"], OfferingRecord) for row in await self.tx.all(Q.call_offerings_lock, site)]

    async def find(self, site: SiteName | None, name: OfferingName | None) -> list[OfferingRecord]:
        return [decode(row["record"], OfferingRecord) for row in await self.tx.all(Q.call_offerings_find, site, name)]

    async def save(self, record: OfferingRecord) -> None:
        await self.tx.run(Q.call_offering_save, record.site, record.offering.name, encode(record))

    async def add_revision(self, record: OfferingRecord, told_at: datetime) -> None:
        offering = record.offering
        await self.tx.run(Q.call_offering_revision_add, record.site, offering.name, record.revision, encode(offering), told_at)


class MemoryOfferings:
    """`OfferingStore` beside a twin of the registry; also its own rows."""

    def __init__(self, store: MemoryRegistryStore) -> None:
        self._store = store
        self.records: dict[str, OfferingRecord] = {}
        self.revisions: dict[tuple[str, int], OfferingRecord] = {}
        self.first_version = 1

    async def lift_versions(self, first: int) -> None:
        self.first_version = first
        for id, record in self.records.items():
            self.records[id] = msgspec.structs.replace(record, version=max(record.version, first))

    @asynccontextmanager
    async def offerings(self, *, read_only: bool = False) -> AsyncIterator[OfferingRows]:
        before = dict(self.records), dict(self.revisions)
        try:
            async with self._store.rows() as rows:
                self.tx: StoreTx = rows.tx
                yield self
        except BaseException:
            self.records, self.revisions = before
            raise

    async def of_site(self, site: SiteName) -> list[OfferingRecord]:
        return await self.find(site, None)

    async def find(self, site: SiteName | None, name: OfferingName | None) -> list[OfferingRecord]:
        found: Sequence[OfferingRecord] = [self.records[id] for id in sorted(self.records)]
        return [one for one in found if site in (None, one.site) and name in (None, one.offering.name)]

    async def save(self, record: OfferingRecord) -> None:
        self.records[record.id] = record

    async def add_revision(self, record: OfferingRecord, told_at: datetime) -> None:
        assert (record.id, record.revision) not in self.revisions, f"revision {record.revision} of {record.id} exists"
        self.revisions[record.id, record.revision] = record
