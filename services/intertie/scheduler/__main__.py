"""The scheduler process: `python -m intertie.scheduler`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated
from zoneinfo import ZoneInfo

import msgspec

from intertie.bus import rpc
from intertie.bus.nats import NatsBus
from intertie.bus.port import Bus
from intertie.clock import SystemClock
from intertie.contracts.identity import Claims
from intertie.contracts.link import Lane
from intertie.errors import Refused
from intertie.lane.pg import PgLaneTables
from intertie.observe import log
from intertie.quarantine import Quarantine
from intertie.quarantine.pg import PgQuarantine
from intertie.runtime import HubSettings, hub_settings, main, reach, ready, serve
from intertie.scheduler.pg import PACKAGE, PgSchedulerStore
from intertie.scheduler.wiring import LEASE_S, Parts, wire
from intertie.settings import load, read_secret
from intertie.store import Database, EventConsumer, Relay, keep_audit
from intertie.trust.claims import ServiceClaims, read_keyset, verify_claims
from intertie.trust.keys import Key

VERSION = package_version("intertie")
LOG = log.get("scheduler")


class SchedulerSettings(HubSettings, frozen=True, kw_only=True):
    """`INTERTIE_<FIELD>`."""

    time_zone: str = "Asia/Shanghai"
    """The wall clock by which owners' lending windows are read, and where settlement periods end."""
    canary_creds: Path | None = None
    """NATS credentials of the canary's own account. Without them no silence moves anything, and nothing is run again elsewhere."""
    rerun_lease_s: Annotated[int, msgspec.Meta(ge=30)] = LEASE_S
    """A hub or bus that is away for longer than this stops all work that asked for `if_site_silent=rerun`."""
    lost_after_days: Annotated[int, msgspec.Meta(ge=1, le=366)] = 7
    """Beyond an attempt's own time limit: when what a silent site held is closed as lost."""


def lending_zone(name: str) -> ZoneInfo:
    """`Refused('settings.invalid')` if there is no such zone."""
    try:
        return ZoneInfo(name)
    except (OSError, ValueError) as err:
        raise Refused(
            "settings.invalid", f"INTERTIE_TIME_ZONE: there is no time zone {name!r}", next_step="use a name like Asia/Shanghai"
        ) from err


def own_keys(keyset: Mapping[str, str]) -> list[str]:
    """This service's public keys: the one in use, and older ones kept in the keys' file as `scheduler.<anything>`."""
    return [public for issuer, public in sorted(keyset.items()) if issuer == "scheduler" or issuer.startswith("scheduler.")]


async def open_canary(settings: SchedulerSettings, held: AsyncExitStack) -> Bus | None:
    """The canary's own connection. A hub whose canary cannot connect, or has no credentials yet, serves all the same: it is deaf until it can."""
    if settings.canary_creds is None:
        LOG.warning("no canary: no silence is believed, and nothing is run again elsewhere")
        return None
    bus = await NatsBus.connect(settings.bus_url, name="canary", credentials=settings.canary_creds, wait=False)
    held.push_async_callback(bus.close)
    return bus


async def open_for_calls(bus: Bus, parts: Parts, quarantine: Quarantine, verifier: rpc.Verifier, settings: HubSettings) -> None:
    """Answer until cancelled; ready once calls and syncs are heard."""
    serving = await rpc.serve(bus, "scheduler", VERSION, {**parts.scheduler.handlers(), **quarantine.handlers()}, verifier=verifier)
    try:
        await parts.keeper.listening.wait()
        async with ready(settings.ready_file, "scheduler"):
            await asyncio.Event().wait()
    finally:
        await serving.close()


async def run(environ: Mapping[str, str]) -> int:
    settings = load(SchedulerSettings, environ)
    hub_settings(environ)  # refuses what no hub process may be told
    zone = lending_zone(settings.time_zone)
    clock, scale = SystemClock(), settings.beat_s
    keyset, key = read_keyset(settings.keys_file), Key.read(settings.key_file)
    own = ServiceClaims(key, "scheduler", clock)
    password = read_secret(settings.database_password_file) if settings.database_password_file else None

    def verified(text: str) -> Claims:
        return verify_claims(text, keyset, clock.now())

    async with AsyncExitStack() as held:
        db = await reach("the database", lambda: Database.open(settings.database_url, password=password, schema="scheduler", clock=clock))
        held.push_async_callback(db.close)
        await db.migrate(PACKAGE)
        bus = await reach(
            f"the bus at {', '.join(settings.bus_url)}",
            lambda: NatsBus.connect(settings.bus_url, name="scheduler", credentials=settings.bus_creds),
        )
        held.push_async_callback(bus.close)
        parts = await wire(
            PgSchedulerStore(db),
            PgLaneTables(db),
            bus,
            clock,
            key,
            own.signed,
            zone=zone,
            scale=scale,
            canary=await open_canary(settings, held),
            lease_s=settings.rerun_lease_s,
            lost_after=timedelta(days=settings.lost_after_days),
            own_keys=own_keys(keyset),
        )
        consumer = EventConsumer(
            bus, db, "scheduler", parts.knowledge.handlers(), snapshot=parts.knowledge.snapshots(), beat_s=scale, clock=clock
        )
        return await serve(
            epoch=db.keep_epoch(),
            lane=parts.keeper.run(),
            planner=parts.planner.run(),
            watch=parts.watch(),
            events=consumer.run(),
            relay=Relay(db, bus, "scheduler", beat_s=scale, clock=clock).run(),
            audit=keep_audit(db, bus, VERSION, own.signed, verified, anchor_s=settings.anchor_s, beat_s=scale),
            calls=open_for_calls(bus, parts, Quarantine(Lane.SCHEDULER, PgQuarantine(db)), verified, settings),
        )


if __name__ == "__main__":
    sys.exit(main("scheduler", run, version=VERSION))
