"""The registry process: `python -m intertie.registry`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib.metadata import version as package_version
from typing import Annotated

import msgspec

from intertie.bus import rpc
from intertie.bus.nats import NatsBus
from intertie.bus.port import Bus
from intertie.clock import SystemClock
from intertie.contracts.identity import Claims
from intertie.contracts.link import Lane
from intertie.lane.pg import PgLaneTables
from intertie.quarantine import Quarantine
from intertie.quarantine.pg import PgQuarantine
from intertie.registry.call_offerings import CallOfferings, PgOfferings
from intertie.registry.drill_store import PgDrills
from intertie.registry.drills import BusBooks, Drills, site_key_of
from intertie.registry.modes import Modes, specs_of
from intertie.registry.observed import PgProofs, Proofs
from intertie.registry.pg import PACKAGE, PgRegistryStore
from intertie.registry.service import Registry
from intertie.runtime import HubSettings, hub_settings, main, reach, ready, serve
from intertie.settings import load, read_secret
from intertie.store import Database, Relay, first_version, keep_audit
from intertie.trust.claims import ServiceClaims, read_keyset, verify_claims
from intertie.trust.keys import Key

VERSION = package_version("intertie")


class RegistrySettings(HubSettings, frozen=True, kw_only=True):
    """`INTERTIE_<FIELD>`, beside every hub service's."""

    probe_max_age_days: Annotated[int, msgspec.Meta(ge=0, le=3_650)] = 0
    """A pool without a probe that passed within so many days, or whose last one failed, gets no work; 0: no proof is asked for."""
    drill_max_age_days: Annotated[int, msgspec.Meta(ge=1, le=3_650)] = 90
    """A site without a passed drill younger than this says so."""


def registry_settings(environ: Mapping[str, str]) -> RegistrySettings:
    """`Refused('settings.invalid')` with everything that is wrong."""
    hub_settings(environ)
    return load(RegistrySettings, environ)


async def open_for_calls(
    bus: Bus, service: Registry, quarantine: Quarantine, modes: Modes, verifier: rpc.Verifier, settings: HubSettings
) -> None:
    """Answer until cancelled; ready once calls and syncs are heard."""
    handlers = {**service.handlers(), **quarantine.handlers(), **modes.handlers()}
    serving = await rpc.serve(bus, "registry", VERSION, handlers, verifier=verifier)
    try:
        await service.keeper.listening.wait()
        async with ready(settings.ready_file, "registry"):
            await asyncio.Event().wait()
    finally:
        await serving.close()


async def run(environ: Mapping[str, str]) -> int:
    settings = registry_settings(environ)
    clock, scale = SystemClock(), settings.beat_s
    keyset = read_keyset(settings.keys_file)
    key = Key.read(settings.key_file)
    own = ServiceClaims(key, "registry", clock)
    password = read_secret(settings.database_password_file) if settings.database_password_file else None

    def verified(text: str) -> Claims:
        return verify_claims(text, keyset, clock.now())

    async with AsyncExitStack() as held:
        db = await reach("the database", lambda: Database.open(settings.database_url, password=password, schema="registry", clock=clock))
        held.push_async_callback(db.close)
        await db.migrate(PACKAGE)
        epoch = await db.epoch()
        bus = await reach(
            f"the bus at {', '.join(settings.bus_url)}",
            lambda: NatsBus.connect(settings.bus_url, name="registry", credentials=settings.bus_creds),
        )
        held.push_async_callback(bus.close)
        store = PgRegistryStore(db)
        await store.lift_versions(first_version(epoch))
        kept = PgDrills(store)
        await kept.lift_versions(first_version(epoch))
        service = Registry(store, PgLaneTables(db), bus, clock, beat_scale=scale, epoch=epoch)
        drills = Drills(
            kept,
            store,
            BusBooks(bus, own.signed),
            key,
            clock,
            silent_limit_s=service.limits.stale_s,
            site_key=lambda site: site_key_of(bus, own.signed, site),
            max_age_days=settings.drill_max_age_days,
            beat_s=scale,
        )
        service.drills = drills
        offered = PgOfferings(store)
        await offered.lift_versions(first_version(epoch))
        service.call_offerings = CallOfferings(offered)
        proofs = Proofs(
            PgProofs(store),
            store,
            clock,
            site_key=lambda site: site_key_of(bus, own.signed, site),
            max_age_days=settings.probe_max_age_days,
            beat_s=scale,
        )
        service.proofs = proofs
        modes = Modes(store, clock, specs_of(bus, own.signed))
        return await serve(
            drills=drills.run(),
            proofs=proofs.run(),
            epoch=db.keep_epoch(),
            lane=service.keeper.run(),
            silence=service.judge_for_ever(),
            relay=Relay(db, bus, "registry", beat_s=scale).run(),
            audit=keep_audit(db, bus, VERSION, own.signed, verified, anchor_s=settings.anchor_s, beat_s=scale, also=drills.handlers()),
            calls=open_for_calls(bus, service, Quarantine(Lane.REGISTRY, PgQuarantine(db)), modes, verified, settings),
        )


if __name__ == "__main__":
    sys.exit(main("registry", run, version=VERSION))
