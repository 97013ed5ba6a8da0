"""The owner's door to a pool of machines: tokens, nodes, and who holds what until when. Root and the agent's own user may."""

from __future__ import annotations

import pwd
from collections import Counter
from collections.abc import Callable

from aiohttp import web

from intertie.agent.machines.pool import Machines
from intertie.agent.machines.reserved import Reserved
from intertie.agent.site import Site
from intertie.contracts.base import decode, encode
from intertie.contracts.machines import CordonNode, MakeToken, ReservationFile, RevokeNode, TokenMade
from intertie.errors import Denied, Refused

Caller = Callable[[web.Request], tuple[int, bool]]
"""The uid at the other end, and whether it may see everybody's."""


def mount(machines: Machines | None, reserved: Reserved, site: Site, app: web.Application, caller: Caller) -> None:
    """Add the routes to the door's application."""

    def owner(request: web.Request) -> str:
        uid, everyone = caller(request)
        if not everyone:
            raise Denied("agent.node_owner", "only root and the agent's own user decide about nodes")
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return str(uid)

    def pool() -> Machines:
        if machines is None:
            raise Refused(
                "machines.none",
                "this site is one machine: no pool is declared",
                next_step='[machines] listen = "HOST:PORT" in site.toml, then start the agent again',
            )
        return machines

    def listed() -> web.Response:
        made = pool()
        node_of = {(one.name, device.id): device.node for one in site.pools.values() for device in one.devices}
        there = {(node_of.get(key, ""), attempt) for key, attempt in site.books.holds.holder.items()}
        return _json(made.nodes(list(site.pools.values()), Counter(node for node, _ in there)))

    async def nodes(request: web.Request) -> web.Response:
        owner(request)
        return listed()

    async def token(request: web.Request) -> web.Response:
        owner(request)
        asked = decode(await request.read() or b"{}", MakeToken, what="token")
        text, expires = await pool().gate.make_token(asked.node, asked.hours)
        return _json(TokenMade(token=text, expires=expires, listen=pool().gate.address))

    async def cordon(request: web.Request) -> web.Response:
        owner(request)
        asked = decode(await request.read() or b"{}", CordonNode, what="cordon")
        await pool().cordon(request.match_info["node"], on=asked.on, reason=asked.reason)
        return listed()

    async def revoke(request: web.Request) -> web.Response:
        owner(request)
        asked = decode(await request.read() or b"{}", RevokeNode, what="revocation")
        await pool().revoke(request.match_info["node"], lost=asked.lost)
        return listed()

    async def holders(request: web.Request) -> web.Response:
        owner(request)
        if request.method == "PUT":
            await reserved.replace(decode(await request.read(), ReservationFile, what="reservations"), list(site.pools.values()))
        return _json(reserved.in_force())

    app.router.add_get("/v1/nodes/reservations", holders)
    app.router.add_put("/v1/nodes/reservations", holders)
    app.router.add_get("/v1/nodes", nodes)
    app.router.add_post("/v1/nodes/token", token)
    app.router.add_post("/v1/nodes/{node}/cordon", cordon)
    app.router.add_post("/v1/nodes/{node}/revoke", revoke)


def _json(value: object) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")
