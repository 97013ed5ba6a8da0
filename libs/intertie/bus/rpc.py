"""Typed calls over any bus: what `contracts.endpoints` lists, with the caller's signed claims, the trace and known errors carried.

A handler gets a decoded request and a `Caller` whose claims were verified here, in the *called* service: nothing is trusted for arriving
on the bus. Known errors travel as `Problem` and are raised on the other side as what they were; anything else becomes `internal` and a
trace id, and is logged whole on this side.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from intertie.bus.port import Bus, Message, Reply, Subscription
from intertie.bus.serving import ERROR, ERROR_CODE
from intertie.contracts.base import Contract, Problem, decode, encode
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import Claims
from intertie.errors import KINDS, IntertieError, Refused, Unauthenticated, Unavailable, kind_of
from intertie.observe import log, metrics, tracing

LOG = log.get("bus.rpc")
CALLS = metrics.Counter("intertie_rpc_calls_total", "Calls answered, by outcome", ("service", "verb", "outcome"))
SECONDS = metrics.Histogram("intertie_rpc_seconds", "How long calls took here", ("service", "verb"))

CLAIMS = "intertie-claims"

# Longer than any caller of ours waits; a handler that is hung gives its worker back.
HANDLER_LIMIT_S = 30.0
# A header shows a stock client what went wrong; the numbers are HTTP's.
_STATUS = {
    "refused": "400",
    "not_found": "404",
    "denied": "403",
    "unauthenticated": "401",
    "conflict": "409",
    "stale": "409",
    "unavailable": "503",
}

Q = TypeVar("Q", bound=Contract)
R = TypeVar("R", bound=Contract)

Verifier = Callable[[str], Claims]
"""Signed claims in, verified claims out; `Unauthenticated` otherwise. `intertie.trust` builds it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `signed` is the header as it came, for a call made on the caller's behalf."""

    verified: Claims | None
    trace_id: str
    signed: str = ""

    @property
    def claims(self) -> Claims:
        """The verified claims; there are none only on an endpoint whose `action` is None."""
        if self.verified is None:
            raise Unauthenticated("auth.no_claims", "this call needs signed claims", next_step="log in, or send a valid token")
        return self.verified


Serve = Callable[[Any, Caller], Awaitable[Contract]]
"""`(request, caller) → reply`, of the types that the endpoint names."""


async def call(
    bus: Bus,
    endpoint: Endpoint[Q, R],
    request: Q,
    *,
    claims: str = "",
    timeout_s: float = 5.0,
) -> R:
    """One call. Raises what the other side raised; `Unavailable` if nobody answered (`bus.timeout`: it may have been done)."""
    with tracing.span(f"call {endpoint.service}.{endpoint.verb}"):
        headers = {tracing.TRACEPARENT: tracing.traceparent()}
        if claims:
            headers[CLAIMS] = claims
        message = await bus.request(endpoint.subject, encode(request), timeout_s=timeout_s, headers=headers)
        if ERROR_CODE in message.headers:
            raise _raised(message, endpoint.subject)
        try:
            return decode(message.body, endpoint.reply, what=f"the answer of {endpoint.subject}")
        except Refused as error:
            # Not the caller's fault, so not a refusal: the two sides are of different versions.
            raise IntertieError("rpc.bad_answer", error.text, next_step="compare the versions of the two services") from error


async def call_again(
    bus: Bus,
    endpoint: Endpoint[Q, R],
    request: Q,
    *,
    claims: str = "",
    timeout_s: float = 5.0,
    tries: int = 3,
) -> R:
    """`call`, repeated with growing pauses while the answer is `Unavailable`: for queries, and for commands that carry their own key."""
    for left in range(tries - 1, 0, -1):
        try:
            return await call(bus, endpoint, request, claims=claims, timeout_s=timeout_s)
        except Unavailable as error:
            LOG.info("a call is repeated", subject=endpoint.subject, code=error.code, left=left)
            await asyncio.sleep(min(error.retry_after_s, 1.0) * (0.1 + random.random()))
    return await call(bus, endpoint, request, claims=claims, timeout_s=timeout_s)


