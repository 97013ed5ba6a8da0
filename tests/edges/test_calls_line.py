"""A gateway's line and a site's desk over a bus that repeats, swaps, loses and stalls, with a real server behind the desk: what comes out of a call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.fakes.model_server import ModelServer, reply_of
from tests.fakes.sites import World, a_site

from intertie.agent.core.rules import Rules
from intertie.agent.endpoint.desk import Desk
from intertie.agent.endpoint.rules import EndpointRule
from intertie.bus.memory import MemoryBroker, MemoryBus, site_account
from intertie.bus.port import Message
from intertie.clock import SystemClock
from intertie.contracts.base import decode, encode
from intertie.contracts.call_offerings import CallOutcome
from intertie.contracts.calls import (
    LOCAL_CALL_SUBJECT,
    WINDOW_BYTES,
    CallData,
    CallDone,
    CallGrant,
    CallHead,
    CallOpen,
    CallRecord,
    call_subject,
    local_answer_subject,
    pack,
)
from intertie.contracts.link import CallClosed, Lane, OfferingsTold, Synced
from intertie.embedded.process import free_port
from intertie.gateway.call_line import Broken, Call, Line
from intertie.ids import CallId, OfferingName, PrincipalId, SiteName, TenantName, mint
from intertie.link.clocks import ClockEstimate
from intertie.link.site import Exchange
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal, seal

GATEWAY = Key.new("U")
CLOCK = SystemClock()
LAB = SiteName("lab")
LIMIT_S = 45.0


class Unruly(MemoryBus):
    """Says each frame twice, and every second one before the one ahead of it: as two connections side by side may."""

    held: tuple[str, bytes] | None = None

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        if not subject.startswith("up.call."):
            await super().publish(subject, body, headers)
            return
        held, self.held = self.held, (subject, body) if self.held is None else None
        if held is None:
            asyncio.get_running_loop().call_later(0.02, self._let_go, (subject, body))
            return
        for one in ((subject, body), held, held):
            await super().publish(*one)

    def _let_go(self, frame: tuple[str, bytes]) -> None:
        if self.held == frame:
            self.held = None
            self._send_twice(frame)

    def _send_twice(self, frame: tuple[str, bytes]) -> None:
        for _ in range(2):
            self._send(Message(*frame))


@dataclass
class Rig:
    """Both ends."""

    world: World
    desk: Desk
    line: Line
    hub: MemoryBus
    site: MemoryBus
    broker: MemoryBroker
    server: ModelServer
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def grant(self, call: CallId, **changes: Any) -> CallGrant:
        given = CallGrant(
            call=call,
            tenant=TenantName("acme"),
            principal=PrincipalId("prn-1"),
            site=LAB,
            offering=OfferingName("tiny"),
            revision=1,
            at=CLOCK.now(),
        )
        return msgspec.structs.replace(given, **changes)

    def frame(self, question: str, *, stream: bool = True, key: Key = GATEWAY, body: bytes | None = None, **grant: Any) -> CallOpen:
        call = CallId(mint("call"))
        asked = {"model": "tiny", "messages": [{"role": "user", "content": question}], "stream": stream}
        return CallOpen(
            call=call,
            gateway=self.line.token,
            grant=seal(key, encode(self.grant(call, **grant)), "gateway"),
            path="/v1/chat/completions",
            headers={"content-type": "application/json"},
            data=json.dumps(asked).encode() if body is None else body,
        )

    async def answer(self, call: Call, *, pass_on: bool = True) -> tuple[bytes, CallDone | Broken]:
        """All bytes, and how it ended."""
        data = b""
        async with asyncio.timeout(LIMIT_S):
            while True:
                match await call.step():
                    case CallData() as part:
                        data += part.data
                        if pass_on:
                            await call.passed_on(len(part.data))
                    case CallHead():
                        pass
                    case CallDone() | Broken() as end:
                        await call.close(None)
                        return data, end

    async def ask(self, question: str, **more: Any) -> tuple[bytes, CallDone | Broken]:
        return await self.answer(self.line.open(LAB, self.frame(question, **more)))

    async def offerings_told(self) -> list[OfferingsTold]:
        return [one for one in await self.world.entries(Lane.REGISTRY) if isinstance(one, OfferingsTold)]

    async def records(self, count: int) -> list[CallRecord]:
        """So many, each under the site's key."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                entries = [one for one in await self.world.entries(Lane.METERING) if isinstance(one, CallClosed)]
                if len(entries) >= count:
                    return [open_seal(entry.sealed, self.world.site.key.public, CallRecord) for entry in entries]
                await asyncio.sleep(0.02)


