"""The gateway's HTTP on a real socket: problems, claims, bytes by digest, the page. The services behind it are short answers on a bus."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from intertie.bus import rpc
from intertie.bus.memory import MemoryBroker
from intertie.clock import SystemClock
from intertie.contracts import endpoints as e
from intertie.contracts.base import encode
from intertie.contracts.http import SubmitBody
from intertie.contracts.identity import Authenticate, Authenticated, Claims, Role
from intertie.contracts.job import (
    AttemptRecord,
    JobQuery,
    JobRecord,
    JobSpec,
    JobState,
    Rejection,
    ResultRef,
    Story,
    StoryLine,
    SubmitJob,
    SubmitReply,
)
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import AttemptBook, BooksReply, Charge, Formula, Statement, StatementQuery, UsagePhase, WhoPays
from intertie.errors import NotFound, Refused, Unauthenticated, Unavailable
from intertie.gateway.__main__ import GatewaySettings, application
from intertie.gateway.objects import ObjectStore
from intertie.gateway.routes import ROUTES
from intertie.ids import AttemptId, DeviceId, Digest, JobId, PoolName, PrincipalId, SiteName, SpecId, StatementId, TenantName
from intertie.trust.keys import Key

NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
JOB = JobId("job-1")
RESULT = b"packed results"
RESULT_DIGEST = Digest("sha256:" + hashlib.sha256(RESULT).hexdigest())


def who(token: str) -> Claims:
    roles = {"user": [Role.TENANT_USER], "site": [Role.SITE], "owner": [Role.SITE_OWNER], "operator": [Role.OPERATOR]}
    if token not in roles:
        raise Unauthenticated("identity.token", "this token is not valid")
    end = int((datetime.now(UTC) + timedelta(minutes=5)).timestamp())
    return Claims(
        iss="identity",
        sub=PrincipalId(f"prn-{token}"),
        name=token,
        roles=roles[token],
        tenant=TenantName("acme") if token == "user" else None,
        site=SiteName("site-a") if token in ("site", "owner") else None,
        iat=end - 300,
        exp=end,
    )


def record(**changes: Any) -> JobRecord:
    attempt = AttemptRecord(
        attempt=AttemptId("att-1"),
        job=JOB,
        tenant=TenantName("acme"),
        number=1,
        epoch=0,
        generation=1,
        site=SiteName("site-a"),
        pool=PoolName("cpu"),
        devices=[DeviceId("slot-0")],
        kind=DeviceKind.SLOT,
        account="guest",
        state="ended",
        why_here="fewest slots left over",
        spec=None,
        spec_revision=0,
        offered_at=NOW,
        started_at=NOW,
        ended_at=NOW + timedelta(seconds=6.418),
        outcome="succeeded",
        ran_us=6_418_000,
        result=ResultRef(digest=RESULT_DIGEST, size=len(RESULT), files=1),
        log_tail="the loss is 0.01",
        native_id="4711",
        native_state="COMPLETED",
        native_reason="None",
        native_at=NOW,
        nodes=["gpu-03"],
        suspended_us=2_000_000,
        version=3,
    )
    base: dict[str, Any] = {
        "job": JOB,
        "tenant": TenantName("acme"),
        "submitted_by": "user",
        "spec": JobSpec(name="<b>train</b>", script="true", outputs=["out"]),
        "state": JobState.SUCCEEDED,
        "submitted_at": NOW,
        "queued_at": NOW,
        "ended_at": NOW,
        "waiting": None,
        "cancel_requested": False,
        "attempts": [attempt],
        "version": 4,
    }
    return JobRecord(**{**base, **changes})


def book() -> AttemptBook:
    us, amount = 6_418_000, Decimal("0.0107")
    formula = Formula(
        duration_us=us,
        quantity_milli=1_000,
        per_hour=Decimal(6),
        currency="CNY",
        unrounded=Decimal("0.010696666"),
        amount=amount,
        phase=UsagePhase.RUN,
        kind=DeviceKind.SLOT,
        model="",
        clause="spec-1 rev 1: run is charged",
        text="",
    )
    charge = Charge(
        attempt=AttemptId("att-1"),
        job=JOB,
        tenant=TenantName("acme"),
        site=SiteName("site-a"),
        spec=SpecId("spec-1"),
        spec_revision=1,
        payer=WhoPays.TENANT,
        amount=amount,
        currency="CNY",
        start=NOW,
        end=NOW + timedelta(microseconds=us),
        formula=formula,
    )
    return AttemptBook(
        attempt=AttemptId("att-1"),
        job=JOB,
        tenant=TenantName("acme"),
        site=SiteName("site-a"),
        segments=1,
        quantity_milli_us=us * 1_000,
        run_us=us,
        first_start=NOW,
        last_end=NOW + timedelta(microseconds=us),
        ended=True,
        complete=True,
        outcome="succeeded",
        cause=None,
        hold=Decimal(0),
        posted=amount,
        in_suspense=0,
        charges=[charge],
    )


class Services:
    """What stands behind the gateway in these tests."""

    def __init__(self) -> None:
        self.submitted: list[SubmitJob] = []
        self.asked_identity = 0

    async def authenticate(self, request: Authenticate, caller: rpc.Caller) -> Authenticated:
        self.asked_identity += 1
        return Authenticated(claims=who(request.token), signed=request.token)

    async def submit(self, request: SubmitJob, caller: rpc.Caller) -> SubmitReply:
        if request.spec.resources.gpus:
            rejection = Rejection(site=SiteName("site-a"), pool=PoolName("cpu"), rule="count", text="8 GPUs wanted, 0 there")
            raise Refused("scheduler.no_site_fits", "no site has it", details={"rejections": [rejection]})
        repeated = any(s.client_key == request.client_key for s in self.submitted)
        self.submitted.append(request)
        return SubmitReply(job=record(), repeated=repeated)

    async def job(self, request: JobQuery, caller: rpc.Caller) -> JobRecord:
        if request.job == "job-busy":
            raise Unavailable("store.busy", "every connection to the database is in use", retry_after_s=3)
        if request.job != JOB:
            raise NotFound("not_found", "there is no such thing, or it is not yours to see")
        return record()

    async def story(self, request: JobQuery, caller: rpc.Caller) -> Story:
        if request.job == "job-broken":
            raise ValueError("a bug with a secret in it")
        line = StoryLine(at=NOW, actor="user", what="submitted", state=JobState.QUEUED, evidence="request abc", recorded_at=NOW)
        return Story(job=await self.job(request, caller), lines=[line])

    async def books(self, request: Any, caller: rpc.Caller) -> BooksReply:
        return BooksReply(books=[book()])

    async def statement(self, request: StatementQuery, caller: rpc.Caller) -> Statement:
        return Statement(
            statement=StatementId("st-1"),
            tenant=request.tenant,
            period="2026-12",
            start=NOW,
            end=NOW,
            time_zone="Asia/Shanghai",
            currency="CNY",
            provisional=True,
            total=Decimal("0.0107"),
            usage_milli_us=0,
            lines=[],
            at=NOW,
        )


class World:
    def __init__(self, session: aiohttp.ClientSession, services: Services) -> None:
        self.session = session
        self.services = services

    def user(self) -> dict[str, str]:
        return {"Authorization": "Bearer user"}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    broker = MemoryBroker()
    bus, behind, services = broker.client("gateway"), broker.client("services"), Services()
    handlers: dict[str, dict[Any, Callable[..., Awaitable[Any]]]] = {
        "identity": {e.AUTHENTICATE: services.authenticate},
        "scheduler": {e.SUBMIT: services.submit, e.JOB: services.job, e.STORY: services.story},
        "metering": {e.BOOKS: services.books, e.STATEMENT: services.statement},
    }
    for service, table in handlers.items():
        await rpc.serve(behind, service, "1.0.0", table, verifier=lambda signed: who("user"))
    settings = GatewaySettings(bus_url=["memory"], key_file=tmp_path / "k", data_dir=tmp_path)
    objects = ObjectStore(tmp_path / "objects", limit_bytes=1_000_000)
    clock = SystemClock()
    app = application(bus, settings, objects, clock, Key.new("U"))
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession(base_url=server.make_url("/"), cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
    ):
        yield World(session, services)
    await bus.close()
    await behind.close()


async def test_a_submit_is_answered_with_the_job_and_a_repeat_with_the_same(world: World) -> None:
    body = encode(SubmitBody(spec=JobSpec(name="n", script="true")))
    headers = {**world.user(), "Idempotency-Key": "k1"}
    async with world.session.post("/v1/jobs", data=body, headers=headers) as first:
        assert first.status == 201
        assert first.headers["X-Trace-Id"]
    async with world.session.post("/v1/jobs", data=body, headers=headers) as second:
        assert second.status == 200
    assert [s.tenant for s in world.services.submitted] == ["acme", "acme"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "code"),
    [
        ("GET", "/v1/jobs/job-1", {}, b"", 401, "http.no_token"),
        ("GET", "/v1/jobs/job-1", {"Authorization": "Bearer nope"}, b"", 401, "identity.token"),
        ("GET", "/v1/jobs/job-1", {"Authorization": "Bearer é"}, b"", 401, "http.bad_token"),
        ("POST", "/v1/jobs", {"Authorization": "Bearer user", "Idempotency-Key": "é"}, b"{}", 400, "http.idempotency_key"),
        ("POST", "/v1/jobs", {"Authorization": "Bearer user", "Content-Encoding": "gzip"}, b"not gzip", 400, "http.bad_request"),
        ("GET", "/v1/jobs/other", {"Authorization": "Bearer user"}, b"", 404, "not_found"),
        ("GET", "/v1/nothing", {"Authorization": "Bearer user"}, b"", 404, "http.not_found"),
        ("DELETE", "/v1/jobs", {"Authorization": "Bearer user"}, b"", 405, "http.method"),
        ("POST", "/v1/jobs", {"Authorization": "Bearer user"}, b"{", 400, "contract.invalid"),
        ("POST", "/v1/jobs", {"Authorization": "Bearer user"}, b'{"spec":{"name":"","script":"x"}}', 400, "contract.invalid"),
        ("POST", "/v1/jobs", {"Authorization": "Bearer user"}, b"x" * 600_000, 413, "http.too_large"),
        ("GET", "/v1/jobs?limit=many", {"Authorization": "Bearer user"}, b"", 400, "http.query"),
        ("GET", "/v1/jobs?state=dancing", {"Authorization": "Bearer user"}, b"", 400, "http.query"),
        ("GET", "/v1/tenants", {"Authorization": "Bearer user"}, b"", 503, "bus.no_responder"),
        ("PUT", "/v1/objects/sha256:xyz", {"Authorization": "Bearer user"}, b"abc", 422, "object.digest"),
    ],
)
async def test_each_mistake_is_a_problem_with_its_code(
    world: World, method: str, path: str, headers: dict[str, str], body: bytes, status: int, code: str
) -> None:
    async with world.session.request(method, path, headers=headers, data=body or None) as response:
        said = await response.json(content_type="application/problem+json")
        assert (response.status, said["code"]) == (status, code)
        assert said["status"] == status
        assert said["detail"]
        assert said["trace_id"] == response.headers["X-Trace-Id"]


async def test_a_service_that_is_too_busy_is_said_to_be_with_the_time_to_ask_again(world: World) -> None:
    """BR-130: a database pool with every connection held reaches the caller as 503 and Retry-After, not as a hang."""
    async with world.session.get("/v1/jobs/job-busy", headers=world.user()) as response:
        said = await response.json(content_type="application/problem+json")
    assert (response.status, response.headers["Retry-After"], said["code"]) == (503, "3", "store.busy")


async def test_a_refusal_carries_what_each_pool_lacks(world: World) -> None:
    body = b'{"spec":{"name":"n","script":"x","resources":{"gpus":8}}}'
    async with world.session.post("/v1/jobs", data=body, headers=world.user()) as response:
        said = await response.json(content_type="application/problem+json")
    assert said["details"]["rejections"][0]["text"] == "8 GPUs wanted, 0 there"


async def test_claims_are_asked_for_once_while_they_hold(world: World) -> None:
    for _ in range(3):
        async with world.session.get("/v1/whoami", headers=world.user()) as response:
            assert (await response.json())["tenant"] == "acme"
    assert world.services.asked_identity == 1


def test_every_endpoint_is_served_over_http_or_is_the_services_own() -> None:
    """A command that no path reaches cannot be given; a new one is put into the table or, on purpose, in here."""
    elsewhere = {e.AUTHENTICATE, e.AUTHENTICATE_SITE, e.STATEMENT, e.BOOKS}
    between_services = {e.ANCHOR_AUDIT, e.CALLS_SEEN, e.REGISTER_SITE, e.SITE_LEFT, e.ATTEMPTS, e.METERING_SNAPSHOT, e.IDENTITY_SNAPSHOT}
    routed = {route.endpoint for route in ROUTES}
    assert set(e.ENDPOINTS) - routed == elsewhere | between_services
    assert not [route.path for route in ROUTES if route.endpoint.action is None and not route.anonymous]


async def test_our_own_mistake_tells_nothing_but_a_trace_id(world: World) -> None:
    async with world.session.get("/v1/jobs/job-broken/story", headers=world.user()) as response:
        text = await response.text()
    assert response.status == 500
    assert "secret" not in text
    assert '"internal"' in text


async def test_bytes_are_stored_under_the_digest_they_have_and_no_other(world: World) -> None:
    async with world.session.put(f"/v1/objects/{RESULT_DIGEST}", data=b"other bytes", headers=world.user()) as wrong:
        assert (await wrong.json(content_type="application/problem+json"))["code"] == "object.mismatch"
    async with world.session.put(f"/v1/objects/{RESULT_DIGEST}", data=RESULT, headers=world.user()) as right:
        assert right.status == 201
    async with world.session.put(f"/v1/objects/{RESULT_DIGEST}", data=RESULT, headers=world.user()) as again:
        assert (again.status, (await again.json())["repeated"]) == (200, True)
    async with world.session.get("/v1/jobs/job-1/result", headers=world.user()) as result:
        assert await result.read() == RESULT
        assert result.headers["X-Digest"] == RESULT_DIGEST


async def test_an_object_over_the_limit_is_refused_and_leaves_nothing(world: World, tmp_path: Path) -> None:
    data = b"x" * 1_000_001
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    async with world.session.put(f"/v1/objects/{digest}", data=data, headers=world.user()) as response:
        assert (response.status, (await response.json(content_type="application/problem+json"))["code"]) == (413, "object.too_large")
    assert not large_files(tmp_path)


async def test_a_pack_that_is_named_again_stays_as_long_as_a_new_one(tmp_path: Path) -> None:
    """A folder that is submitted daily has one digest: swept by the age of its first upload it would be gone under the jobs that wait for it."""
    now = datetime.now(UTC)
    objects = ObjectStore(tmp_path / "objects", limit_bytes=1_000, keep=timedelta(days=35))

    async def put(at: datetime) -> None:
        if await objects.lasting(RESULT_DIGEST, at) is None:
            await objects.put(RESULT_DIGEST, chunks(RESULT))

    await put(now)
    (file,) = [p for p in (tmp_path / "objects").rglob("*") if p.is_file()]
    os.utime(file, (0, (now - timedelta(days=34)).timestamp()))
    await put(now)
    assert await objects.sweep(now + timedelta(days=2)) == []
    assert await objects.lasting(RESULT_DIGEST, now + timedelta(days=2)) == len(RESULT)
    assert await objects.sweep(now + timedelta(days=36)) == [RESULT_DIGEST]
    assert await objects.size(RESULT_DIGEST) is None


async def test_two_gateways_that_sweep_one_folder_do_not_end_each_other(tmp_path: Path) -> None:
    stores = [ObjectStore(tmp_path / "objects", limit_bytes=1_000) for _ in range(2)]
    digests = set()
    for number in range(20):
        data = str(number).encode()
        digests.add("sha256:" + hashlib.sha256(data).hexdigest())
        await stores[0].put("sha256:" + hashlib.sha256(data).hexdigest(), chunks(data))
    late = datetime.now(UTC) + timedelta(days=36)
    gone = await asyncio.gather(*(store.sweep(late) for store in stores))
    assert {digest for one in gone for digest in one} == digests


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    yield data


def large_files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 1_000]


async def test_a_user_cannot_read_a_pack_by_its_digest(world: World) -> None:
    async with world.session.put(f"/v1/objects/{RESULT_DIGEST}", data=RESULT, headers=world.user()) as stored:
        assert stored.status == 201
    async with world.session.get(f"/v1/objects/{RESULT_DIGEST}", headers=world.user()) as response:
        assert response.status in (403, 404)


async def test_results_that_are_not_here_yet_say_where_they_are(world: World) -> None:
    async with world.session.get("/v1/jobs/job-1/result", headers=world.user()) as response:
        said = await response.json(content_type="application/problem+json")
    assert (response.status, said["code"]) == (404, "job.result_elsewhere")


async def test_a_statement_comes_as_csv_with_chinese_headers(world: World) -> None:
    async with world.session.get("/v1/statements?format=csv&lang=zh", headers=world.user()) as response:
        text = (await response.read()).decode("utf-8-sig")
    assert "金额" in text
    assert 'filename="statement-acme-2026-12.csv"' in response.headers["Content-Disposition"]


async def test_the_page_asks_to_sign_in_and_then_tells_the_story_safely(world: World) -> None:
    async with world.session.get("/jobs/job-1", allow_redirects=False) as response:
        assert response.status == 303
        assert response.headers["Location"].startswith("/login?next=/jobs/job-1")
    async with world.session.post("/login", data={"token": "nope", "next": "/jobs/job-1"}) as wrong:
        assert wrong.status == 401
    form = {"token": "user", "next": "/jobs/job-1"}
    async with world.session.post("/login", data=form, headers={"Accept-Language": "zh-CN"}) as page:
        text = await page.text()
    assert page.status == 200
    assert "&lt;b&gt;train&lt;/b&gt;" in text
    assert "<b>train</b>" not in text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]


async def test_the_page_speaks_the_readers_language(world: World) -> None:
    async with world.session.post("/v1/jobs/job-1/link", headers=world.user()) as made:
        url = (await made.json())["url"].partition("8480")[2]
    async with world.session.get(url, headers={"Accept-Language": "zh-CN"}) as page:
        text = await page.text()
    assert "第 1 次运行" in text
    assert "已结束" in text
    assert "站点调度器: 本地作业 4711 COMPLETED(截至" in text and "节点 gpu-03" in text and "其中挂起 2 秒" in text
    async with world.session.get(url + "&lang=en") as page:
        text = await page.text()
    assert "Attempt 1" in text
    assert "the site&#39;s scheduler: 4711 COMPLETED, as of" in text and "(None)" not in text


async def test_a_link_shows_its_own_job_only(world: World) -> None:
    async with world.session.post("/v1/jobs/job-1/link", headers=world.user()) as made:
        ticket = (await made.json())["url"].partition("view=")[2]
    async with world.session.get(f"/jobs/job-2?view={ticket}", allow_redirects=False) as response:
        assert response.status == 303
    async with world.session.get(f"/jobs/job-1?view={ticket[:-4]}AAAA", allow_redirects=False) as response:
        assert response.status == 303


@pytest.mark.parametrize(
    ("token", "price", "log"),
    [("user", True, True), ("operator", True, False), ("owner", False, False)],
)
async def test_a_link_shows_no_more_than_whoever_made_it_may_see(world: World, token: str, price: bool, log: bool) -> None:
    """Both sides of two agreements see the same seconds, each only its own price; what a job prints is its tenant's."""
    async with world.session.post("/v1/jobs/job-1/link", headers={"Authorization": f"Bearer {token}"}) as made:
        url = (await made.json())["url"].partition("8480")[2]
    async with world.session.get(url, headers={"Accept-Language": "en"}) as page:
        text = await page.text()
    assert "6.418 s" in text
    assert ("¥6.00" in text, "the loss is 0.01" in text) == (price, log)


