"""The drill: a site and the hub rehearse a cut of their link with the owner's consent, and both write down what happened.

The site's agent makes the cut itself: it closes its connection for the agreed time, whatever happens, and the owner ends it at once whenever
he likes. What each side saw, the verdict that follows from it and the signatures are one canonical JSON document that can be checked without a hub.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from intertie.contracts.base import Contract, Event, Instant, NonNegative, Positive, Text
from intertie.ids import AttemptId, JobId, PoolName, SiteName

DrillId = Annotated[str, msgspec.Meta(pattern="^drl-[0-9A-Za-z-]{1,60}$")]
Seconds = Annotated[int, msgspec.Meta(ge=5, le=3_600)]
"""Longer than an hour is no rehearsal, and shorter than five seconds is no cut."""


class DrillKind(StrEnum):
    """rehearsal: one pool with one small job, before the site may be cut as a whole for longer. cut: the site's drill."""

    REHEARSAL = "rehearsal"
    CUT = "cut"


class DrillState(StrEnum):
    PLANNED = "planned"
    CUT = "cut"
    """The site has fallen silent in the drill's time."""
    BACK = "back"
    """The site's own account of it is here; books are compared."""
    JUDGED = "judged"
    CALLED_OFF = "called_off"
    """It did not take place: nobody consented, the site refused, or a person called it off."""


class DrillConsent(Contract, frozen=True, kw_only=True):
    """The owner's word. given: `site` at the site's own door · `token` by a site owner's token at the hub."""

    allowed: bool
    given: str
    by: str
    """The local user, or the principal's name."""
    at: Instant
    until: Instant | None = None
    longest_s: Seconds = 900


class DrillAttempt(Contract, frozen=True, kw_only=True):
    """A federation attempt that was open at some time of the cut, by the site's own records."""

    attempt: AttemptId
    job: JobId
    pool: PoolName
    before: str
    """Its state when the cut began; empty if it came later."""
    after: str
    """Its state when the link was back."""
    began_in_cut: bool
    """Its process began while nobody heard the site."""
    go_before: bool
    """The hub's go had arrived before the cut."""
    same_process: bool
    """The same supervisor was found before and after, for one that ran through."""
    ran_us: NonNegative = 0
    """What its supervisor measured, once ended."""
    outcome: str = ""
    cause: str = ""


class DrillLocal(Contract, frozen=True, kw_only=True):
    """What the owner's own users did during the cut: counts, no names."""

    running_before: NonNegative
    submitted: NonNegative
    started: NonNegative
    ended: NonNegative


class DrillLane(Contract, frozen=True, kw_only=True):
    """What a lane had to tell afterwards."""

    lane: str
    waiting: NonNegative
    """Entries that were not acknowledged when the link was made again."""
    to_head_ms: NonNegative | None
    """From then until all of them were acknowledged; None: not within the time that the site watched."""


class SiteDrill(Contract, frozen=True, kw_only=True):
    """The site's own account, by its own clock."""

    drill: DrillId
    site: SiteName
    seconds: Seconds
    cut_at: Instant
    back_at: Instant
    """When the connection was allowed again."""
    ended_by: str
    """`time` · `owner`."""
    restarts: NonNegative
    """Times the agent was started anew during the cut."""
    islanded_at: Instant | None
    """When the site itself noticed that nobody hears it."""
    heard_at: Instant | None
    """The first answer afterwards."""
    attempts: Annotated[list[DrillAttempt], msgspec.Meta(max_length=500)]
    local: DrillLocal
    lanes: list[DrillLane]
    agent_version: str


class DrillBook(Contract, frozen=True, kw_only=True):
    """One attempt in the three books, in microseconds; None where a book has no end of it."""

    attempt: AttemptId
    site_us: NonNegative | None
    scheduler_us: NonNegative | None
    metering_us: NonNegative | None
    outcome: str
    """The scheduler's; empty while it runs."""
    cause: str


class HubDrill(Contract, frozen=True, kw_only=True):
    """The hub's own account, by its own clock."""

    silent_at: Instant | None
    """When the registry called the site stale."""
    heard_at: Instant | None
    """When it was fresh again."""
    silent_limit_ms: NonNegative
    """After this much silence the hub calls a site stale."""
    books: list[DrillBook]


