"""The page of one job's story: server-rendered, Chinese and English, no script.

A reader signs in with a token, or comes by a link that the command line asked for: signed here, for one job, for twelve hours, and showing
no more than whoever made it may see.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zoneinfo import ZoneInfo

import msgspec
from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from intertie.bus import rpc
from intertie.bus.port import Bus
from intertie.clock import Clock
from intertie.contracts import endpoints as e
from intertie.contracts.http import Link
from intertie.contracts.identity import Authenticated
from intertie.contracts.job import AttemptRecord, JobQuery, JobRecord, Story
from intertie.contracts.usage import AttemptBook, BookQuery
from intertie.errors import IntertieError, Unauthenticated
from intertie.gateway.http import CALL_TIMEOUT_S, Door, json_response, status_of
from intertie.ids import JobId
from intertie.lifecycle import word
from intertie.observe import tracing
from intertie.rating.text import clause_in, formula_text
from intertie.text import Lang, accepted, say
from intertie.text.devices import use_lines
from intertie.text.native import native_words
from intertie.text.story import happened
from intertie.trust import rights

LINK_LIFE = timedelta(hours=12)
# Signed-in browsers; the oldest is signed out beyond it.
SESSIONS = 10_000
COOKIE = "intertie_session"
# Parts of a page that not everyone who may read a job may see, and the right that each needs: prices, and the log's last lines.
SHOWN = {"p": "statement.read", "l": "job.logs"}
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Pages:
    """`/jobs/{job}`, `/login`, and `POST /v1/jobs/{job}/link`."""

    def __init__(
        self, bus: Bus, door: Door, clock: Clock, *, own_claims: Callable[[], str], link_key: bytes, public_url: str, time_zone: str
    ) -> None:
        self._bus = bus
        self._door = door
        self._clock = clock
        self._own_claims = own_claims
        self._url = public_url.rstrip("/")
        self._zone = ZoneInfo(time_zone)
        self._link_key = link_key
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._templates = Environment(
            loader=PackageLoader("intertie.gateway"), autoescape=select_autoescape(), undefined=StrictUndefined, trim_blocks=True
        )

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/jobs/{job}", self.job)
        app.router.add_get("/login", self.login)
        app.router.add_post("/login", self.sign_in)
        app.router.add_post("/v1/jobs/{job}/link", self.link)
        app.router.add_static("/static/", Path(__file__).parent / "static")

    async def link(self, request: web.Request) -> web.Response:
        """A link to one job's page, for whoever may read the job."""
        who = await self._door.caller(request)
        job = JobId(request.match_info["job"])
        record = await rpc.call(self._bus, e.JOB, JobQuery(job=job), claims=who.signed, timeout_s=CALL_TIMEOUT_S)
        shows = "".join(letter for letter, action in SHOWN.items() if rights.allowed(who.claims, action, tenant=record.tenant))
        expires = self._clock.now() + LINK_LIFE
        ticket = self._ticket(job, int(expires.timestamp()), shows)
        return json_response(Link(url=f"{self._url}/jobs/{job}?view={ticket}", expires_at=expires), status=201)

    def _ticket(self, job: JobId, end: int, shows: str) -> str:
        """`<end>.<shows>.<proof>`: whoever holds it may read this job until then, with what these letters of `SHOWN` stand for."""
        proof = hmac.digest(self._link_key, f"{job} {end} {shows}".encode(), "sha256")[:16]
        return f"{end:x}.{shows}.{base64.urlsafe_b64encode(proof).decode('ascii').rstrip('=')}"

    async def login(self, request: web.Request) -> web.Response:
        return self._html("login.html", request, next=_local(request.query.get("next", "/")), wrong=False)

    async def sign_in(self, request: web.Request) -> web.Response:
        """Take a token, give a session cookie; the token itself never goes back to the browser."""
        form = await request.post()
        token, target = str(form.get("token", "")).strip(), _local(str(form.get("next", "/")))
        try:
            await self._door.of_token(token)
        except Unauthenticated:
            return self._html("login.html", request, status=401, next=target, wrong=True)
        session = secrets.token_urlsafe(32)
        self._sessions[session] = token
        while len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        response = web.HTTPSeeOther(target)
        response.set_cookie(COOKIE, session, httponly=True, samesite="Strict", secure=request.secure, path="/")
        raise response

    async def job(self, request: web.Request) -> web.Response:
        """The story of one job, with its books and formulas."""
        job = JobId(request.match_info["job"])
        reader = await self._reader(request, job)
        if reader is None:
            raise web.HTTPSeeOther(f"/login?next={quote(request.path_qs, safe='')}")
        claims, shows = reader
        try:
            story = await rpc.call(self._bus, e.STORY, JobQuery(job=job), claims=claims, timeout_s=CALL_TIMEOUT_S)
            books = await self._books(story.job, claims)
            if "p" not in shows:
                books = {name: msgspec.structs.replace(book, charges=[]) for name, book in books.items()}
            if "l" not in shows:
                story = msgspec.structs.replace(story, job=silenced(story.job))
        except IntertieError as err:
            return self._html(
                "error.html",
                request,
                status=status_of(err),
                text=err.text,
                next_step=err.next_step,
                code=err.code,
                trace_id=tracing.trace_id(),
            )
        return self._html("job.html", request, **self._view(story, books, self._lang(request)))

    async def _reader(self, request: web.Request, job: JobId) -> tuple[str, str] | None:
        """Signed claims to read this job with, and what of `SHOWN` may be shown: by the link, by the session (its claims decide, so all); None to
        sign in first."""
        if ticket := request.query.get("view"):
            end, _, shows = ticket.rpartition(".")[0].partition(".")
            if re.fullmatch(r"[0-9a-f]{1,12}", end) and int(end, 16) > self._clock.now().timestamp():
                if hmac.compare_digest(ticket.encode(), self._ticket(job, int(end, 16), shows).encode()):
                    return self._own_claims(), shows
        if session := self._sessions.get(request.cookies.get(COOKIE, "")):
            try:
                who: Authenticated = await self._door.of_token(session)
                return who.signed, "".join(SHOWN)
            except Unauthenticated:
                return None
        return None

    async def _books(self, job: JobRecord, claims: str) -> dict[str, AttemptBook]:
        """Metering's books by attempt; none if metering is away: the page is the story first."""
        if not job.attempts:
            return {}
        try:
            query = BookQuery(attempts=[a.attempt for a in job.attempts][-500:])
            reply = await rpc.call(self._bus, e.BOOKS, query, claims=claims, timeout_s=CALL_TIMEOUT_S)
        except IntertieError:
            return {}
        return {book.attempt: book for book in reply.books}

    def _view(self, story: Story, books: dict[str, AttemptBook], lang: Lang) -> dict[str, Any]:
        job = story.job
        return {
            "job": job,
            "word": word(job.state, site_silent=job.site_silent_since is not None),
            "asked": asked(job),
            "attempts": [attempt_view(a, books.get(a.attempt), lang) for a in job.attempts],
            "lines": story.lines,
            "has_result": any(a.result for a in job.attempts),
        }

    def _lang(self, request: web.Request) -> Lang:
        chosen = request.query.get("lang", "")
        if chosen in ("zh", "en"):
            return "zh" if chosen == "zh" else "en"
        return accepted(request.headers.get("Accept-Language", ""))

    def _html(self, template: str, request: web.Request, *, status: int = 200, **values: Any) -> web.Response:
        lang = self._lang(request)
        other = request.rel_url.update_query(lang="en" if lang == "zh" else "zh") if request.method == "GET" else ""
        text = self._templates.get_template(template).render(
            lang=lang,
            other_language=str(other),
            t=lambda key, **v: say(key, lang, **v),
            happened=lambda what: happened(what, lang),
            moment=partial(moment, zone=self._zone),
            native_words=native_words,
            **values,
        )
        return web.Response(text=text, content_type="text/html", charset="utf-8", status=status, headers=SECURITY_HEADERS)


