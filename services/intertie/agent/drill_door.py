"""The owner's door to drills: allow, revoke, stop, and what is planned. Root and the agent's own user may; nobody else of this machine."""

from __future__ import annotations

import pwd
from collections.abc import Callable

from aiohttp import web

from intertie.agent.drill import Drill
from intertie.contracts.base import decode, encode
from intertie.contracts.local import AllowDrill
from intertie.errors import Denied

Caller = Callable[[web.Request], tuple[int, bool]]
"""The uid at the other end, and whether it may see everybody's."""


def mount(drill: Drill, app: web.Application, caller: Caller) -> None:
    """Add the routes to the door's application."""

    def owner(request: web.Request) -> str:
        uid, everyone = caller(request)
        if not everyone:
            raise Denied("agent.drill_owner", "only root and the agent's own user decide about drills")
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return str(uid)

    async def say(request: web.Request) -> web.Response:
        caller(request)
        return _json(drill.status())

    async def allow(request: web.Request) -> web.Response:
        by = owner(request)
        asked = decode(await request.read() or b"{}", AllowDrill, what="consent")
        await drill.allow(by=by, until=asked.until, longest_s=asked.longest_s)
        return _json(drill.status())

    async def revoke(request: web.Request) -> web.Response:
        await drill.revoke(by=owner(request))
        return _json(drill.status())

    async def stop(request: web.Request) -> web.Response:
        owner(request)
        drill.stop()
        return _json(drill.status())

    app.router.add_get("/v1/drill", say)
    app.router.add_post("/v1/drill/allow", allow)
    app.router.add_post("/v1/drill/revoke", revoke)
    app.router.add_post("/v1/drill/stop", stop)


def _json(value: object) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")
