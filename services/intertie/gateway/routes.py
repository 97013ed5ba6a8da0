"""The HTTP API as one table: which path asks which endpoint, and how the request is built from path, query and body.

The OpenAPI document is generated from this table, so what is served and what is documented cannot differ. Paths that carry bytes or pages
(objects, results, the job's page) are in `objects` and `pages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from intertie.contracts import endpoints as e
from intertie.contracts.accounting import ReconciliationQuery
from intertie.contracts.audit import AuditAnchorsQuery, AuditChainQuery
from intertie.contracts.base import Contract, Empty, decode
from intertie.contracts.call_offerings import OfferingsQuery
from intertie.contracts.calls import AttainmentQuery, CallsQuery, DecideCall, DecideCallBody
from intertie.contracts.drill import CallOffDrill, ConsentDrill, DrillQuery, DrillSignature, DrillsQuery, PlanDrill, SignDrill
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.http import (
    AllowanceBody,
    CloseAttemptBody,
    CloseBody,
    ConsentBody,
    CordonBody,
    GrantBody,
    MappingBody,
    QuotaBody,
    ReasonBody,
    SubmitBody,
)
from intertie.contracts.identity import (
    AuditQuery,
    CreateTenant,
    CreateToken,
    InviteSite,
    JoinSite,
    LeaveSite,
    MapAccount,
    RevokeSite,
    RevokeToken,
)
from intertie.contracts.incident import AcknowledgeIncident, CloseIncident, IncidentsQuery, IncidentState, ReportIncident
from intertie.contracts.job import (
    CancelJob,
    CloseAttempt,
    JobQuery,
    JobsQuery,
    JobState,
    LogsQuery,
    PreemptJob,
    SetGrant,
    SetQuota,
    SubmitJob,
)
from intertie.contracts.modes import (
    DecideMode,
    DeclareDowntime,
    DowntimeBody,
    ModeBody,
    MovePhase,
    PhaseBody,
    PoolQuery,
    RemoveDowntime,
)
from intertie.contracts.offerings import RequestBody
from intertie.contracts.probe import ProofsQuery
from intertie.contracts.quarantine import QuarantineQuery, Reinterpret
from intertie.contracts.site import CordonPool, SitesQuery, TaskType
from intertie.contracts.usage import AgreeSpec, ReleaseSegment, SetAllowance, SpecsQuery, StatementQuery, SuspenseQuery
from intertie.errors import Refused
from intertie.ids import AttemptId, CallId, IncidentId, JobId, OfferingName, PoolName, SiteName, TenantName, TokenId, mint

C = TypeVar("C", bound=Contract)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a request brought: path and query as text, the body as bytes, who asks."""

    path: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes
    idempotency_key: str
    tenant: TenantName | None

    def parse(self, kind: type[C]) -> C:
        """The body as a contract; `contract.invalid` names the place."""
        return decode(self.body or b"{}", kind, what="the request body")

    def number(self, name: str, default: int, *, low: int = 0, high: int = 1_000_000_000_000) -> int:
        """A whole number of the query."""
        text = self.query.get(name, "")
        if not text:
            return default
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise Refused("http.query", f"query parameter {name}={text[:40]!r} is not a whole number from {low} to {high}")
        return int(text)

    def choice(self, name: str, kind: type[JobState] | type[IncidentState] | type[TaskType]) -> Any:
        """One word of a closed set, or None."""
        text = self.query.get(name, "")
        try:
            return kind(text) if text else None
        except ValueError:
            raise Refused("http.query", f"query parameter {name}={text[:40]!r} is none of: {', '.join(kind)}") from None

    def own_tenant(self, asked: TenantName | str | None) -> TenantName:
        """The tenant acted for: the one asked for, else the caller's."""
        chosen = asked or self.tenant
        if not chosen:
            raise Refused("http.tenant", "no tenant is named, and your token belongs to none", next_step="name a tenant")
        return TenantName(chosen)


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the API."""

    method: str
    path: str
    endpoint: Endpoint[Any, Any]
    build: Callable[[Parts], Contract]
    summary: str
    body: type[Contract] | None = None
    query: tuple[str, ...] = ()
    status: int = 200
    anonymous: bool = False
    operation: str = ""
    """Its name where another path asks the same endpoint; empty: the endpoint's."""


