"""The owner's door to probes: what was proven last and why the next one waits, and one now."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from intertie.agent.probe import Probe
from intertie.contracts.base import encode
from intertie.errors import Denied, NotFound
from intertie.ids import PoolName

Caller = Callable[[web.Request], tuple[int, bool]]
"""The uid at the other end, and whether it may see everybody's."""


def mount(probe: Probe, app: web.Application, caller: Caller) -> None:
    """Add the routes to the door's application."""

    async def say(request: web.Request) -> web.Response:
        caller(request)
        return web.Response(body=encode(probe.told()), content_type="application/json")

    async def now(request: web.Request) -> web.Response:
        _, everyone = caller(request)
        if not everyone:
            raise Denied("agent.probe_owner", "only root and the agent's own user ask for a probe")
        pools = [one.pool for one in probe.told()]
        pool = request.match_info["pool"]
        if pool not in pools:
            raise NotFound("agent.probe_pool", f"there is no pool {pool[:63]} here", next_step=f"pools: {', '.join(pools)}")
        probe.asked.add(PoolName(pool))
        return web.Response(body=encode(probe.told()), content_type="application/json")

    app.router.add_get("/v1/probe", say)
    app.router.add_post("/v1/probe/{pool}", now)
