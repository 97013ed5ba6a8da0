"""Three books of one attempt compared: what the scheduler allocated, what the site measured, what its own accounting says. Pure; corrects nothing.

A difference is told only beyond what the books themselves can tell apart: the native clock's stated resolution, the error of our clock's anchor,
and what a native scheduler does before and after our part of a run. Where a day was not read, nothing is concluded from what it lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from intertie.contracts.accounting import BypassUse, Difference, Differs, NativeDay, NativeRecord, SiteReconciliation
from intertie.contracts.job import AttemptRecord
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import AttemptBook
from intertie.ids import AttemptId, SiteName

AROUND_US = 5_000_000
"""Prolog, launch and epilog: a native record may be longer than ours by so much, never shorter."""
LATER = timedelta(minutes=5)
"""Our end reaches the hub, and their accounting its database, within this; only then does one that goes on say something."""
LONGEST = timedelta(days=400)
"""What a site tells of a run that is longer covers no days that anybody would look through."""
SHOWN = 500
"""Differences listed in one answer; beyond these they are counted."""


@dataclass(frozen=True, slots=True)
class Ours:
    """One attempt by our two books."""

    record: AttemptRecord
    book: AttemptBook
    error_s: float = 0.0
    """Of the anchor of its segments."""

    @property
    def ran(self) -> bool:
        return self.record.started_at is not None or self.book.segments > 0


@dataclass(frozen=True, slots=True)
class Told:
    """A part of a day as it is kept: the newest reading of each (cluster, day) counts, and only if it is whole and proven."""

    day: NativeDay
    proven: bool


@dataclass(frozen=True, slots=True)
class Days:
    """What of a site's own accounting may be believed."""

    whole: Mapping[tuple[str, str], Sequence[NativeDay]]
    """(cluster, day) → its parts."""
    incomplete: Sequence[str]

    @property
    def days(self) -> frozenset[str]:
        return frozenset(day for _, day in self.whole)

    def covers(self, start: datetime, end: datetime) -> bool:
        """Every day that [start, end] touches was read, the last of them late enough to show its end."""
        if not timedelta(0) <= end - start <= LONGEST:
            return False
        touched = days_between(start, end)
        if not set(touched) <= self.days:
            return False
        last = [part.read_at for (_, day), parts in self.whole.items() if day == touched[-1] for part in parts]
        return max(last) - end >= LATER

    def records(self) -> list[NativeRecord]:
        """Each run once, by its newest reading: a run over midnight stands in two days."""
        newest: dict[tuple[str, str, datetime | None, int], tuple[datetime, NativeRecord]] = {}
        for parts in self.whole.values():
            for part in parts:
                for one in part.records:
                    key = (one.cluster, one.native_id, one.submitted, one.restarts)
                    if key not in newest or newest[key][0] < part.read_at:
                        newest[key] = (part.read_at, one)
        return [one for _, one in newest.values()]

    def bypass(self) -> list[BypassUse]:
        """Per account, summed over days."""
        sums: dict[str, tuple[int, int, int]] = {}
        for parts in self.whole.values():
            for use in (use for part in parts for use in part.bypass):
                runs, device_us, unknown = sums.get(use.account, (0, 0, 0))
                sums[use.account] = (runs + use.runs, device_us + use.device_us, unknown + use.unknown)
        return [BypassUse(account=name, runs=r, device_us=d, unknown=u) for name, (r, d, u) in sorted(sums.items())]


def days_between(start: datetime, end: datetime) -> list[str]:
    """UTC days that [start, end] touches, as they are written."""
    first, last = _utc(start).date(), _utc(end).date()
    return [_written(first + timedelta(days=n)) for n in range((last - first).days + 1)]


def _utc(moment: datetime) -> datetime:
    """Also of the first and last hours that a calendar has, which some zones do not share."""
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC) if moment.year > 1 else datetime.min.replace(tzinfo=UTC)


def _written(day: date) -> str:
    return day.isoformat()


def read(told: Iterable[Told]) -> Days:
    """The newest whole and proven reading of each day; a day that has none is incomplete."""
    parts: dict[tuple[str, str], dict[datetime, dict[int, Told]]] = {}
    for one in told:
        reading = parts.setdefault((one.day.cluster, one.day.day), {}).setdefault(one.day.read_at, {})
        if one.day.part not in reading or one.proven:
            reading[one.day.part] = one
    whole: dict[tuple[str, str], Sequence[NativeDay]] = {}
    incomplete: set[str] = set()
    for key, readings in parts.items():
        good = [at for at, found in readings.items() if _is_whole(found)]
        if good:
            newest = readings[max(good)]
            whole[key] = [newest[number].day for number in sorted(newest)]
        else:
            incomplete.add(key[1])
    return Days(whole, sorted(incomplete))


