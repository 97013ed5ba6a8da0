"""HTTP around the table of routes: who asks, how an error looks (RFC 9457), how a request becomes one call on the bus."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from datetime import timedelta
from http import HTTPStatus
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from intertie.bus import rpc
from intertie.bus.port import Bus
from intertie.clock import Clock
from intertie.contracts import endpoints as e
from intertie.contracts.base import Contract, encode
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.http import SubmitBody, Whoami
from intertie.contracts.identity import Authenticate, Authenticated, AuthenticateSite
from intertie.contracts.usage import Statement, StatementQuery
from intertie.errors import (
    Conflict,
    Denied,
    IntertieError,
    NotFound,
    Refused,
    Stale,
    Unauthenticated,
    Unavailable,
    kind_of,
)
from intertie.gateway.objects import ObjectStore
from intertie.gateway.routes import ROUTES, Parts, Route, statement_query
from intertie.observe import log as logs
from intertie.observe import tracing
from intertie.rating.export import statement_csv

log = logs.get("gateway")

Q = TypeVar("Q", bound=Contract)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# A request on the bus may carry 1 MiB with its headers; what is larger belongs into a work pack.
BODY_BYTES = 512 * 1024
# Longer than a service's own database limit (5 s), so that its answer, not our impatience, is what the caller reads.
CALL_TIMEOUT_S = 8.0
# A page is up to 512 KiB of lines; this many is some 100,000 jobs in one answer.
STATEMENT_PAGES = 200
# Tokens whose claims are remembered until shortly before they end; one entry is some 500 bytes.
CLAIMS_CACHE = 10_000

STATUS: dict[type[IntertieError], int] = {
    Refused: 422,
    NotFound: 404,
    Denied: 403,
    Unauthenticated: 401,
    Conflict: 409,
    Unavailable: 503,
    Stale: 409,
}
# Refusals about the shape of a request are the client's mistake, not a rule of ours.
BAD_REQUEST = ("contract.", "http.", "name.")


def status_of(error: IntertieError) -> int:
    """The HTTP status of a known error."""
    if error.code.endswith(".too_large"):
        return 413
    if error.code == "http.method":
        return 405
    if type(error) is Refused and error.code.startswith(BAD_REQUEST):
        return 400
    return STATUS.get(type(error), 500)


def problem(error: BaseException, trace_id: str) -> web.Response:
    """RFC 9457 `application/problem+json`: type is the code, `next_step` says what to do; the unknown is `internal` with its trace id."""
    if isinstance(error, IntertieError):
        status, code, text, next_step, details = status_of(error), error.code, error.text, error.next_step, error.details
    else:
        status, code, text, next_step, details = (
            500,
            "internal",
            "something went wrong on our side",
            "give the trace id to the operator",
            {},
        )
    body = {
        "type": f"urn:intertie:error:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": text,
        "code": code,
        "kind": kind_of(error),
        "next_step": next_step,
        "details": details,
        "trace_id": trace_id,
    }
    headers = {"X-Trace-Id": trace_id}
    if isinstance(error, Unavailable):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="intertie"'
    return web.Response(status=status, body=encode(body), content_type="application/problem+json", headers=headers)


@web.middleware
async def errors_and_trace(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One span per request; every error as a problem, none as a traceback."""
    resource = request.match_info.route.resource
    route = resource.canonical if resource else "unmatched"
    trace_id = ""
    try:
        with tracing.span(f"{request.method} {route}", {"http.route": route}, parent=request.headers.get("traceparent")):
            trace_id = tracing.trace_id()
            response = await handler(request)
    except web.HTTPException as err:
        if err.status < 400:
            raise
        return problem(_http_error(err, request), trace_id)
    except IntertieError as err:
        return problem(err, trace_id)
    except ConnectionError:
        raise
    except (HttpProcessingError, web.RequestPayloadError):
        text = f"{request.method} {request.path[:200]}: the body cannot be read as its headers say"
        return problem(Refused("http.bad_request", text), trace_id)
    except Exception as err:
        log.exception("request failed", route=route, trace=trace_id)
        return problem(err, trace_id)
    if not response.prepared:
        response.headers["X-Trace-Id"] = trace_id
    return response


def _http_error(err: web.HTTPException, request: web.Request) -> IntertieError:
    if err.status == 404:
        return NotFound("http.not_found", f"there is nothing at {request.path[:200]}", next_step="GET /openapi.json lists what there is")
    code = {405: "http.method", 413: "http.too_large"}.get(err.status, "http.bad_request")
    return Refused(code, f"{request.method} {request.path[:200]}: {err.reason}")


