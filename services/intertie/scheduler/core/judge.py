"""What the leader finds of attempts whose sites are silent, or speak and hold nothing: which rulings are due, and what a person must know.

`silence` says what each ruling does; here is only when. Everything is measured by the leader's own monotonic clock and the rows of the lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from intertie.contracts.incident import ReportIncident, Severity
from intertie.ids import AttemptId, JobId
from intertie.link.keeper import SiteRow
from intertie.scheduler.core import silence
from intertie.scheduler.core.hearing import Hearing
from intertie.scheduler.core.rows import Attempt, AttemptState, Change, File, Ignored

# One digest may be older than what was just interpreted; two in a row are the site's word.
DIGESTS = 2
# A stop that was answered and has no effect for so long needs a person (field case BR-050).
STOP_EFFECT_S = 600.0
# Rulings of one round are one transaction: a bus that is down makes every site silent at once.
RULINGS = 256


@dataclass(frozen=True, slots=True)
class Judgement:
    job: JobId
    attempt: AttemptId
    decide: Callable[[File], Change | Ignored]


@dataclass(frozen=True, slots=True)
class Limits:
    """`lease_s`: in force now. `lost_after`: beyond an attempt's own limit."""

    lease_s: int
    lost_after: timedelta = silence.LOST_AFTER
    stop_effect_s: float = STOP_EFFECT_S


@dataclass(slots=True)
class Roll:
    """What this leader has seen so far: attempts that a site's digest did not list, and stops without effect. Begins anew with each office."""

    missing: dict[AttemptId, tuple[int, int]] = field(default_factory=dict)
    """The last digest that lacked it (by the site's `heard`), and how many in a row did."""
    stopping: dict[AttemptId, float] = field(default_factory=dict)

    def keep(self, live: Sequence[Attempt]) -> None:
        """Forget what is no longer held."""
        names = {a.record.attempt for a in live}
        self.missing = {name: seen for name, seen in self.missing.items() if name in names}
        self.stopping = {name: seen for name, seen in self.stopping.items() if name in names}

    def lacks(self, name: AttemptId, row: SiteRow) -> int:
        """One more look at a digest that does not list it: how many different ones in a row did not."""
        before = self.missing.get(name)
        if before is None or row.heard > before[0]:
            self.missing[name] = (row.heard, (before[1] if before else 0) + 1)
        return self.missing[name][1]


@dataclass(frozen=True, slots=True)
class Findings:
    rulings: tuple[Judgement, ...]
    incidents: tuple[ReportIncident, ...]


def find(live: Sequence[Attempt], hearing: Hearing, roll: Roll, limits: Limits, *, now: datetime, now_s: float) -> Findings:
    """`live`: as the store loads them for a round, after the lane's rows were read."""
    roll.keep(live)
    rulings, incidents = list[Judgement](), list[ReportIncident]()
    for attempt in live:
        if attempt.state is AttemptState.OFFERED:
            continue
        for decide in _rulings(attempt, hearing, roll, limits, now, now_s):
            if len(rulings) < RULINGS:
                rulings.append(Judgement(attempt.record.job, attempt.record.attempt, decide))
        incidents += _incidents(attempt, hearing, roll, limits, now, now_s)
    return Findings(tuple(rulings), tuple(incidents))


