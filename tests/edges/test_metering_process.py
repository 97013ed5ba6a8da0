"""The metering process itself, on a real bus and a real database: from a site's sync and the scheduler's events to a statement, through a kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from tests.conftest import PgDatabase
from tests.core.metering_world import SITE, TENANT, attribution, ended, record, segment

from intertie.bus import rpc
from intertie.bus.nats import NatsBus
from intertie.clock import SystemClock
from intertie.contracts import endpoints
from intertie.contracts.base import Empty, Event, encode
from intertie.contracts.identity import Claims, Role, SiteKeyChanged, SiteKeyRecord
from intertie.contracts.job import AttemptChanged
from intertie.contracts.link import Clocks, JournalOpened, Lane, LostRange, PeriodClosed, SegmentClosed, Sync, Synced, sync_subject
from intertie.contracts.quarantine import QuarantineQuery, Reinterpret
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import AgreeSpec, LedgerCheck, PeriodCount, Price, Statement, StatementQuery
from intertie.embedded.nats import running_nats
from intertie.errors import IntertieError
from intertie.ids import JournalId, PrincipalId, SessionId, digest, new_event
from intertie.link.journal import first_digest
from intertie.store import EVENTS
from intertie.store.outbox import new_row
from intertie.trust.claims import sign_claims
from intertie.trust.keys import Key
from intertie.trust.seal import seal

# Generous: a laptop that runs the whole suite beside it.
LIMIT_S = 30.0


@dataclass
class Hub:
    """Keys and addresses of a hub of which only metering runs."""

    folder: Path
    bus_url: str
    pg: PgDatabase
    keys: dict[str, Key] = field(default_factory=lambda: {name: Key.new("U") for name in ("identity", "scheduler", "metering")})

    def environ(self) -> dict[str, str]:
        url, password = self.pg.role("metering")
        self._write("password", password)
        self._write("keys.json", json.dumps({name: key.public for name, key in self.keys.items()}))
        if not (self.folder / "metering.nk").exists():
            self.keys["metering"].write(self.folder / "metering.nk")
        return {
            "PATH": os.environ["PATH"],
            "INTERTIE_BUS_URL": self.bus_url,
            "INTERTIE_DATABASE_URL": url,
            "INTERTIE_DATABASE_PASSWORD_FILE": str(self.folder / "password"),
            "INTERTIE_KEY_FILE": str(self.folder / "metering.nk"),
            "INTERTIE_KEYS_FILE": str(self.folder / "keys.json"),
            "INTERTIE_DATA_DIR": str(self.folder),
            "INTERTIE_READY_FILE": str(self.folder / "ready"),
            "INTERTIE_BEAT_S": "0.1",
        }

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")
        (self.folder / name).chmod(0o600)

    def operator(self) -> str:
        """Signed claims of an operator, as identity gives them."""
        at = int(SystemClock().now().timestamp())
        who = Claims(iss="identity", sub=PrincipalId("p-1"), name="ann", roles=[Role.OPERATOR], iat=at, exp=at + 300)
        return sign_claims(self.keys["identity"], who)

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "metering.log").open("ab") as out:
            return subprocess.Popen([sys.executable, "-m", "intertie.metering"], env=self.environ(), stdout=out, stderr=out)

    @asynccontextmanager
    async def metering(self) -> AsyncIterator[subprocess.Popen[bytes]]:
        """The process, ready; killed at the end if it still lives."""
        process = self.start()
        try:
            await until(lambda: (self.folder / "ready").exists() or process.poll() is not None)
            assert process.poll() is None, (self.folder / "metering.log").read_text(encoding="utf-8")
            yield process
        finally:
            process.kill()
            process.wait()
            (self.folder / "ready").unlink(missing_ok=True)


async def until(done: object) -> None:
    """Poll until `done()`, at most the limit."""
    assert callable(done)
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = done()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.05)


async def tell(bus: NatsBus, event: Event, service: str) -> None:
    """Publish an event as its keeper's relay does."""
    row = new_row(event, service, SystemClock().now(), "")
    headers = {**row.headers, "intertie-epoch": "1", "intertie-number": "1"}
    await bus.append(row.subject, row.body, message_id=new_event(), headers=headers)


async def sync(bus: NatsBus, entries: list[bytes], nonce: int) -> Synced:
    """One sync of the site's metering lane, from the beginning of its journal."""
    journal = JournalId("jnl-1")
    message = Sync(
        site=SITE,
        session=SessionId("ses-1"),
        lane=Lane.METERING,
        nonce=nonce,
        taken_nonce=nonce - 1,
        journal=journal,
        first_seq=1,
        digest_before=first_digest(journal),
        entries=[msgspec.Raw(entry) for entry in entries],
        at_head=True,
        clocks=Clocks(utc=SystemClock().now(), boot_s=1.0, kernel_boot="boot"),
    )
    answer = await bus.request(sync_subject(SITE, Lane.METERING), encode(message), timeout_s=5)
    return msgspec.json.decode(answer.body, type=Synced)


