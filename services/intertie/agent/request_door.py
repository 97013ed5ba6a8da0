"""The owner's door to job requests: what waits, yes, and no with a reason. Root and the agent's own user decide; nobody else of this machine."""

from __future__ import annotations

import pwd
from collections.abc import Callable

from aiohttp import web

from intertie.agent.requests import Requests
from intertie.contracts.base import decode, encode, place_of_nul
from intertie.contracts.offerings import LocalDecline, LocalRequests
from intertie.errors import Denied, Refused
from intertie.ids import AttemptId

Caller = Callable[[web.Request], tuple[int, bool]]
"""The uid at the other end, and whether it may see everybody's."""


def mount(requests: Requests, app: web.Application, caller: Caller) -> None:
    """Add the routes to the door's application."""

    def owner(request: web.Request) -> str:
        uid, everyone = caller(request)
        if not everyone:
            raise Denied("requests.owner_only", "only root and the agent's own user answer job requests", next_step="call it with sudo")
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return str(uid)

    async def listed(request: web.Request) -> web.Response:
        owner(request)
        found = requests.listed()
        return _json(LocalRequests(requests=found, count=len(found)))

    async def accept(request: web.Request) -> web.Response:
        by = owner(request)
        return _json(await requests.accept(AttemptId(request.match_info["attempt"]), by=by))

    async def decline(request: web.Request) -> web.Response:
        by = owner(request)
        asked = decode(await request.read(), LocalDecline, what="decline")
        if place := place_of_nul(asked):
            raise Refused("local.nul", f"{place} holds a NUL character", next_step="leave it out")
        return _json(await requests.decline(AttemptId(request.match_info["attempt"]), by=by, reason=asked.reason))

    app.router.add_get("/v1/requests", listed)
    app.router.add_post("/v1/requests/{attempt}/accept", accept)
    app.router.add_post("/v1/requests/{attempt}/decline", decline)


def _json(value: object) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")