async def until(true: Callable[[], object]) -> None:
    """Poll until it is true, or an awaitable that says so; fail at the deadline."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = true()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.02)


def rules(port: int, path: str = "", **more: Any) -> Rules:
    """With a `path` it is no OpenAI server, but one with words of its own there."""
    limits = {"stall_s": 20, "concurrency": 4, **more}
    given = {"name": "tiny", "upstream": f"http://127.0.0.1:{port}{path}", "tenants": ["acme"], "models": ["tiny"], "limits": limits}
    if path:
        given |= {"protocol": "http-json", "models": []}
    return Rules(endpoint=[msgspec.convert(given, EndpointRule)])


@asynccontextmanager
async def rig(folder: Path, *, bus: type[MemoryBus] = MemoryBus, **limits: Any) -> AsyncIterator[Rig]:
    server, port = ModelServer(), free_port()
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    broker = MemoryBroker()
    hub = broker.client("gateway")
    account = site_account(LAB)
    broker.client("other", account)  # makes the account known
    site = bus(broker, "agent", account)
    async with a_site(folder, rules=rules(port, **limits)) as world:
        joined = world.site.joined
        world.site.joined = msgspec.structs.replace(joined, service_keys={**joined.service_keys, "gateway": GATEWAY.public})
        desk, line = Desk(world.site), Line(hub, CLOCK)
        await desk.recover()
        await desk.listen(site)
        await line.listen()
        made = Rig(world, desk, line, hub, site, broker, server)
        made.tasks = [asyncio.create_task(desk.run()), asyncio.create_task(line.run())]
        try:
            await until(lambda: desk.status().endpoints[0].available)
            yield made
        finally:
            for task in made.tasks:
                task.cancel()
            await asyncio.gather(*made.tasks, return_exceptions=True)
            await desk.close()
            await runner.cleanup()


def words(data: bytes) -> str:
    """What a stream's events say."""
    events = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ") and "[DONE]" not in line]
    return "".join(choice["delta"].get("content", "") for event in events for choice in json.loads(event)["choices"])


@pytest.mark.parametrize("bus", [MemoryBus, Unruly])
async def test_an_answer_is_whole_whatever_the_bus_repeats_and_swaps(tmp_path: Path, bus: type[MemoryBus]) -> None:
    async with rig(tmp_path, bus=bus) as made:
        question = "words=60 pause_ms=5"
        data, end = await made.ask(question)
        assert isinstance(end, CallDone) and end.outcome is CallOutcome.COMPLETED and end.response_bytes == len(data)
        assert words(data) == "".join(reply_of(question, 60)) and data.endswith(b"data: [DONE]\n\n")
        [record] = await made.records(1)
        assert (record.outcome, record.response_bytes, record.events) == (CallOutcome.COMPLETED, len(data), 61)
        assert (record.input_tokens, record.output_tokens) == (None, None), "a stream that was not asked tells no usage"


