"""What the scheduler needs of its store: a narrow port whose every writing verb is one transaction, with events, audit row and story in it.

The rules stay in `core`: a verb that changes a job is given a pure decision and calls it with the locked rows. Who asks is a mandatory
argument of every read of a job (`Scope`): what lies outside is not there. `pg` keeps it in PostgreSQL, `memory` is the twin; one suite for both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from intertie.contracts.base import EventMeta
from intertie.contracts.identity import AuditQuery, AuditRow
from intertie.contracts.job import AttemptSnapshot, JobsQuery, QuotaRecord, Rejection, SetQuota, StoryLine, WaitReason
from intertie.ids import AttemptId, Digest, JobId, RoundId, SiteName, TenantName
from intertie.scheduler.core.given import Fact, RoundInput
from intertie.scheduler.core.grants import Grant
from intertie.scheduler.core.orders import Order
from intertie.scheduler.core.rows import Attempt, Change, File, Ignored, Job, JobView
from intertie.store import Leader, StoreTx
from intertie.trust.rights import Scope

# How many queued jobs one round looks at. The rest wait unseen for the next; at 10,000 pools × jobs a second a round stays far below its beat.
QUEUE_LIMIT = 2_000
# Rounds that are remembered per job: enough to see a reason change, few enough that a week of waiting stays small.
VERDICTS_KEPT = 20
# Attempts that came to nothing and are shown with their job; those that ran are always shown. The rest stays in the story and in the audit.
IDLE_ATTEMPTS_SHOWN = 50
# Instructions in one answer; the keeper also bounds its bytes.
ORDERS_LIMIT = 64

# Other settings from a copy that knows no more than the last one are believed after this: a changed configuration, not two copies taking turns.
SETTLED_CONTENT = timedelta(seconds=60)

EVERYTHING = Scope(everything=True, tenant=None, site=None)
"""For the scheduler's own work; a caller's scope comes from `trust.rights.scope`."""

Decide = Callable[[File], Change | Ignored]
DecideAttempt = Callable[[File | None], Change | Ignored]


def result_of(outcome: Change | Ignored) -> str:
    """As the audit row says it."""
    return f"nothing to do: {outcome.why}" if isinstance(outcome, Ignored) else "ok"


DecidePlacement = Callable[[File], Change | Ignored]


@dataclass(frozen=True, slots=True)
class Submitted:
    job: Job
    repeated: bool
    """The client key was there before; `job` is what it made then."""


@dataclass(frozen=True, slots=True)
class RoundRow:
    """A round that decided or told something."""

    round: RoundId
    at: datetime
    input: Digest
    """Of the whole snapshot: the round can be replayed and compared."""
    queued: int
    not_examined: int


@dataclass(frozen=True, slots=True)
class Told:
    """A job's verdict of one round."""

    job: JobId
    digest: Digest
    reason: WaitReason
    text: str
    rejections: tuple[Rejection, ...]
    since: datetime


@dataclass(frozen=True, slots=True)
class Placement:
    job: JobId
    decide: DecidePlacement


@dataclass(frozen=True, slots=True)
class Ruling:
    """The leader decides about one attempt of a job (None: its live one): an offer is taken back, a promise given, a silent one replaced."""

    job: JobId
    decide: Decide
    attempt: AttemptId | None = None


Withdrawal = Ruling
"""The oldest of the rulings: an offer that nobody answers."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A site's settings with one content: their number, and since when they are in force."""

    number: int
    at: datetime


@dataclass(frozen=True, slots=True)
class OpenOrder:
    """An instruction that is due, with what it is made from."""

    order: Order
    epoch: int
    number: int
    attempt: Attempt
    job: Job
    env: Mapping[str, str]
    """Only for an offer."""


def new_first(orders: Sequence[OpenOrder], mark: tuple[int, int]) -> list[OpenOrder]:
    """What the site has not stored before what it has, each by number: repeats must never crowd out what is new."""
    return sorted(orders, key=lambda o: ((o.epoch, o.number) <= mark, o.epoch, o.number))[:ORDERS_LIMIT]


