"""Calls at the gateway's own door, with a site played frame by frame: what a caller gets of what a site, honest or not, says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestServer

from intertie.bus import rpc
from intertie.bus.memory import MemoryBroker, MemoryBus, site_account
from intertie.bus.port import Message
from intertie.clock import SystemClock
from intertie.contracts import endpoints as e
from intertie.contracts.base import encode
from intertie.contracts.call_offerings import (
    CallLimits,
    CallOffering,
    CallOfferingChanged,
    CallOutcome,
    CallProtocol,
    OfferingRecord,
    OfferingsQuery,
    OfferingsReply,
)
from intertie.contracts.calls import (
    LOCAL_CALL_SUBJECT,
    CallAbort,
    CallData,
    CallDone,
    CallGrant,
    CallHead,
    CallOpen,
    CallPart,
    CallRoom,
    CallSeen,
    CallsSeen,
    CallsTaken,
    CallTaken,
    UpFrame,
    local_answer_subject,
    pack,
    unpack_down,
)
from intertie.contracts.identity import Authenticate, Authenticated, Claims, Role
from intertie.errors import Unauthenticated
from intertie.gateway import calls as calls_module
from intertie.gateway.__main__ import GatewaySettings, application
from intertie.gateway.call_answer import AGAIN, NEXT_STEPS, STATUSES
from intertie.gateway.calls import Calls
from intertie.gateway.http import Door
from intertie.gateway.objects import ObjectStore
from intertie.ids import CallId, OfferingName, PoolName, PrincipalId, SiteName, TenantName
from intertie.trust.claims import ServiceClaims
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal

GATEWAY = Key.new("U")
CLOCK = SystemClock()
NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
LIMIT_S = 45.0
BODY = {"model": "tiny", "messages": []}
EVENT = b'data: {"choices": []}\n\n'


def claims(token: str) -> Claims:
    if token not in ("acme", "rival", "operator"):
        raise Unauthenticated("identity.token", "this token is not valid")
    end = int((datetime.now(UTC) + timedelta(minutes=5)).timestamp())
    role = Role.OPERATOR if token == "operator" else Role.TENANT_USER
    tenant = None if token == "operator" else TenantName(token)
    return Claims(iss="identity", sub=PrincipalId(f"prn-{token}"), name=token, roles=[role], tenant=tenant, iat=end - 300, exp=end)


def offering(name: str = "tiny", **changes: Any) -> OfferingRecord:
    limits = CallLimits(max_body_bytes=300_000, per_minute=changes.pop("per_minute", 100_000))
    told = CallOffering(
        name=OfferingName(name), pool=PoolName("p"), protocol=CallProtocol.OPENAI, models=["tiny"], limits=limits, tenants=["acme"]
    )
    standard = OfferingRecord(site=SiteName("lab"), offering=told, revision=3, available=True, told_at=NOW, version=1)
    return msgspec.structs.replace(standard, **changes)


Script = Callable[["PlayedSite", CallOpen], Coroutine[Any, Any, None]]


@dataclass
class PlayedSite:
    """A site that does what a script says with each call."""

    bus: MemoryBus
    script: Script
    opened: list[CallOpen] = field(default_factory=list)
    parts: dict[CallId, bytes] = field(default_factory=dict)
    aborted: list[CallAbort] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def heard(self, message: Message) -> None:
        match unpack_down(message.body):
            case CallOpen() as frame:
                self.opened.append(frame)
                self.parts[frame.call] = frame.data
                self.tasks.append(asyncio.get_running_loop().create_task(self.script(self, frame)))
            case CallPart() as part:
                self.parts[part.call] += part.data
            case CallAbort() as abort:
                self.aborted.append(abort)
        self.news.set()

    async def say(self, frame: CallOpen, *frames: UpFrame) -> None:
        for one in frames:
            await self.bus.publish(local_answer_subject(frame.gateway), pack(one))


@dataclass
class Rig:
    site: PlayedSite
    hub: MemoryBus
    server: TestServer
    seen: list[CallSeen]

    async def ask(
        self, *, token: str = "acme", name: str = "tiny", path: str = "v1/chat/completions", **more: Any
    ) -> tuple[int, Any, bytes]:
        """(status, headers, body)."""
        url = self.server.make_url(f"/v1/offerings/lab/{name}/{path}")
        more = more or {"json": BODY}
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as http, http.post(url, **more) as answer:
            return answer.status, answer.headers, await answer.read()

    async def told(self, count: int = 1) -> list[CallSeen]:
        async with asyncio.timeout(LIMIT_S):
            while len(self.seen) < count:  # noqa: ASYNC110  the spool has no event for a test
                await asyncio.sleep(0.02)
        return self.seen


def says(*make: Callable[[CallOpen], UpFrame]) -> Script:
    async def script(site: PlayedSite, frame: CallOpen) -> None:
        await site.say(frame, CallTaken(call=frame.call), *(one(frame) for one in make))

    return script


def head(status: int = 200, seq: int = 1, **headers: str) -> Callable[[CallOpen], UpFrame]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda frame: CallHead(call=frame.call, seq=seq, status=status, headers={"content-type": "application/json", **named})


def stream_head() -> Callable[[CallOpen], UpFrame]:
    return lambda frame: CallHead(call=frame.call, seq=1, status=200, headers={"content-type": "text/event-stream"})


def data(seq: int, value: bytes) -> Callable[[CallOpen], UpFrame]:
    return lambda frame: CallData(call=frame.call, seq=seq, data=value)


def done(seq: int, outcome: CallOutcome = CallOutcome.COMPLETED, size: int = 0, **more: Any) -> Callable[[CallOpen], UpFrame]:
    return lambda frame: CallDone(call=frame.call, seq=seq, outcome=outcome, response_bytes=size, **more)


@asynccontextmanager
async def rig(folder: Path, script: Script, records: Sequence[OfferingRecord] = (offering(),)) -> AsyncIterator[Rig]:
    broker = MemoryBroker()
    hub, services = broker.client("gateway"), broker.client("services")
    seen: list[CallSeen] = []

    async def authenticate(request: Authenticate, caller: rpc.Caller) -> Authenticated:
        return Authenticated(claims=claims(request.token), signed=f"signed-{request.token}")

    async def listed(request: OfferingsQuery, caller: rpc.Caller) -> OfferingsReply:
        behind = sorted((one for one in records if one.id > request.after), key=lambda one: one.id)  # One a page.
        return OfferingsReply(offerings=behind[:1], next=behind[0].id if len(behind) > 1 else "")

    async def taken(request: CallsSeen, caller: rpc.Caller) -> CallsTaken:
        seen.extend(request.calls)
        return CallsTaken(new=len(request.calls))

    def verified(text: str) -> Claims:
        return claims("operator")

    await rpc.serve(services, "identity", "0.1.0", {e.AUTHENTICATE: authenticate}, verifier=verified)
    await rpc.serve(services, "registry", "0.1.0", {e.CALL_OFFERINGS: listed}, verifier=verified)
    await rpc.serve(services, "metering", "0.1.0", {e.CALLS_SEEN: taken}, verifier=verified)
    site = PlayedSite(broker.client("agent", site_account("lab")), script)
    await site.bus.listen(LOCAL_CALL_SUBJECT, site.heard)
    settings = GatewaySettings(bus_url=["x"], key_file=folder / "key", data_dir=folder)
    calls = Calls(hub, Door(hub, CLOCK), CLOCK, GATEWAY, ServiceClaims(GATEWAY, "gateway", CLOCK).signed, folder / "calls")
    objects = ObjectStore(folder / "objects", limit_bytes=1 << 20, keep=timedelta(days=1))
    running = asyncio.create_task(calls.run())
    server = TestServer(application(hub, settings, objects, CLOCK, GATEWAY, calls))
    await server.start_server()
    try:
        await calls.offerings.refresh()
        yield Rig(site, hub, server, seen)
    finally:
        await server.close()
        running.cancel()
        await asyncio.gather(running, *site.tasks, return_exceptions=True)
        calls.close()


async def test_bytes_pass_unchanged_and_the_grant_is_the_gateways_own(tmp_path: Path) -> None:
    body = b'{"odd":  "spacing"\n}'
    async with rig(tmp_path, says(head(), data(2, body[:7]), data(3, body[7:]), done(4, size=len(body)))) as made:
        status, headers, got = await made.ask()
        assert (status, got) == (200, body) and headers["X-Intertie-Call"] == made.site.opened[0].call
        [frame] = made.site.opened
        grant = open_seal(frame.grant, GATEWAY.public, CallGrant)
        assert (grant.call, grant.tenant, grant.site, grant.offering, grant.revision) == (frame.call, "acme", "lab", "tiny", 3)
        assert "authorization" not in {name.lower() for name in frame.headers} and "acme" not in str(frame.headers)
        [seen] = await made.told()
        assert (seen.outcome, seen.response_bytes, seen.status, seen.taken) == (CallOutcome.COMPLETED, len(body), 200, True)


async def test_a_site_sets_no_cookie_and_runs_no_script_at_the_hubs_address(tmp_path: Path) -> None:
    page = b"<script>alert(1)</script>"
    hostile = head(set_cookie="intertie_session=stolen", location="https://evil.example", content_type="text/html", x_bad="a\r\nb: c")
    async with rig(tmp_path, says(hostile, data(2, page), done(3, size=len(page)))) as made:
        _, headers, got = await made.ask()
        assert got == page and not {"Set-Cookie", "Location", "x-bad", "b"} & set(headers)
        assert headers["X-Content-Type-Options"] == "nosniff" and "sandbox" in headers["Content-Security-Policy"]


WRONG: list[tuple[str, Script, int, str]] = [
    ("bytes before a head", says(data(1, b"x")), 502, "call.site_wrong"),
    (
        "an end before it was taken",
        says(done(1, CallOutcome.UPSTREAM_FAILED, code="call.upstream_unreachable")),
        502,
        "call.upstream_unreachable",
    ),
    ("completed without an answer", says(done(1)), 502, ""),
    ("stalled", says(done(1, CallOutcome.UPSTREAM_STALLED, code="call.upstream_stalled")), 504, "call.upstream_stalled"),
    ("busy", says(done(1, CallOutcome.REFUSED, code="call.busy", retry_after_s=7)), 429, "call.busy"),
    ("a word that nobody knows", says(done(1, CallOutcome.REFUSED, code="call.from_the_future")), 502, "call.from_the_future"),
]


@pytest.mark.parametrize(("what", "script", "status", "code"), WRONG, ids=[row[0] for row in WRONG])
async def test_what_breaks_before_an_answer_is_a_problem_that_openai_clients_read(
    tmp_path: Path, what: str, script: Script, status: int, code: str
) -> None:
    async with rig(tmp_path, script) as made:
        got, headers, body = await made.ask()
        said = json.loads(body)
        assert (got, said["code"], said["error"]["code"]) == (status, code, code)
        assert headers["Content-Type"].startswith("application/problem+json")
        assert ("Retry-After" in headers) is (status == 429)
        assert len(await made.told()) == 1


def test_every_error_of_a_call_says_what_to_do_next() -> None:
    assert set(STATUSES) == set(NEXT_STEPS)
    assert set(NEXT_STEPS) >= AGAIN


async def test_two_heads_or_bytes_that_do_not_add_up_are_no_answer(tmp_path: Path) -> None:
    for script in (says(stream_head(), data(2, EVENT), done(3, size=999)), says(stream_head(), data(2, EVENT), head(seq=3))):
        async with rig(tmp_path, script) as made:
            status, _, body = await made.ask()
            assert status == 200 and body.startswith(EVENT) and b'"error"' in body.removeprefix(EVENT)
            [seen] = await made.told()
            assert seen.outcome is CallOutcome.INTERRUPTED


async def test_a_stream_that_breaks_ends_after_a_whole_event_with_one_error(tmp_path: Path) -> None:
    broken = done(4, CallOutcome.UPSTREAM_FAILED, code="call.upstream_broke_off", text="it broke")
    async with rig(tmp_path, says(stream_head(), data(2, EVENT + b'data: {"cho'), data(3, b'ices": [1'), broken)) as made:
        _, _, body = await made.ask()
        events = [event for event in body.split(b"\n\n") if event]
        assert events[0] + b"\n\n" == EVENT and len(events) == 2
        assert json.loads(events[1].removeprefix(b"data: "))["error"] == {
            "message": "it broke",
            "type": "intertie",
            "code": "call.upstream_broke_off",
        }
        [seen] = await made.told()
        assert (seen.outcome, seen.response_bytes) == (CallOutcome.UPSTREAM_FAILED, len(EVENT))


async def test_a_plain_answer_that_breaks_is_a_connection_that_ends_early(tmp_path: Path) -> None:
    broken = done(3, CallOutcome.UPSTREAM_FAILED, code="call.upstream_broke_off")
    async with rig(tmp_path, says(head(content_length="100"), data(2, b"x" * 10), broken)) as made:
        with pytest.raises(aiohttp.ClientError):
            await made.ask()
        [seen] = await made.told()
        assert seen.outcome is CallOutcome.UPSTREAM_FAILED


@pytest.mark.parametrize("said", ["100", "3"])
async def test_an_answer_of_another_length_than_its_head_says_is_none(tmp_path: Path, said: str) -> None:
    """A caller would wait for the rest, or take the next answer of the connection for it."""
    async with rig(tmp_path, says(head(content_length=said), data(2, b"x" * 10), done(3, size=10))) as made:
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(made.ask(), 20)
        [seen] = await made.told()
        assert (seen.outcome, seen.code) == (CallOutcome.INTERRUPTED, "call.site_wrong")


async def test_a_body_that_does_not_come_holds_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "BODY_S", 0.3)

    async def never() -> AsyncIterator[bytes]:
        yield b'{"model":'
        await asyncio.sleep(60)

    async with rig(tmp_path, says()) as made:
        status, _, body = await asyncio.wait_for(made.ask(data=never()), 30)
        assert (status, json.loads(body)["code"]) == (408, "call.body_slow")
        assert made.site.opened == []


async def test_a_large_body_waits_for_room_and_arrives_whole(tmp_path: Path) -> None:
    body = bytes(range(256)) * 1_100

    async def script(site: PlayedSite, frame: CallOpen) -> None:
        await site.say(frame, CallTaken(call=frame.call))
        while len(site.parts[frame.call]) < len(body):
            await site.say(frame, CallRoom(call=frame.call, through=len(site.parts[frame.call]) + 600_000))
            site.news.clear()
            await site.news.wait()
        await site.say(frame, head()(frame), data(2, b"{}")(frame), done(3, size=2)(frame))

    async with rig(tmp_path, script) as made:
        status, _, got = await made.ask(data=body)
        assert (status, got) == (200, b"{}") and made.site.parts[made.site.opened[0].call] == body


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_offerings_limit_is_413_and_the_site_is_told(tmp_path: Path, chunked: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 50_000

    async with rig(tmp_path, says()) as made:
        status, _, body = await made.ask(data=chunks() if chunked else b"x" * 500_000)
        assert status == 413 and json.loads(body)["code"] == "call.too_large"
        assert bool(made.site.opened) is chunked, "a length that is said is refused before anything is called"
        if chunked:
            assert [abort.code for abort in made.site.aborted] == ["call.too_large"]


async def test_a_caller_who_hangs_up_before_the_first_byte_is_noticed(tmp_path: Path) -> None:
    async with rig(tmp_path, says()) as made:
        task = asyncio.create_task(made.ask())
        async with asyncio.timeout(LIMIT_S):
            while not made.site.opened:
                await made.site.news.wait()
                made.site.news.clear()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while not made.site.aborted:
                made.site.news.clear()
                await made.site.news.wait()
        [seen] = await made.told()
        assert (seen.outcome, made.site.aborted[0].outcome) == (CallOutcome.CLIENT_GONE, CallOutcome.CLIENT_GONE)


REFUSED = [
    ("a tenant who is not admitted", {"token": "rival"}, 404, "call.unknown_offering"),
    ("nobody", {"token": "nobody"}, 401, "identity.token"),
    ("an operator, who is no tenant", {"token": "operator"}, 403, "rights.denied"),
    ("no such offering", {"name": "other"}, 404, "call.unknown_offering"),
    ("a path of another protocol", {"path": "call"}, 404, "call.path"),
    ("a paused one", {"name": "paused"}, 503, "call.paused"),
    ("one whose server is down", {"name": "down"}, 503, "call.unavailable"),
    ("one that was withdrawn", {"name": "gone"}, 404, "call.unknown_offering"),
]


@pytest.mark.parametrize(("why", "asked", "status", "code"), REFUSED, ids=[row[0] for row in REFUSED])
async def test_what_may_not_be_called_goes_nowhere(tmp_path: Path, why: str, asked: dict[str, str], status: int, code: str) -> None:
    records = [
        offering(),
        offering("paused", available=False, paused=True, reason="mine today"),
        offering("down", available=False, reason="its server does not answer"),
        offering("gone", withdrawn=True, available=False),
    ]
    async with rig(tmp_path, says(), records) as made:
        got, _, body = await made.ask(**asked)
        assert (got, json.loads(body)["code"]) == (status, code)
        assert made.site.opened == [] and made.seen == []


async def test_a_tenant_who_calls_too_often_is_told_when_to_come_again(tmp_path: Path) -> None:
    async with rig(tmp_path, says(head(), data(2, b"{}"), done(3, size=2)), [offering(per_minute=3)]) as made:
        answers = [await made.ask() for _ in range(4)]
        assert [status for status, _, _ in answers] == [200, 200, 200, 429]
        assert int(answers[3][1]["Retry-After"]) >= 1 and len(made.site.opened) == 3


async def test_an_event_of_the_registry_is_in_force_at_once_and_an_older_one_is_not(tmp_path: Path) -> None:
    async with rig(tmp_path, says(head(), data(2, b"{}"), done(3, size=2))) as made:

        async def tell(record: OfferingRecord) -> None:
            event = CallOfferingChanged(version=record.version, record=record)
            await made.hub.publish(event.subject, encode(event))

        await tell(offering(available=False, paused=True, reason="mine", version=2))
        async with asyncio.timeout(LIMIT_S):
            while (await made.ask())[0] != 503:  # noqa: ASYNC110  asked as a caller would
                await asyncio.sleep(0.02)
        await tell(offering(version=1))
        assert (await made.ask())[0] == 503
