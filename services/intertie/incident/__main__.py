"""The incident process: `python -m intertie.incident`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib.metadata import version as package_version

from intertie.bus import rpc
from intertie.bus.nats import NatsBus
from intertie.bus.port import Bus
from intertie.clock import SystemClock
from intertie.contracts.identity import Claims
from intertie.contracts.incident import FaultReported
from intertie.contracts.site import PoolChanged, SiteChanged
from intertie.incident.pg import PACKAGE, PgIncidentStore
from intertie.incident.service import Incidents
from intertie.runtime import HubSettings, hub_settings, main, reach, ready, serve
from intertie.settings import read_secret
from intertie.store import Database, EventConsumer, Relay, first_version, keep_audit
from intertie.trust.claims import ServiceClaims, read_keyset, verify_claims
from intertie.trust.keys import Key

VERSION = package_version("intertie")


async def open_for_calls(bus: Bus, service: Incidents, verifier: rpc.Verifier, settings: HubSettings) -> None:
    """Answer until cancelled. What the registry says is learnt beside: nobody waits for that here."""
    serving = await rpc.serve(bus, "incident", VERSION, service.handlers(), verifier=verifier)
    try:
        async with ready(settings.ready_file, "incident"):
            await asyncio.Event().wait()
    finally:
        await serving.close()


async def run(environ: Mapping[str, str]) -> int:
    settings = hub_settings(environ)
    clock, scale = SystemClock(), settings.beat_s
    keyset = read_keyset(settings.keys_file)
    own = ServiceClaims(Key.read(settings.key_file), "incident", clock)
    password = read_secret(settings.database_password_file) if settings.database_password_file else None

    def verified(text: str) -> Claims:
        return verify_claims(text, keyset, clock.now())

    async with AsyncExitStack() as held:
        db = await reach("the database", lambda: Database.open(settings.database_url, password=password, schema="incident", clock=clock))
        held.push_async_callback(db.close)
        await db.migrate(PACKAGE)
        store = PgIncidentStore(db)
        await store.lift_versions(first_version(await db.epoch()))
        bus = await reach(
            f"the bus at {', '.join(settings.bus_url)}",
            lambda: NatsBus.connect(settings.bus_url, name="incident", credentials=settings.bus_creds),
        )
        held.push_async_callback(bus.close)
        service = Incidents(store, clock)
        consumer = EventConsumer(
            bus,
            db,
            "incident",
            {SiteChanged: service.on_site, PoolChanged: service.on_pool, FaultReported: service.on_fault},
            snapshot={"registry": lambda: service.learn_sites(bus, own.signed())},
            beat_s=scale,
            clock=clock,
        )
        return await serve(
            epoch=db.keep_epoch(),
            events=consumer.run(),
            relay=Relay(db, bus, "incident", beat_s=scale).run(),
            audit=keep_audit(db, bus, VERSION, own.signed, verified, anchor_s=settings.anchor_s, beat_s=scale),
            calls=open_for_calls(bus, service, verified, settings),
        )


if __name__ == "__main__":
    sys.exit(main("incident", run, version=VERSION))