async def serve(
    bus: Bus,
    service: str,
    version: str,
    handlers: Mapping[Endpoint[Any, Any], Serve],
    *,
    verifier: Verifier,
    workers: int = 32,
    limit_s: float = HANDLER_LIMIT_S,
) -> Subscription:
    """Answer these endpoints as the micro service `service`, at most `workers` at once; several copies share the load."""
    for endpoint in handlers:
        assert endpoint.service == service, f"{endpoint.subject} is not {service}'s to serve"
    return await bus.serve(
        service,
        version,
        {endpoint.subject: _Endpoint(endpoint, handler, verifier, limit_s) for endpoint, handler in handlers.items()},
        workers=workers,
    )


@dataclass(frozen=True, slots=True)
class _Endpoint:
    endpoint: Endpoint[Any, Any]
    handler: Serve
    verifier: Verifier
    limit_s: float

    async def __call__(self, message: Message) -> bytes | Reply | None:
        began = asyncio.get_running_loop().time()
        service, verb = self.endpoint.service, self.endpoint.verb
        with tracing.span(f"serve {service}.{verb}", parent=message.headers.get(tracing.TRACEPARENT, "")):
            outcome = "ok"
            try:
                return encode(await self._handled(message))
            except IntertieError as error:
                outcome = kind_of(error)
                return _told(error)
            except Exception:
                outcome = "internal"
                LOG.exception("a call failed inside", subject=message.subject)
                return _told(IntertieError("internal", "something went wrong here; the trace id finds it in the logs"))
            finally:
                CALLS.inc(service=service, verb=verb, outcome=outcome)
                SECONDS.observe(asyncio.get_running_loop().time() - began, service=service, verb=verb)

    async def _handled(self, message: Message) -> Contract:
        signed = message.headers.get(CLAIMS, "")
        verified = self.verifier(signed) if signed else None
        caller = Caller(verified, tracing.trace_id(), signed)
        if self.endpoint.action is not None:
            _ = caller.claims
        request = decode(message.body, self.endpoint.request, what=f"the request to {message.subject}")
        try:
            async with asyncio.timeout(self.limit_s) as limit:
                reply: Contract = await self.handler(request, caller)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Unavailable("rpc.slow", f"{message.subject} took longer than {self.limit_s:g} s: it may have been done") from None
        wanted: type[Contract] = self.endpoint.reply
        assert isinstance(reply, wanted), f"{message.subject} answers {wanted.__name__}, not {type(reply).__name__}"
        return reply


def problem(error: IntertieError, trace_id: str = "") -> Problem:
    """The wire form of a known error; details that JSON cannot hold become text."""
    details: dict[str, Any] = msgspec.to_builtins(error.details, str_keys=True, enc_hook=str)
    return Problem(
        kind=kind_of(error),
        code=error.code,
        text=error.text[:4_000],
        next_step=error.next_step,
        details=details,
        trace_id=trace_id or tracing.trace_id(),
    )


def error_of(told: Problem) -> IntertieError:
    """The error that a `Problem` was. A kind that we do not know is `internal` here too."""
    kind = KINDS.get(told.kind, IntertieError)
    if kind is Unavailable:
        after = told.details.get("retry_after_s", 1.0)
        error: IntertieError = Unavailable(
            told.code, told.text, retry_after_s=float(after) if isinstance(after, int | float) else 1.0, next_step=told.next_step
        )
        error.details.update(told.details)
    else:
        error = kind(told.code, told.text, next_step=told.next_step, details=told.details)
    if told.trace_id:
        error.details.setdefault("trace_id", told.trace_id)
    return error


def _told(error: IntertieError) -> Reply:
    told = problem(error)
    return Reply(encode(told), {ERROR: error.code[:200], ERROR_CODE: _STATUS.get(told.kind, "500")})


def _raised(message: Message, subject: str) -> IntertieError:
    """An error answer: a `Problem`, or only the headers (a busy or crashed service, one that is not ours)."""
    code = message.headers.get(ERROR, "") or "internal"
    try:
        return error_of(decode(message.body, Problem))
    except Refused:
        pass
    match message.headers[ERROR_CODE]:
        case "503":
            return Unavailable(code, f"{subject} has too much to do", retry_after_s=0.5)
        case "413":
            return Refused(code, f"the answer of {subject} is too large", next_step="ask for less at once")
        case status:
            return IntertieError("internal", f"{subject} answered with error {status} {code}")