def _submit(p: Parts) -> SubmitJob:
    body = p.parse(SubmitBody)
    return SubmitJob(
        tenant=p.own_tenant(body.tenant),
        spec=body.spec,
        env=body.env,
        client_key=p.idempotency_key or mint("key"),
        dry_run=body.dry_run,
    )


def _jobs(p: Parts) -> JobsQuery:
    state = p.choice("state", JobState)
    return JobsQuery(
        tenant=TenantName(p.query["tenant"]) if p.query.get("tenant") else None,
        states=[state] if state else [],
        site=SiteName(p.query["site"]) if p.query.get("site") else None,
        limit=p.number("limit", 100, low=1, high=1_000),
        after=JobId(p.query["after"]) if p.query.get("after") else None,
    )


def _job(p: Parts) -> JobQuery:
    return JobQuery(job=JobId(p.path["job"]))


def _logs(p: Parts) -> LogsQuery:
    attempt = p.query.get("attempt")
    return LogsQuery(
        job=JobId(p.path["job"]),
        attempt=AttemptId(attempt) if attempt else None,
        offset=p.number("offset", 0),
        limit=p.number("limit", 65_536, low=1, high=262_144),
    )


def _cordon(p: Parts) -> CordonPool:
    body = p.parse(CordonBody)
    return CordonPool(site=SiteName(p.path["site"]), pool=body.pool, on=body.on, drain=body.drain, reason=body.reason)


def _proofs(p: Parts) -> ProofsQuery:
    pool = p.query.get("pool")
    return ProofsQuery(site=SiteName(p.path["site"]), pool=PoolName(pool) if pool else None, limit=p.number("limit", 8, low=1, high=100))


def _sites(p: Parts) -> SitesQuery:
    return SitesQuery(
        site=SiteName(p.query["site"]) if p.query.get("site") else None,
        accelerator=p.query.get("accelerator") or None,
        task_type=p.choice("task_type", TaskType),
        after=p.query.get("after", ""),
    )


def _quota(p: Parts) -> SetQuota:
    body = p.parse(QuotaBody)
    return SetQuota(tenant=TenantName(p.path["tenant"]), site=body.site, kind=body.kind, limit=body.limit)


def _grant(p: Parts) -> SetGrant:
    body = p.parse(GrantBody)
    return SetGrant(
        tenant=TenantName(p.path["tenant"]),
        site=SiteName(p.path["site"]),
        kind=body.kind,
        devices=body.devices,
        card_hours=body.card_hours,
        valid_days=body.valid_days,
    )


def _close_attempt(p: Parts) -> CloseAttempt:
    body = p.parse(CloseAttemptBody)
    return CloseAttempt(attempt=AttemptId(p.path["attempt"]), reason=body.reason, site_gone=body.site_gone)


def _incidents(p: Parts) -> IncidentsQuery:
    return IncidentsQuery(
        state=p.choice("state", IncidentState),
        site=SiteName(p.query["site"]) if p.query.get("site") else None,
        limit=p.number("limit", 100, low=1, high=1_000),
    )


def _audit(p: Parts) -> AuditQuery:
    before = p.number("before", 0)
    return AuditQuery(limit=p.number("limit", 100, low=1, high=1_000), before=before or None)


def _chain(p: Parts) -> AuditChainQuery:
    return AuditChainQuery(
        after_epoch=p.number("after_epoch", 0), after_number=p.number("after_number", 0), limit=p.number("limit", 500, low=1, high=1_000)
    )


def _anchors(p: Parts) -> AuditAnchorsQuery:
    service = p.query.get("service", "")
    return AuditAnchorsQuery(
        service=service, after_epoch=p.number("after_epoch", 0), after_number=p.number("after_number", 0), newest=not service
    )


def _drills(p: Parts) -> DrillsQuery:
    return DrillsQuery(site=SiteName(p.query["site"]) if p.query.get("site") else None, limit=p.number("limit", 50, low=1, high=500))


