"""Metering on a store of either kind, with real keys and seals: what a site's lane and the scheduler's events bring, one call each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
from tests.conftest import PgDatabase
from tests.core.metering_world import SITE, T0, TENANT, attribution, spec

from intertie.bus.rpc import Caller
from intertie.clock import ManualClock
from intertie.contracts.base import Empty, EventMeta, encode
from intertie.contracts.identity import Claims, Role, SiteKeyChanged, SiteKeyRecord
from intertie.contracts.job import AttemptChanged, AttemptRecord, JobChanged, JobState
from intertie.contracts.link import EntryBase, JournalOpened, Lane, LostRange, PeriodClosed, SegmentClosed
from intertie.contracts.usage import (
    AgreeSpec,
    AttemptBook,
    BookQuery,
    LedgerCheck,
    MeterSpec,
    PeriodCount,
    Segment,
    Statement,
    StatementQuery,
)
from intertie.ids import AttemptId, Digest, JobId, JournalId, PrincipalId, SessionId, SiteName, TenantName, digest, new_event
from intertie.lane.memory import MemoryLaneTables
from intertie.lane.pg import PgLaneTables
from intertie.lane.tables import LaneEntry
from intertie.link.keeper import NewEntry, SiteRow
from intertie.metering.memory import MemoryMetering
from intertie.metering.pg import PACKAGE, PgMetering
from intertie.metering.service import Metering, trust
from intertie.metering.store import MeteringStore
from intertie.rating import measured
from intertie.store import Database
from intertie.trust.keys import Key
from intertie.trust.seal import seal

SCHEDULER = Key.new("U")
DIGEST = digest(b"the last that the site remembers")


def claims(*roles: Role, tenant: str | None = None, site: str | None = None) -> Caller:
    who = Claims(
        iss="identity",
        sub=PrincipalId("p-1"),
        name="ann",
        roles=list(roles),
        tenant=TenantName(tenant) if tenant else None,
        site=SiteName(site) if site else None,
        iat=0,
        exp=2**40,
    )
    return Caller(who, "trace")


OPERATOR = claims(Role.OPERATOR)


@dataclass
class Edge:
    """A running metering and what the tests say to it. `key` seals for every site unless told otherwise."""

    store: MeteringStore
    lanes: PgLaneTables | MemoryLaneTables
    clock: ManualClock = field(default_factory=lambda: ManualClock(T0))
    key: Key = field(default_factory=lambda: Key.new("U"))
    seq: dict[JournalId, int] = field(default_factory=dict)
    journals: dict[SiteName, JournalId] = field(default_factory=dict)
    news: int = 0

    def __post_init__(self) -> None:
        self.service = Metering(self.store, self.lanes, trust(SCHEDULER.public), self.clock, news=self._heard)

    def _heard(self) -> None:
        self.news += 1

    def wait(self, until: datetime) -> None:
        """Time goes on."""
        self.clock.advance((until - self.clock.now()).total_seconds())

    # --- what comes ---

    async def know_site(self, site: SiteName = SITE, *, version: int = 1, key: Key | None = None, revoked: bool = False) -> None:
        keys = SiteKeyRecord(site=site, site_key=(key or self.key).public, signing_key="A", account="A", revoked=revoked)
        await self.service.on_site_key(SiteKeyChanged(version=version, record=keys), meta())

    async def agree(self, like: MeterSpec | None = None) -> MeterSpec:
        """Agree to the terms of `like` (the standard ones)."""
        terms = like or spec()
        fields = {name: getattr(terms, name) for name in AgreeSpec.__struct_fields__}
        return await self.service.agree_spec(AgreeSpec(**fields), OPERATOR)

    def seal(self, segment: Segment, of: AttemptRecord | None, *, key: Key | None = None) -> SegmentClosed:
        """The entry of a segment, attributed to an attempt by the scheduler."""
        if of is not None:
            segment = msgspec.structs.replace(segment, attribution=seal(SCHEDULER, encode(attribution(of)), "scheduler"))
        signer = key or self.key
        return SegmentClosed(seq=1, at=T0, sealed=seal(signer, encode(segment), signer.public))

    async def receive(self, entry: EntryBase, site: SiteName = SITE) -> LaneEntry:
        """Commit an entry on a site's lane, as the lane keeper does before anything is interpreted."""
        journal = self.journals.setdefault(site, JournalId(f"jnl-{site}"))
        seq = self.seq[journal] = self.seq.get(journal, 0) + 1
        raw = encode(msgspec.structs.replace(entry, seq=seq))
        mark = Digest(digest(raw))
        async with self.lanes.turn(Lane.METERING, [site]) as turn:
            await turn.save([row_of(site, journal, seq, mark, self.clock.now())], {site: [NewEntry(seq, mark, raw)]}, [])
        return LaneEntry(site, Lane.METERING, journal, seq, mark, raw, self.clock.now())

    async def send(self, segment: Segment, of: AttemptRecord | None, *, site: SiteName = SITE, key: Key | None = None) -> None:
        """A segment comes and is interpreted."""
        await self.service.interpret(await self.receive(self.seal(segment, of, key=key), site))

    async def say(self, entry: EntryBase, site: SiteName = SITE) -> None:
        """Any entry comes and is interpreted."""
        await self.service.interpret(await self.receive(entry, site))

    async def open_journal(self, journal: str, site: SiteName = SITE) -> None:
        """The site's journal is replaced by a new one, and says so first."""
        previous, self.journals[site] = self.journals.get(site), JournalId(journal)
        await self.say(JournalOpened(seq=1, at=T0, previous=previous, why="agent_restored", place="here", kernel_boot="boot"), site)

    def period(self, period: str, start: datetime, end: datetime, counted: Sequence[Segment], *, key: Key | None = None) -> PeriodClosed:
        """A site's word that a period is over, with these segments in it."""
        count = PeriodCount(
            site=counted[0].site if counted else SITE,
            period=period,
            start=start,
            end=end,
            attempts=len({segment.attempt for segment in counted}),
            segments=len(counted),
            quantity_milli_us=measured(counted),
        )
        signer = key or self.key
        return PeriodClosed(seq=1, at=end, sealed=seal(signer, encode(count), signer.public))

    def lost_range(self, journal: str, first: int, last: int, *, key: Key | None = None) -> LostRange:
        """A site's word that nobody has these entries any more."""
        facts = {"journal": journal, "lane": "metering", "first": first, "last": last, "digest_last": DIGEST}
        signer = key or self.key
        sealed = seal(signer, encode(facts), signer.public)
        return LostRange(seq=1, at=T0, journal=JournalId(journal), first=first, last=last, digest_last=DIGEST, sealed=sealed)

    async def tell(self, record: AttemptRecord, *, wall_s: int = 3_600, about: EventMeta | None = None) -> None:
        """The scheduler's event comes."""
        await self.service.on_attempt(AttemptChanged(version=record.version, record=record, wall_s=wall_s), about or meta())

    async def name(self, job: JobId, name: str, version: int = 1) -> None:
        event = JobChanged(
            version=version,
            job=job,
            tenant=TENANT,
            site=None,
            name=name,
            state=JobState.QUEUED,
            previous=None,
            actor="ann",
            reason="",
            at=T0,
        )
        await self.service.on_job(event, meta())

    # --- what is asked ---

    async def book(self, attempt: AttemptId | str) -> AttemptBook:
        (book,) = (await self.service.books(BookQuery(attempts=[AttemptId(attempt)]), OPERATOR)).books
        return book

    async def statement(self, period: str = "", **changes: Any) -> Statement:
        return await self.service.statement(StatementQuery(tenant=TENANT, period=period, **changes), OPERATOR)

    async def check(self) -> LedgerCheck:
        """The ledger's own proof, which must hold at any time."""
        found = await self.service.check(Empty(), OPERATOR)
        assert not (found.sum or found.closed_with_hold or found.open_without_hold or found.differing), found
        return found


