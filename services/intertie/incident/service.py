"""Incident at work: turns what sites' silence and services' faults say into incidents, and lets people handle them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from intertie.bus import rpc
from intertie.bus.port import Bus
from intertie.bus.rpc import Caller, Serve
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.base import EventMeta
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import AuditQuery, AuditReply
from intertie.contracts.incident import (
    AcknowledgeIncident,
    CloseIncident,
    FaultReported,
    IncidentRecord,
    IncidentsQuery,
    IncidentsReply,
    ReportIncident,
)
from intertie.contracts.site import PoolChanged, SiteChanged, SitesQuery
from intertie.errors import NotFound
from intertie.ids import IncidentId
from intertie.incident import core
from intertie.incident.store import Decide, IncidentStore
from intertie.observe import log
from intertie.store import audit_reply
from intertie.trust.rights import not_found, require, scope

LOG = log.get("incident")


class Incidents:
    """The service."""

    def __init__(self, store: IncidentStore, clock: Clock) -> None:
        self.store, self.clock = store, clock

    def handlers(self) -> Mapping[Endpoint[Any, Any], Serve]:
        return {
            endpoints.REPORT_INCIDENT: self.report,
            endpoints.INCIDENTS: self.list,
            endpoints.ACKNOWLEDGE_INCIDENT: self.acknowledge,
            endpoints.CLOSE_INCIDENT: self.close,
            endpoints.INCIDENT_AUDIT: self.audit,
        }

    # --- what others say ---

    async def on_site(self, event: SiteChanged, meta: EventMeta) -> None:
        await self.store.apply_site(event.record, now=self.clock.now(), meta=meta)

    async def on_pool(self, event: PoolChanged, meta: EventMeta) -> None:
        await self.store.apply_pool(event.record, now=self.clock.now(), meta=meta)

    async def on_fault(self, event: FaultReported, meta: EventMeta) -> None:
        record = await self.store.fold(event.report, now=self.clock.now(), actor=event.service, meta=meta)
        if record is not None:
            LOG.info("a fault was folded", incident=record.incident, key=record.key, times=record.times, service=event.service)

    async def learn_sites(self, bus: Bus, signed: str) -> None:
        """Every site and pool as the registry has them now: what was missed changes nothing else."""
        pages = [await rpc.call(bus, endpoints.SITES, SitesQuery(), claims=signed)]
        while pages[-1].next:
            pages.append(await rpc.call(bus, endpoints.SITES, SitesQuery(after=pages[-1].next), claims=signed))
        now = self.clock.now()
        # Pools first: whether a site's silence is watched hangs on their phases.
        for pool in [pool for reply in pages for pool in reply.pools]:
            await self.store.apply_pool(pool, now=now)
        for site in [site for reply in pages for site in reply.sites]:
            await self.store.apply_site(site, now=now)

    # --- calls ---

    async def report(self, request: ReportIncident, caller: Caller) -> IncidentRecord:
        """Fold a report. Reporting the end of what is not open is `NotFound`: there is no record to answer with."""
        require(caller.claims, "incident.report", tenant=request.tenant, site=request.site)
        record = await self.store.fold(request, now=self.clock.now(), actor=caller.claims.sub)
        if record is None:
            raise NotFound("incident.not_open", f"no incident of {request.key} is open")
        return record

    async def list(self, query: IncidentsQuery, caller: Caller) -> IncidentsReply:
        """Newest first, cut to what the caller may see in the query itself."""
        return IncidentsReply(incidents=list(await self.store.find(query, scope(caller.claims, "incident.read"))))

    async def acknowledge(self, request: AcknowledgeIncident, caller: Caller) -> IncidentRecord:
        by, now = caller.claims.sub, self.clock.now()
        return await self._handle(
            request.incident, caller, lambda record: core.acknowledge(record, by=by, now=now), "incident.acknowledge", ""
        )

    async def close(self, request: CloseIncident, caller: Caller) -> IncidentRecord:
        by, now = caller.claims.sub, self.clock.now()
        return await self._handle(
            request.incident,
            caller,
            lambda record: core.close(record, by=by, reason=request.reason, now=now),
            "incident.close",
            request.reason,
        )

    async def _handle(self, incident: IncidentId, caller: Caller, decide: Decide, action: str, reason: str) -> IncidentRecord:
        """Existence is judged before the decision: what is not the caller's reads like what is not there."""
        seen = scope(caller.claims, "incident.handle")
        known = await self.store.get(incident)
        if known is None or not seen.covers(tenant=known.tenant, site=known.site):
            raise not_found()
        after = await self.store.change(incident, decide, actor=caller.claims.sub, action=action, reason=reason)
        assert after is not None, "incidents are never deleted"
        return after

    async def audit(self, query: AuditQuery, caller: Caller) -> AuditReply:
        require(caller.claims, "audit.read")
        return await audit_reply(self.store, query)
