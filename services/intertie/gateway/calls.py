"""`/v1/offerings/{site}/{name}/…`: where calls of sites' offerings enter.

The gateway knows the caller (identity's claims), the offering (the registry's record), the caller's rate, and nothing of the upstream. It seals a grant,
hands the body to the site part by part, the answer to the caller as it comes, and keeps its own word on each call until metering has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web

from intertie.bus import rpc
from intertie.bus.port import Bus
from intertie.clock import Clock
from intertie.contracts import endpoints as e
from intertie.contracts.base import encode
from intertie.contracts.call_offerings import PATHS, CallOutcome, OfferingRecord
from intertie.contracts.calls import (
    PART_BYTES,
    WINDOW_BYTES,
    CallAbort,
    CallData,
    CallDone,
    CallGrant,
    CallHead,
    CallOpen,
    CallSeen,
    CallsSeen,
)
from intertie.contracts.identity import Authenticated
from intertie.errors import IntertieError, NotFound, Refused
from intertie.gateway.call_answer import Answer, problem
from intertie.gateway.call_limits import Rates
from intertie.gateway.call_line import Broken, Call, Line
from intertie.gateway.call_spool import Spool
from intertie.gateway.http import Door, status_of
from intertie.gateway.offerings import REFRESH_S, Offerings
from intertie.ids import CallId, TenantName, mint
from intertie.observe import log, metrics, tracing
from intertie.runtime import Beat
from intertie.trust import rights
from intertie.trust.keys import Key
from intertie.trust.seal import seal

LOG = log.get("gateway.calls")
CALLS = metrics.Counter("intertie_calls_total", "Calls of offerings, by how they ended", ("outcome",))

# Calls under way here, of all tenants: each may hold a window in both directions, 1 MiB.
MOST_CALLS = 1_000
# How soon a caller who hung up before the first byte is noticed.
HANGUP_S = 0.25
# For the first part of a body, which is asked of nobody's server yet: some 3 KiB a second.
BODY_S = 30.0
HEADERS = ("content-type", "accept", "user-agent", "openai-beta")
MODELS = "/v1/models"


GONE = Broken(CallOutcome.CLIENT_GONE, "call.client_gone", "the caller hung up")
OTHER_LENGTH = Broken(CallOutcome.INTERRUPTED, "call.site_wrong", "the answer is not as long as its head says")


@dataclass
class _Told:
    """What will be said of a call."""

    opened_s: float
    first_byte_us: int | None = None
    status: int | None = None
    request_bytes: int = 0


class Calls:
    """Handlers of calls, the line to the sites, and the spool."""

    def __init__(self, bus: Bus, door: Door, clock: Clock, key: Key, own_claims: Callable[[], str], folder: Path) -> None:
        self._bus, self.door, self._clock, self._key, self._own_claims = bus, door, clock, key, own_claims
        self.offerings = Offerings(bus, clock, own_claims)
        self._line = Line(bus, clock)
        self._spool = Spool.open(folder)
        self._rates = Rates()

    def add_to(self, app: web.Application) -> None:
        base = "/v1/offerings/{site}/{name}"
        app.router.add_get(f"{base}{MODELS}", self.models)
        for path in sorted({path for paths in PATHS.values() for path in paths}):
            app.router.add_post(f"{base}{path}", self.call)

    async def run(self) -> None:
        """Listen, keep the offerings fresh, tell metering; for ever."""
        await self._line.listen()
        await self.offerings.listen()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._line.run(), name="calls-line")
            group.create_task(Beat("offerings", REFRESH_S).run(self.offerings.refresh), name="calls-offerings")
            group.create_task(self._spool.run(self._tell), name="calls-spool")

    def close(self) -> None:
        self._spool.close()

    async def _tell(self, calls: Sequence[CallSeen]) -> None:
        await rpc.call(self._bus, e.CALLS_SEEN, CallsSeen(calls=list(calls)), claims=self._own_claims())

    # --- handlers ---

    async def models(self, request: web.Request) -> web.StreamResponse:
        """What an offering serves, as a client of the OpenAI protocol asks it."""
        _, record, _ = await self._may_call(request)
        listed = [{"id": model, "object": "model", "created": 0, "owned_by": record.site} for model in record.offering.models]
        return web.Response(body=encode({"object": "list", "data": listed}), content_type="application/json")

    async def call(self, request: web.Request) -> web.StreamResponse:
        """One call, from its admission to its record."""
        trace_id = tracing.trace_id()
        try:
            who, record, tenant = await self._may_call(request)
            self._admit(request, record, tenant)
            return await self._made(request, record, who, tenant, trace_id)
        except IntertieError as err:
            after = int(getattr(err, "retry_after_s", 0)) or int(str(err.details.get("retry_after_s", 0)).partition(".")[0])
            status = 0 if err.code.startswith("call.") else status_of(err)
            return problem(err.code, err.text, trace_id=trace_id, status=status, retry_after_s=after, next_step=err.next_step)

    async def _may_call(self, request: web.Request) -> tuple[Authenticated, OfferingRecord, TenantName]:
        who = await self.door.caller(request)
        tenant = who.claims.tenant
        rights.require(who.claims, "call.make", tenant=tenant)
        record = await self.offerings.find(request.match_info["site"], request.match_info["name"])
        if record is None or tenant is None or not record.offering.admits(tenant):
            text = f"there is no offering {request.match_info['site'][:63]}/{request.match_info['name'][:63]} for you"
            raise NotFound("call.unknown_offering", text, next_step="intertie offerings lists what you may call")
        return who, record, tenant

    def _admit(self, request: web.Request, record: OfferingRecord, tenant: TenantName) -> None:
        """In this order; what is refused here went nowhere."""
        offering = record.offering
        path = _path(request)
        if path not in PATHS[offering.protocol]:
            raise Refused(
                "call.path", f"{record.id} speaks {offering.protocol.value}: it has {', '.join(sorted(PATHS[offering.protocol]))}"
            )
        if not record.available:
            raise Refused("call.paused" if record.paused else "call.unavailable", f"{record.id} takes no calls now: {record.reason}")
        most = offering.limits.max_body_bytes
        if request.content_length is not None and request.content_length > most:
            raise Refused("call.too_large", f"a request to {record.id} may hold {most} bytes")
        if self._line.under_way >= MOST_CALLS or self._spool.full:
            raise Refused("call.gateway_full", "this gateway has as many calls under way, or untold, as it can bear")
        wait_s = self._rates.take(tenant, record.id, offering.limits.per_minute, self._clock.monotonic_s())
        if wait_s > 0:
            text = f"{record.id} takes {offering.limits.per_minute} calls a minute of each tenant"
            raise Refused("call.rate", text, details={"retry_after_s": int(wait_s) + 1})

    async def _made(
        self, request: web.Request, record: OfferingRecord, who: Authenticated, tenant: TenantName, trace_id: str
    ) -> web.StreamResponse:
        id, at = CallId(mint("call")), self._clock.now()
        try:
            async with asyncio.timeout(BODY_S):
                first, last = await _first_part(request, record.offering.limits.max_body_bytes)
        except TimeoutError:
            raise Refused("call.body_slow", f"the request's body did not come within {BODY_S:g} s; nothing was called") from None
        offering = record.offering.name
        grant = CallGrant(
            call=id,
            tenant=tenant,
            principal=who.claims.sub,
            site=record.site,
            offering=offering,
            revision=record.revision,
            at=at,
            traceparent=tracing.traceparent(),
        )
        told = _Told(self._clock.boot_s(), request_bytes=len(first))
        draft = CallSeen(
            call=id,
            tenant=tenant,
            principal=who.claims.sub,
            site=record.site,
            offering=offering,
            opened=at,
            end_us=0,
            outcome=CallOutcome.INTERRUPTED,
            request_bytes=len(first),
        )
        self._spool.opened(draft)
        headers = {name: value for name in HEADERS if (value := request.headers.get(name, "")) and value.isprintable()}
        frame = CallOpen(
            call=id,
            gateway=self._line.token,
            grant=seal(self._key, encode(grant), "gateway"),
            path=_path(request),
            headers={**headers, "traceparent": tracing.traceparent()},
            data=first,
            last=last,
            credit=WINDOW_BYTES,
        )
        way = self._line.open(record.site, frame)
        passing = _Passing(request, way, told, self._clock, trace_id, record.offering.limits.max_body_bytes)
        ending = Broken(CallOutcome.INTERRUPTED, "call.gateway_stopped", "the gateway was stopped")
        try:
            response, ending = await passing.run(whole=last)
            return response
        except asyncio.CancelledError:
            if _hung_up(request):
                ending = GONE
            raise
        finally:
            gone = ending.outcome in (CallOutcome.CLIENT_GONE, CallOutcome.INTERRUPTED) or passing.body_wrong
            await way.close(CallAbort(call=id, outcome=ending.outcome, code=ending.code) if gone else None)
            CALLS.inc(outcome=ending.outcome.value)
            seen = msgspec.structs.replace(
                draft,
                first_byte_us=told.first_byte_us,
                end_us=_since(self._clock, told.opened_s),
                outcome=ending.outcome,
                code=ending.code,
                status=told.status,
                request_bytes=told.request_bytes,
                response_bytes=passing.handed,
                taken=way.taken,
            )
            self._spool.closed(seen)


class _Passing:
    """Between one caller's connection and one call."""

    def __init__(self, request: web.Request, way: Call, told: _Told, clock: Clock, trace_id: str, most_bytes: int) -> None:
        self._request, self._way, self._told, self._clock, self._trace_id = request, way, told, clock, trace_id
        self._most_bytes = most_bytes
        self._answer: Answer | None = None
        self._came = 0
        self.body_wrong = False

    @property
    def handed(self) -> int:
        return self._answer.handed if self._answer is not None else 0

    async def run(self, *, whole: bool) -> tuple[web.StreamResponse, Broken]:
        """The response as it was given, and how the call ended for its caller."""
        pump = None if whole else asyncio.create_task(self._pump(), name=f"body-{self._way.call}")
        try:
            return await self._pass()
        except ConnectionError:
            return self._given(), GONE
        finally:
            if pump is not None:
                pump.cancel()
                with suppress(asyncio.CancelledError):
                    await pump

    async def _pass(self) -> tuple[web.StreamResponse, Broken]:
        while True:
            match await self._next():
                case CallHead() as head if self._answer is None:
                    self._told.status = head.status
                    self._answer = Answer(self._request, head.status, head.headers, self._way.call, self._trace_id)
                    await self._answer.begin()
                case CallData() as data if self._answer is not None:
                    if self._told.first_byte_us is None:
                        self._told.first_byte_us = _since(self._clock, self._told.opened_s)
                    self._came += len(data.data)
                    if self._answer.length is not None and self._came > self._answer.length:
                        return await self._fail(OTHER_LENGTH, 0), OTHER_LENGTH
                    await self._answer.hand(data.data)
                    await self._way.passed_on(len(data.data))
                case CallDone() as done if done.outcome is CallOutcome.COMPLETED and done.response_bytes != self._came:
                    wrong = Broken(CallOutcome.INTERRUPTED, "call.parts_lost", f"{self._came} of {done.response_bytes} bytes came")
                    return await self._fail(wrong, 0), wrong
                case CallDone() as done:
                    return await self._end(done)
                case Broken() as broken:
                    return await self._fail(broken, 0), broken
                case _:
                    wrong = Broken(CallOutcome.INTERRUPTED, "call.site_wrong", "the site's frames make no answer")
                    return await self._fail(wrong, 0), wrong

    async def _end(self, done: CallDone) -> tuple[web.StreamResponse, Broken]:
        ending = Broken(done.outcome, done.code, done.text)
        passed = self._answer is not None and self._told.status is not None
        whole = done.outcome in (CallOutcome.COMPLETED, CallOutcome.INCOMPLETE, CallOutcome.REJECTED)
        if passed and self._answer is not None and (whole or done.code == "call.upstream_error"):
            if self._answer.length not in (None, self._came):
                return await self._fail(OTHER_LENGTH, 0), OTHER_LENGTH
            await self._answer.end()
            return self._answer.response, ending
        return await self._fail(ending, done.retry_after_s), ending

    async def _fail(self, broken: Broken, retry_after_s: int) -> web.StreamResponse:
        LOG.info("a call ended early", call=self._way.call, code=broken.code, outcome=broken.outcome.value)
        if self._answer is None:
            return problem(broken.code, broken.text, trace_id=self._trace_id, retry_after_s=retry_after_s)
        await self._answer.fail(broken.code, broken.text)
        return self._answer.response

    def _given(self) -> web.StreamResponse:
        """What aiohttp is told of a connection that is gone."""
        return self._answer.response if self._answer is not None else web.Response(status=499)

    async def _next(self) -> CallHead | CallData | CallDone | Broken:
        """The next step, or `ConnectionError` once the caller is gone."""
        step = asyncio.ensure_future(self._way.step())
        try:
            while True:
                done, _ = await asyncio.wait({step}, timeout=HANGUP_S)
                if done:
                    return step.result()
                if _hung_up(self._request):
                    raise ConnectionResetError("the caller hung up")
        finally:
            step.cancel()

    async def _pump(self) -> None:
        """The rest of the body, as the site has room for it."""
        try:
            async for data in self._request.content.iter_chunked(PART_BYTES):
                self._told.request_bytes += len(data)
                if self._told.request_bytes > self._most_bytes:
                    self.body_wrong = True
                    self._way.broken(CallOutcome.REFUSED, "call.too_large", f"a request may hold {self._most_bytes} bytes")
                    return
                await self._way.send(data, last=False)
            await self._way.send(b"", last=True)
        except ConnectionError:
            self.body_wrong = True
            self._way.broken(CallOutcome.CLIENT_GONE, "call.client_gone", "the caller hung up")
        except IntertieError as err:
            self._way.broken(CallOutcome.INTERRUPTED, "call.bus_lost", err.text)
        except Exception as err:  # noqa: BLE001  # what a caller's broken body raises is many things
            self.body_wrong = True
            self._way.broken(CallOutcome.CLIENT_GONE, "call.body_broken", f"the body ended early: {type(err).__name__}")


async def _first_part(request: web.Request, most_bytes: int) -> tuple[bytes, bool]:
    """Up to one part of the body, and whether that was all."""
    content, first = request.content, bytearray()
    while len(first) < PART_BYTES and not content.at_eof():
        data = await content.read(PART_BYTES - len(first))
        if not data:
            break
        first += data
    if len(first) > most_bytes:
        raise Refused("call.too_large", f"a request may hold {most_bytes} bytes")
    return bytes(first), content.at_eof() or not request.can_read_body


def _hung_up(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _path(request: web.Request) -> str:
    """What is called below the offering."""
    return "/" + request.path.split("/", 5)[5]


def _since(clock: Clock, began_s: float) -> int:
    return max(0, round((clock.boot_s() - began_s) * 1e6))