@asynccontextmanager
async def opened(kind: str, pg: PgDatabase | None) -> AsyncIterator[Edge]:
    """Metering on a store of this kind that knows site-a's key and has agreed to the standard terms."""
    if pg is None or kind == "memory":
        clock = ManualClock(T0)
        store = MemoryMetering(clock=clock)
        made = Edge(store, MemoryLaneTables(store), clock)
        await made.know_site()
        await made.agree()
        yield made
        return
    database = await Database.open(pg.url, password=pg.password, schema="metering")
    try:
        await database.migrate(PACKAGE)
        made = Edge(PgMetering(database), PgLaneTables(database))
        await made.know_site()
        await made.agree()
        yield made
    finally:
        await database.close()


def meta() -> EventMeta:
    return EventMeta(id=new_event(), type="t", source="s", entity="e", time=T0, number=1, epoch=1)


def row_of(site: SiteName, journal: JournalId, seq: int, mark: Digest, now: datetime, lane: Lane = Lane.METERING) -> SiteRow:
    """What a keeper keeps of a site that has just said entry `seq` of this journal."""
    return SiteRow(
        site=site,
        lane=lane,
        session=SessionId("ses"),
        journal=journal,
        ack_through=seq,
        digest=mark,
        safe_through=seq,
        interpreted_through=0,
        heard=seq,
        last_heard=now,
        last_nonce=seq,
        taken_nonce=seq,
        at_head=True,
        running=None,
        instruction_epoch=0,
        instruction_mark=0,
        settings_revision=0,
        clocks=None,
        clock_offset_s=0.0,
        clock_error_s=0.0,
    )
