"""Drills at the hub, on PostgreSQL and on the twin: who may be cut when, what is noticed, and what the verdict changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.conftest import PgDatabase
from tests.edges.test_registry_store import REQUEST, SITE, A, on_postgres

from intertie.bus.rpc import Caller
from intertie.clock import ManualClock
from intertie.contracts.drill import (
    CallOffDrill,
    ConsentDrill,
    DrillAttempt,
    DrillBook,
    DrillConsent,
    DrillKind,
    DrillLane,
    DrillLocal,
    DrillQuery,
    DrillRecord,
    DrillsQuery,
    DrillState,
    PlanDrill,
    SignDrill,
    SiteDrill,
)
from intertie.contracts.identity import AuditQuery, Claims, Role
from intertie.contracts.link import DrillConsented, DrillRefused, DrillReported, Lane
from intertie.contracts.site import Freshness, SitesQuery
from intertie.errors import Conflict, Denied, NotFound, Refused
from intertie.ids import AttemptId, Digest, JobId, JournalId, PrincipalId, SiteName
from intertie.lane.tables import LaneEntry
from intertie.registry.core.freshness import Judgement
from intertie.registry.drill_store import DrillStore, MemoryDrills, PgDrills
from intertie.registry.drills import Drills
from intertie.registry.memory import MemoryRegistryStore
from intertie.registry.store import RegistryStore
from intertie.store import StoreTx
from intertie.trust.evidence import PERSON, faults_of, sign_part
from intertie.trust.keys import Key

T0 = datetime(2026, 5, 1, 12, tzinfo=UTC)
SITE_KEY, HUB_KEY, PERSON_KEY = Key.new("U"), Key.new("U"), Key.new("U")


class PlayedBooks:
    """What scheduler and metering hold, as a test says."""

    def __init__(self) -> None:
        self.metering_us: int | None = 5_000_000

    async def of(self, attempts: Sequence[DrillAttempt]) -> tuple[list[DrillBook], bool]:
        lines = [
            DrillBook(
                attempt=a.attempt, site_us=a.ran_us, scheduler_us=a.ran_us, metering_us=self.metering_us, outcome="succeeded", cause=""
            )
            for a in attempts
        ]
        return lines, self.metering_us is not None


@dataclass
class Hub:
    """A registry with one fresh site, its drills, and hands on the clock."""

    registry: RegistryStore
    store: DrillStore
    clock: ManualClock
    drills: Drills
    books: PlayedBooks
    seq: int = 0

    async def hear(self, freshness: Freshness) -> None:
        async with self.registry.leading("judge") as leader:
            judged = Judgement(freshness, hears_us=True)
            await self.registry.heard(SITE, judged, last_heard=self.clock.now(), clock_offset_s=None, leader=leader, now=self.clock.now())

    async def says(self, kind: Callable[..., Any], **fields: Any) -> None:
        """An entry of the site's registry lane."""
        self.seq += 1
        said = kind(seq=self.seq, at=self.clock.now(), islanded=False, **fields)
        entry = LaneEntry(SITE, Lane.REGISTRY, JournalId("jrn-1"), self.seq, Digest("d"), b"", self.clock.now())

        async def mark(tx: StoreTx) -> None:
            """Nothing to mark: there is no lane here."""

        await self.drills.said(entry, said, mark)

    async def allow(self, **changed: Any) -> None:
        consent = DrillConsent(allowed=True, given="site", by="root", at=self.clock.now(), longest_s=900)
        await self.says(DrillConsented, consent=msgspec.structs.replace(consent, **changed))

    async def plan(self, **changed: Any) -> DrillRecord:
        request = PlanDrill(site=SITE, pool=A, kind=DrillKind.REHEARSAL, seconds=60, after_s=10, reason="why")
        return await self.drills.plan(msgspec.structs.replace(request, **changed), OPERATOR)

    async def record(self, id: str) -> DrillRecord:
        return next(d for d in (await self.drills.drills(DrillsQuery(), OPERATOR)).drills if d.drill == id)

    def after(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def through(self, planned: DrillRecord, *, key: Key = SITE_KEY) -> DrillRecord:
        """The cut happens, is noticed, and the site tells of it."""
        self.after(12)
        await self.hear(Freshness.STALE)
        await self.drills.look()
        assert (await self.record(planned.drill)).state is DrillState.CUT
        self.after(planned.seconds)
        await self.hear(Freshness.FRESH)
        report = account(planned, self.clock.now())
        signature = sign_part(key, report, role="site", name=SITE, at=self.clock.now())
        await self.says(DrillReported, report=report, signature=signature)
        for _ in range(3):
            await self.drills.look()
        return await self.record(planned.drill)

    async def rehearsed(self) -> None:
        await self.allow()
        assert (await self.through(await self.plan())).verdict == "passed"


def caller(role: Role, site: SiteName | None = None) -> Caller:
    claims = Claims(iss="identity", sub=PrincipalId("prn-1"), name="li", roles=[role], site=site, iat=0, exp=1)
    return Caller(claims, "")


OPERATOR, OWNER, OTHER = caller(Role.OPERATOR), caller(Role.SITE_OWNER, SITE), caller(Role.SITE_OWNER, SiteName("site-b"))


def account(planned: DrillRecord, back: datetime) -> SiteDrill:
    attempt = DrillAttempt(
        attempt=AttemptId("att-1"),
        job=JobId("job-1"),
        pool=A,
        before="running",
        after="ended",
        began_in_cut=False,
        go_before=True,
        same_process=True,
        ran_us=5_000_000,
        outcome="succeeded",
    )
    cut = back - timedelta(seconds=planned.seconds)
    return SiteDrill(
        drill=planned.drill,
        site=SITE,
        seconds=planned.seconds,
        cut_at=cut,
        back_at=back,
        ended_by="time",
        restarts=0,
        islanded_at=cut,
        heard_at=back,
        attempts=[attempt],
        local=DrillLocal(running_before=0, submitted=0, started=0, ended=0),
        lanes=[DrillLane(lane="scheduler", waiting=1, to_head_ms=10)],
        agent_version="0.1.0",
    )


async def a_hub(registry: RegistryStore, store: DrillStore, clock: ManualClock) -> Hub:
    books = PlayedBooks()

    async def site_key(site: SiteName) -> str:
        return SITE_KEY.public

    drills = Drills(store, registry, books, HUB_KEY, clock, silent_limit_s=15.0, site_key=site_key)
    hub = Hub(registry, store, clock, drills, books)
    await registry.register(REQUEST, actor="identity", now=clock.now())
    await hub.hear(Freshness.FRESH)
    return hub


@pytest.fixture(params=["pg", "memory"])
async def hub(request: pytest.FixtureRequest) -> AsyncIterator[Hub]:
    clock = ManualClock(T0)
    if request.param == "memory":
        twin = MemoryRegistryStore(clock=clock)
        yield await a_hub(twin, MemoryDrills(twin), clock)
        return
    pg: PgDatabase = request.getfixturevalue("pg")
    async with on_postgres(pg) as real:
        yield await a_hub(real, PgDrills(real), clock)


async def refused(work: Awaitable[object], kind: type[Exception] = Refused) -> str:
    with pytest.raises(kind) as error:
        await work
    return str(getattr(error.value, "code", ""))


async def test_a_drill_needs_the_owners_consent_that_covers_it(hub: Hub) -> None:
    assert await refused(hub.plan()) == "drill.no_consent"
    await hub.allow(longest_s=30)
    assert await refused(hub.plan()) == "drill.consent_shorter"
    await hub.allow(until=T0 + timedelta(seconds=30))
    assert await refused(hub.plan()) == "drill.consent_over"
    await hub.allow(allowed=False)
    assert await refused(hub.plan()) == "drill.no_consent"
    await hub.allow()
    assert (await hub.plan()).state is DrillState.PLANNED


async def test_consent_by_token_is_the_owners_alone(hub: Hub) -> None:
    ask = ConsentDrill(site=SITE)
    assert await refused(hub.drills.consent(ask, OPERATOR), Denied) == "rights.denied"
    assert await refused(hub.drills.consent(ask, OTHER), NotFound) == "not_found"
    assert (await hub.drills.consent(ask, OWNER)).given == "token"
    assert (await hub.plan()).consent is not None


async def test_a_whole_site_is_cut_only_after_a_rehearsal_has_passed_and_one_drill_at_a_time(hub: Hub) -> None:
    await hub.allow()
    assert await refused(hub.plan(kind=DrillKind.CUT, pool=None)) == "drill.not_rehearsed"
    assert await refused(hub.plan(pool=None)) == "drill.pool_needed"
    assert await refused(hub.plan(seconds=600)) == "drill.too_long"
    planned = await hub.plan()
    assert await refused(hub.plan(), Conflict) == "drill.another"
    assert (await hub.through(planned)).verdict == "passed"
    assert (await hub.plan(kind=DrillKind.CUT, pool=None, seconds=600)).state is DrillState.PLANNED


async def test_a_rehearsal_of_last_year_counts_no_more(hub: Hub) -> None:
    await hub.rehearsed()
    hub.after(91 * 86_400)
    assert await refused(hub.plan(kind=DrillKind.CUT, pool=None)) == "drill.not_rehearsed"


async def test_a_silent_site_is_not_drilled(hub: Hub) -> None:
    await hub.allow()
    await hub.hear(Freshness.STALE)
    assert await refused(hub.plan()) == "drill.not_fresh"


async def test_a_passed_cut_stands_in_the_sites_record_and_a_rehearsal_does_not(hub: Hub) -> None:
    await hub.rehearsed()
    assert (await hub.registry.sites(SitesQuery()))[0][0].drill_passed_at is None
    judged = await hub.through(await hub.plan(kind=DrillKind.CUT, pool=None))
    assert judged.verdict == "passed", judged.checks
    assert judged.silent_at is not None
    assert judged.heard_at is not None
    assert (await hub.registry.sites(SitesQuery()))[0][0].drill_passed_at == judged.judged_at


async def test_books_that_differ_fail_it_and_books_that_are_not_complete_are_waited_for(hub: Hub) -> None:
    await hub.allow()
    hub.books.metering_us = None
    planned = await hub.plan()
    assert (await hub.through(planned)).state is DrillState.BACK
    hub.after(600)
    await hub.drills.look()
    judged = await hub.record(planned.drill)
    assert (judged.verdict, [c.name for c in judged.checks if not c.ok]) == ("failed", ["books_agree"])


async def test_an_account_that_the_sites_key_did_not_sign_is_none(hub: Hub) -> None:
    await hub.allow()
    record = await hub.through(await hub.plan(), key=Key.new("U"))
    assert (record.state, record.verdict) == (DrillState.CALLED_OFF, "")


async def test_what_the_site_refuses_and_what_it_never_did_is_called_off(hub: Hub) -> None:
    await hub.allow()
    planned = await hub.plan()
    await hub.says(DrillRefused, drill=planned.drill, code="agent.drill_late", text="too late")
    assert "too late" in (await hub.record(planned.drill)).text
    planned = await hub.plan()
    hub.after(200)
    await hub.drills.look()
    assert (await hub.record(planned.drill)).state is DrillState.CALLED_OFF


async def test_taking_the_consent_back_calls_off_what_is_planned(hub: Hub) -> None:
    await hub.allow()
    planned = await hub.plan()
    await hub.allow(allowed=False)
    assert (await hub.record(planned.drill)).state is DrillState.CALLED_OFF


async def test_a_site_that_does_not_come_back_stays_cut_until_a_person_says_otherwise(hub: Hub) -> None:
    await hub.allow()
    planned = await hub.plan()
    assert (await hub.drills.call_off(CallOffDrill(drill=planned.drill), OPERATOR)).state is DrillState.CALLED_OFF
    planned = await hub.plan()
    hub.after(12)
    await hub.hear(Freshness.UNKNOWN)
    await hub.drills.look()
    assert await refused(hub.drills.call_off(CallOffDrill(drill=planned.drill), OPERATOR), Conflict) == "drill.under_way"
    hub.after(86_400)
    await hub.drills.look()
    assert (await hub.record(planned.drill)).state is DrillState.CUT
    assert (await hub.drills.call_off(CallOffDrill(drill=planned.drill, reason="it burnt down"), OPERATOR)).state is DrillState.CALLED_OFF


async def test_a_person_signs_once_and_the_audit_names_the_key(hub: Hub) -> None:
    await hub.allow()
    judged = await hub.through(await hub.plan())
    evidence = await hub.drills.evidence(DrillQuery(drill=judged.drill), OWNER)
    assert faults_of(evidence, need_person=False) == []
    assert faults_of(evidence) == ["nobody signed as person"]
    forged = sign_part(PERSON_KEY, evidence.document.at_site, role=PERSON, name="Li Wei", at=T0)
    assert await refused(hub.drills.sign(SignDrill(drill=judged.drill, signature=forged), OWNER)) == "drill.signature"
    given = sign_part(PERSON_KEY, evidence.document, role=PERSON, name="Li Wei", at=T0)
    for _ in range(2):
        signed = await hub.drills.sign(SignDrill(drill=judged.drill, signature=given), OWNER)
    assert faults_of(signed) == []
    assert [s.role for s in signed.signatures] == ["site", "hub", "person"]
    rows = [row for row in await hub.registry.read_audit(AuditQuery()) if row.action == "drill.sign"]
    assert [PERSON_KEY.public in row.reason for row in rows] == [True]


async def test_a_drill_of_anothers_site_is_not_there(hub: Hub) -> None:
    await hub.allow()
    planned = await hub.plan()
    assert (await hub.drills.drills(DrillsQuery(), OTHER)).drills == []
    assert await refused(hub.drills.evidence(DrillQuery(drill=planned.drill), OTHER), NotFound) == "not_found"
    assert await refused(hub.drills.call_off(CallOffDrill(drill=planned.drill), OTHER), NotFound) == "not_found"
