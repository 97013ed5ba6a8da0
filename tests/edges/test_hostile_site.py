"""A joined site that lies, against the whole hub: what it may cost is its own lane, never another's job, bill or turn.

What it can say and hear on the bus at all is in `test_embedded_operator_bus` (BR-128); here it uses every word that it has.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tests.conftest import PgServer
from tests.edges.conftest import RunningHub
from tests.edges.hostile_world import ACME, OBJECT_BYTES, POOL, RIVAL, Hub, Member, own_database, running_hub
from tests.edges.identity_world import CLOCK, until

from intertie.contracts.base import encode
from intertie.contracts.job import Attribution, Cause, JobState
from intertie.contracts.link import (
    Claimed,
    Ended,
    Go,
    Lane,
    LaneState,
    NotStarted,
    OfferBody,
    OfferRefused,
    ResultStored,
    Staging,
    Started,
    StopAnswered,
    local_sync_subject,
)
from intertie.contracts.site import DeviceKind, DeviceState
from intertie.contracts.telemetry import DeviceSample, NodeSample, encode_sample, local_telemetry_subject
from intertie.contracts.usage import Segment
from intertie.errors import Unavailable
from intertie.ids import AttemptId, DeviceId, InstructionId, JournalId, PoolName, SegmentId, SessionId, SiteName, mint
from intertie.link.keeper import BATCH_ENTRIES, MOST_EPOCH
from intertie.trust.claims import site_claims
from intertie.trust.keys import Key
from intertie.trust.seal import seal

pytestmark = pytest.mark.asyncio(loop_scope="module")

HUGE = 10**30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(session_hub: RunningHub, postgres_server: PgServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hub]:
    with own_database(postgres_server) as pg:
        async with running_hub(session_hub.layout, pg, tmp_path_factory.mktemp("gateway")) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="module")
async def victim(hub: Hub, unique: str) -> Member:
    return await hub.member(SiteName(f"good-{unique}"))


@pytest_asyncio.fixture(loop_scope="module")
async def thief(hub: Hub, unique: str) -> Member:
    return await hub.member(SiteName(f"evil-{unique}"))


async def running(hub: Hub, member: Member, **spec: Any) -> OfferBody:
    """A job of this site, claimed, sent off and started by the rules."""
    job = await hub.submit(member.name, **spec)
    body, _ = await member.offered(job)
    member.say(Claimed, body, devices=list(body.devices))
    lane = member[Lane.SCHEDULER]

    async def sent_off() -> bool:
        await lane.speak()
        return any(isinstance(one, Go) and one.attempt == body.attempt for one in lane.heard.values())

    await until(sent_off, "the go comes")
    member.say(Staging, body)
    member.say(Started, body, started=CLOCK.now(), devices=list(body.devices), native_id="7", account="")
    await lane.speak()
    await hub.reaches(job, JobState.RUNNING)
    return body


def end(body: OfferBody, **lies: Any) -> dict[str, Any]:
    """Fields of an honest end after a minute, but for the lies."""
    now = CLOCK.now()
    honest: dict[str, Any] = {
        "outcome": "succeeded",
        "cause": None,
        "exit_code": 0,
        "signal": None,
        "reason": "",
        "started": now - timedelta(seconds=60),
        "ended": now,
        "ran_us": 60_000_000,
        "segments": 1,
        "quantity_milli_us": 60_000_000 * 1_000 * len(body.devices),
        "last_metering_seq": 1,
    }
    return {**honest, **lies}


# --- syncs -----------------------------------------------------------------------------------------------------------------------------------


def junk(count: int, size: int) -> list[msgspec.Raw]:
    return [msgspec.Raw(json.dumps({"kind": "junk", "seq": n + 1, "pad": "x" * size}).encode()) for n in range(count)]


NO_SYNCS: list[tuple[str, str, Callable[[Member, Member], bytes]]] = [
    ("garbage", "contract.invalid", lambda evil, good: b"\xff\x00\x01garbage"),
    ("nothing", "contract.invalid", lambda evil, good: b""),
    ("deep nesting", "contract.invalid", lambda evil, good: b"[" * 200_000),
    ("another shape", "contract.invalid", lambda evil, good: b'{"site": "x"}'),
    ("a site's name as user text", "contract.invalid", lambda evil, good: encode({"site": ["*"], "lane": "everything"})),
    ("another site's name", "link.site_mismatch", lambda evil, good: encode(evil[Lane.SCHEDULER].sync(site=good.name))),
    ("another lane", "link.lane_mismatch", lambda evil, good: encode(evil[Lane.SCHEDULER].sync(lane=Lane.METERING))),
    ("an epoch at the end of the numbers", "link.epoch", lambda evil, good: encode(evil[Lane.SCHEDULER].sync(instruction_epoch=HUGE))),
    ("entries beyond a batch", "link.too_large", lambda evil, good: encode(evil[Lane.SCHEDULER].sync(entries=junk(9, 100_000)))),
    ("too many entries", "link.too_large", lambda evil, good: encode(evil[Lane.SCHEDULER].sync(entries=junk(BATCH_ENTRIES + 1, 1)))),
    ("a nonce that no table holds", "lane.unrecorded", lambda evil, good: encode(evil[Lane.SCHEDULER].sync(nonce=HUGE))),
    ("a mark that no table holds", "lane.unrecorded", lambda evil, good: encode(evil[Lane.SCHEDULER].sync(instruction_mark=HUGE))),
    ("NUL in a journal's name", "lane.unrecorded", lambda evil, good: encode(evil[Lane.SCHEDULER].sync(session=SessionId("a\x00b")))),
    ("NUL in an attempt", "lane.unrecorded", lambda evil, good: encode(evil[Lane.SCHEDULER].sync(running=[AttemptId("a\x00b")]))),
    (
        "a clock before time",
        "lane.unrecorded",
        lambda evil, good: encode(evil[Lane.SCHEDULER].sync(clocks={"utc": "0001-01-01T00:00:00+23:59", "boot_s": 1, "kernel_boot": "b"})),
    ),
]


@pytest.mark.parametrize(("kind", "forge"), [row[1:] for row in NO_SYNCS], ids=[row[0] for row in NO_SYNCS])
async def test_what_is_no_sync_is_told_to_people_and_holds_up_nobody(
    hub: Hub, thief: Member, victim: Member, kind: str, forge: Callable[[Member, Member], bytes]
) -> None:
    await thief.bus.publish(local_sync_subject(Lane.SCHEDULER), forge(thief, victim))
    # Without a reply nothing is answered; with one it is the same.
    answered = asyncio.create_task(thief[Lane.SCHEDULER].send(forge(thief, victim), timeout_s=30))
    assert (await victim[Lane.SCHEDULER].speak()).state is LaneState.OK
    await hub.incidents(thief.name, kind)
    answered.cancel()
    await asyncio.gather(answered, return_exceptions=True)
    assert not await hub.world.open_incidents(victim.name)
    answer = await thief[Lane.SCHEDULER].speak()
    assert (answer.state, answer.ack_through, answer.quarantined) == (LaneState.OK, 0, 0)


@pytest.mark.parametrize(
    ("lies", "state"),
    [
        # A jump over entries that never were: asked for again, none taken.
        ({"first_seq": 100}, LaneState.BEHIND),
        ({"first_seq": HUGE}, LaneState.BEHIND),
        ({"first_seq": 100, "forgotten_through": HUGE}, LaneState.HUB_RESTORED),
        # A history of its own.
        ({"digest_before": "sha256:" + "0" * 64}, LaneState.FORKED),
        ({"journal": JournalId("jnl-another")}, LaneState.AGENT_RESTORED),
        # Says of a session that was never ours that it was answered.
        ({"session": SessionId("ses-another"), "taken_nonce": 7}, LaneState.SUPERSEDED),
        ({"instruction_epoch": MOST_EPOCH}, LaneState.HUB_RESTORED),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_site_that_lies_about_its_journal_stops_its_own_lane_and_gets_nothing(
    hub: Hub, thief: Member, lies: dict[str, Any], state: LaneState
) -> None:
    lane = thief[Lane.SCHEDULER]
    assert (await lane.speak()).state is LaneState.OK
    answer = await lane.speak(**lies)
    assert (answer.state, answer.instructions, answer.safe_through) == (state, [], 0)
    assert (await lane.speak()).state is LaneState.OK, "the truth is heard again"


async def test_an_old_sync_said_again_changes_nothing(hub: Hub, thief: Member) -> None:
    body = await running(hub, thief)
    lane = thief[Lane.SCHEDULER]
    old = lane.sync()
    thief.say(Ended, body, **end(body, outcome="failed", cause=Cause.JOB, exit_code=1))
    await lane.speak()
    before = await hub.reaches(body.job, JobState.FAILED)
    answer = await lane.send(encode(old))
    assert answer is None or answer.state is LaneState.BUSY
    await lane.speak()
    assert await hub.job(body.job) == before


async def test_an_answer_goes_to_no_subject_that_the_site_chose(hub: Hub, thief: Member, victim: Member) -> None:
    heard: list[str] = []

    async def note(message: Any) -> None:
        heard.append(message.body.decode("utf-8", "replace"))

    ears = [await victim.bus.subscribe("down.*", note), await hub.world.gateway.subscribe("intertie.v1.evt.>", note)]
    lane = thief[Lane.SCHEDULER]
    from tests.edges.conftest import connect

    from intertie.trust.login import SiteLogin

    assert thief.site.joined is not None
    mouth = await connect(hub.world.layout.bus_url, SiteLogin(thief.site.signing, thief.site.joined.account, CLOCK))
    for reply in ("intertie.v1.evt.scheduler.job.changed.t.s", f"intertie.v1.down.{victim.name}.ask", "$SYS.REQ.CLAIMS.UPDATE"):
        await mouth.publish(local_sync_subject(Lane.SCHEDULER), encode(lane.sync()), reply=reply)
    await mouth.flush(timeout=5)
    await mouth.close()
    await lane.speak()
    await victim[Lane.SCHEDULER].speak()
    await hub.world.gateway.alive(5)
    for ear in ears:
        await ear.close()
    assert [text for text in heard if '"nonce"' in text] == []


async def test_ten_megabytes_of_junk_are_set_aside_while_others_are_answered(hub: Hub, thief: Member, victim: Member) -> None:
    lane = thief[Lane.SCHEDULER]
    entries = [json.dumps({"kind": "junk", "seq": n + 1, "pad": "x" * 200_000}).encode() for n in range(52)]

    async def flood() -> None:
        for raw in entries:
            lane.raws.append(raw)
            await lane.speak()

    flooding = asyncio.create_task(flood())
    while not flooding.done():
        assert (await victim[Lane.SCHEDULER].speak()).state is LaneState.OK
        await asyncio.sleep(0.02)
    await flooding

    async def all_aside() -> bool:
        return (await lane.speak()).quarantined == len(entries)

    await until(all_aside, "every entry is in quarantine")
    assert len(await hub.incidents(thief.name, "lane.quarantine")) == 1
    assert not await hub.world.open_incidents(victim.name)


# --- jobs ------------------------------------------------------------------------------------------------------------------------------------


async def test_what_a_site_says_of_anothers_attempt_is_set_aside_and_the_job_goes_on(hub: Hub, thief: Member, victim: Member) -> None:
    job = await hub.submit(victim.name)
    body, offer = await victim.offered(job)
    before = await hub.job(job)
    thief.say(Claimed, body, devices=list(body.devices))
    thief.say(OfferRefused, body, code="device_busy", text="", fault=False)
    thief.say(NotStarted, body, code="late", text="")
    thief.say(Staging, body)
    thief.say(Started, body, started=CLOCK.now(), devices=list(body.devices), native_id="1", account="root")
    thief.say(Ended, body, **end(body))
    thief.say(ResultStored, body, result=None)
    thief.say(StopAnswered, body, answer="already_ended", instruction=InstructionId(offer.id))
    lane = thief[Lane.SCHEDULER]

    async def all_aside() -> bool:
        return (await lane.speak()).quarantined == 8

    await until(all_aside, "every lie is in quarantine")
    await hub.incidents(thief.name, "lane.quarantine")
    after = await hub.job(job)
    assert (after.state, after.attempts) == (before.state, before.attempts)
    victim.say(Claimed, body, devices=list(body.devices))
    await victim[Lane.SCHEDULER].speak()

    async def claimed() -> bool:
        return (await hub.job(job)).attempts[-1].state == "claimed"

    await until(claimed, "the victim's own word counts")


OWN_LIES: list[tuple[str, Callable[[Member, OfferBody], None]]] = [
    ("another generation", lambda evil, body: evil.say(Ended, body, **end(body), generation=body.generation + 1)),
    ("another epoch", lambda evil, body: evil.say(Ended, body, **end(body), epoch=HUGE)),
    ("an attempt that never was", lambda evil, body: evil.say(Started, body, attempt="att-x", **started())),
    ("another number than it was chained under", lambda evil, body: evil.say(Staging, body, seq=9_999)),
    ("more time than any table holds", lambda evil, body: evil.say(Ended, body, **end(body, ran_us=HUGE))),
    ("more quantity than any table holds", lambda evil, body: evil.say(Ended, body, **end(body, quantity_milli_us=-1))),
    ("an end before time", lambda evil, body: evil.say(Ended, body, **end(body, ended="0001-01-01T00:00:00+23:59"))),
    ("an outcome of its own", lambda evil, body: evil.say(Ended, body, **end(body, outcome="paid"))),
]


def started() -> dict[str, Any]:
    return {"started": CLOCK.now(), "devices": [], "native_id": "1", "account": ""}


@pytest.mark.parametrize("lie", [row[1] for row in OWN_LIES], ids=[row[0] for row in OWN_LIES])
async def test_a_lie_about_its_own_attempt_is_set_aside_and_the_next_true_word_counts(
    hub: Hub, thief: Member, lie: Callable[[Member, OfferBody], None]
) -> None:
    body = await running(hub, thief)
    lie(thief, body)
    lane = thief[Lane.SCHEDULER]

    async def aside() -> bool:
        return (await lane.speak()).quarantined == 1

    await until(aside, "the lie is in quarantine")
    assert (await hub.job(body.job)).state is JobState.RUNNING
    thief.say(Ended, body, **end(body))
    await lane.speak()
    await hub.reaches(body.job, JobState.SUCCEEDED)


@pytest.mark.parametrize("lane", list(Lane))
@pytest.mark.parametrize(
    "entry",
    [
        # msgspec repeats an unknown tag in its message: with the NUL, which no PostgreSQL text holds.
        '{"kind": "j\\u0000", "seq": 1}',
        '{"kind": "staging", "seq": 1, "at": "2026-01-01T00:00:00Z", "attempt": "a\\u0000", "job": "j", "epoch": 1, "generation": 1}',
        '{"kind": "inventory", "seq": 1, "at": "2026-01-01T00:00:00Z", "pools": [{"pool": "p\\u0000", "devices": []}]}',
        '{"seq": 1}',
        '{"seq": "1"}',
        "[]",
        "1e999",
    ],
)
async def test_no_entry_ends_its_keeper(hub: Hub, thief: Member, victim: Member, lane: Lane, entry: str) -> None:
    """It is set aside, the next one follows, and others are answered: also after the keeper was started again, since it is still there then."""
    thief[lane].raws.append(entry.encode())

    async def aside() -> bool:
        return (await thief[lane].speak()).quarantined == 1

    await until(aside, "it is in quarantine")
    await hub.incidents(thief.name, "lane.quarantine")
    assert (await victim[lane].speak()).state is LaneState.OK


async def test_control_characters_that_a_site_tells_reach_nobodys_terminal_or_database(hub: Hub, thief: Member) -> None:
    """They are kept as text; whoever shows them makes them harmless (`test_hostile_tenant`)."""
    body = await running(hub, thief)
    thief.say(
        Ended,
        body,
        **end(body, outcome="failed", cause=Cause.JOB, exit_code=1, reason="\x1b]0;owned\x07\x00\u202e", log_tail="\x00\x1b[2J"),
    )
    await thief[Lane.SCHEDULER].speak()
    record = await hub.reaches(body.job, JobState.FAILED)
    assert "\x1b" in record.attempts[-1].reason


# --- telemetry -------------------------------------------------------------------------------------------------------------------------------


async def test_telemetry_of_one_site_says_nothing_about_another(hub: Hub, thief: Member, victim: Member) -> None:
    """Names in a payload prove nothing: the server's name in the subject counts. Garbage is dropped."""
    lost = [DeviceSample(id=DeviceId(f"slot-{n}"), pool=POOL, kind=DeviceKind.SLOT, state=DeviceState.LOST) for n in range(2)]
    for node in ("n1", victim.name):
        sample = NodeSample(node=node, sampled=CLOCK.now() + timedelta(days=1), sequence=2**60, devices=lost)
        await thief.bus.publish(local_telemetry_subject(node), encode_sample(sample))
    await thief.bus.publish(local_telemetry_subject("n1"), b"\xc1garbage")
    await thief.bus.alive(5)
    job = await hub.submit(victim.name)
    body, _ = await victim.offered(job)
    assert body.site == victim.name


