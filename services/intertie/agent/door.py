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
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path

from aiohttp import web

from intertie.agent import accounts
from intertie.agent.core import logs, usage
from intertie.agent.core.model import Attempt, State
from intertie.agent.site import Site
from intertie.contracts.base import Problem, decode, encode
from intertie.contracts.local import LocalJob, LocalJobs, LocalLog, LocalStatus, LocalSubmit
from intertie.errors import Denied, IntertieError, NotFound, Refused, Unavailable, kind_of
from intertie.observe import log

LOG = log.get("agent.door")

# A script of 128 KiB and an environment; a request larger than this is a mistake.
REQUEST_BYTES = 1024 * 1024
LOG_BYTES = 128 * 1024
LISTED = 500
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


def peer_uid(request: web.Request) -> int:
    """The uid at the other end of the socket, as the kernel knows it."""
    assert request.transport is not None
    end = request.transport.get_extra_info("socket")
    with socket.socket(fileno=os.dup(end.fileno())) as same:
        _, uid, _ = struct.unpack("3i", same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


class Door:
    """`status` fills what the site itself does not know (lanes, versions)."""

    def __init__(self, site: Site, status: Callable[[], Awaitable[LocalStatus]]) -> None:
        self._site, self._status = site, status

    def application(self) -> web.Application:
        app = web.Application(client_max_size=REQUEST_BYTES, middlewares=[_problems])
        app.router.add_post("/v1/jobs", self._submit)
        app.router.add_get("/v1/jobs", self._jobs)
        app.router.add_get("/v1/jobs/{job}", self._job)
        app.router.add_get("/v1/jobs/{job}/log", self._log)
        app.router.add_post("/v1/jobs/{job}/cancel", self._cancel)
        app.router.add_get("/v1/status", self._say_status)
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

    async def _submit(self, request: web.Request) -> web.Response:
        uid, _ = self._caller(request)
        asked = decode(await request.read(), LocalSubmit, what="local job")
        if asked.as_user:
            if uid != 0:
                raise Denied("agent.as_user", "only root may run a local job as another user")
            account = accounts.by_name(asked.as_user)
            if account is None:
                raise Refused("agent.as_user", f"there is no user {asked.as_user!r} here")
            uid = account.uid
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
        return _json(_told(job), status=201)

    async def _jobs(self, request: web.Request) -> web.Response:
        uid, everyone = self._caller(request)
        return _json(LocalJobs(jobs=[_told(job) for job in self._mine(uid, everyone)]))

    def _mine(self, uid: int, everyone: bool) -> Sequence[Attempt]:
        found = [a for a in self._site.books.attempts.values() if a.local is not None and (everyone or a.local.uid == uid)]
        return sorted(found, key=lambda a: a.id, reverse=True)[:LISTED]

    async def _job(self, request: web.Request) -> web.Response:
        uid, everyone = self._caller(request)
        return _json(_told(self._site.owner.job(request.match_info["job"], uid, everyone=everyone)))

    async def _log(self, request: web.Request) -> web.Response:
        uid, everyone = self._caller(request)
        job = self._site.owner.job(request.match_info["job"], uid, everyone=everyone)
        offset = request.query.get("offset", "0")
        if not offset.isdigit():
            raise Refused("agent.offset", f"offset {offset[:20]!r} is not a number of bytes")
        return _json(await read_log(self._site, job, int(offset), LOG_BYTES))

    async def _cancel(self, request: web.Request) -> web.Response:
        uid, everyone = self._caller(request)
        return _json(_told(await self._site.owner.cancel(request.match_info["job"], uid, everyone=everyone)))

    async def _say_status(self, request: web.Request) -> web.Response:
        self._caller(request)
        return _json(await self._status())


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


def _told(job: Attempt) -> LocalJob:
    assert job.local is not None
    ended = job.ended
    return LocalJob(
        job=job.job,
        name=job.spec.name,
        user=job.local.user,
        word=WORDS[job.state],
        pool=job.pool,
        devices=list(job.devices),
        submitted=job.local.submitted,
        started=_started(job),
        ended=ended.ended if ended else None,
        outcome=ended.outcome if ended else None,
        exit_code=ended.exit_code if ended else None,
        reason=ended.reason if ended else "",
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