class Door:
    """Turns a token into signed claims, and remembers them for most of their life."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._known: OrderedDict[bytes, Authenticated] = OrderedDict()

    async def caller(self, request: web.Request) -> Authenticated:
        """Who sends this request: `Authorization: Bearer <token>` for people, `Intertie-Site <JWT>` for agents."""
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        secret = secret.strip()
        if not secret.isascii():
            raise Unauthenticated("http.bad_token", "what stands in the Authorization header is no token of ours")
        if scheme.lower() == "bearer" and secret:
            return await self.of_token(secret)
        if scheme.lower() == "intertie-site" and secret:
            return await self._ask(e.AUTHENTICATE_SITE, AuthenticateSite(signed=secret), secret)
        raise Unauthenticated(
            "http.no_token",
            "this needs a token in the Authorization header",
            next_step="intertie login, or set INTERTIE_TOKEN",
        )

    async def of_token(self, token: str) -> Authenticated:
        """Claims of an API token."""
        return await self._ask(e.AUTHENTICATE, Authenticate(token=token), token)

    async def _ask(self, endpoint: Endpoint[Q, Authenticated], question: Q, secret: str) -> Authenticated:
        key = hashlib.sha256(secret.encode()).digest()
        soon = (self._clock.now() + timedelta(seconds=30)).timestamp()
        known = self._known.get(key)
        if known is not None and known.claims.exp > soon:
            self._known.move_to_end(key)
            return known
        answer = await rpc.call(self._bus, endpoint, question, claims="", timeout_s=CALL_TIMEOUT_S)
        self._known[key] = answer
        while len(self._known) > CLAIMS_CACHE:
            self._known.popitem(last=False)
        return answer


class Api:
    """Serves `ROUTES` and the statement."""

    def __init__(self, bus: Bus, door: Door, objects: ObjectStore) -> None:
        self._bus = bus
        self._door = door
        self._objects = objects

    def add_to(self, app: web.Application) -> None:
        for route in ROUTES:
            app.router.add_route(route.method, route.path, self._handler(route))
        app.router.add_get("/v1/statements", self.statement)
        app.router.add_get("/v1/whoami", self.whoami)

    def _handler(self, route: Route) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            who = None if route.anonymous else await self._door.caller(request)
            parts = await read_parts(request, who)
            if route.endpoint is e.SUBMIT:
                await self._require_work(parts.parse(SubmitBody))
            reply = await rpc.call(
                self._bus, route.endpoint, route.build(parts), claims=who.signed if who else "", timeout_s=CALL_TIMEOUT_S
            )
            status = 200 if getattr(reply, "repeated", False) or _dry(route, parts) else route.status
            return json_response(reply, status=status)

        return handle

    async def _require_work(self, body: SubmitBody) -> None:
        """A job's work pack is here, as large as it says: at a site a pack that cannot be had would look like the site's fault."""
        work = body.spec.work
        if work is None:
            return
        size = await self._objects.size(work.digest)
        if size is None and not body.dry_run:
            raise Refused(
                "job.work_missing", f"no work pack {work.digest} is stored here", next_step=f"PUT /v1/objects/{work.digest} first"
            )
        if size is not None and size != work.size:
            raise Refused("job.work_size", f"the work pack {work.digest} has {size} bytes, not {work.size}")

    async def _whole_statement(self, query: StatementQuery, claims: str) -> Statement:
        """All pages of a statement; the bus carries them one by one. `Refused('statement.too_large')` beyond the last page we hold."""
        pages: list[Statement] = []
        while len(pages) < STATEMENT_PAGES:
            page = await rpc.call(self._bus, e.STATEMENT, query, claims=claims, timeout_s=CALL_TIMEOUT_S)
            pages.append(page)
            if not page.more_after:
                return _joined(pages)
            query = msgspec.structs.replace(query, after=page.more_after)
        raise Refused("statement.too_large", f"the statement has more than {STATEMENT_PAGES} pages of jobs")

    async def whoami(self, request: web.Request) -> web.Response:
        """Whom the token speaks for."""
        claims = (await self._door.caller(request)).claims
        return json_response(Whoami(name=claims.name, roles=claims.roles, tenant=claims.tenant, site=claims.site))

    async def statement(self, request: web.Request) -> web.Response:
        """A statement as JSON, or as CSV with `format=csv` (header language by `lang`)."""
        who = await self._door.caller(request)
        form = request.query.get("format", "json")
        if form not in ("json", "csv"):
            raise Refused("http.query", f"query parameter format={form[:40]!r} is neither json nor csv")
        query = statement_query(await read_parts(request, who))
        statement = await self._whole_statement(query, who.signed)
        if form == "json":
            return json_response(statement)
        text = statement_csv(statement, request.query.get("lang", "en"))
        name = f"statement-{statement.tenant}-{statement.period}.csv"
        return web.Response(
            body=text.encode(),
            content_type="text/csv",
            charset="utf-8",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )


def _joined(pages: list[Statement]) -> Statement:
    """One statement of its pages; every page carries the sums of the whole."""
    return msgspec.structs.replace(pages[-1], lines=[line for page in pages for line in page.lines], more_after="")


def _dry(route: Route, parts: Parts) -> bool:
    return route.endpoint is e.SUBMIT and parts.parse(SubmitBody).dry_run


async def read_parts(request: web.Request, who: Authenticated | None) -> Parts:
    """The request as the routes need it; the body is bounded."""
    if request.content_length is not None and request.content_length > BODY_BYTES:
        raise Refused("http.too_large", f"a request body may hold {BODY_BYTES} bytes", next_step="put files into the work folder")
    body = await request.content.read(BODY_BYTES + 1) if request.can_read_body else b""
    while request.can_read_body and len(body) <= BODY_BYTES and not request.content.at_eof():
        body += await request.content.read(BODY_BYTES + 1 - len(body))
    if len(body) > BODY_BYTES:
        raise Refused("http.too_large", f"a request body may hold {BODY_BYTES} bytes", next_step="put files into the work folder")
    key = request.headers.get("Idempotency-Key", "")
    if len(key) > 128 or not key.isascii():
        raise Refused("http.idempotency_key", "an Idempotency-Key may have 128 characters of ASCII")
    return Parts(
        path=dict(request.match_info),
        query=dict(request.query),
        body=body,
        idempotency_key=key,
        tenant=who.claims.tenant if who else None,
    )


def json_response(reply: msgspec.Struct, *, status: int = 200) -> web.Response:
    """A contract as JSON."""
    return web.Response(status=status, body=encode(reply), content_type="application/json")
