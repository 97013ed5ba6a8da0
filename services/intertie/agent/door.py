"""The owner's door: HTTP over the unix socket `agent.sock`. Works with hub, bus and network gone.

Who calls is what the kernel says of the other end (SO_PEERCRED), never what a request claims. Root and the agent's own user see everybody's
local work; others their own. A job runs as its caller; only root may name another user. The messages are `contracts.local`.
"""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path

import msgspec
from aiohttp import web

from intertie.agent import accounts, preview
from intertie.agent.core import logs, usage
from intertie.agent.core.model import OPEN, Attempt, State
from intertie.agent.grants import TakenBy
from intertie.agent.leave import Leaving
from intertie.agent.site import Site
from intertie.contracts.base import Problem, decode, encode, place_of_nul
from intertie.contracts.job import JobSpec, Resources
from intertie.contracts.local import (
    LentWork,
    LocalJob,
    LocalJobs,
    LocalLeave,
    LocalLog,
    LocalPause,
    LocalReclaim,
    LocalStatus,
    LocalSubmit,
)
from intertie.errors import Denied, IntertieError, NotFound, Refused, Unavailable, kind_of
from intertie.ids import AttemptId
from intertie.observe import log

LOG = log.get("agent.door")

# A script of 128 KiB and an environment; a request larger than this is a mistake.
REQUEST_BYTES = 1024 * 1024
LOG_BYTES = 128 * 1024
LISTED = 500
# No log is longer than a 64-bit number says.
OFFSET_DIGITS = 18
# Of a tenant's work that names no limit: what a hub would give it.
TENANT_WALL_S = 3_600
GROUP = "intertie"
"""Members may use the door of a root agent, if the group exists; else root alone."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

WORDS = {
    State.WAITING: "waiting",
    State.CLAIMED: "preparing",
    State.STAGING: "preparing",
    State.RUNNING: "running",
    State.ENDED: "ended",
    State.NOT_STARTED: "ended",
    State.REFUSED: "ended",
}


def refuse_nul(asked: object) -> None:
    """Nothing that is asked here carries a NUL: neither an argument, a path and an account, nor what the hub is told of it."""
    if place := place_of_nul(asked):
        raise Refused("local.nul", f"{place} holds a NUL character", next_step="leave it out; binary content belongs into a file")


def peer_uid(request: web.Request) -> int:
    """The uid at the other end of the socket, as the kernel knows it."""
    assert request.transport is not None
    end = request.transport.get_extra_info("socket")
    with socket.socket(fileno=os.dup(end.fileno())) as same:
        _, uid, _ = struct.unpack("3i", same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


class Door:
    """`status` fills what the site itself does not know (lanes, versions). `leaving` is the way out of the federation, `end` ends the agent."""

    def __init__(
        self,
        site: Site,
        status: Callable[[], Awaitable[LocalStatus]],
        leaving: Leaving | None = None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._site, self._status, self._leaving, self._end_agent = site, status, leaving, end
        self.also: Callable[[web.Application, Callable[[web.Request], tuple[int, bool]]], None] = lambda app, caller: None
        """Adds routes of another room, which asks `caller` who asks."""

    def application(self) -> web.Application:
        app = web.Application(client_max_size=REQUEST_BYTES, middlewares=[_problems])
        app.router.add_post("/v1/jobs", self._submit)
        app.router.add_get("/v1/jobs", self._jobs)
        app.router.add_get("/v1/jobs/{job}", self._job)
        app.router.add_get("/v1/jobs/{job}/log", self._log)
        app.router.add_post("/v1/jobs/{job}/cancel", self._cancel)
        app.router.add_get("/v1/status", self._say_status)
        self.also(app, self._caller)
        app.router.add_post("/v1/pause", self._pause)
        app.router.add_post("/v1/resume", self._resume)
        app.router.add_post("/v1/lent/{attempt}/reclaim", self._reclaim)
        app.router.add_get("/v1/statement", self._statement)
        app.router.add_post("/v1/leave", self._leave)
        app.router.add_get("/v1/leave", self._say_leaving)
        app.router.add_post("/v1/leave/end", self._end)
        return app

    async def open(self, path: Path) -> web.AppRunner:
        """Listen; `await runner.cleanup()` closes. A socket left by a killed agent is taken over (the caller holds the folder's lock)."""
        if len(os.fsencode(path)) > 107:
            raise Refused(
                "agent.socket_path", f"{path} is longer than a unix socket's name may be (107 bytes)", next_step="choose a shorter --data"
            )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        runner = web.AppRunner(self.application(), access_log=None)
        await runner.setup()
        # Nobody may connect between bind and chmod.
        before = os.umask(0o177)
        try:
            await web.UnixSite(runner, str(path)).start()
        finally:
            os.umask(before)
        if accounts.is_root():
            try:
                os.chown(path, 0, grp.getgrnam(GROUP).gr_gid)
            except KeyError:
                LOG.info("only root may use the door", group=GROUP, next_step=f"groupadd {GROUP} and start again, to let its members in")
        os.chmod(path, 0o660)
        return runner

    def _caller(self, request: web.Request) -> tuple[int, bool]:
        """(uid, may see everybody's). A single-user agent serves its own user and root alone: its jobs run as that user."""
        uid = peer_uid(request)
        everyone = uid in (0, os.geteuid())
        if self._site.adapter.single_user and not everyone:
            raise Denied("agent.single_user", "this agent is not root and serves only the user it runs as")
        return uid, everyone

    def _owner(self, request: web.Request) -> str:
        """The name of the caller, who must be root or the agent's own user: what concerns the whole site is theirs alone."""
        uid, everyone = self._caller(request)
        if not everyone:
            raise Denied("agent.owner_only", "only root and the agent's own user may do this", next_step="call it with sudo")
        account = accounts.by_uid(uid)
        return account.name if account is not None else str(uid)

    async def _submit(self, request: web.Request) -> web.Response:
        uid, _ = self._caller(request)
        asked = decode(await request.read(), LocalSubmit, what="local job")
        # The owner's own script may hold what it likes; a tenant's becomes a job of the hub's, by the hub's rules.
        refuse_nul(asked if asked.tenant is not None else msgspec.structs.replace(asked, script=""))
        if asked.as_user:
            if uid != 0:
                raise Denied("agent.as_user", "only root may run a local job as another user")
            account = accounts.by_name(asked.as_user)
            if account is None:
                raise Refused("agent.as_user", f"there is no user {asked.as_user!r} here")
            uid = account.uid
        if asked.tenant is not None:
            wanted = Resources(gpus=asked.gpus, slots=asked.slots)
            spec = JobSpec(name=asked.name, script=asked.script, resources=wanted, wall_s=asked.wall_s or TENANT_WALL_S)
            taken = await self._site.grants.submit(tenant=asked.tenant, spec=spec, env=asked.env, uid=uid)
            return _json(self._told(taken), status=201)
        job = await self._site.owner.submit(
            name=asked.name,
            script=asked.script,
            env=asked.env,
            cwd=asked.cwd,
            uid=uid,
            slots=asked.slots,
            gpus=asked.gpus,
            wall_s=asked.wall_s,
        )
        return _json(self._told(job), status=201)

    async def _jobs(self, request: web.Request) -> web.Response:
        uid, everyone = self._caller(request)
        return _json(LocalJobs(jobs=[self._told(job) for job in self._site.owner.jobs(uid, everyone=everyone)[:LISTED]]))

    def _told(self, job: Attempt) -> LocalJob:
        return told(job, self._site.grants.taken.get(job.id))

    async def _job(self, request: web.Request) -> web.Response:
        uid, everyone = self._caller(request)
        return _json(self._told(self._site.owner.job(request.match_info["job"], uid, everyone=everyone)))

    async def _log(self, request: web.Request) -> web.Response:
        uid, everyone = self._caller(request)
        job = self._site.owner.job(request.match_info["job"], uid, everyone=everyone)
        offset = request.query.get("offset", "0")
        if not (offset.isascii() and offset.isdigit() and len(offset) <= OFFSET_DIGITS):
            raise Refused("agent.offset", f"offset {offset[:20]!r} is not a number of bytes")
        return _json(await read_log(self._site, job, int(offset), LOG_BYTES))

    async def _cancel(self, request: web.Request) -> web.Response:
        uid, everyone = self._caller(request)
        return _json(self._told(await self._site.owner.cancel(request.match_info["job"], uid, everyone=everyone)))

    async def _say_status(self, request: web.Request) -> web.Response:
        uid, everyone = self._caller(request)
        status = await self._status()
        own = [self._told(job) for job in self._site.owner.jobs(uid, everyone=everyone) if job.state in OPEN or job.state is State.WAITING]
        return _json(msgspec.structs.replace(status, local=own[:LISTED]))

    # --- the owner's own ---

    async def _pause(self, request: web.Request) -> web.Response:
        by = self._owner(request)
        asked = decode(await request.read() or b"{}", LocalPause, what="pause")
        refuse_nul(asked)
        await self._site.pause.press(until=asked.until, by=by, reason=asked.reason)
        return _json(self._site.pause.told())

    async def _resume(self, request: web.Request) -> web.Response:
        if self._leaving is not None and self._leaving.told.step != "none":
            raise Refused("pause.leaving", "this site is leaving the federation", next_step="intertie site leave goes on with it")
        await self._site.pause.resume(by=self._owner(request))
        return _json(self._site.pause.told())

    async def _reclaim(self, request: web.Request) -> web.Response:
        by = self._owner(request)
        asked = decode(await request.read(), LocalReclaim, what="reclaim")
        refuse_nul(asked)
        name = AttemptId(request.match_info["attempt"])
        return _json(lent(await self._site.pause.reclaim(name, by=by, reason=asked.reason, grace_s=asked.grace_s), self._site))

    async def _statement(self, request: web.Request) -> web.Response:
        self._owner(request)
        return _json(await preview.statement(self._site, request.query.get("period", "")))

    def _way_out(self) -> Leaving:
        if self._leaving is None:
            raise Unavailable("leave.not_ready", "the agent is not ready to leave", retry_after_s=1)
        return self._leaving

    async def _leave(self, request: web.Request) -> web.Response:
        by = self._owner(request)
        asked = decode(await request.read() or b"{}", LocalLeave, what="leave")
        refuse_nul(asked)
        return _json(await self._way_out().begin(now=asked.now, reason=asked.reason, by=by))

    async def _say_leaving(self, request: web.Request) -> web.Response:
        self._owner(request)
        return _json(self._way_out().told)

    async def _end(self, request: web.Request) -> web.Response:
        """After the leaving, and not before: there is nothing left for an agent to do."""
        self._owner(request)
        told = self._way_out().told
        if told.step != "left":
            raise Refused("leave.not_left", "this site has not left the federation", next_step="intertie site leave")
        self._end_agent()
        return _json(told)


async def read_log(site: Site, job: Attempt, offset: int, limit: int) -> LocalLog:
    """Whole characters from `offset` (BR-140); a fragment at the end is held back while more may come."""
    over = job.state not in (State.WAITING, State.CLAIMED, State.STAGING, State.RUNNING)
    before = min(logs.LOOK_BACK, offset)
    chunk = await site.adapter.log(job.id, offset - before, limit + before)
    before = min(before, len(chunk.data))
    at = chunk.offset + before
    complete = over and chunk.offset + len(chunk.data) >= chunk.total
    piece = logs.cut(chunk.data, before, at, complete=complete)
    ended = over and piece.next_offset >= chunk.total
    return LocalLog(offset=piece.offset, next_offset=piece.next_offset, text=piece.text, total=chunk.total, ended=ended)


def lent(attempt: Attempt, site: Site) -> LentWork:
    """Federation work as the owner sees it."""
    word = "ending" if attempt.stop is not None and attempt.state in OPEN else WORDS[attempt.state]
    return LentWork(
        attempt=attempt.id,
        job=attempt.job,
        pool=attempt.pool,
        devices=list(attempt.devices),
        word=word,
        started=usage.utc_of(attempt.started.utc_ns) if attempt.started else None,
        by_allowance=attempt.id in site.grants.taken,
    )


def told(job: Attempt, taken: TakenBy | None) -> LocalJob:
    """A local job, or a tenant's that was taken here (`taken`: by whom)."""
    by = job.local or taken
    assert by is not None, f"{job.id} is the hub's"
    ended, never = job.ended, job.refusal if job.state is State.NOT_STARTED else None
    return LocalJob(
        job=job.job,
        name=job.spec.name,
        user=by.user,
        tenant=job.tenant if taken is not None else None,
        word=WORDS[job.state],
        pool=job.pool,
        devices=list(job.devices),
        submitted=by.submitted,
        started=_started(job),
        ended=ended.ended if ended else None,
        outcome=ended.outcome if ended else "failed" if never else None,
        exit_code=ended.exit_code if ended else None,
        reason=ended.reason if ended else never.text if never else "",
        ran_us=ended.ran_us if ended else 0,
    )


def _started(job: Attempt) -> datetime | None:
    return usage.utc_of(job.started.utc_ns) if job.started else None


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), status=status, content_type="application/json")


STATUS: tuple[tuple[type[IntertieError], int], ...] = ((NotFound, 404), (Denied, 403), (Unavailable, 503), (Refused, 400))


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except IntertieError as err:
        status = next((number for kind, number in STATUS if isinstance(err, kind)), 409)
        problem = Problem(kind=kind_of(err), code=err.code, text=err.text, next_step=err.next_step, details=err.details)
        return _json(problem, status=status)
