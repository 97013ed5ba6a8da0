"""Every query and command: its subject, what it takes, what it gives, and who may call it.

Each row is served by its keeper as a NATS micro-service endpoint (`intertie.v1.{qry,cmd}.<service>.<verb>`), called through
`intertie.bus.rpc`, and described from here in the AsyncAPI document. `action` is the word that `intertie.trust.rights` judges;
`None` is for calls that carry their own proof (a join token, an API token).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from intertie.contracts import accounting as ac
from intertie.contracts import audit as a
from intertie.contracts import call_offerings as co
from intertie.contracts import calls as c
from intertie.contracts import drill as d
from intertie.contracts import identity as i
from intertie.contracts import incident as n
from intertie.contracts import job as j
from intertie.contracts import link as k
from intertie.contracts import modes as m
from intertie.contracts import probe as pr
from intertie.contracts import quarantine as q
from intertie.contracts import site as s
from intertie.contracts import usage as u
from intertie.contracts.base import PREFIX, Contract, Empty

Q = TypeVar("Q", bound=Contract)
R = TypeVar("R", bound=Contract)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Q, R]):
    """One request/reply. `kind` is `qry` (changes nothing) or `cmd` (leaves an audit row of what it changed, or of whom it turned away)."""

    kind: str
    service: str
    verb: str
    request: type[Q]
    reply: type[R]
    action: str | None

    @property
    def subject(self) -> str:
        return f"{PREFIX}.{self.kind}.{self.service}.{self.verb}"


# registry
SITES = Endpoint("qry", "registry", "sites", s.SitesQuery, s.SitesReply, "site.read")
REGISTER_SITE = Endpoint("cmd", "registry", "register_site", s.RegisterSite, s.SiteRecord, "site.register")
SITE_LEFT = Endpoint("cmd", "registry", "site_left", s.SiteLeft, s.SiteRecord, "site.register")
CORDON = Endpoint("cmd", "registry", "cordon", s.CordonPool, s.SitesReply, "site.cordon")
PLAN_DRILL = Endpoint("cmd", "registry", "plan_drill", d.PlanDrill, d.DrillRecord, "drill.start")
CALL_OFF_DRILL = Endpoint("cmd", "registry", "call_off_drill", d.CallOffDrill, d.DrillRecord, "drill.start")
CONSENT_DRILL = Endpoint("cmd", "registry", "consent_drill", d.ConsentDrill, d.DrillConsent, "drill.consent")
DRILLS = Endpoint("qry", "registry", "drills", d.DrillsQuery, d.DrillsReply, "drill.read")
DRILL_EVIDENCE = Endpoint("qry", "registry", "drill_evidence", d.DrillQuery, d.DrillEvidence, "drill.read")
SIGN_DRILL = Endpoint("cmd", "registry", "sign_drill", d.SignDrill, d.DrillEvidence, "drill.start")
DECIDE_MODE = Endpoint("cmd", "registry", "decide_mode", m.DecideMode, s.PoolRecord, "pool.mode")
MOVE_PHASE = Endpoint("cmd", "registry", "move_phase", m.MovePhase, s.PoolRecord, "pool.phase")
DECLARE_DOWNTIME = Endpoint("cmd", "registry", "declare_downtime", m.DeclareDowntime, s.PoolRecord, "pool.downtime")
REMOVE_DOWNTIME = Endpoint("cmd", "registry", "remove_downtime", m.RemoveDowntime, s.PoolRecord, "pool.downtime")
POOL_HISTORY = Endpoint("qry", "registry", "pool_history", m.PoolQuery, m.PoolHistory, "pool.history")
CALL_OFFERINGS = Endpoint("qry", "registry", "call_offerings", co.OfferingsQuery, co.OfferingsReply, "offering.read")
PROOFS = Endpoint("qry", "registry", "proofs", pr.ProofsQuery, pr.ProofsReply, "site.read")
REGISTRY_AUDIT = Endpoint("qry", "registry", "audit", i.AuditQuery, i.AuditReply, "audit.read")
REGISTRY_QUARANTINE = Endpoint("qry", "registry", "quarantine", q.QuarantineQuery, q.QuarantineReply, "quarantine.read")
REGISTRY_REINTERPRET = Endpoint("cmd", "registry", "reinterpret", q.Reinterpret, q.Reinterpreted, "quarantine.retry")
REGISTRY_AUDIT_CHAIN = Endpoint("qry", "registry", "audit_chain", a.AuditChainQuery, a.AuditChainReply, "audit.read")

# scheduler
SUBMIT = Endpoint("cmd", "scheduler", "submit", j.SubmitJob, j.SubmitReply, "job.submit")
CANCEL = Endpoint("cmd", "scheduler", "cancel", j.CancelJob, j.JobRecord, "job.cancel")
JOB = Endpoint("qry", "scheduler", "job", j.JobQuery, j.JobRecord, "job.read")
JOBS = Endpoint("qry", "scheduler", "jobs", j.JobsQuery, j.JobsReply, "job.read")
STORY = Endpoint("qry", "scheduler", "story", j.JobQuery, j.Story, "job.read")
LOGS = Endpoint("qry", "scheduler", "logs", j.LogsQuery, k.LogChunk, "job.logs")
ATTEMPTS = Endpoint("qry", "scheduler", "attempts", j.AttemptsQuery, j.AttemptsReply, "service.snapshot")
SET_QUOTA = Endpoint("cmd", "scheduler", "set_quota", j.SetQuota, j.QuotasReply, "quota.set")
QUOTAS = Endpoint("qry", "scheduler", "quotas", Empty, j.QuotasReply, "quota.read")
PREEMPT = Endpoint("cmd", "scheduler", "preempt", j.PreemptJob, j.JobRecord, "job.preempt")
CLOSE_ATTEMPT = Endpoint("cmd", "scheduler", "close_attempt", j.CloseAttempt, j.JobRecord, "attempt.close")
SET_GRANT = Endpoint("cmd", "scheduler", "set_grant", j.SetGrant, j.GrantsReply, "grant.set")
GRANTS = Endpoint("qry", "scheduler", "grants", Empty, j.GrantsReply, "grant.read")
SCHEDULER_AUDIT = Endpoint("qry", "scheduler", "audit", i.AuditQuery, i.AuditReply, "audit.read")
SCHEDULER_QUARANTINE = Endpoint("qry", "scheduler", "quarantine", q.QuarantineQuery, q.QuarantineReply, "quarantine.read")
SCHEDULER_REINTERPRET = Endpoint("cmd", "scheduler", "reinterpret", q.Reinterpret, q.Reinterpreted, "quarantine.retry")
SCHEDULER_AUDIT_CHAIN = Endpoint("qry", "scheduler", "audit_chain", a.AuditChainQuery, a.AuditChainReply, "audit.read")

# metering
AGREE_SPEC = Endpoint("cmd", "metering", "agree_spec", u.AgreeSpec, u.MeterSpec, "spec.agree")
SPECS = Endpoint("qry", "metering", "specs", u.SpecsQuery, u.SpecsReply, "spec.read")
STATEMENT = Endpoint("qry", "metering", "statement", u.StatementQuery, u.Statement, "statement.read")
BOOKS = Endpoint("qry", "metering", "books", u.BookQuery, u.BooksReply, "statement.read")
CALLS = Endpoint("qry", "metering", "calls", c.CallsQuery, c.CallsReply, "call.read")
CALL_ATTAINMENT = Endpoint("qry", "metering", "call_attainment", c.AttainmentQuery, c.Attainment, "offering.read")
DECIDE_CALL = Endpoint("cmd", "metering", "decide_call", c.DecideCall, c.CallBook, "call.decide")
CALLS_SEEN = Endpoint("cmd", "metering", "calls_seen", c.CallsSeen, c.CallsTaken, "call.seen")
SET_ALLOWANCE = Endpoint("cmd", "metering", "set_allowance", u.SetAllowance, u.Allowance, "allowance.set")
METERING_SNAPSHOT = Endpoint("qry", "metering", "snapshot", Empty, u.MeteringSnapshotReply, "service.snapshot")
LEDGER_CHECK = Endpoint("qry", "metering", "check", Empty, u.LedgerCheck, "ledger.check")
METERING_AUDIT = Endpoint("qry", "metering", "audit", i.AuditQuery, i.AuditReply, "audit.read")
METERING_QUARANTINE = Endpoint("qry", "metering", "quarantine", q.QuarantineQuery, q.QuarantineReply, "quarantine.read")
METERING_REINTERPRET = Endpoint("cmd", "metering", "reinterpret", q.Reinterpret, q.Reinterpreted, "quarantine.retry")
RECONCILIATION = Endpoint("qry", "metering", "reconciliation", ac.ReconciliationQuery, ac.ReconciliationReply, "reconciliation.read")
SUSPENSE = Endpoint("qry", "metering", "suspense", u.SuspenseQuery, u.SuspenseReply, "suspense.read")
RELEASE_SUSPENSE = Endpoint("cmd", "metering", "release_suspense", u.ReleaseSegment, u.AttemptBook, "suspense.release")
METERING_AUDIT_CHAIN = Endpoint("qry", "metering", "audit_chain", a.AuditChainQuery, a.AuditChainReply, "audit.read")

# identity
AUTHENTICATE = Endpoint("cmd", "identity", "authenticate", i.Authenticate, i.Authenticated, None)
AUTHENTICATE_SITE = Endpoint("cmd", "identity", "authenticate_site", i.AuthenticateSite, i.Authenticated, None)
JOIN = Endpoint("cmd", "identity", "join", i.JoinSite, i.Joined, None)
INVITE_SITE = Endpoint("cmd", "identity", "invite_site", i.InviteSite, i.Invited, "site.invite")
REVOKE_SITE = Endpoint("cmd", "identity", "revoke_site", i.RevokeSite, i.SiteKeyRecord, "site.revoke")
LEAVE_SITE = Endpoint("cmd", "identity", "leave_site", i.LeaveSite, i.LeaveReceipt, None)
CREATE_TENANT = Endpoint("cmd", "identity", "create_tenant", i.CreateTenant, i.TenantRecord, "tenant.create")
TENANTS = Endpoint("qry", "identity", "tenants", Empty, i.TenantsReply, "tenant.read")
CREATE_TOKEN = Endpoint("cmd", "identity", "create_token", i.CreateToken, i.TokenCreated, "token.create")
TOKENS = Endpoint("qry", "identity", "tokens", Empty, i.TokensReply, "token.read")
REVOKE_TOKEN = Endpoint("cmd", "identity", "revoke_token", i.RevokeToken, i.TokenRecord, "token.revoke")
MAP_ACCOUNT = Endpoint("cmd", "identity", "map_account", i.MapAccount, i.MappingsReply, "mapping.set")
MAPPINGS = Endpoint("qry", "identity", "mappings", Empty, i.MappingsReply, "mapping.read")
IDENTITY_SNAPSHOT = Endpoint("qry", "identity", "snapshot", Empty, i.IdentitySnapshotReply, "service.snapshot")
IDENTITY_AUDIT = Endpoint("qry", "identity", "audit", i.AuditQuery, i.AuditReply, "audit.read")
ANCHOR_AUDIT = Endpoint("cmd", "identity", "anchor_audit", a.AnchorAudit, a.AuditAnchor, "audit.anchor")
AUDIT_ANCHORS = Endpoint("qry", "identity", "audit_anchors", a.AuditAnchorsQuery, a.AuditAnchorsReply, "audit.read")
IDENTITY_AUDIT_CHAIN = Endpoint("qry", "identity", "audit_chain", a.AuditChainQuery, a.AuditChainReply, "audit.read")

# incident
REPORT_INCIDENT = Endpoint("cmd", "incident", "report", n.ReportIncident, n.IncidentRecord, "incident.report")
INCIDENTS = Endpoint("qry", "incident", "list", n.IncidentsQuery, n.IncidentsReply, "incident.read")
ACKNOWLEDGE_INCIDENT = Endpoint("cmd", "incident", "acknowledge", n.AcknowledgeIncident, n.IncidentRecord, "incident.handle")
CLOSE_INCIDENT = Endpoint("cmd", "incident", "close", n.CloseIncident, n.IncidentRecord, "incident.handle")
INCIDENT_AUDIT = Endpoint("qry", "incident", "audit", i.AuditQuery, i.AuditReply, "audit.read")
INCIDENT_AUDIT_CHAIN = Endpoint("qry", "incident", "audit_chain", a.AuditChainQuery, a.AuditChainReply, "audit.read")

ENDPOINTS: tuple[Endpoint[Contract, Contract], ...] = tuple(value for value in list(globals().values()) if isinstance(value, Endpoint))
