"""The gateway process: `python -m intertie.gateway`."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web

from intertie.bus.nats import NatsBus
from intertie.bus.port import Bus
from intertie.clock import SystemClock
from intertie.contracts.http import Health
from intertie.errors import Unavailable
from intertie.gateway.calls import Calls
from intertie.gateway.files import Files
from intertie.gateway.http import BODY_BYTES, Api, Door, errors_and_trace, json_response
from intertie.gateway.objects import ObjectStore
from intertie.gateway.openapi import document
from intertie.gateway.pages import Pages
from intertie.runtime import Beat, main, reach, ready, serve
from intertie.settings import load
from intertie.trust.claims import ServiceClaims
from intertie.trust.keys import Key

VERSION = package_version("intertie")


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`INTERTIE_<FIELD>`. The gateway has no database: it keeps bytes, not facts."""

    bus_url: list[str]
    bus_creds: Path | None = None
    key_file: Path
    data_dir: Path
    ready_file: Path | None = None
    listen: str = "127.0.0.1:8480"
    public_url: str = "http://127.0.0.1:8480"
    time_zone: str = "Asia/Shanghai"
    object_limit_mib: Annotated[int, msgspec.Meta(ge=1)] = 2_048
    object_days: Annotated[int, msgspec.Meta(ge=1)] = 35
    """Packs and results older than this are removed; longer than any site is expected to be away."""
    beat_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0


def application(
    bus: Bus, settings: GatewaySettings, objects: ObjectStore, clock: SystemClock, key: Key, calls: Calls | None = None
) -> web.Application:
    """The whole of HTTP. `calls`: those of sites' offerings, where they are taken."""
    app = web.Application(middlewares=[errors_and_trace], client_max_size=BODY_BYTES)
    door = calls.door if calls is not None else Door(bus, clock)
    if calls is not None:
        calls.add_to(app)
    Api(bus, door, objects).add_to(app)
    Files(bus, door, objects, clock).add_to(app)
    Pages(
        bus,
        door,
        clock,
        own_claims=ServiceClaims(key, "gateway", clock).signed,
        # Ed25519 signatures are deterministic: every copy of the gateway, and the next start, reads the same links.
        link_key=hashlib.sha256(key.sign(b"intertie: key of the links to jobs")).digest(),
        public_url=settings.public_url,
        time_zone=settings.time_zone,
    ).add_to(app)
    described = msgspec.json.encode(document(VERSION))

    async def openapi(request: web.Request) -> web.Response:
        return web.Response(body=described, content_type="application/json")

    async def health(request: web.Request) -> web.Response:
        alive = await bus.alive()
        return json_response(Health(ok=alive, bus=alive, version=VERSION), status=200 if alive else 503)

    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/healthz", health)
    return app


async def listen(app: web.Application, settings: GatewaySettings) -> None:
    """Serve HTTP until cancelled; requests in flight are given time to end."""
    host, _, port = settings.listen.rpartition(":")
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=5)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host or "127.0.0.1", int(port)).start()
        except OSError as err:
            raise Unavailable(
                "gateway.listen", f"cannot listen at {settings.listen}: {err.strerror}", next_step="free the port, or set INTERTIE_LISTEN"
            ) from err
        async with ready(settings.ready_file, "gateway", {"url": settings.public_url}):
            await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def run(environ: Mapping[str, str]) -> int:
    settings = load(GatewaySettings, environ)
    clock = SystemClock()
    key = Key.read(settings.key_file)
    bus = await reach(
        f"the bus at {', '.join(settings.bus_url)}",
        lambda: NatsBus.connect(settings.bus_url, name="gateway", credentials=settings.bus_creds),
    )
    objects = ObjectStore(
        settings.data_dir / "objects", limit_bytes=settings.object_limit_mib * 1024 * 1024, keep=timedelta(days=settings.object_days)
    )
    calls = Calls(bus, Door(bus, clock), clock, key, ServiceClaims(key, "gateway", clock).signed, settings.data_dir / "calls")
    sweeper = Beat("objects", 3_600, scale=settings.beat_s)
    try:
        return await serve(
            http=listen(application(bus, settings, objects, clock, key, calls), settings),
            calls=calls.run(),
            sweep=sweeper.run(lambda: objects.sweep(clock.now())),
        )
    finally:
        calls.close()
        await bus.close()


if __name__ == "__main__":
    sys.exit(main("gateway", run, version=VERSION))