def _consent(p: Parts) -> ConsentDrill:
    body = p.parse(ConsentBody)
    return ConsentDrill(site=SiteName(p.path["site"]), allowed=body.allowed, until=body.until, longest_s=body.longest_s)


def _mapping(p: Parts) -> MapAccount:
    return MapAccount(tenant=TenantName(p.path["tenant"]), site=SiteName(p.path["site"]), account=p.parse(MappingBody).account)


def _empty(p: Parts) -> Empty:
    return Empty()


def _site_of(p: Parts) -> SiteName | None:
    return SiteName(p.query["site"]) if p.query.get("site") else None


def _suspense(p: Parts) -> SuspenseQuery:
    return SuspenseQuery(site=_site_of(p), limit=p.number("limit", 100, low=1, high=500))


def _quarantine(p: Parts) -> QuarantineQuery:
    return QuarantineQuery(site=_site_of(p), limit=p.number("limit", 100, low=1, high=500))


def _quarantine_of(service: str, listed: Endpoint[Any, Any], tried: Endpoint[Any, Any]) -> tuple[Route, Route]:
    """The same two paths for each keeper of a lane."""
    path = f"/v1/quarantine/{service}"
    return (
        Route("GET", path, listed, _quarantine, "Entries that cannot be interpreted", query=("site", "limit")),
        Route("POST", f"{path}/retry", tried, lambda p: p.parse(Reinterpret), "Interpret them again", Reinterpret),
    )


def _offerings(p: Parts) -> OfferingsQuery:
    return OfferingsQuery(site=_site_of(p), after=p.query.get("after", ""))


def _calls(p: Parts) -> CallsQuery:
    offering = p.query.get("offering", "")
    site, slash, name = offering.rpartition("/")
    return CallsQuery(
        tenant=TenantName(p.query["tenant"]) if p.query.get("tenant") else None,
        site=SiteName(site) if slash else _site_of(p),
        offering=OfferingName(name) if offering else None,
        day=p.query.get("day", ""),
        call=CallId(p.query["call"]) if p.query.get("call") else None,
        state=p.query.get("state", ""),
        limit=p.number("limit", 100, low=1, high=500),
        after=p.query.get("after", ""),
    )


def _decide_call(p: Parts) -> DecideCall:
    body = p.parse(DecideCallBody)
    return DecideCall(call=CallId(p.path["call"]), **{name: getattr(body, name) for name in DecideCallBody.__struct_fields__})


CHAIN_QUERY = ("after_epoch", "after_number", "limit")


def _pool_of(p: Parts) -> dict[str, Any]:
    return {"site": SiteName(p.path["site"]), "pool": PoolName(p.path["pool"])}


def _decide_mode(p: Parts) -> DecideMode:
    return DecideMode(**_pool_of(p), **msgspec.structs.asdict(p.parse(ModeBody)))


def _move_phase(p: Parts) -> MovePhase:
    return MovePhase(**_pool_of(p), **msgspec.structs.asdict(p.parse(PhaseBody)))


def _downtime(p: Parts) -> DeclareDowntime:
    return DeclareDowntime(**_pool_of(p), **msgspec.structs.asdict(p.parse(DowntimeBody)))


def _request(p: Parts) -> SubmitJob:
    body = p.parse(RequestBody)
    spec = msgspec.structs.replace(body.spec, site=SiteName(p.path["site"]), offering=p.path["offering"], budget=body.budget)
    return SubmitJob(
        tenant=p.own_tenant(body.tenant), spec=spec, env=body.env, client_key=p.idempotency_key or mint("key"), dry_run=body.dry_run
    )