async def test_nobody_adds_prices_to_a_link_that_has_none(world: World) -> None:
    async with world.session.post("/v1/jobs/job-1/link", headers={"Authorization": "Bearer owner"}) as made:
        bare = (await made.json())["url"].partition("view=")[2]
    async with world.session.post("/v1/jobs/job-1/link", headers=world.user()) as made:
        whole = (await made.json())["url"].partition("view=")[2]
    forged = ".".join([*whole.split(".")[:2], bare.split(".")[2]])
    async with world.session.get(f"/jobs/job-1?view={forged}", allow_redirects=False) as response:
        assert response.status == 303


@pytest.mark.parametrize("token", ["owner", "operator"])
async def test_results_are_their_tenants(world: World, token: str) -> None:
    async with world.session.get("/v1/jobs/job-1/result", headers={"Authorization": f"Bearer {token}"}) as response:
        said = await response.json(content_type="application/problem+json")
    assert (response.status, said["code"]) == (403, "rights.denied")


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example"])
async def test_signing_in_never_sends_people_elsewhere(world: World, target: str) -> None:
    async with world.session.post("/login", data={"token": "user", "next": target}, allow_redirects=False) as response:
        assert response.headers["Location"] == "/"


async def test_health_is_a_round_trip_on_the_bus(world: World) -> None:
    async with world.session.get("/healthz") as response:
        assert (await response.json())["bus"] is True
