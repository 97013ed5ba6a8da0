"""A site's owner presses the red button and lets it go, says that the disk is full, and leaves with a receipt: over a real bus, to a real registry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal

import msgspec
import pytest
from tests.conftest import PgDatabase
from tests.edges.identity_world import CLOCK, TEAM, Site, World, running_world, until
from tests.edges.test_identity_join import hub

from intertie.bus import rpc
from intertie.bus.nats import NatsBus
from intertie.bus.rpc import Caller
from intertie.contracts import endpoints
from intertie.contracts.base import encode
from intertie.contracts.identity import Claims, LeaveBody, LeaveReceipt, LeaveSite, LeaveTotals
from intertie.contracts.job import AttemptRecord, AttemptSnapshot, AttemptsQuery, AttemptsReply
from intertie.contracts.link import JournalOpened, Lane, LendingPaused, SiteCondition
from intertie.contracts.site import DeviceKind, Freshness
from intertie.contracts.usage import AttemptBook, BookQuery, BooksReply
from intertie.embedded.hub import HubLayout
from intertie.embedded.nats import Nats
from intertie.errors import Conflict, Unauthenticated, Unavailable
from intertie.ids import AttemptId, JobId, PoolName, SiteName
from intertie.trust.claims import read_keyset, verify_claims
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal, seal

assert hub, "the fixture of a bus of the test's own"
A = SiteName("site-a")


@pytest.fixture
async def world(hub: tuple[HubLayout, Nats], pg: PgDatabase) -> AsyncIterator[World]:  # noqa: F811  # pytest hands it in by name
    async with running_world(hub[0], pg) as running:
        yield running


async def says(site: Site, entry: LendingPaused | SiteCondition | JournalOpened) -> None:
    await site.journal.append(lambda seqs: {Lane.REGISTRY: [msgspec.structs.replace(entry, seq=seqs[Lane.REGISTRY])]})
    if site.lane is not None:
        site.lane.wake()


def pause(on: bool, **fields: object) -> LendingPaused:
    return LendingPaused(seq=1, at=CLOCK.now(), paused=on, **fields)  # type: ignore[arg-type]  # fields of several types


async def test_the_owners_pause_is_shown_with_its_reason_and_ends_by_itself(world: World) -> None:
    site = Site(A)
    await world.join(site)
    await world.speak(site)
    await says(site, pause(True, reason="exam week", by="ann"))
    await until(lambda: paused(world, True), "the pause is shown")
    record = await world.record(A)
    assert record is not None and (record.paused_reason, record.paused_until) == ("exam week", None)
    await says(site, pause(False))
    await until(lambda: paused(world, False), "it is let go")
    await says(site, pause(True, until=CLOCK.now() + timedelta(seconds=1), reason="an hour"))
    await until(lambda: paused(world, True), "the second pause is shown")
    await until(lambda: paused(world, False), "and ends by itself, without a word of the site")
    await says(site, pause(True, until=CLOCK.now() - timedelta(days=1), reason="said again from an old journal"))
    await says(site, SiteCondition(seq=1, at=CLOCK.now(), accepting=False, code="disk_full", text="3 MiB left", self_stop=True))
    await until(lambda: condition(world, "disk_full: 3 MiB left"), "the condition is shown")
    record = await world.record(A)
    assert record is not None and not record.paused and not record.accepting and record.self_stop
    await says(site, SiteCondition(seq=1, at=CLOCK.now(), accepting=True))
    await until(lambda: condition(world, ""), "and is over")


async def paused(world: World, wanted: bool) -> bool:
    record = await world.record(A)
    return record is not None and record.paused is wanted


async def condition(world: World, wanted: str) -> bool:
    record = await world.record(A)
    return record is not None and record.condition == wanted


# --- leaving -----------------------------------------------------------------------------------------------------------------------------


def attempt(id: str, *, site: SiteName = A, over: bool = True) -> AttemptRecord:
    return AttemptRecord(
        attempt=AttemptId(id),
        job=JobId("job-1"),
        tenant=TEAM,
        number=1,
        site=site,
        pool=PoolName("slots"),
        state="ended" if over else "running",
        epoch=1,
        generation=1,
        devices=[],
        kind=DeviceKind.SLOT,
        account="",
        why_here="",
        spec=None,
        spec_revision=0,
        offered_at=CLOCK.now(),
        ended_at=CLOCK.now() if over else None,
        version=1,
    )


def book(id: str, *, complete: bool = True) -> AttemptBook:
    return AttemptBook(
        attempt=AttemptId(id),
        job=JobId("job-1"),
        tenant=TEAM,
        site=A,
        segments=2,
        quantity_milli_us=3_600_000_000_000,
        run_us=3_600_000_000,
        first_start=CLOCK.now(),
        last_end=CLOCK.now(),
        ended=complete,
        complete=complete,
        outcome="succeeded",
        cause=None,
        hold=Decimal(0),
        posted=Decimal(0),
        in_suspense=0,
        charges=[],
    )


class Keepers:
    """What scheduler and metering hold; they are played here."""

    def __init__(self) -> None:
        self.attempts: list[AttemptRecord] = []
        self.books: list[AttemptBook] = []

    async def said(self, ask: AttemptsQuery, caller: Caller) -> AttemptsReply:
        """Two a page."""
        left = [a for a in self.attempts if ask.after is None or a.attempt > ask.after]
        return AttemptsReply(attempts=[AttemptSnapshot(record=a, wall_s=60) for a in left[:2]], more=len(left) > 2)

    async def metered(self, ask: BookQuery, caller: Caller) -> BooksReply:
        return BooksReply(books=[one for one in self.books if one.attempt in ask.attempts])


@asynccontextmanager
async def keepers(layout: HubLayout) -> AsyncIterator[Keepers]:
    made, keyset = Keepers(), read_keyset(layout.public_keys)

    def verified(text: str) -> Claims:
        return verify_claims(text, keyset, CLOCK.now())

    served = []
    for name, handlers in (("scheduler", {endpoints.ATTEMPTS: made.said}), ("metering", {endpoints.BOOKS: made.metered})):
        bus = await NatsBus.connect(layout.bus_url, name=name, credentials=layout.creds_file(name))
        await rpc.serve(bus, name, "1.0.0", handlers, verifier=verified)
        served.append(bus)
    try:
        yield made
    finally:
        for bus in served:
            await bus.close()


def leaving(site: Site, key: Key | None = None, name: SiteName = A) -> LeaveSite:
    body = LeaveBody(site=name, journal=site.journal.id, last={"scheduler": 9}, at=CLOCK.now(), reason="the lease of the hall ends")
    return LeaveSite(site=name, sealed=seal(key or site.key, encode(body), site.key.public))


async def leave(world: World, request: LeaveSite) -> LeaveReceipt:
    found: LeaveReceipt = await world.call(endpoints.LEAVE_SITE, request, signed="")
    return found


async def test_a_site_leaves_when_nothing_is_open_and_keeps_its_receipt(world: World) -> None:
    """Invariant 14: what was given up stays revoked; the receipt is verified with identity's public key alone."""
    site = Site(A)
    joined = await world.join(site)
    await world.speak(site)
    await until(lambda: world.is_(A, Freshness.FRESH), "it is heard")
    with pytest.raises(Unavailable):
        await leave(world, leaving(site))
    async with keepers(world.layout) as held:
        held.attempts = [attempt("att-1"), attempt("att-2", site=SiteName("site-b"), over=False), attempt("att-3", over=False)]
        held.books = [book("att-1"), book("att-3", complete=False)]
        with pytest.raises(Conflict, match="scheduler still waits.*att-3"):
            await leave(world, leaving(site))
        held.attempts[2] = attempt("att-3")
        with pytest.raises(Conflict, match="metering still waits.*att-3"):
            await leave(world, leaving(site))
        held.books[1] = book("att-3")
        with pytest.raises(Unauthenticated):
            await leave(world, leaving(site, Key.new("U")))
        receipt = await leave(world, leaving(site))
        assert await leave(world, leaving(site)) == receipt, "a repeat changes nothing"
    totals = open_seal(receipt.sealed, joined.service_keys["identity"], LeaveTotals)
    assert (totals.attempts, totals.segments, totals.quantity_milli_us) == (2, 4, 7_200_000_000_000)
    assert (totals.site, totals.site_key, totals.journal, totals.revoked) == (A, site.key.public, site.journal.id, True)
    record = await world.record(A)
    assert record is not None and record.left_at == totals.left_at
    known = await world.identity.store.site(A)
    assert known is not None and known.revoked and site.signing.public in known.revoked_keys
    assert site.bus is not None
    await until(lambda: gone(site), "its connection is dropped")


async def gone(site: Site) -> bool:
    assert site.bus is not None
    return not site.bus.connected


async def test_a_revoked_site_cannot_leave_nor_one_for_another(world: World) -> None:
    site = Site(A)
    await world.join(site)
    with pytest.raises(Unauthenticated):
        await leave(world, leaving(site, name=SiteName("site-b")))
    await world.identity.revoke_site(A, actor="ops", reason="stolen")
    with pytest.raises(Unauthenticated):
        await leave(world, leaving(site))


async def test_a_word_of_leaving_said_again_after_the_site_came_back_sends_nobody_away(world: World) -> None:
    """Neither by the keys of before, which never come back, nor by the new ones, which did not sign it."""
    site = Site(A)
    await world.join(site)
    said = leaving(site)
    async with keepers(world.layout):
        await leave(world, said)
    back = Site(A)
    back.key = site.key
    with pytest.raises(Conflict) as refused:
        await world.join(back)
    assert refused.value.code == "identity.key_revoked"
    again = Site(A)
    await world.join(again)
    with pytest.raises(Unauthenticated):
        await leave(world, said)
    known = await world.identity.store.site(A)
    assert known is not None and not known.revoked and known.receipt is None
