"""Service access, as a caller lives it: the stock `openai` client through gateway, bus and agent to a model server that listens on 127.0.0.1 alone.

Answers are computed from the question, so that a byte that was lost or came twice shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from tests.fakes.model_server import reply_of
from tests.journeys.endpoint_world import OFFERING, SITE, EndpointWorld, endpoint_world

from intertie.agent.config import Folder
from intertie.cli.local_door import call as door
from intertie.contracts.call_offerings import CallOutcome, CallPays
from intertie.contracts.calls import Attainment, CallBook, LocalEndpoints
from intertie.contracts.identity import CreateTenant, CreateToken, Role, TenantRecord, TokenCreated
from intertie.ids import TenantName

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALLS, AT_ONCE = 1_000, 50


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[EndpointWorld]:
    async with endpoint_world() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(world: EndpointWorld) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=world.base_url(), api_key=world.token, max_retries=0, timeout=60) as made:
        yield made


def question(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def settled(world: EndpointWorld, fits: Callable[[CallBook], bool], count: int = 1) -> list[CallBook]:
    """The books of so many calls that fit, once both words on each are here."""

    def look() -> list[CallBook] | None:
        found = [book for book in world.calls() if fits(book)]
        return found if len(found) >= count and all(book.state != "waiting" for book in found) else None

    return await world.stack.until(look, what=f"{count} calls are settled")


async def plain(client: openai.AsyncOpenAI, text: str) -> str:
    made = await client.chat.completions.create(model="tiny", messages=question(text))
    return made.choices[0].message.content or ""


async def streamed(client: openai.AsyncOpenAI, text: str) -> str:
    options: Any = {"include_usage": True}
    said: list[str] = []
    async for chunk in await client.chat.completions.create(model="tiny", messages=question(text), stream=True, stream_options=options):
        said += [choice.delta.content or "" for choice in chunk.choices]
    return "".join(said)


async def counts(world: EndpointWorld) -> dict[str, int]:
    def ask() -> dict[str, int]:
        with urllib.request.urlopen(f"{world.upstream}/counts", timeout=10) as answer:
            found: dict[str, int] = json.loads(answer.read())
        return found

    return await world.stack.do(ask)


async def test_a_thousand_calls_of_a_stock_client_lose_and_double_no_byte_and_each_is_on_the_statement(
    world: EndpointWorld, client: openai.AsyncOpenAI
) -> None:
    """Show 5. Added latency is printed by `ops/bench calls`; here it is counted that all arrive."""
    before = await counts(world)
    gate = asyncio.Semaphore(AT_ONCE)
    took: list[float] = []

    async def one(number: int) -> bool:
        text = f"question {number} words={number % 40 + 1}"
        async with gate:
            began = time.perf_counter()
            said = await (streamed if number % 2 else plain)(client, text)
            took.append(time.perf_counter() - began)
        return said == "".join(reply_of(text, number % 40 + 1))

    right = await asyncio.gather(*(one(number) for number in range(CALLS)))
    assert all(right), f"{right.count(False)} of {CALLS} answers differ"
    assert (await counts(world))["calls"] - before["calls"] == CALLS
    books = await settled(world, lambda book: book.offering == OFFERING, CALLS)
    print(
        f"\n{CALLS} calls, {AT_ONCE} at once: p50 {statistics.median(took) * 1e3:.1f} ms, p99 {sorted(took)[int(CALLS * 0.99)] * 1e3:.1f} ms"
    )
    assert len(books) == CALLS and all(book.state == "settled" and not book.differences for book in books)
    words = [number % 40 + 1 for number in range(CALLS)]
    assert sum(book.output_tokens or 0 for book in books) == sum(words)
    assert sum(book.input_tokens or 0 for book in books) == 3 * CALLS
    expected = sum((Decimal("0.001") + (Decimal(2) * 3 + Decimal(6) * count) / 1_000_000).quantize(Decimal("0.000001")) for count in words)
    assert sum(book.amount or 0 for book in books) == expected
    statement = await world.stack.do(world.stack.statement)
    [line] = [line for line in statement.calls if line.offering == OFFERING]
    assert (line.calls, line.amount, line.waiting) == (CALLS, expected, 0)
    assert statement.total >= expected
    check = await world.stack.do(world.stack.check)
    assert check.sum == 0 and check.calls_differing == 0
    month = await world.stack.do(lambda: world.stack.user.get(f"/v1/offerings/{SITE}/{OFFERING}/attainment", Attainment))
    assert month.calls == CALLS and month.kept + month.missed == CALLS and month.availability_percent == 100


async def test_the_bus_dies_in_the_middle_of_a_stream_and_the_caller_gets_one_clear_error(
    world: EndpointWorld, client: openai.AsyncOpenAI
) -> None:
    text = "cut words=400 pause_ms=20"
    said: list[str] = []
    with pytest.raises(openai.APIError, match="bus was lost"):
        async for chunk in await client.chat.completions.create(model="tiny", messages=question(text), stream=True):
            said += [choice.delta.content or "" for choice in chunk.choices]
            if len(said) == 5:
                world.stack.kill("nats")
    whole = "".join(reply_of(text, 400))
    assert whole.startswith("".join(said)) and len(said) >= 5
    [book] = await settled(world, lambda book: book.outcome == "interrupted")
    assert book.code == "call.bus_lost" and book.state in ("suspense", "settled")

    async def again() -> bool:
        with contextlib.suppress(openai.APIError):
            return await plain(client, "back words=2") == "".join(reply_of("back words=2", 2))
        return False

    deadline = time.monotonic() + 60
    while not await again():
        assert time.monotonic() < deadline, world.stack.logs()
        await asyncio.sleep(0.2)


async def test_a_caller_who_hangs_up_stops_the_upstream_and_leaves_one_record(world: EndpointWorld, client: openai.AsyncOpenAI) -> None:
    """BR-092 (a, b): whatever was produced is the caller's; tokens that nobody counted wait for a person and are never nought."""
    before = await counts(world)
    stream = await client.chat.completions.create(model="tiny", messages=question("leave words=500 pause_ms=20"), stream=True)
    async for _ in stream:
        break
    await stream.close()
    [book] = await settled(world, lambda book: book.outcome == "client_gone")
    assert (book.state, book.reason, book.output_tokens, book.amount) == ("suspense", "tokens_unknown", None, None)
    assert book.response_bytes > 0
    deadline = time.monotonic() + 30
    while (await counts(world))["aborted"] == before["aborted"]:
        assert time.monotonic() < deadline, "the upstream was not told"
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("text", "outcome", "code"),
    [
        ("stall words=9", "upstream_stalled", "call.upstream_stalled"),
        ("break words=9", "upstream_failed", "call.upstream_broke_off"),
    ],
)
async def test_an_upstream_that_stalls_or_breaks_off_is_one_error_and_one_named_state(
    world: EndpointWorld, client: openai.AsyncOpenAI, text: str, outcome: str, code: str
) -> None:
    with pytest.raises(openai.APIError) as raised:
        async for _ in await client.chat.completions.create(model="tiny", messages=question(text), stream=True):
            pass
    assert raised.value.code == code
    [book] = await settled(world, lambda book: book.outcome == outcome)
    assert (book.code, book.state, book.amount, book.payer) == (code, "settled", Decimal(0), CallPays.FREE)


