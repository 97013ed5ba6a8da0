"""A service's epoch: what makes every number of ours usable once, even after the database has forgotten that it gave it (LINK D3).

It is raised by a person (`intertie hub restored`) and by the service itself when it finds that the PostgreSQL it stands on is another one, or
continues on another timeline. A raised epoch is the second in which it was raised, counted from 2025, unless one still higher is known: what
a restore forgot cannot say how high its epochs were, and the clock can.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from intertie.contracts.incident import ReportIncident, Severity
from intertie.store.tx import Q, Tx
from intertie.store.versions import first_version

# Where the seconds are counted from; 2056 is their 1,000,000,000th, above which no lane believes an epoch.
BEGINNING = datetime(2025, 1, 1, tzinfo=UTC)
# An epoch that a site tells and that lies this far beyond our clock is no word of any hub of ours, and following it would use up the numbers.
BELIEVED_AHEAD_S = 366 * 86_400


@dataclass(frozen=True, slots=True)
class Place:
    """Which database this is. `timeline` is None on a standby, which numbers nothing."""

    system_identifier: int
    timeline: int | None

    def __str__(self) -> str:
        return f"PostgreSQL {self.system_identifier} on timeline {self.timeline}"


@dataclass(frozen=True, slots=True)
class Epoch:
    """A service's epoch as it stands in its table."""

    number: int
    reason: str
    raised_at: datetime
    place: Place | None
    """None: begun by a version that did not look."""


@dataclass(frozen=True, slots=True)
class Raised:
    """What a raise did; `before == after` if it had been done already."""

    service: str
    before: int
    after: int


def believed(told: Iterable[int], now: datetime) -> list[int]:
    """The epochs among `told` that can be a hub's word."""
    limit = by_clock(now) + BELIEVED_AHEAD_S
    return [epoch for epoch in told if epoch <= limit]


def by_clock(now: datetime) -> int:
    """The epoch that is raised now if none higher is known."""
    return max(2, int((now - BEGINNING).total_seconds()))


def target(own: Iterable[int], told: Iterable[int], now: datetime) -> int:
    """An epoch above every one known here and every one that was ever raised by a clock before `now`."""
    return max([by_clock(now), *(epoch + 1 for epoch in own), *(epoch + 1 for epoch in believed(told, now))])


def differs(known: Place | None, found: Place) -> bool:
    """True if `found` is not where this epoch was begun. What is not known, or not said, differs from nothing."""
    if known is None or found.timeline is None:
        return False
    return (known.system_identifier, known.timeline) != (found.system_identifier, found.timeline)


async def load(tx: Tx, *, lock: bool = False) -> Epoch:
    """The epoch; with `lock` nobody else raises it until this transaction ends."""
    row = await tx.one(Q.epoch_lock if lock else Q.epoch_whole)
    assert row is not None, "the first migration makes the row"
    known = row["system_identifier"] is not None
    place = Place(row["system_identifier"], row["timeline"]) if known else None
    return Epoch(row["epoch"], row["reason"], row["raised_at"], place)


async def find_place(tx: Tx) -> Place:
    """Where this connection ends."""
    row = await tx.one(Q.epoch_place)
    assert row is not None, "a row of constants"
    return Place(row["system_identifier"], row["timeline"])


async def told_by_sites(tx: Tx) -> dict[str, int]:
    """Site → the highest epoch whose word it has taken; empty where this service keeps no lane."""
    return {row["site"]: row["epoch"] for row in await tx.all(Q.epoch_told)}


async def raise_to(tx: Tx, epoch: int, *, reason: str, actor: str, service: str, at: datetime) -> None:
    """Begin this epoch, and turn every leader of the one before out of office, with its audit row; the caller holds the lock. Versions of faults go
    on above all earlier ones here; those of entities when their keeper starts."""
    place = await find_place(tx)
    await tx.run(Q.epoch_raise, epoch, reason, at, place.system_identifier, place.timeline)
    await tx.run(Q.leader_dismiss)
    await tx.one(Q.epoch_faults, first_version(epoch))
    await tx.audit(actor=actor, action="epoch.raise", target=f"{service}/{epoch}", reason=reason)


async def settle(tx: Tx, service: str, now: datetime) -> Epoch:
    """The epoch to work in: the one that stands, or a new one, with an incident, if the database is not where that one was begun."""
    found, known = await find_place(tx), await load(tx)
    if known.place is not None and not differs(known.place, found):
        return known
    known = await load(tx, lock=True)
    if known.place is None:
        if found.timeline is not None:
            await tx.run(Q.epoch_placed, found.system_identifier, found.timeline)
        return await load(tx)
    if differs(known.place, found):
        number = target([known.number], (await told_by_sites(tx)).values(), now)
        reason = f"the database is {found}, and was {known.place}"
        await raise_to(tx, number, reason=reason, actor="rule", service=service, at=now)
        await tx.fault(_report(service, known.number, number, reason))
    return await load(tx)


def _report(service: str, before: int, after: int, reason: str) -> ReportIncident:
    return ReportIncident(
        key=f"store.epoch_raised/{service}",
        kind="store.epoch_raised",
        severity=Severity.CRITICAL,
        title=f"{service} stands on another database than before",
        text=f"{reason}. Epoch {before} became {after}: what was committed last may be gone. "
        "Sites say again what they still hold; follow the runbook of a failover, which ends in `intertie hub restored`.",
    )