POOL_PATH = "/v1/sites/{site}/pools/{pool}"
POOL_ROUTES: tuple[Route, ...] = (
    Route(
        "GET",
        f"{POOL_PATH}/history",
        e.POOL_HISTORY,
        lambda p: PoolQuery(**_pool_of(p), limit=p.number("limit", 100, low=1, high=500)),
        "A pool, and all that was decided about it",
        query=("limit",),
    ),
    Route(
        "POST",
        "/v1/job-offerings/{site}/{offering}/requests",
        e.SUBMIT,
        _request,
        "Ask a site's owner to run a job under one of their job offerings",
        RequestBody,
        status=201,
        operation="scheduler_request",
    ),
    Route(
        "GET",
        "/v1/reconciliation",
        e.RECONCILIATION,
        lambda p: ReconciliationQuery(site=_site_of(p), period=p.query.get("period", "")),
        "Our books against each site's own accounting",
        query=("site", "period"),
    ),
    Route("PUT", f"{POOL_PATH}/mode", e.DECIDE_MODE, _decide_mode, "Decide a pool's mode by its two questions", ModeBody),
    Route("POST", f"{POOL_PATH}/phase", e.MOVE_PHASE, _move_phase, "Move a pool to its next phase", PhaseBody),
    Route("POST", f"{POOL_PATH}/downtimes", e.DECLARE_DOWNTIME, _downtime, "Declare a downtime", DowntimeBody, status=201),
    Route(
        "POST",
        f"{POOL_PATH}/downtimes/{{downtime}}/remove",
        e.REMOVE_DOWNTIME,
        lambda p: RemoveDowntime(**_pool_of(p), id=p.path["downtime"]),
        "Take a downtime back",
    ),
)

