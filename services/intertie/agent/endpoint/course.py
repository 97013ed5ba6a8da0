"""One call at the site: body in, upstream asked, answer out as it comes, counted on the way. The desk decides whether it is taken at all.

It ends in exactly one `Ending`. Bytes of the answer are passed on as they came; no more are in flight than the gateway gave credit for. Nothing is
tried twice: what an upstream did with a request that broke off, nobody here knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import aiohttp

from intertie.agent.endpoint.rules import EndpointRule
from intertie.agent.endpoint.usage import Asked, Reader, Used, asked, is_json
from intertie.bus.chunks import Credit, Ordered, Window
from intertie.clock import Clock
from intertie.contracts.call_offerings import CallOffering, CallOutcome, CallProtocol
from intertie.contracts.calls import (
    PART_BYTES,
    WINDOW_BYTES,
    CallAlive,
    CallData,
    CallDone,
    CallHead,
    CallOpen,
    CallPart,
    CallRoom,
    CallTaken,
    UpFrame,
)
from intertie.errors import IntertieError

# Of a request, what an upstream needs; the caller's token and cookies are none of its business.
REQUEST_HEADERS = frozenset({"content-type", "accept", "user-agent", "traceparent", "openai-beta"})
# Of an answer, what a caller needs; what concerns one connection alone is left out.
ANSWER_HEADERS = frozenset(
    {"content-type", "content-length", "content-encoding", "cache-control", "retry-after", "x-request-id", "openai-processing-ms"}
)
STREAM = "text/event-stream"

T = TypeVar("T")
Say = Callable[[UpFrame], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Ending:
    """How it ended, and why."""

    outcome: CallOutcome
    code: str = ""
    text: str = ""
    retry_after_s: int = 0


class Over(Exception):
    """Raised inside a call to end it."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.code)
        self.ending = ending