def _is_whole(found: Mapping[int, Told]) -> bool:
    wanted = next(iter(found.values())).day.parts
    return set(found) == set(range(1, wanted + 1)) and all(one.proven and one.day.parts == wanted for one in found.values())


# --- one attempt -------------------------------------------------------------------------------------------------------------------------


def compare(ours: Ours, theirs: Sequence[NativeRecord], days: Days, *, now: datetime) -> list[Difference]:
    """Every way in which the books of one attempt differ."""
    found = _between_ours(ours)
    runs = sorted(theirs, key=lambda one: (one.started or datetime.max.replace(tzinfo=UTC), one.native_id))
    began = [one for one in runs if one.started is not None]
    if not ours.ran:
        return found + [_extra(ours, one) for one in began]
    found += _doubled(ours, began)
    if not began:
        return found + _missing(ours, days)
    found += [one for run in began for one in (_attribution(ours, run), _quantity(ours, run)) if one is not None]
    found += _runaway(ours, began[-1], days, now)
    return found + _times(ours, began)


def _told(kind: Differs, ours: Ours, run: NativeRecord | None, mine: str, their: str, beyond: str = "", text: str = "") -> Difference:
    return Difference(
        kind=kind, attempt=ours.record.attempt, native_id=run.native_id if run else "", ours=mine, theirs=their, beyond=beyond, text=text
    )


def _between_ours(ours: Ours) -> list[Difference]:
    """The scheduler's counts and the meter's, once the attempt is complete at neither's fault."""
    record, book = ours.record, ours.book
    if record.ended_at is None or (record.segments, record.quantity_milli_us) == (book.segments, book.quantity_milli_us):
        return []
    mine = f"{record.segments} segments, {record.quantity_milli_us} m·µs"
    return [_told(Differs.METER, ours, None, mine, f"{book.segments} segments, {book.quantity_milli_us} m·µs", text=book.missing)]


def _extra(ours: Ours, run: NativeRecord) -> Difference:
    state = ours.record.state
    return _told(Differs.EXTRA, ours, run, f"{state}, never ran", _span(run), text=f"a ghost: {run.state} at the site under our tag")


def _missing(ours: Ours, days: Days) -> list[Difference]:
    record = ours.record
    if record.started_at is None or record.ended_at is None or not days.covers(record.started_at, record.ended_at):
        return []
    return [
        _told(Differs.MISSING, ours, None, f"ran {_s(record.ran_us)}", "no run", text="the site's own accounting was read for that time")
    ]


def _doubled(ours: Ours, began: Sequence[NativeRecord]) -> list[Difference]:
    """Two runs at once; one after the other is a restart, or a resubmit after a lost one."""
    found = []
    for before, after in zip(began, began[1:], strict=False):
        assert after.started is not None
        resolution = timedelta(microseconds=max(before.resolution_us, after.resolution_us))
        if before.ended is None or before.ended - after.started > resolution:
            found.append(_told(Differs.DOUBLED, ours, after, "one run", f"{before.native_id} and {after.native_id} at once"))
    return found


def _attribution(ours: Ours, run: NativeRecord) -> Difference | None:
    mine = ours.record.account
    if not run.account or not mine or run.account == mine:
        return None
    return _told(Differs.ATTRIBUTION, ours, run, mine, run.account)


def _quantity(ours: Ours, run: NativeRecord) -> Difference | None:
    if run.devices is None or run.devices == len(ours.record.devices):
        return None
    if run.devices == 0 and ours.record.kind is DeviceKind.SLOT:
        return None  # Most count cards, and this is no run on any.
    return _told(Differs.QUANTITY, ours, run, f"{len(ours.record.devices)} devices", f"{run.devices} devices")


def _runaway(ours: Ours, last: NativeRecord, days: Days, now: datetime) -> list[Difference]:
    """Only a reading from well after our end says that it went on."""
    began, ended = ours.record.started_at, ours.record.ended_at
    if ended is None or last.ended is not None or now - ended < LATER or not days.covers(began or ended, ended):
        return []
    return [_told(Differs.RUNAWAY, ours, last, f"ended {ended.isoformat(timespec='seconds')}", f"{last.state}, not ended")]


def tolerance_us(run: NativeRecord, error_s: float) -> int:
    """Both ends of a native run are cut to its resolution, and our anchor is as sure as it says."""
    return run.resolution_us + int(2 * error_s * 1_000_000)


