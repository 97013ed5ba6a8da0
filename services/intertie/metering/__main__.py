"""The metering process: `python -m intertie.metering`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from importlib.metadata import version as package_version

from intertie.bus import rpc
from intertie.bus.nats import NatsBus
from intertie.bus.port import Bus
from intertie.clock import SystemClock
from intertie.contracts.identity import Claims, SiteKeyChanged
from intertie.contracts.job import AttemptChanged, JobChanged
from intertie.contracts.link import Lane
from intertie.errors import Refused
from intertie.lane.keeper import LaneKeeper
from intertie.lane.pg import PgLaneTables
from intertie.metering.call_store import PgCalls
from intertie.metering.calls import Calls
from intertie.metering.native import NativeBooks
from intertie.metering.native_store import PgNative
from intertie.metering.pg import PACKAGE, PgMetering
from intertie.metering.service import Metering, sealed_by, trust
from intertie.quarantine import Quarantine
from intertie.quarantine.pg import PgQuarantine
from intertie.runtime import Beat, HubSettings, hub_settings, main, reach, ready, serve
from intertie.settings import read_secret
from intertie.store import Database, EventConsumer, Relay, first_version, keep_audit
from intertie.trust.claims import ServiceClaims, read_keyset, verify_claims
from intertie.trust.keys import Key

VERSION = package_version("intertie")

# Segments wait for a key, a record or an agreement: each of these hints; this comes round if a hint was lost.
SWEEP_S = 30.0


async def open_for_calls(
    bus: Bus, service: Metering, quarantine: Quarantine, verifier: rpc.Verifier, lane: LaneKeeper, settings: HubSettings
) -> None:
    """Answer until cancelled; ready once calls and syncs are heard. The snapshots of others may come later: nobody waits for them here."""
    serving = await rpc.serve(bus, "metering", VERSION, {**service.endpoints(), **quarantine.handlers()}, verifier=verifier)
    try:
        await lane.listening.wait()
        async with ready(settings.ready_file, "metering"):
            await asyncio.Event().wait()
    finally:
        await serving.close()


def scheduler_key(keyset: Mapping[str, str]) -> str:
    """Whose attributions to believe."""
    try:
        return keyset["scheduler"]
    except KeyError:
        raise Refused(
            "settings.keys", "the file of public keys names no scheduler", next_step="write it again with `intertie hub init`"
        ) from None


async def run(environ: Mapping[str, str]) -> int:
    settings = hub_settings(environ)
    clock, scale = SystemClock(), settings.beat_s
    keyset = read_keyset(settings.keys_file)
    own = ServiceClaims(Key.read(settings.key_file), "metering", clock)
    password = read_secret(settings.database_password_file) if settings.database_password_file else None
    db = await reach("the database", lambda: Database.open(settings.database_url, password=password, schema="metering", clock=clock))
    try:
        await db.migrate(PACKAGE)
        epoch = await db.epoch()
        store = PgMetering(db)
        await store.lift_versions(first_version(epoch))
        bus = await reach(
            f"the bus at {', '.join(settings.bus_url)}",
            lambda: NatsBus.connect(settings.bus_url, name="metering", credentials=settings.bus_creds),
        )
        try:
            sweep = Beat("metering-suspense", SWEEP_S, scale=scale)
            lanes = PgLaneTables(db)
            service = Metering(store, lanes, trust(scheduler_key(keyset)), clock, news=sweep.hint)
            service.calls = Calls(PgCalls(db), lanes, sealed_by, keyset.get("gateway", ""), clock)
            service.native = NativeBooks(store, PgNative(db), lanes, trust(scheduler_key(keyset)), clock)
            lane = LaneKeeper(bus, Lane.METERING, lanes, clock, interpret=service.interpret, epoch=lambda: epoch)
            consumer = EventConsumer(
                bus,
                db,
                "metering",
                {AttemptChanged: service.on_attempt, JobChanged: service.on_job, SiteKeyChanged: service.on_site_key},
                snapshot={
                    "scheduler": lambda: service.learn_all_attempts(bus, own.signed()),
                    "identity": lambda: service.learn_all_keys(bus, own.signed()),
                },
                beat_s=scale,
                clock=clock,
            )

            def verified(text: str) -> Claims:
                return verify_claims(text, keyset, clock.now())

            return await serve(
                epoch=db.keep_epoch(),
                lane=lane.run(),
                events=consumer.run(),
                relay=Relay(db, bus, "metering", beat_s=scale).run(),
                audit=keep_audit(db, bus, VERSION, own.signed, verified, anchor_s=settings.anchor_s, beat_s=scale),
                suspense=sweep.run(service.reconsider),
                calls=open_for_calls(bus, service, Quarantine(Lane.METERING, PgQuarantine(db)), verified, lane, settings),
            )
        finally:
            await bus.close()
    finally:
        await db.close()


if __name__ == "__main__":
    sys.exit(main("metering", run, version=VERSION))