ROUTES: tuple[Route, ...] = (
    *POOL_ROUTES,
    Route("POST", "/v1/join", e.JOIN, lambda p: p.parse(JoinSite), "Join a site by its one-time token", JoinSite, anonymous=True),
    Route("POST", "/v1/site/leave", e.LEAVE_SITE, lambda p: p.parse(LeaveSite), "A site leaves, by its own key", LeaveSite, anonymous=True),
    Route("POST", "/v1/jobs", e.SUBMIT, _submit, "Submit a job", SubmitBody, status=201),
    Route("GET", "/v1/jobs", e.JOBS, _jobs, "Jobs, newest first", query=("tenant", "state", "site", "limit", "after")),
    Route("GET", "/v1/jobs/{job}", e.JOB, _job, "One job"),
    Route("GET", "/v1/jobs/{job}/story", e.STORY, _job, "All that happened to a job, with its evidence"),
    Route("GET", "/v1/jobs/{job}/logs", e.LOGS, _logs, "Bytes of a job's log", query=("attempt", "offset", "limit")),
    Route(
        "POST",
        "/v1/jobs/{job}/cancel",
        e.CANCEL,
        lambda p: CancelJob(job=JobId(p.path["job"]), reason=p.parse(ReasonBody).reason),
        "Cancel a job: a lasting intent",
        ReasonBody,
    ),
    Route(
        "POST",
        "/v1/jobs/{job}/preempt",
        e.PREEMPT,
        lambda p: PreemptJob(job=JobId(p.path["job"]), reason=p.parse(CloseBody).reason),
        "Stop a job's attempt for somebody else's sake; the platform pays",
        CloseBody,
    ),
    Route("POST", "/v1/attempts/{attempt}/close", e.CLOSE_ATTEMPT, _close_attempt, "Wait no longer for a silent site", CloseAttemptBody),
    Route("GET", "/v1/sites", e.SITES, _sites, "Sites and pools, by capability", query=("site", "accelerator", "task_type", "after")),
    Route("GET", "/v1/sites/{site}/proofs", e.PROOFS, _proofs, "Probes and drift of a site's pools", query=("pool", "limit")),
    Route("POST", "/v1/sites/{site}/cordon", e.CORDON, _cordon, "No new work for a site or pool, or lift it", CordonBody),
    Route(
        "POST", "/v1/invitations", e.INVITE_SITE, lambda p: p.parse(InviteSite), "Invite a site: a one-time token", InviteSite, status=201
    ),
    Route(
        "POST",
        "/v1/sites/{site}/revoke",
        e.REVOKE_SITE,
        lambda p: RevokeSite(site=SiteName(p.path["site"]), reason=p.parse(CloseBody).reason),
        "Take a site's keys away: its connections drop at once",
        CloseBody,
    ),
    Route("GET", "/v1/tenants", e.TENANTS, _empty, "Tenants"),
    Route("POST", "/v1/tenants", e.CREATE_TENANT, lambda p: p.parse(CreateTenant), "Create a tenant", CreateTenant, status=201),
    Route("GET", "/v1/mappings", e.MAPPINGS, _empty, "Which local account a tenant becomes at which site"),
    Route("PUT", "/v1/tenants/{tenant}/mappings/{site}", e.MAP_ACCOUNT, _mapping, "Map a tenant to a local account", MappingBody),
    Route(
        "PUT",
        "/v1/tenants/{tenant}/allowance",
        e.SET_ALLOWANCE,
        lambda p: SetAllowance(tenant=TenantName(p.path["tenant"]), amount=p.parse(AllowanceBody).amount),
        "What the scheduler may spend for a tenant",
        AllowanceBody,
    ),
    Route("GET", "/v1/grants", e.GRANTS, _empty, "Islanded allowances in force"),
    Route("PUT", "/v1/tenants/{tenant}/grants/{site}", e.SET_GRANT, _grant, "What a tenant may use at a site that is alone", GrantBody),
    Route("GET", "/v1/quotas", e.QUOTAS, _empty, "Quotas"),
    Route("PUT", "/v1/tenants/{tenant}/quota", e.SET_QUOTA, _quota, "How many devices a tenant may hold at once", QuotaBody),
    Route("GET", "/v1/tokens", e.TOKENS, _empty, "Tokens, without their secrets"),
    Route(
        "POST",
        "/v1/tokens",
        e.CREATE_TOKEN,
        lambda p: p.parse(CreateToken),
        "Create a token; its secret is shown once",
        CreateToken,
        status=201,
    ),
    Route(
        "POST",
        "/v1/tokens/{token}/revoke",
        e.REVOKE_TOKEN,
        lambda p: RevokeToken(id=TokenId(p.path["token"]), reason=p.parse(ReasonBody).reason),
        "Revoke a token",
        ReasonBody,
    ),
    Route("GET", "/v1/meter-specs", e.SPECS, lambda p: SpecsQuery(party=p.query.get("party", "")), "Agreed meter specs", query=("party",)),
    Route(
        "POST",
        "/v1/meter-specs",
        e.AGREE_SPEC,
        lambda p: p.parse(AgreeSpec),
        "Agree a meter spec, or its next revision",
        AgreeSpec,
        status=201,
    ),
    Route("GET", "/v1/offerings", e.CALL_OFFERINGS, _offerings, "Call offerings that you may call, or see", query=("site", "after")),
    Route(
        "GET",
        "/v1/offerings/{site}/{name}/attainment",
        e.CALL_ATTAINMENT,
        lambda p: AttainmentQuery(site=SiteName(p.path["site"]), offering=OfferingName(p.path["name"]), month=p.query.get("month", "")),
        "Promise against measurement of one offering and month",
        query=("month",),
    ),
    Route(
        "GET",
        "/v1/calls",
        e.CALLS,
        _calls,
        "Calls of offerings, newest first, each with its formula",
        query=("tenant", "site", "offering", "day", "call", "state", "limit", "after"),
    ),
    Route(
        "POST",
        "/v1/calls/{call}/decision",
        e.DECIDE_CALL,
        _decide_call,
        "A person decides how many tokens a call used, of which nobody counted them",
        DecideCallBody,
    ),
    Route("GET", "/v1/ledger/check", e.LEDGER_CHECK, _empty, "The ledger's own proof"),
    Route("GET", "/v1/suspense", e.SUSPENSE, _suspense, "Usage that waits, and for what", query=("site", "limit")),
    Route(
        "POST",
        "/v1/suspense/release",
        e.RELEASE_SUSPENSE,
        lambda p: p.parse(ReleaseSegment),
        "A person decides that a segment counts",
        ReleaseSegment,
    ),
    *_quarantine_of("registry", e.REGISTRY_QUARANTINE, e.REGISTRY_REINTERPRET),
    *_quarantine_of("scheduler", e.SCHEDULER_QUARANTINE, e.SCHEDULER_REINTERPRET),
    *_quarantine_of("metering", e.METERING_QUARANTINE, e.METERING_REINTERPRET),
    Route("POST", "/v1/incidents", e.REPORT_INCIDENT, lambda p: p.parse(ReportIncident), "Report a fault", ReportIncident, status=201),
    Route("GET", "/v1/incidents", e.INCIDENTS, _incidents, "Incidents, newest first", query=("state", "site", "limit")),
    Route(
        "POST",
        "/v1/incidents/{incident}/acknowledge",
        e.ACKNOWLEDGE_INCIDENT,
        lambda p: AcknowledgeIncident(incident=IncidentId(p.path["incident"])),
        "Take an incident",
    ),
    Route(
        "POST",
        "/v1/incidents/{incident}/close",
        e.CLOSE_INCIDENT,
        lambda p: CloseIncident(incident=IncidentId(p.path["incident"]), reason=p.parse(CloseBody).reason),
        "Close an incident with a reason",
        CloseBody,
    ),
    Route("GET", "/v1/audit/registry", e.REGISTRY_AUDIT, _audit, "Audit rows", query=("limit", "before")),
    Route("GET", "/v1/audit/scheduler", e.SCHEDULER_AUDIT, _audit, "Audit rows", query=("limit", "before")),
    Route("GET", "/v1/audit/metering", e.METERING_AUDIT, _audit, "Audit rows", query=("limit", "before")),
    Route("GET", "/v1/audit/identity", e.IDENTITY_AUDIT, _audit, "Audit rows", query=("limit", "before")),
    Route("GET", "/v1/audit/incident", e.INCIDENT_AUDIT, _audit, "Audit rows", query=("limit", "before")),
    Route("GET", "/v1/audit/registry/chain", e.REGISTRY_AUDIT_CHAIN, _chain, "Links of the audit chain", query=CHAIN_QUERY),
    Route("GET", "/v1/audit/scheduler/chain", e.SCHEDULER_AUDIT_CHAIN, _chain, "Links of the audit chain", query=CHAIN_QUERY),
    Route("GET", "/v1/audit/metering/chain", e.METERING_AUDIT_CHAIN, _chain, "Links of the audit chain", query=CHAIN_QUERY),
    Route("GET", "/v1/audit/identity/chain", e.IDENTITY_AUDIT_CHAIN, _chain, "Links of the audit chain", query=CHAIN_QUERY),
    Route("GET", "/v1/audit/incident/chain", e.INCIDENT_AUDIT_CHAIN, _chain, "Links of the audit chain", query=CHAIN_QUERY),
    Route(
        "GET",
        "/v1/audit/anchors",
        e.AUDIT_ANCHORS,
        _anchors,
        "Anchored heads of the audit chains: the newest of each, or all of one service's",
        query=("service", "after_epoch", "after_number"),
    ),
    Route("GET", "/v1/drills", e.DRILLS, _drills, "Drills, newest first, and who consents", query=("site", "limit")),
    Route("POST", "/v1/drills", e.PLAN_DRILL, lambda p: p.parse(PlanDrill), "Plan a drill: a cut of a site's link", PlanDrill, status=201),
    Route(
        "POST",
        "/v1/drills/{drill}/call-off",
        e.CALL_OFF_DRILL,
        lambda p: CallOffDrill(drill=p.path["drill"], reason=p.parse(ReasonBody).reason),
        "Call a drill off before it begins",
        ReasonBody,
    ),
    Route("GET", "/v1/drills/{drill}/evidence", e.DRILL_EVIDENCE, lambda p: DrillQuery(drill=p.path["drill"]), "A judged drill, signed"),
    Route(
        "POST",
        "/v1/drills/{drill}/signatures",
        e.SIGN_DRILL,
        lambda p: SignDrill(drill=p.path["drill"], signature=p.parse(DrillSignature)),
        "A person's signature under a drill",
        DrillSignature,
    ),
    Route("PUT", "/v1/sites/{site}/drill-consent", e.CONSENT_DRILL, _consent, "A site owner's consent to drills", ConsentBody),
)


def statement_query(p: Parts) -> StatementQuery:
    """`GET /v1/statements`: also answered as CSV, hence outside the table."""
    return StatementQuery(tenant=p.own_tenant(p.query.get("tenant")), period=p.query.get("period", ""))