def _times(ours: Ours, began: Sequence[NativeRecord]) -> list[Difference]:
    """Length first; then when. Of an attempt whose runs were several, the lengths are summed."""
    if ours.record.ended_at is None or any(run.elapsed_us is None or run.ended is None for run in began):
        return []
    # A native scheduler counts what was suspended apart; our run holds it.
    theirs = sum((run.elapsed_us or 0) + run.suspended_us for run in began)
    held = ours.record.ran_us
    within = sum(tolerance_us(run, ours.error_s) for run in began)
    delta = theirs - held
    allowed = f"{_s(within)} and {_s(AROUND_US * len(began))} around"
    if delta < -within or delta > within + AROUND_US * len(began):
        return [_told(Differs.DURATION, ours, began[-1], _s(held), _s(theirs), allowed)]
    return _clock(ours, began[0], within)


def _clock(ours: Ours, first: NativeRecord, within_us: int) -> list[Difference]:
    mine = ours.record.started_at
    if mine is None or first.started is None:
        return []
    late_us = (mine - first.started) // timedelta(microseconds=1)
    if -within_us <= late_us <= within_us + AROUND_US:
        return []
    return [
        _told(
            Differs.CLOCK,
            ours,
            first,
            mine.isoformat(timespec="milliseconds"),
            first.started.isoformat(timespec="milliseconds"),
            f"{_s(within_us)} and {_s(AROUND_US)} around",
        )
    ]


def _s(microseconds: int) -> str:
    return f"{microseconds / 1_000_000:.3f} s"


def _span(run: NativeRecord) -> str:
    began = run.started.isoformat(timespec="seconds") if run.started else "?"
    return f"{began} – {run.ended.isoformat(timespec='seconds') if run.ended else 'running'}"


# --- a site's period ---------------------------------------------------------------------------------------------------------------------


def unknown(run: NativeRecord) -> Difference:
    """A run under a tag that no book of ours has."""
    return Difference(
        kind=Differs.EXTRA,
        attempt=run.tag,
        native_id=run.native_id,
        ours="no such attempt",
        theirs=_span(run),
        text=f"a ghost: {run.state} at the site under a tag that is not known here",
    )


def reconcile(
    site: SiteName,
    period: str,
    attempts: Sequence[Ours],
    days: Days,
    *,
    start: datetime,
    end: datetime,
    now: datetime,
    known: Collection[AttemptId] = (),
) -> SiteReconciliation:
    """Counts first, then each attempt. `attempts`: ours that may have run in [start, end); `known`: of those outside it, which exist here."""
    runs = [one for one in days.records() if one.started is not None and one.started < end and (one.ended is None or one.ended > start)]
    by_tag: dict[AttemptId, list[NativeRecord]] = {}
    for run in runs:
        by_tag.setdefault(run.tag, []).append(run)
    mine = {one.record.attempt: one for one in attempts}
    differences = [one for each in attempts for one in compare(each, by_tag.get(each.record.attempt, []), days, now=now)]
    differences += [unknown(run) for tag, some in sorted(by_tag.items()) if tag not in mine and tag not in known for run in some]
    covered = [one for one in attempts if one.ran and _covered(one, days, now)]
    tagged = {one.record.attempt for one in covered}
    native = [run for run in runs if run.tag in tagged or (run.tag not in mine and run.tag not in known)]
    until = min(end, now)
    due = (
        [day for day in days_between(start, until - timedelta(microseconds=1)) if day < _written(now.astimezone(UTC).date())]
        if until > start
        else []
    )
    return SiteReconciliation(
        site=site,
        period=period,
        clusters=sorted({cluster for cluster, _ in days.whole}),
        days_read=len(set(due) & days.days),
        days_due=len(due),
        incomplete_days=list(days.incomplete)[:62],
        our_runs=len(covered),
        native_runs=len({run.tag for run in native}),
        our_milli_us=sum(1_000 * len(one.record.devices) * one.record.ran_us for one in covered),
        native_milli_us=_milli_us(native),
        counts_agree=len(covered) == len({run.tag for run in native}),
        compared=len(attempts),
        differences=differences[:SHOWN],
        more=max(0, len(differences) - SHOWN),
        bypass=days.bypass(),
    )


def _covered(one: Ours, days: Days, now: datetime) -> bool:
    began = one.record.started_at or one.book.first_start
    return began is not None and days.covers(began, one.record.ended_at or min(now, began))


def _milli_us(runs: Iterable[NativeRecord]) -> int | None:
    total = 0
    for run in runs:
        if run.devices is None or run.elapsed_us is None:
            return None
        total += 1_000 * run.devices * run.elapsed_us
    return total