class Course:
    """One call under way. `run` it once; `part`, `credit`, `abort` come from the gateway meanwhile."""

    def __init__(
        self,
        opened: CallOpen,
        rule: EndpointRule,
        offering: CallOffering,
        client: aiohttp.ClientSession,
        api_key: str,
        say: Say,
        clock: Clock,
    ) -> None:
        self.opened, self.rule, self.offering = opened, rule, offering
        self.call = opened.call
        self.accepted = clock.now()
        self._client, self._api_key, self._say, self._clock = client, api_key, say, clock
        self._began_s = clock.boot_s()
        self.heard_s = clock.monotonic_s()
        """When the gateway was last heard of it."""
        self._parts: Ordered[CallPart] = Ordered()
        self._body = bytearray(opened.data)
        self._whole = opened.last
        self._window = Window(WINDOW_BYTES, passed=len(opened.data), granted=WINDOW_BYTES)
        self._credit = Credit(opened.credit)
        self._bell = asyncio.Event()
        self._work: asyncio.Task[Ending] | None = None
        self._aborted: Ending | None = None
        self.seq = 0
        self.first_byte_us: int | None = None
        self.status: int | None = None
        self.streamed = False
        self._reader: Reader | None = None
        self._asked: Asked | None = None

    # --- what the gateway says ---

    def part(self, part: CallPart) -> None:
        """More of the body. A part beyond the credit is no gateway of ours."""
        self.heard_s = self._clock.monotonic_s()
        try:
            ready = self._parts.take(part.seq, part)
        except IntertieError as err:
            self.abort(Ending(CallOutcome.INTERRUPTED, "call.parts_lost", err.text))
            return
        for one in ready:
            self._body += one.data
            self._whole = self._whole or one.last
        if len(self._body) > self.offering.limits.max_body_bytes:
            self.abort(Ending(CallOutcome.REFUSED, "call.too_large", f"the body has more than {self.offering.limits.max_body_bytes} bytes"))
        self._bell.set()

    def credit(self, through: int) -> None:
        self.heard_s = self._clock.monotonic_s()
        self._credit.grant(through)
        self._bell.set()

    def abort(self, ending: Ending) -> None:
        """End it for a reason that is not the upstream's; the first one counts."""
        if self._aborted is None:
            self._aborted = ending
            if self._work is not None:
                self._work.cancel()

    @property
    def sent_bytes(self) -> int:
        return self._credit.sent

    @property
    def request_bytes(self) -> int:
        return len(self._body)

    def elapsed_us(self) -> int:
        return max(0, round((self._clock.boot_s() - self._began_s) * 1e6))

    def used(self) -> Used:
        """As far as the upstream said."""
        return self._reader.used() if self._reader is not None else Used(model=(self._asked.model or "") if self._asked else "")

    # --- the way ---

    async def run(self) -> Ending:
        """To its end, whatever comes."""
        self._work = asyncio.create_task(self._bounded(), name=f"call-{self.call}")
        if self._aborted is not None:
            self._work.cancel()
        try:
            await asyncio.wait({self._work})
        except asyncio.CancelledError:
            self.abort(Ending(CallOutcome.INTERRUPTED, "call.agent_stopped", "the site's agent was stopped"))
            await asyncio.wait({self._work})
        if self._work.cancelled():
            return self._aborted or Ending(CallOutcome.INTERRUPTED, "call.agent_stopped")
        error = self._work.exception()
        if error is not None:
            raise error
        return self._aborted or self._work.result()

    async def _bounded(self) -> Ending:
        limits = self.offering.limits
        try:
            async with asyncio.timeout(limits.max_duration_s):
                await self._collect()
                await self._exchange()
        except Over as over:
            return over.ending
        except TimeoutError:
            return Ending(CallOutcome.TIMED_OUT, "call.timed_out", f"the call took longer than {limits.max_duration_s} s")
        except (aiohttp.ClientError, OSError) as err:
            code = "call.upstream_unreachable" if isinstance(err, aiohttp.ClientConnectorError) else "call.upstream_broke_off"
            return Ending(CallOutcome.UPSTREAM_FAILED, code, f"the site's server of {self.rule.name} failed: {type(err).__name__}")
        except IntertieError as err:
            return Ending(CallOutcome.INTERRUPTED, "call.bus_lost", err.text)
        assert self.status is not None, "an exchange without an error has a status"
        if self.status >= 500:
            return Ending(CallOutcome.UPSTREAM_FAILED, "call.upstream_error", f"the site's server answered {self.status}")
        if self.status >= 400:
            return Ending(CallOutcome.REJECTED, "call.upstream_refused", f"the site's server answered {self.status}")
        if self.used().incomplete:
            return Ending(CallOutcome.INCOMPLETE, "call.incomplete", "the site's server ended early, and says so")
        return Ending(CallOutcome.COMPLETED)

    async def _collect(self) -> None:
        """The whole body: bounded by the offering, asked for as it arrives."""
        await self._say(CallTaken(call=self.call))
        while not self._whole:
            self._bell.clear()
            passed = len(self._body) - self._window.passed
            if (through := self._window.passed_on(passed)) is not None:
                await self._say(CallRoom(call=self.call, through=through))
            await self._bell.wait()
        if self.offering.protocol is CallProtocol.HTTP_JSON:
            if not is_json(bytes(self._body)):
                raise Over(Ending(CallOutcome.REFUSED, "call.not_json", "the request's body is no JSON"))
            return
        self._asked = asked(bytes(self._body))
        if self._asked is None:
            raise Over(Ending(CallOutcome.REFUSED, "call.not_json", "the request's body is no JSON object of the OpenAI protocol"))
        if self.offering.models and self._asked.model not in self.offering.models:
            text = f"{self.rule.name} serves {', '.join(self.offering.models[:10])}, not {str(self._asked.model)[:80]!r}"
            raise Over(Ending(CallOutcome.REFUSED, "call.model", text))
        if self.offering.usage_required and not self._asked.tells_usage:
            text = "this offering is priced by tokens: ask a stream for its usage with stream_options.include_usage"
            raise Over(Ending(CallOutcome.REFUSED, "call.usage_required", text))

    async def _exchange(self) -> None:
        """Ask the upstream, once, and pass its answer on."""
        stall_s = self.offering.limits.stall_s
        request = self._client.request("POST", self._address(), data=bytes(self._body), headers=self._headers(), allow_redirects=False)
        response = await self._within(request, stall_s)
        async with response:
            self.status = response.status
            self.streamed = response.headers.get("Content-Type", "").lower().startswith(STREAM)
            self._reader = Reader(self.streamed)
            await self._number(lambda seq: CallHead(call=self.call, seq=seq, status=response.status, headers=_told(response.headers)))
            while data := await self._within(response.content.readany(), stall_s):
                if self.first_byte_us is None:
                    self.first_byte_us = self.elapsed_us()
                self._reader.feed(data)
                await self._pass(data)

    async def _within(self, work: Awaitable[T], limit_s: float) -> T:
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"the site's server of {self.rule.name} said nothing for {limit_s:g} s"
            raise Over(Ending(CallOutcome.UPSTREAM_STALLED, "call.upstream_stalled", text)) from None

    async def _pass(self, data: bytes) -> None:
        """As much at a time as the gateway has room for: a slow caller slows the upstream, and fills no memory here."""
        if self._credit.sent + len(data) > self.offering.limits.max_answer_bytes:
            text = f"the answer has more than {self.offering.limits.max_answer_bytes} bytes"
            raise Over(Ending(CallOutcome.UPSTREAM_FAILED, "call.answer_too_large", text))
        view = memoryview(data)
        while view:
            room = min(self._credit.room(), PART_BYTES)
            if room == 0:
                self._bell.clear()
                if self._credit.room() == 0:
                    await self._bell.wait()
                continue
            part = bytes(view[:room])
            view = view[room:]
            await self._number(lambda seq, part=part: CallData(call=self.call, seq=seq, data=part))  # type: ignore[misc]  # bound now
            self._credit.spend(len(part))

    async def _number(self, make: Callable[[int], UpFrame]) -> None:
        self.seq += 1
        await self._say(make(self.seq))

    async def alive(self) -> None:
        with suppress(IntertieError):
            await self._say(CallAlive(call=self.call, sent=self.seq))

    async def done(self, ending: Ending) -> None:
        """The last frame. If the way is broken nobody hears it, and the gateway finds that out by itself."""
        with suppress(IntertieError):
            await self._number(
                lambda seq: CallDone(
                    call=self.call,
                    seq=seq,
                    outcome=ending.outcome,
                    code=ending.code,
                    text=ending.text[:1_000],
                    retry_after_s=ending.retry_after_s,
                    response_bytes=self._credit.sent,
                )
            )

    def _address(self) -> str:
        if self.offering.protocol is CallProtocol.HTTP_JSON:
            return self.rule.upstream
        return self.rule.upstream.rstrip("/").removesuffix("/v1") + self.opened.path

    def _headers(self) -> dict[str, str]:
        headers = {key: value for key, value in self.opened.headers.items() if key.lower() in REQUEST_HEADERS}
        headers["Accept-Encoding"] = "identity"
        headers["X-Request-Id"] = self.call
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        return headers


def _told(headers: Mapping[str, str]) -> dict[str, str]:
    return {key.lower(): value[:1_000] for key, value in headers.items() if key.lower() in ANSWER_HEADERS}