@pytest.fixture
async def hub(short_folder: Path, pg: PgDatabase) -> AsyncIterator[tuple[Hub, NatsBus]]:
    with running_nats(short_folder) as server:
        bus = await NatsBus.connect(server.url, name="test")
        try:
            yield Hub(short_folder, server.url, pg), bus
        finally:
            await bus.close()


async def test_a_sync_and_an_event_become_a_statement_through_a_kill(hub: tuple[Hub, NatsBus]) -> None:
    made, bus = hub
    site = Key.new("U")
    async with made.metering() as process:
        await bus.ensure_stream(EVENTS)
        ask = AgreeSpec(
            title="standard", provider="platform", consumer="*", currency="CNY", prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal(6))]
        )
        agreed = await rpc.call(bus, endpoints.AGREE_SPEC, ask, claims=made.operator())
        offered = record(spec=agreed.spec, spec_revision=1)
        run = msgspec.structs.replace(
            segment(offered, 0, 6.418, last=True), attribution=seal(made.keys["scheduler"], encode(attribution(offered)), "scheduler")
        )
        entry = encode(SegmentClosed(seq=1, at=run.end, sealed=seal(site, encode(run), site.public)))
        answer = await sync(bus, [entry], 1)
        assert answer.ack_through == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
    async with made.metering() as process:
        again = await sync(bus, [entry], 2)
        assert again.ack_through == 1
        keys = SiteKeyRecord(site=SITE, site_key=site.public, signing_key="A", account="A")
        await tell(bus, SiteKeyChanged(version=1, record=keys), "identity")
        done = ended(offered, [run])
        await tell(bus, AttemptChanged(version=done.version, record=done, wall_s=60), "scheduler")

        async def statement() -> Statement:
            query = StatementQuery(tenant=TENANT, period="2026-12")
            return await rpc.call(bus, endpoints.STATEMENT, query, claims=made.operator())

        async def settled() -> bool:
            return (await statement()).total != 0

        await until(settled)
        found = await statement()
        assert (found.total, found.incomplete, found.in_suspense) == (Decimal("0.0107"), [], 0)
        check = await rpc.call(bus, endpoints.LEDGER_CHECK, Empty(), claims=made.operator())
        assert check.text == "the ledger agrees with the segments"
        with pytest.raises(IntertieError):
            await rpc.call(bus, endpoints.LEDGER_CHECK, Empty(), claims="")
        process.terminate()
        assert await asyncio.to_thread(process.wait, LIMIT_S) == 0


async def test_what_a_site_says_beside_its_segments_arrives_and_what_cannot_be_read_waits_to_be_read_again(
    hub: tuple[Hub, NatsBus],
) -> None:
    """A period that is over, a range that nobody has, and an entry of a newer version, in one sync."""
    made, bus = hub
    site = Key.new("U")
    at = SystemClock().now()
    start, end = datetime(2026, 9, 30, 16, tzinfo=UTC), datetime(2026, 10, 31, 16, tzinfo=UTC)
    count = PeriodCount(site=SITE, period="2026-10", start=start, end=end, attempts=1, segments=3, quantity_milli_us=9)
    facts = {"journal": "jnl-0", "lane": "metering", "first": 2, "last": 5, "digest_last": digest(b"x")}
    lost = LostRange(
        seq=3, at=at, journal=JournalId("jnl-0"), first=2, last=5, digest_last=digest(b"x"), sealed=seal(site, encode(facts), site.public)
    )
    opened = JournalOpened(seq=1, at=at, previous=JournalId("jnl-0"), why="hub_restored", place="here", kernel_boot="boot")
    entries = [
        encode(opened),
        encode(PeriodClosed(seq=2, at=at, sealed=seal(site, encode(count), site.public))),
        encode(lost),
        encode({"kind": "of_tomorrow", "seq": 4}),
    ]
    async with made.metering():
        await bus.ensure_stream(EVENTS)
        keys = SiteKeyRecord(site=SITE, site_key=site.public, signing_key="A", account="A")
        await tell(bus, SiteKeyChanged(version=1, record=keys), "identity")
        assert (await sync(bus, entries, 1)).ack_through == 4

        async def check() -> LedgerCheck:
            return await rpc.call(bus, endpoints.LEDGER_CHECK, Empty(), claims=made.operator())

        async def quarantined(times: int) -> bool:
            # A second time: set aside, read again, set aside again.
            listed = await rpc.call(bus, endpoints.METERING_QUARANTINE, QuarantineQuery(site=SITE), claims=made.operator())
            seen.update(entry.at for entry in listed.entries)
            return len(seen) == times and [(entry.seq, entry.kind) for entry in listed.entries] == [(4, "of_tomorrow")]

        async def told() -> bool:
            found = await check()
            return [one.entries for one in found.lost] == [4] and [(one.state, one.missing_segments) for one in found.periods] == [
                ("missing", 3)
            ]

        seen = set[datetime]()
        await until(lambda: quarantined(1))
        await until(told)
        again = Reinterpret(site=SITE, reason="tried with this version")
        assert (await rpc.call(bus, endpoints.METERING_REINTERPRET, again, claims=made.operator())).reopened == 1
        await until(lambda: quarantined(2))
        assert (await check()).sum == 0