async def test_a_part_that_is_lost_is_one_error_and_never_a_shorter_answer(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        lost = iter([False, False, False, True])
        made.site.faults.drop = lambda direction, subject: direction == "out" and subject.startswith("up.call") and next(lost, False)
        _, end = await made.ask("words=40 pause_ms=5")
        assert isinstance(end, Broken) and (end.outcome, end.code) == (CallOutcome.INTERRUPTED, "call.parts_lost")


async def test_nobody_at_the_site_is_said_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        began = CLOCK.monotonic_s()
        frame = made.frame("hello")
        _, end = await made.answer(made.line.open(SiteName("elsewhere"), frame))
        assert isinstance(end, Broken) and end.code == "call.no_site" and end.outcome is CallOutcome.REFUSED
        assert CLOCK.monotonic_s() - began < 30 and made.server.calls == 0


async def test_another_site_cannot_speak_of_a_call_that_is_not_its_own(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        thief = made.broker.client("thief", site_account("thief"))
        question = "words=30 pause_ms=10"
        frame = made.frame(question)
        call = made.line.open(LAB, frame)
        for seq in range(1, 6):
            forged = CallDone(call=frame.call, seq=seq, outcome=CallOutcome.COMPLETED)
            await thief.publish(local_answer_subject(made.line.token), pack(forged))
        data, end = await made.answer(call)
        assert isinstance(end, CallDone) and words(data) == "".join(reply_of(question, 30))


async def test_a_site_that_gives_no_heed_to_its_credit_ends_its_call_and_fills_no_memory(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        hostile = made.broker.client("hostile", site_account("hostile"))
        await hostile.listen(LOCAL_CALL_SUBJECT, lambda message: None)
        frame = made.frame("hello")
        call = made.line.open(SiteName("hostile"), frame)
        to = local_answer_subject(made.line.token)
        await hostile.publish(to, pack(CallHead(call=frame.call, seq=1, status=200)))
        for seq in range(2, 12):
            await hostile.publish(to, pack(CallData(call=frame.call, seq=seq, data=b"x" * 100_000)))
        data, end = await made.answer(call, pass_on=False)
        assert isinstance(end, Broken) and end.code == "call.site_wrong" and len(data) <= WINDOW_BYTES


async def test_br_093_a_call_that_comes_twice_reaches_the_server_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        frame = made.frame("words=3")
        call = made.line.open(LAB, frame)
        await made.hub.publish(call_subject(LAB), pack(frame))
        _, end = await made.answer(call)
        await made.hub.publish(call_subject(LAB), pack(frame))
        await made.ask("words=1")
        assert isinstance(end, CallDone) and made.server.calls == 2 and len(await made.records(2)) == 2


async def test_a_caller_who_reads_slowly_slows_the_server_and_fills_no_memory(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        question = "words=8000"
        call = made.line.open(LAB, made.frame(question))
        await until(lambda: any(course.sent_bytes >= WINDOW_BYTES for course in made.desk._courses.values()))
        course = next(iter(made.desk._courses.values()))
        assert course.sent_bytes == WINDOW_BYTES, "no more than the credit, however long nobody reads"
        data, end = await made.answer(call)
        assert isinstance(end, CallDone) and end.outcome is CallOutcome.COMPLETED
        assert len(data) > 2 * WINDOW_BYTES and words(data) == "".join(reply_of(question, 8_000))


REFUSED = [
    ("another key", {"key": Key.new("U")}, "seal.invalid"),
    ("for another site", {"site": SiteName("rival")}, "call.grant"),
    ("too old", {"at": CLOCK.now() - timedelta(minutes=5)}, "call.too_late"),
    ("from the future", {"at": CLOCK.now() + timedelta(minutes=5)}, "call.too_late"),
    ("no such offering", {"offering": OfferingName("other")}, "call.unknown_offering"),
    ("a tenant who is not admitted", {"tenant": TenantName("rival")}, "call.tenant"),
    ("no JSON", {"body": b"\xff"}, "call.not_json"),
    ("a model that is not served", {"body": b'{"model": "huge"}'}, "call.model"),
]


async def test_what_a_server_with_words_of_its_own_is_asked_is_any_json(tmp_path: Path) -> None:
    """`model` and `stream` mean there what that server likes."""
    async with rig(tmp_path, path="/predict") as made:
        for body in (b'{"model": {"size": 3}, "stream": "yes"}', b"[1, 2]"):
            opened = msgspec.structs.replace(made.frame("", body=body), path="/call")
            answer, end = await made.answer(made.line.open(LAB, opened))
            assert isinstance(end, CallDone) and (end.outcome, end.code) == (CallOutcome.COMPLETED, "")
            assert json.loads(answer) == {"echo": json.loads(body)}
        _, end = await made.answer(made.line.open(LAB, msgspec.structs.replace(made.frame("", body=b"{"), path="/call")))
        assert isinstance(end, CallDone) and (end.outcome, end.code) == (CallOutcome.REFUSED, "call.not_json")
        assert made.server.calls == 2


@pytest.mark.parametrize(("why", "changes", "code"), REFUSED, ids=[row[0] for row in REFUSED])
async def test_what_the_site_does_not_take_reaches_no_server(tmp_path: Path, why: str, changes: dict[str, Any], code: str) -> None:
    async with rig(tmp_path) as made:
        _, end = await made.ask("hello", **changes)
        assert isinstance(end, CallDone) and (end.outcome, end.code) == (CallOutcome.REFUSED, code)
        assert made.server.calls == 0


async def test_the_red_button_and_the_switch_of_one_refuse_new_calls_and_end_none(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        under_way = made.line.open(LAB, made.frame("words=40 pause_ms=20"))
        await until(lambda: made.server.calls)
        await made.world.site.pause.press(until=None, by="owner", reason="mine")
        _, end = await made.ask("hello")
        assert isinstance(end, CallDone) and end.code == "call.paused"
        await made.world.site.pause.resume(by="owner")
        await made.desk.pause("tiny", True)
        _, end = await made.ask("hello")
        assert isinstance(end, CallDone) and end.code == "call.paused"
        await made.desk.pause("tiny", False)
        _, end = await made.ask("words=1")
        assert isinstance(end, CallDone) and end.outcome is CallOutcome.COMPLETED
        _, first = await made.answer(under_way)
        assert isinstance(first, CallDone) and first.outcome is CallOutcome.COMPLETED


async def test_a_lost_bus_ends_every_call_on_both_sides_as_interrupted(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        call = made.line.open(LAB, made.frame("words=400 pause_ms=20"))
        await until(lambda: made.server.calls)
        made.site.cut()
        made.hub.cut()
        _, end = await made.answer(call)
        assert isinstance(end, Broken) and (end.outcome, end.code) == (CallOutcome.INTERRUPTED, "call.bus_lost")
        [record] = await made.records(1)
        assert (record.outcome, record.code) == (CallOutcome.INTERRUPTED, "call.bus_lost")
        await until(lambda: made.server.aborted)


async def test_what_was_under_way_when_the_agent_died_is_recorded_at_its_next_start(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        call = made.line.open(LAB, made.frame("words=400 pause_ms=20"))
        await until(lambda: made.server.calls)
        await until(lambda: made.world.journal.read(_open_rows))
        again = Desk(made.world.site)
        await again.recover()
        [record] = await made.records(1)
        assert (record.call, record.outcome, record.code) == (call.call, CallOutcome.INTERRUPTED, "call.agent_restarted")
        assert not await made.world.journal.read(_open_rows), "told once"


def _open_rows(cursor: Any) -> list[str]:
    return [row[0] for row in cursor.execute("SELECT key FROM setting WHERE key LIKE 'call/%'")]


def exchange(version: int) -> Exchange:
    synced = Synced(v=version, nonce=1, ack_through=0, safe_through=0, epoch=1, clock=CLOCK.now())
    return Exchange(1, 0.0, 0.0, synced, ClockEstimate(0.0, 0.0, 0.0, 0.0), 0)


async def test_offerings_are_told_to_a_registry_that_knows_them_and_again_when_they_change(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:

        async def says(paused: bool) -> bool:
            return bool(found := await made.offerings_told()) and found[-1].offerings[0].paused is paused

        made.desk.answered(exchange(2))
        await made.desk._tell()
        assert await made.offerings_told() == []
        made.desk.answered(exchange(3))
        for paused in (False, True):
            await made.desk.pause("tiny", paused)
            await until(partial(says, paused))
        assert [one.offerings[0].available for one in await made.offerings_told()] == [True, False]
        stored = await made.world.journal.read(
            lambda cursor: cursor.execute("SELECT value FROM setting WHERE key = 'endpoint_paused'").fetchone()[0]
        )
        assert decode(stored, list[str]) == ["tiny"]


async def test_an_owner_who_offers_nothing_any_more_says_so_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        made.desk.answered(exchange(3))
        await until(made.offerings_told)
        made.world.site.rules = Rules()
        again = Desk(made.world.site)
        await again.recover()
        running = asyncio.create_task(again.run())
        try:
            again.answered(exchange(3))

            async def nothing() -> bool:
                return (await made.offerings_told())[-1].offerings == []

            await until(nothing)
            again._look.set()
            await again._tell()
            assert [len(one.offerings) for one in await made.offerings_told()] == [1, 0]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