def silenced(job: JobRecord) -> JobRecord:
    """The job without what it printed."""
    return msgspec.structs.replace(job, attempts=[msgspec.structs.replace(attempt, log_tail="") for attempt in job.attempts])


def asked(job: JobRecord) -> str:
    """What a job asked for, in one line."""
    r = job.spec.resources
    image = f" · {job.spec.image}" if job.spec.image else ""
    if r.gpus:
        memory = f" ≥ {r.gpu_memory_mib} MiB" if r.gpu_memory_mib else ""
        return f"{r.gpus} × {r.gpu_model or 'GPU'}{memory} · {job.spec.wall_s} s{image}"
    return f"{r.slots} × CPU slot · {job.spec.wall_s} s{image}"


def seconds(us: int) -> str:
    """Seconds with milliseconds, from microseconds."""
    return f"{Decimal(us) / 1_000_000:.3f}"


def attempt_view(record: AttemptRecord, book: AttemptBook | None, lang: Lang) -> dict[str, Any]:
    """One attempt: its three books side by side, and each amount with its formula."""
    rows: list[tuple[str, str]] = []
    if book is not None and record.ended_at is not None and record.started_at is not None:
        span_us = round((record.ended_at - record.started_at).total_seconds() * 1_000_000)
        every = (record.ran_us, span_us, book.run_us)
        rows = [
            ("site", seconds(record.ran_us)),
            ("scheduler", seconds(span_us)),
            ("metering", seconds(book.run_us)),
            ("difference", seconds(max(every) - min(every))),
        ]
    formulas = [
        {
            "text": formula_text(charge.formula, lang),
            "clause": clause_in(charge.formula.clause, lang),
            "payer": charge.payer,
            "islanded": charge.islanded,
        }
        for charge in (book.charges if book else [])
    ]
    return {
        "record": record,
        "books": rows,
        "formulas": formulas,
        "missing": book.missing if book and not book.complete else "",
        "use": use_lines(record.device_use, lang),
    }


def moment(at: datetime, zone: ZoneInfo) -> str:
    """A moment in the hub's settlement time zone, to the second, with its offset."""
    return at.astimezone(zone).strftime("%Y-%m-%d %H:%M:%S %z")


def _local(target: str) -> str:
    """A path on this host, or `/`: a sign-in must not send people elsewhere."""
    return target if target.startswith("/") and not target.startswith(("//", "/\\")) else "/"
