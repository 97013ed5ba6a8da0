"""The owner's door to call offerings: how they are, and the switch of each. Root and the agent's own user decide; nobody else of this machine."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from intertie.agent.endpoint.desk import Desk
from intertie.contracts.base import encode
from intertie.errors import Denied

Caller = Callable[[web.Request], tuple[int, bool]]
"""The uid at the other end, and whether it may see everybody's."""


def mount(desk: Desk, app: web.Application, caller: Caller) -> None:
    """Add the routes to the door's application."""

    def said() -> web.Response:
        return web.Response(body=encode(desk.status()), content_type="application/json")

    async def listed(request: web.Request) -> web.Response:
        caller(request)
        return said()

    async def switch(request: web.Request) -> web.Response:
        _, everyone = caller(request)
        if not everyone:
            raise Denied(
                "endpoint.owner_only", "only root and the agent's own user decide about call offerings", next_step="call it with sudo"
            )
        await desk.pause(request.match_info["name"], request.match_info["switch"] == "pause")
        return said()

    app.router.add_get("/v1/endpoints", listed)
    app.router.add_post("/v1/endpoints/{name}/{switch:pause|resume}", switch)