def _rulings(
    attempt: Attempt, hearing: Hearing, roll: Roll, limits: Limits, now: datetime, now_s: float
) -> Iterator[Callable[[File], Change | Ignored]]:
    """At most one: the first that applies."""
    record, site = attempt.record, attempt.record.site
    row = hearing.row(site)
    elsewhere = row is not None and attempt.journal is not None and row.journal != attempt.journal
    speaks = hearing.caught_up(site) and hearing.silent_since(site, now_s) is None
    if row is not None and speaks and row.running is not None and not elsewhere:
        if record.attempt in row.running:
            roll.missing.pop(record.attempt, None)
            if record.lost_by is not None and attempt.open:
                yield partial(silence.heard_again, now=now)
        elif attempt.state is not AttemptState.CLAIMED and roll.lacks(record.attempt, row) >= DIGESTS:
            why = f"{site} is at head and lists it no longer, in {DIGESTS} digests in a row, and has told no end"
            evidence = f"digests of {site}/{row.journal} through {row.ack_through}"
            yield partial(silence.gone, actor=f"site/{site}", why=why, evidence=evidence, now=now)
        return
    if not attempt.open:
        return
    silent_s, lease_s = hearing.silent_for_s(site, now_s), max(attempt.lease_s, limits.lease_s)
    if attempt.live and attempt.lease_s and silent_s > lease_s + silence.margin_s(lease_s):
        yield partial(silence.replace_silent, silent_s=silent_s, lease_s=lease_s, now=now)
    elif record.lost_by is None and ((since := hearing.silent_since(site, now_s)) is not None or (elsewhere and speaks)):
        # Also where its site speaks, and out of another journal than the one in which this was claimed.
        yield partial(silence.promise, since=since, lost_after=limits.lost_after, now=now)
    elif record.lost_by is not None and now >= record.lost_by and (silent_s > hearing.silent_s or (elsewhere and speaks)):
        yield partial(silence.lose, now=now)


def _incidents(attempt: Attempt, hearing: Hearing, roll: Roll, limits: Limits, now: datetime, now_s: float) -> Iterator[ReportIncident]:
    record, site = attempt.record, attempt.record.site
    if attempt.stop_answer == "stopping" and attempt.open and hearing.caught_up(site) and hearing.silent_since(site, now_s) is None:
        since_s = roll.stopping.setdefault(record.attempt, now_s)
        if now_s - since_s > limits.stop_effect_s:
            yield _not_effective(attempt, now_s - since_s)
    if hearing.is_deaf(now_s) and (waits := _waits_for_ears(attempt, hearing, limits, now, now_s)):
        yield ReportIncident(
            key="scheduler.deaf",
            kind="scheduler.deaf",
            severity=Severity.WARNING,
            title="Silence moves nothing: this hub cannot tell whether it could hear its sites",
            text=f"{site} is silent {waits}. The canary's syncs on the scheduler lane are not answered, or it has no credentials "
            "(INTERTIE_CANARY_CREDS); until they are, no silence is believed.",
        )


def _waits_for_ears(attempt: Attempt, hearing: Hearing, limits: Limits, now: datetime, now_s: float) -> str:
    """What a hub that hears would do now about this attempt of a silent site; empty if nothing."""
    record, quiet_s, lease_s = attempt.record, hearing.quiet_for_s(attempt.record.site, now_s), max(attempt.lease_s, limits.lease_s)
    if attempt.live and attempt.lease_s and quiet_s > lease_s + silence.margin_s(lease_s):
        return f"beyond the lease of job {record.job} (if_site_silent=rerun), which is not run again"
    if attempt.open and record.lost_by is not None and now >= record.lost_by and quiet_s > hearing.silent_s:
        return f"beyond the date promised for job {record.job} ({record.lost_by:%Y-%m-%d %H:%M}Z), which is not closed as lost"
    return ""


def _not_effective(attempt: Attempt, for_s: float) -> ReportIncident:
    record = attempt.record
    return ReportIncident(
        key=f"scheduler.stop_not_effective/{record.attempt}",
        kind="scheduler.stop_not_effective",
        severity=Severity.CRITICAL,
        title=f"A stop at {record.site} has no effect",
        text=f"{record.site} has answered the stop of attempt {record.attempt} (job {record.job}, native id {record.native_id or 'unknown'}) "
        f"and its processes live on for {for_s:.0f} s. Its devices stay held, and metering goes on until its end is seen.",
        site=record.site,
        tenant=record.tenant,
    )