async def test_a_plain_answer_that_never_comes_is_a_gateway_timeout(world: EndpointWorld, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        await plain(client, "stall please")
    assert raised.value.status_code == 504 and raised.value.code == "call.upstream_stalled"


async def test_what_the_upstream_refuses_is_handed_on_and_costs_nothing(world: EndpointWorld, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="as you asked"):
        await plain(client, "status=422")
    [book] = await settled(world, lambda book: book.outcome == "rejected")
    assert (book.status, book.payer, book.amount) == (422, CallPays.FREE, Decimal(0))


async def test_a_body_of_many_parts_arrives_whole(world: EndpointWorld, client: openai.AsyncOpenAI) -> None:
    text = "words=3 " + "x" * 3_000_000
    assert await plain(client, text) == "".join(reply_of(text, 3))
    with pytest.raises(openai.APIStatusError) as raised:
        await plain(client, "x" * 5_000_000)
    assert raised.value.status_code == 413


async def test_a_model_that_is_not_served_is_refused_before_the_upstream(world: EndpointWorld, client: openai.AsyncOpenAI) -> None:
    before = await counts(world)
    with pytest.raises(openai.BadRequestError, match="serves tiny"):
        await client.chat.completions.create(model="huge", messages=question("hello"))
    assert (await counts(world))["calls"] == before["calls"]


async def test_embeddings_and_plain_json_are_calls_too(world: EndpointWorld, client: openai.AsyncOpenAI) -> None:
    made = await client.embeddings.create(model="tiny", input=["one two", "three"], encoding_format="float")
    assert [item.embedding for item in made.data] == [[7.0, 0.5], [5.0, 0.5]]
    url = f"{world.stack.layout.public_url}/v1/offerings/{SITE}/predict/call"
    headers = {"Authorization": f"Bearer {world.token}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json={"x": [1, 2]}) as answer:
        assert answer.status == 200 and await answer.json() == {"echo": {"x": [1, 2]}}
    [embedded] = await settled(world, lambda book: book.offering == OFFERING and book.output_tokens == 0)
    assert embedded.input_tokens == 3 and embedded.amount == Decimal("0.001006")
    [called] = await settled(world, lambda book: book.offering == "predict")
    assert (called.state, called.amount) == ("settled", Decimal("0.01"))


async def test_who_is_not_admitted_finds_nothing(world: EndpointWorld) -> None:
    def other() -> str:
        world.stack.admin.post("/v1/tenants", TenantRecord, CreateTenant(tenant=TenantName("rival")))
        asked = CreateToken(name="rival", roles=[Role.TENANT_USER], tenant=TenantName("rival"))
        return world.stack.admin.post("/v1/tokens", TokenCreated, asked).token

    token = await world.stack.do(other)
    async with openai.AsyncOpenAI(base_url=world.base_url(), api_key=token, max_retries=0) as stranger:
        with pytest.raises(openai.NotFoundError):
            await plain(stranger, "hello")
    async with openai.AsyncOpenAI(base_url=world.base_url("narrow"), api_key=token, max_retries=0) as guest:
        assert await plain(guest, "hello words=1") == reply_of("hello words=1", 1)[0]
    async with openai.AsyncOpenAI(base_url=world.base_url(), api_key="wrong", max_retries=0) as nobody:
        with pytest.raises(openai.AuthenticationError):
            await plain(nobody, "hello")


async def test_more_calls_at_once_than_the_owner_takes_are_told_to_come_again(world: EndpointWorld) -> None:
    async with openai.AsyncOpenAI(base_url=world.base_url("narrow"), api_key=world.token, max_retries=0) as narrow:
        stream = await narrow.chat.completions.create(model="tiny", messages=question("words=500 pause_ms=20"), stream=True)
        async for _ in stream:
            break
        with pytest.raises(openai.RateLimitError) as raised:
            await plain(narrow, "me too")
        assert raised.value.code == "call.busy" and int(raised.value.response.headers["retry-after"]) >= 1
        await stream.close()


def switch(world: EndpointWorld, name: str, to: str) -> LocalEndpoints:
    socket = str(Folder(world.stack.sites[SITE].folder).socket)
    return door(socket, "POST", f"/v1/endpoints/{name}/{to}", LocalEndpoints)


async def test_the_owner_pauses_one_offering_and_lets_it_go_on(world: EndpointWorld, client: openai.AsyncOpenAI) -> None:
    told = await world.stack.do(lambda: switch(world, OFFERING, "pause"))
    assert [one.paused for one in told.endpoints if one.name == OFFERING] == [True]
    with pytest.raises(openai.InternalServerError) as raised:
        await plain(client, "hello")
    assert raised.value.status_code == 503 and raised.value.code == "call.paused"
    await world.stack.until(lambda: (one := world.offering()) is not None and one.paused, what="the hub is told")
    await world.stack.do(lambda: switch(world, OFFERING, "resume"))
    await world.stack.until(lambda: (one := world.offering()) is not None and one.available, what="it is available")

    async def again() -> str:
        with contextlib.suppress(openai.APIError):
            return await plain(client, "again words=1")
        return ""

    deadline = time.monotonic() + 30
    while not await again():
        assert time.monotonic() < deadline


async def test_an_upstream_that_is_down_is_said_before_anything_is_called(world: EndpointWorld) -> None:
    await world.stack.until(lambda: (one := world.offering("gone")) is not None and "does not answer" in one.reason, what="it is told")
    async with openai.AsyncOpenAI(base_url=world.base_url("gone"), api_key=world.token, max_retries=0) as gone:
        with pytest.raises(openai.InternalServerError, match="does not answer") as raised:
            await plain(gone, "hello")
    assert raised.value.status_code == 503 and raised.value.code == "call.unavailable"


async def test_metering_may_be_away_while_calls_are_made(world: EndpointWorld, client: openai.AsyncOpenAI) -> None:
    known = {book.call for book in world.calls()}
    world.stack.kill("metering")
    for number in range(5):
        text = f"unmetered {number} words=2"
        assert await plain(client, text) == "".join(reply_of(text, 2))
    books = await settled(world, lambda book: book.call not in known, 5)
    assert len(books) == 5 and all(book.state == "settled" and not book.differences for book in books)


async def test_a_killed_gateway_forgets_no_call_that_it_opened(world: EndpointWorld, client: openai.AsyncOpenAI) -> None:
    known = {book.call for book in world.calls()}
    before = await counts(world)
    with pytest.raises(Exception) as raised:  # noqa: B017  # whatever a client calls a connection that ends
        stream = await client.chat.completions.create(model="tiny", messages=question("gate words=900 pause_ms=30"), stream=True)
        killed = 0
        async for _ in stream:
            killed = killed or world.stack.kill("gateway")
    assert not isinstance(raised.value, AssertionError)
    [book] = await settled(world, lambda book: book.call not in known)
    assert (book.outcome, book.code) == ("interrupted", "call.gateway_restarted")
    deadline = time.monotonic() + 60
    while (await counts(world))["aborted"] == before["aborted"]:
        assert time.monotonic() < deadline, "the upstream works on for nobody"
        await asyncio.sleep(0.2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("offerings",), ("lab/tiny", "openai", "95 % within 5000 ms")),
        (("offering", "show", "lab/tiny"), ("/v1/offerings/lab/tiny/v1", "answered")),
        (("calls", "--offering", "lab/tiny", "--state", "settled"), ("call-", "completed", "settled")),
        (("statement",), ("lab/tiny", "tokens in")),
        (("statement", "--csv"), ("lab/tiny",)),
        (("calls", "--offering", "lab/tiny", "--json"), ('"formula":"1 call',)),
    ],
)
async def test_the_command_line_shows_offerings_and_unfolds_each_call(
    world: EndpointWorld, client: openai.AsyncOpenAI, words: tuple[str, ...], said: tuple[str, ...]
) -> None:
    known = {book.call for book in world.calls()}
    await plain(client, "shown words=2")
    await settled(world, lambda book: book.call not in known)
    env = {**os.environ, "INTERTIE_URL": world.stack.layout.public_url, "INTERTIE_TOKEN": world.token, "INTERTIE_LANG": "en"}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "intertie.cli", *words], env=env, capture_output=True, text=True, check=False, timeout=60
        )

    done = await world.stack.do(run)
    assert done.returncode == 0, done.stderr
    assert all(part in done.stdout for part in said), done.stdout[:3_000]
    if words == ("calls", "--offering", "lab/tiny", "--json"):
        first = json.loads(done.stdout)["calls"][0]["call"]
        shown = await world.stack.do(lambda: words_of(["calls", first], env))
        assert first in shown and "ms (first byte" in shown


def words_of(words: list[str], env: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-m", "intertie.cli", *words], env=env, capture_output=True, text=True, check=True, timeout=60
    ).stdout


async def test_a_killed_agent_ends_the_call_once_and_both_words_say_interrupted(world: EndpointWorld, client: openai.AsyncOpenAI) -> None:
    known = {book.call for book in world.calls()}
    with pytest.raises(openai.APIError) as raised:
        async for _ in await client.chat.completions.create(model="tiny", messages=question("kill words=600 pause_ms=30"), stream=True):
            child = world.stack.sites[SITE].child
            assert child is not None
            if child.poll() is None:
                await world.stack.do(child.kill)
    assert raised.value.code == "call.site_silent"
    started = time.monotonic()
    with pytest.raises(openai.InternalServerError) as refused:
        await plain(client, "nobody there")
    assert refused.value.code == "call.no_site" and time.monotonic() - started < 30
    await world.stack.start_agent(SITE)
    books = await settled(world, lambda book: book.call not in known, 2)
    by_code = {book.code: book for book in books}
    assert by_code["call.site_silent"].outcome == "interrupted"
    assert (by_code["call.no_site"].outcome, by_code["call.no_site"].amount) == (CallOutcome.REFUSED, Decimal(0))