class SchedulerStore(Protocol):
    """All methods raise `Unavailable` when the store is away."""

    def leading(self, role: str) -> AbstractAsyncContextManager[Leader]: ...

    async def submit(self, job: Job, env: Mapping[str, str], told: StoryLine) -> Submitted:
        """Insert the job unless its tenant has used the client key before."""
        ...

    async def by_key(self, tenant: TenantName, client_key: str) -> Job | None:
        """What this key made before."""
        ...

    async def view(self, job: JobId, scope: Scope) -> JobView | None: ...

    async def views(self, query: JobsQuery, scope: Scope) -> tuple[list[JobView], bool]:
        """Newest first, and whether there are more."""
        ...

    async def story(self, job: JobId, scope: Scope) -> list[StoryLine]:
        """In the order in which it was recorded; empty if the job is not there."""
        ...

    async def change(self, job: JobId, scope: Scope, decide: Decide, *, actor: str, action: str, reason: str) -> Change | Ignored | None:
        """Decide under the job's lock; None if it is not there. Leaves an audit row either way."""
        ...

    async def apply(self, tx: StoreTx, attempt: AttemptId | None, decide: DecideAttempt) -> Change | Ignored:
        """Decide what an entry means, in the lane's own transaction."""
        ...

    async def open_at(self, tx: StoreTx, site: SiteName) -> list[AttemptId]:
        """Attempts of the site that are not known to have ended, lost ones included; by id."""
        ...

    async def take_up(self, tx: StoreTx, job: Job, told: StoryLine, decide: Decide) -> Change | Ignored:
        """Decide about a job that another side knew first, in the lane's own transaction: `job` is inserted unless it is here; `decide` is given the
        file as it is then. A client key that was used again meanwhile gives way."""
        ...

    async def change_attempt(
        self, attempt: AttemptId, scope: Scope, decide: Decide, *, actor: str, action: str, reason: str
    ) -> Change | Ignored | None:
        """`change` of a named attempt's file, live or not."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[StoreTx]: ...

    async def load_round(self, allowances: Mapping[TenantName, datetime]) -> RoundInput:
        """`allowances`: tenants with a limited one, and since when what they use counts against it."""
        ...

    async def save_round(self, leader: Leader, row: RoundRow, placements: Sequence[Placement], told: Sequence[Told]) -> list[Change]:
        """Fenced. A placement whose job has left the queue, or whose device has a holder, is left out; what was placed comes back."""
        ...

    async def withdraw(self, leader: Leader, withdrawals: Sequence[Ruling]) -> list[Change]:
        """Fenced. What changed meanwhile is left alone by its own decision; what was ruled comes back."""
        ...

    async def orders(self, site: SiteName, mark: tuple[int, int]) -> list[OpenOrder]:
        """What the site is to be told, new before known. `mark`: the highest (epoch, number) that it has on disk."""
        ...

    async def owed(self, sites: Collection[SiteName]) -> frozenset[SiteName]:
        """Those of these sites that may have orders: `orders` of any other is empty."""
        ...

    async def attempts(self, after: AttemptId | None, limit: int) -> list[AttemptSnapshot]: ...

    async def quotas(self) -> list[QuotaRecord]: ...

    async def set_quota(self, quota: SetQuota, *, actor: str) -> None: ...

    async def learn(self, facts: Sequence[Fact], meta: EventMeta | None = None) -> list[Fact]:
        """Keep what is newer than what is held; those come back."""
        ...

    async def known(self) -> list[Fact]: ...

    async def grants(self) -> list[Grant]:
        """By site, tenant and kind; also those that have ended, and those taken away (devices 0), whose numbers go on."""
        ...

    async def set_grant(self, grant: Grant, *, now: datetime) -> None:
        """Numbered here; `devices` 0 takes it away. `Refused` if the site has no room for one more; what has ended makes room."""
        ...

    async def settings_revision(self, site: SiteName, content: Digest, known: int, now: datetime, *, above: int = 0) -> Revision | None:
        """The revision of a site's settings with this content. A new content gets the next number if it comes from who knows as much as whoever
        made the last one, or more (`known`: a sum of versions, which only rises); None from who is behind: two copies never take turns.

        `above`: the revision that the site has. One that a restore made this service forget is passed, or nothing newer would ever be taken."""
        ...

    async def epoch(self) -> int: ...

    async def lift_versions(self, epoch: int, first: int) -> None:
        """No job and no attempt of an epoch before has a version below this from here on (`store.first_version`); nothing else of them changes."""
        ...

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]: ...
