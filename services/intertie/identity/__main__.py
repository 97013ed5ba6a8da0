"""The identity process: `python -m intertie.identity`. It has two connections: one as a hub service, one in NATS' system account."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated

import msgspec

from intertie.bus import rpc
from intertie.bus.nats import NatsBus
from intertie.bus.port import Bus
from intertie.clock import SystemClock
from intertie.contracts.identity import Claims
from intertie.identity.accounts import AccountPusher, Signer, hub_account
from intertie.identity.anchors import Anchors, PgAnchors
from intertie.identity.bootstrap import ensure_operator
from intertie.identity.pg import PACKAGE, PgIdentityStore
from intertie.identity.service import Addresses, Identity
from intertie.identity.stream import StreamMaker
from intertie.runtime import HubSettings, hub_settings, main, reach, ready, serve
from intertie.settings import load, read_secret
from intertie.store import Database, Relay, first_version, keep_audit
from intertie.trust.claims import ServiceClaims, read_keyset, verify_claims
from intertie.trust.keys import Key

VERSION = package_version("intertie")


class IdentitySettings(HubSettings, frozen=True, kw_only=True):
    """`INTERTIE_<FIELD>`, beside every hub service's."""

    operator_dir: Path
    """Folder of `operator.nk` and `hub.nk`."""
    system_creds: Path
    """Credentials in NATS' system account."""
    accounts_file: Path | None = None
    """NATS' preload file, kept up to date here."""
    public_url: str = "http://127.0.0.1:8480"
    """The gateway as sites reach it."""
    bus_public_urls: list[str] = []
    """The bus as sites reach it; empty: as we do."""
    bus_replicas: Annotated[int, msgspec.Meta(ge=0, le=5)] = 0
    """Copies of the event stream in a cluster of the bus; 0: as they are."""


async def open_for_calls(bus: Bus, service: Identity, verifier: rpc.Verifier, settings: HubSettings) -> None:
    serving = await rpc.serve(bus, "identity", VERSION, service.handlers(), verifier=verifier)
    try:
        async with ready(settings.ready_file, "identity"):
            await asyncio.Event().wait()
    finally:
        await serving.close()


def identity_settings(environ: Mapping[str, str]) -> IdentitySettings:
    """`Refused('settings.invalid')` with everything that is wrong."""
    hub_settings(environ)
    return load(IdentitySettings, environ)


async def run(environ: Mapping[str, str]) -> int:
    settings = identity_settings(environ)
    clock, scale = SystemClock(), settings.beat_s
    keyset = read_keyset(settings.keys_file)
    key = Key.read(settings.key_file)
    signer = Signer(Key.read(settings.operator_dir / "operator.nk"), hub_account(settings.operator_dir), clock)
    addresses = Addresses(settings.bus_public_urls or settings.bus_url, settings.public_url)
    password = read_secret(settings.database_password_file) if settings.database_password_file else None

    def verified(text: str) -> Claims:
        return verify_claims(text, keyset, clock.now())

    async with AsyncExitStack() as held:
        db = await reach("the database", lambda: Database.open(settings.database_url, password=password, schema="identity", clock=clock))
        held.push_async_callback(db.close)
        await db.migrate(PACKAGE)
        epoch = await db.epoch()
        store = PgIdentityStore(db)
        await store.lift_versions(first_version(epoch))
        async with db.leading("bootstrap"):
            # Of copies that start together one makes the first operator, whose token and file must be one.
            await ensure_operator(store, settings.data_dir, clock.now())
        where = f"the bus at {', '.join(settings.bus_url)}"
        bus = await reach(where, lambda: NatsBus.connect(settings.bus_url, name="identity", credentials=settings.bus_creds))
        held.push_async_callback(bus.close)
        system = await reach(where, lambda: NatsBus.connect(settings.bus_url, name="system", credentials=settings.system_creds))
        held.push_async_callback(system.close)
        pusher = AccountPusher(system, store, signer, clock, accounts_file=settings.accounts_file, beat_scale=scale)
        service = Identity(store, bus, key, signer, pusher, clock, keyset=keyset, addresses=addresses)
        return await serve(
            epoch=db.keep_epoch(),
            accounts=pusher.run(),
            stream=StreamMaker(bus, store, clock, epoch=epoch, replicas=settings.bus_replicas, beat_scale=scale).run(),
            relay=Relay(db, bus, "identity", beat_s=scale).run(),
            audit=keep_audit(
                db,
                bus,
                VERSION,
                ServiceClaims(key, "identity", clock).signed,
                verified,
                anchor_s=settings.anchor_s,
                beat_s=scale,
                also=Anchors(PgAnchors(db, first_version=first_version(epoch)), key, clock).handlers(),
            ),
            calls=open_for_calls(bus, service, verified, settings),
        )


if __name__ == "__main__":
    sys.exit(main("identity", run, version=VERSION))