class DrillCheck(Contract, frozen=True, kw_only=True):
    """One thing that must be true of a passed drill."""

    name: str
    ok: bool
    text: Text


class DrillRecord(Contract, frozen=True, kw_only=True):
    """What the registry keeps of a drill."""

    drill: DrillId
    site: SiteName
    pool: PoolName | None
    kind: DrillKind
    state: DrillState
    seconds: Seconds
    start: Instant
    asked_by: str
    asked_at: Instant
    reason: Text
    consent: DrillConsent | None = None
    silent_at: Instant | None = None
    heard_at: Instant | None = None
    verdict: str = ""
    """`passed` · `failed`; empty before it is judged."""
    checks: list[DrillCheck] = []
    text: Text = ""
    """Why it was called off."""
    judged_at: Instant | None = None
    signed_by: list[str] = []
    version: Positive = 1


class DrillChanged(Event, frozen=True, kw_only=True):
    """A drill's record is now this."""

    TYPE: ClassVar[str] = "io.intertie.drill.changed.v1"
    SERVICE: ClassVar[str] = "registry"

    record: DrillRecord

    @property
    def entity(self) -> str:
        return f"{self.record.site}/{self.record.drill}"

    @property
    def site_token(self) -> str:
        return self.record.site


class PlanDrill(Contract, frozen=True, kw_only=True):
    """`cmd.registry.plan_drill`: ask for a cut. Refused without the owner's consent, beside another drill, and, for a whole site's, without a
    rehearsal that passed."""

    site: SiteName
    pool: PoolName | None = None
    kind: DrillKind = DrillKind.CUT
    seconds: Seconds
    after_s: Annotated[int, msgspec.Meta(ge=1, le=604_800)] = 10
    """Seconds from now until the cut."""
    reason: Text = ""


class ConsentDrill(Contract, frozen=True, kw_only=True):
    """`cmd.registry.consent_drill`: the site owner's consent by token; `allowed` false takes it back."""

    site: SiteName
    allowed: bool = True
    until: Instant | None = None
    longest_s: Seconds = 900


class CallOffDrill(Contract, frozen=True, kw_only=True):
    """`cmd.registry.call_off_drill`: before it began. During a cut nobody but the site's owner can be heard."""

    drill: DrillId
    reason: Text = ""


class DrillsQuery(Contract, frozen=True, kw_only=True):
    """`qry.registry.drills`: newest first."""

    site: SiteName | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=500)] = 50


class SiteConsent(Contract, frozen=True, kw_only=True):
    site: SiteName
    consent: DrillConsent


class DrillsReply(Contract, frozen=True, kw_only=True):
    drills: list[DrillRecord]
    consents: list[SiteConsent] = []
    max_age_days: NonNegative = 0
    """The hub's policy: a site without a passed drill younger than this says so."""


class DrillQuery(Contract, frozen=True, kw_only=True):
    """`qry.registry.drill_evidence`."""

    drill: DrillId


class DrillDocument(Contract, frozen=True, kw_only=True):
    """Everything that a verdict follows from, and the verdict."""

    v: Positive = 1
    drill: DrillId
    site: SiteName
    pool: PoolName | None
    kind: DrillKind
    seconds: Seconds
    start: Instant
    asked_by: str
    asked_at: Instant
    reason: Text
    consent: DrillConsent
    at_site: SiteDrill
    at_hub: HubDrill
    checks: list[DrillCheck]
    verdict: str


class DrillSignature(Contract, frozen=True, kw_only=True):
    """role: `site` signs its own account, `hub` the document, `person` the document after reading it. Which bytes: `intertie.trust.evidence`."""

    role: str
    name: str
    key: str
    """Public nkey."""
    at: Instant
    signature: str
    """64 bytes of Ed25519, base64."""


class DrillEvidence(Contract, frozen=True, kw_only=True):
    """A judged drill with its signatures: what `intertie drill verify` reads."""

    document: DrillDocument
    signatures: list[DrillSignature]


class SignDrill(Contract, frozen=True, kw_only=True):
    """`cmd.registry.sign_drill`: a person's signature; the key's public half goes into the audit row."""

    drill: DrillId
    signature: DrillSignature
