"""Incidents: one open fault each, folded by key, acknowledged and closed by a person with a reason."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from intertie.contracts.base import Contract, Event, Instant, Positive, Text
from intertie.ids import IncidentId, SiteName, TenantName


class IncidentState(StrEnum):
    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    CLOSED = "closed"


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class IncidentRecord(Contract, frozen=True, kw_only=True):
    incident: IncidentId
    key: str
    """What it is about: repeats of the same key fold into the open incident (`site.silent/site-a`)."""
    kind: str
    severity: Severity
    title: str
    text: Text
    site: SiteName | None
    tenant: TenantName | None
    state: IncidentState
    opened_at: Instant
    last_seen_at: Instant
    times: Positive
    recovered_at: Instant | None
    """The condition is gone by itself; a person still closes it."""
    acknowledged_by: str | None
    acknowledged_at: Instant | None
    closed_by: str | None
    closed_at: Instant | None
    close_reason: Text
    version: Positive


class ReportIncident(Contract, frozen=True, kw_only=True):
    """`cmd.incident.report`, also as the event `fault.reported`: a service saw something that a person must know."""

    key: str
    kind: str
    severity: Severity
    title: str
    text: Text
    site: SiteName | None = None
    tenant: TenantName | None = None
    recovered: bool = False


class FaultReported(Event, frozen=True, kw_only=True):
    """Any keeper: a dead letter, a quarantined entry, a forked journal. Folded into an incident."""

    TYPE: ClassVar[str] = "io.intertie.fault.reported.v1"
    SERVICE: ClassVar[str] = "_"

    service: str
    report: ReportIncident
    at: Instant

    @property
    def entity(self) -> str:
        return f"fault/{self.service}/{self.report.key}"

    @property
    def subject(self) -> str:
        return f"intertie.v1.evt.{self.service}.fault.reported.{self.report.tenant or '_'}.{self.report.site or '_'}"


class IncidentChanged(Event, frozen=True, kw_only=True):
    TYPE: ClassVar[str] = "io.intertie.incident.changed.v1"
    SERVICE: ClassVar[str] = "incident"

    record: IncidentRecord

    @property
    def entity(self) -> str:
        return self.record.incident

    @property
    def site_token(self) -> str:
        return self.record.site or "_"

    @property
    def tenant_token(self) -> str:
        return self.record.tenant or "_"


class IncidentsQuery(Contract, frozen=True, kw_only=True):
    """`qry.incident.list`: newest first."""

    state: IncidentState | None = None
    site: SiteName | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 100


class IncidentsReply(Contract, frozen=True, kw_only=True):
    incidents: list[IncidentRecord]


class AcknowledgeIncident(Contract, frozen=True, kw_only=True):
    """`cmd.incident.acknowledge`."""

    incident: IncidentId


class CloseIncident(Contract, frozen=True, kw_only=True):
    """`cmd.incident.close`: a reason is mandatory."""

    incident: IncidentId
    reason: Annotated[str, msgspec.Meta(min_length=3, max_length=1_000)]