# --- money -----------------------------------------------------------------------------------------------------------------------------------

FORGER = Key.new("U")
MONTH = timedelta(days=30)


def attributed(member: Member, body: OfferBody, key: Key, **lies: Any) -> Segment:
    honest: dict[str, Any] = {
        "tenant": ACME,
        "job": body.job,
        "attempt": body.attempt,
        "site": member.name,
        "pool": body.pool,
    }
    return member.segment(body, attribution=seal(key, encode(Attribution(**{**honest, **lies})), "scheduler"))


Lie = Callable[[Member, OfferBody, OfferBody], None]
"""(the thief, its own attempt, the victim's)."""

MONEY_LIES: list[tuple[str, Lie]] = [
    ("another site's name", lambda e, own, other: e.measure(e.segment(own, site=other.site))),
    ("another site's whole segment", lambda e, own, other: e.measure(e.segment(other, site=other.site))),
    ("another site's attempt", lambda e, own, other: e.measure(e.segment(own, attempt=other.attempt))),
    ("another site's attribution", lambda e, own, other: e.measure(e.segment(own, attribution=other.attribution))),
    ("another tenant, attributed by itself", lambda e, own, other: e.measure(attributed(e, own, e.site.key, tenant=RIVAL))),
    ("itself, attributed by itself", lambda e, own, other: e.measure(attributed(e, own, e.site.key))),
    ("no attribution", lambda e, own, other: e.measure(e.segment(own, attribution=None))),
    ("a forged seal", lambda e, own, other: e.measure(e.segment(own), key=FORGER)),
    (
        "a seal of other bytes",
        lambda e, own, other: e.measure(
            e.segment(own),
            sealed=msgspec.structs.replace(
                seal(e.site.key, encode(e.segment(own)), "s"), payload=encode(e.segment(own, quantity_milli=1)).decode()
            ),
        ),
    ),
    ("more of a device than there is", lambda e, own, other: e.measure(e.segment(own, quantity_milli=1_000_000))),
    ("a number that no table holds", lambda e, own, other: e.measure(e.segment(own, quantity_milli=HUGE))),
    ("a device that it was not given", lambda e, own, other: e.measure(e.segment(own, devices=[DeviceId("slot-9")]))),
    ("a hundredfold dearer device", lambda e, own, other: e.measure(e.segment(own, kind=DeviceKind.GPU, model="H200"))),
    ("another pool", lambda e, own, other: e.measure(e.segment(own, pool=PoolName("dear")))),
    ("since 1970", lambda e, own, other: e.measure(e.segment(own, start=datetime(1970, 1, 1, tzinfo=UTC)))),
    ("until 2100", lambda e, own, other: e.measure(e.segment(own, end=datetime(2100, 1, 1, tzinfo=UTC)))),
    ("a month ago", lambda e, own, other: e.measure(e.segment(own, start=CLOCK.now() - MONTH, end=CLOCK.now() - MONTH / 2))),
    ("a month ahead", lambda e, own, other: e.measure(e.segment(own, start=CLOCK.now() + MONTH, end=CLOCK.now() + 2 * MONTH))),
    ("the end before the start", lambda e, own, other: e.measure(e.segment(own, start=CLOCK.now(), end=CLOCK.now() - MONTH / 60))),
    ("longer than its wall limit", lambda e, own, other: e.measure(e.segment(own, start=CLOCK.now() - timedelta(hours=20)))),
    ("NUL in its id", lambda e, own, other: e.measure(e.segment(own, id=SegmentId("seg-\x00")))),
    ("a phase of its own", lambda e, own, other: e.measure(msgspec.structs.replace(e.segment(own), phase="lunch"))),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(hub: Hub) -> tuple[Member, OfferBody, Member, OfferBody]:
    """An attempt that runs at each of two sites; those of the money tests."""
    evil, good = await hub.member(SiteName("evil-money")), await hub.member(SiteName("good-money"))
    return evil, await running(hub, evil), good, await running(hub, good)


@pytest.mark.parametrize("lie", [row[1] for row in MONEY_LIES], ids=[row[0] for row in MONEY_LIES])
async def test_a_segment_that_lies_bills_nobody(hub: Hub, two: tuple[Member, OfferBody, Member, OfferBody], lie: Lie) -> None:
    """It waits in suspense, or in quarantine if it is no segment at all; either way it is kept, and counted."""
    evil, own, _, other = two
    lane = evil[Lane.METERING]
    check = await hub.check()
    before = check.suspense_segments + check.quarantined
    lie(evil, own, other)
    await lane.speak()

    async def kept() -> bool:
        now = await hub.check()
        return now.suspense_segments + now.quarantined == before + 1

    await until(kept, "it is kept aside")
    for body in (own, other):
        book = await hub.book(body.attempt)
        assert book is None or (book.posted, book.segments, book.charges) == (Decimal(0), 0, [])
    assert (await hub.statement(ACME)).total == 0
    assert (await hub.statement(RIVAL)).lines == []
    proof = await hub.check()
    assert (proof.sum, proof.differing) == (Decimal(0), [])


async def test_a_replayed_id_with_another_quantity_changes_no_bill(hub: Hub, thief: Member) -> None:
    """The first word stays; the same word again is the same fact; another under its name waits for a person."""
    body = await running(hub, thief)
    lane = thief[Lane.METERING]
    true = thief.segment(body)
    thief.measure(true)
    await lane.speak()

    async def billed() -> bool:
        book = await hub.book(body.attempt)
        return book is not None and book.segments == 1

    await until(billed, "the true segment counts")
    paid = await hub.book(body.attempt)
    assert paid is not None and paid.posted > 0
    thief.measure(true)
    thief.measure(msgspec.structs.replace(true, quantity_milli=true.quantity_milli // 2))
    thief.measure(msgspec.structs.replace(true, start=true.start - timedelta(seconds=30)))
    await lane.speak()

    async def aside() -> bool:
        book = await hub.book(body.attempt)
        return book is not None and book.in_suspense == 2

    await until(aside, "the two others wait")
    book = await hub.book(body.attempt)
    assert book is not None and (book.posted, book.segments, book.run_us) == (paid.posted, 1, paid.run_us)


async def test_a_site_that_promises_more_segments_than_it_sends_is_named_and_paid_nothing_more(hub: Hub, thief: Member) -> None:
    body = await running(hub, thief)
    thief.measure(thief.segment(body))
    thief.say(Ended, body, **end(body, segments=1_000, quantity_milli_us=10**15, last_metering_seq=1_000))
    await thief[Lane.METERING].speak()
    await thief[Lane.SCHEDULER].speak()
    await hub.reaches(body.job, JobState.SUCCEEDED)

    async def told() -> bool:
        book = await hub.book(body.attempt)
        return book is not None and book.ended and book.segments == 1

    await until(told, "metering has heard of the end")
    book = await hub.book(body.attempt)
    assert book is not None and not book.complete and thief.name in book.missing
    assert book.posted == sum((charge.amount for charge in book.charges), Decimal(0))
    assert body.attempt in " ".join((await hub.statement()).incomplete)


# --- HTTP ------------------------------------------------------------------------------------------------------------------------------------

DIGEST = "sha256:" + hashlib.sha256(b"result").hexdigest()


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def claimed(site: str, **lies: Any) -> dict[str, Any]:
    at = int(CLOCK.now().timestamp())
    honest = {
        "iss": site,
        "sub": f"site/{site}",
        "name": site,
        "roles": ["site"],
        "site": site,
        "aud": "intertie",
        "iat": at,
        "exp": at + 300,
    }
    return {**honest, **lies}


def unsigned(evil: Member, good: Member) -> str:
    return f"{part({'alg': 'none', 'kid': good.name, 'typ': 'JWT'})}.{part(claimed(good.name))}."


def confused(evil: Member, good: Member) -> str:
    """HMAC with the public key as its secret."""
    text = f"{part({'alg': 'HS256', 'kid': good.name, 'typ': 'JWT'})}.{part(claimed(good.name))}"
    mac = hmac.new(good.site.key.public.encode(), text.encode(), hashlib.sha256).digest()
    return f"{text}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


def grafted(evil: Member, good: Member) -> str:
    """Own signature under another's words."""
    head, _, signature = site_claims(evil.site.key, evil.name, CLOCK.now()).split(".")
    return f"{head}.{part(claimed(good.name))}.{signature}"


PROOFS: list[tuple[str, Callable[[Member, Member], str]]] = [
    ("its own key for another site", lambda evil, good: site_claims(evil.site.key, good.name, CLOCK.now())),
    ("a key of nobody", lambda evil, good: site_claims(FORGER, good.name, CLOCK.now())),
    ("expired", lambda evil, good: site_claims(evil.site.key, evil.name, CLOCK.now() - timedelta(hours=1))),
    ("of tomorrow", lambda evil, good: site_claims(evil.site.key, evil.name, CLOCK.now() + timedelta(days=1))),
    ("unsigned", unsigned),
    ("HMAC by a public key", confused),
    ("grafted", grafted),
    ("a site that never was", lambda evil, good: site_claims(evil.site.key, SiteName("no-such-site"), CLOCK.now())),
    ("not a token", lambda evil, good: "a.b.c"),
    ("very long", lambda evil, good: "a" * 6_000),
    ("its signing key", lambda evil, good: site_claims(Key.new("U"), evil.name, CLOCK.now())),
]


@pytest.mark.parametrize("forge", [row[1] for row in PROOFS], ids=[row[0] for row in PROOFS])
async def test_no_forged_proof_opens_the_door(hub: Hub, thief: Member, victim: Member, forge: Callable[[Member, Member], str]) -> None:
    headers = {"Authorization": f"Intertie-Site {forge(thief, victim)}"}
    async with hub.http.put(f"/v1/objects/{DIGEST}", data=b"result", headers=headers) as answer:
        assert answer.status == 401, await answer.text()
        assert (await answer.json())["code"] == "identity.site_invalid"


async def test_a_site_may_bring_results_and_take_packs_and_nothing_else(hub: Hub, thief: Member) -> None:
    allowed = thief.proof()
    async with hub.http.put(f"/v1/objects/{DIGEST}", data=b"result", headers=allowed) as answer:
        assert answer.status in (200, 201), await answer.text()
    job = mint("job")
    for method, path, body in (
        ("GET", "/v1/jobs", None),
        ("GET", f"/v1/jobs/{job}", None),
        ("POST", "/v1/jobs", b'{"spec":{"name":"x","script":"true"},"tenant":"team-a"}'),
        ("POST", f"/v1/jobs/{job}/cancel", b"{}"),
        ("POST", "/v1/tokens", b'{"name":"x","roles":["operator"]}'),
        ("POST", "/v1/invitations", b'{"site":"x","kind":"machines","owner":"x","owner_tenant":"team-a"}'),
        ("GET", "/v1/audit/identity", None),
        ("GET", f"/v1/statements?tenant={ACME}", None),
        ("GET", "/v1/ledger/check", None),
        ("PUT", f"/v1/tenants/{ACME}/allowance", b'{"amount":"1"}'),
    ):
        async with hub.http.request(method, path, data=body, headers=allowed) as answer:
            said = await answer.text()
            empty = answer.status == 200 and path == "/v1/jobs" and json.loads(said)["jobs"] == []
            assert empty or answer.status in (403, 404), (path, answer.status, said)


@pytest.mark.parametrize(
    "name",
    [
        "..%2F..%2F..%2Fetc%2Fpasswd",
        "sha256:..%2F..%2Fetc%2Fpasswd",
        "sha256:" + "A" * 64,
        "sha256:" + "0" * 63,
        "sha256:" + "0" * 64 + "%00",
        "sha256:" + "0" * 64 + "%0a",
        "%2e%2e",
        "*",
        "sha256:" + "٠" * 64,
    ],
)
async def test_an_object_is_named_by_a_digest_and_by_nothing_else(hub: Hub, thief: Member, name: str) -> None:
    import yarl

    before = sorted(hub.objects.rglob("*"))
    for method in ("PUT", "GET"):
        url = yarl.URL(f"{hub.http._base_url}v1/objects/{name}", encoded=True)
        data = b"x" if method == "PUT" else None
        async with hub.http.request(method, url, data=data, headers=thief.proof()) as answer:
            assert answer.status in (400, 404, 422), (answer.status, await answer.text())
    assert sorted(hub.objects.rglob("*")) == before


@pytest.mark.parametrize(("size", "code"), [(OBJECT_BYTES + 1, "object.too_large"), (1_000, "object.mismatch")])
async def test_an_upload_that_is_too_large_or_another_leaves_nothing_behind(hub: Hub, thief: Member, size: int, code: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        """Without a length, as a liar would send it."""
        for start in range(0, size, 100_000):
            yield b"x" * min(100_000, size - start)

    name = "sha256:" + hashlib.sha256(code.encode()).hexdigest()
    before = sorted(path for path in hub.objects.rglob("*") if path.is_file())
    async with hub.http.put(f"/v1/objects/{name}", data=chunks(), headers=thief.proof()) as answer:
        assert (await answer.json())["code"] == code
    assert sorted(path for path in hub.objects.rglob("*") if path.is_file()) == before


async def test_the_hubs_own_machinery_does_not_answer_a_site(hub: Hub, thief: Member) -> None:
    for subject in ("$JS.API.STREAM.LIST", "$SYS.REQ.CLAIMS.LIST", "$SRV.PING", "intertie.v1.qry.identity.snapshot", "down.ask"):
        with pytest.raises(Unavailable) as refused:
            await thief.bus.request(subject, b"", timeout_s=10)
        assert refused.value.code == "bus.denied"
