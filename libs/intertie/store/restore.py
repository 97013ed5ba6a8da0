"""After a restore: every service's epoch raised to one number above all that anybody knows, each schema in one transaction.

This is what `intertie hub restored` does. A restore that keeps system identifier and timeline (a copied data folder) cannot be seen by the
services themselves; one that changes them is seen, and raised by each service for itself: then this only brings them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from intertie.clock import Clock, SystemClock
from intertie.errors import Conflict, Refused
from intertie.store import epoch as epochs
from intertie.store.epoch import Raised
from intertie.store.pg import Database
from intertie.store.tx import Q, Tx

KEEPERS = ("identity", "registry", "scheduler", "metering", "incident")
"""The services that have a schema."""


@dataclass(frozen=True, slots=True)
class Login:
    """How a service's schema is reached. role: whom the login becomes, if it is not the service's own."""

    url: str
    password: str | None
    role: str = ""

    def __repr__(self) -> str:
        return f"Login({self.url!r}, role={self.role!r})"


@dataclass(frozen=True, slots=True)
class Restored:
    """What was done. `told`: the highest epoch that any site has taken; `doubted`: sites whose word was too high to be a hub's."""

    services: Sequence[Raised]
    told: int
    doubted: Sequence[str]


async def restored(
    logins: Mapping[str, Login], *, reason: str, actor: str, live: bool = False, clock: Clock | None = None, wait_s: float = 30.0
) -> Restored:
    """Raise every service's epoch. Repeatable: a schema that was raised for this `reason`, above what sites tell, is left as it is.

    `Conflict('hub.services_run')` if a service is connected and not `live`; `Refused('hub.reason')` without a reason.
    """
    if len(reason.strip()) < 3:
        raise Refused("hub.reason", "a raise of the epochs needs a reason", next_step="say which restore this follows")
    chosen = clock or SystemClock()
    async with AsyncExitStack() as held:
        schemas: dict[str, Database] = {}
        for service, login in logins.items():
            schemas[service] = await Database.open(
                login.url,
                password=login.password,
                schema=service,
                role=login.role,
                application_name="intertie-hub-restored",
                clock=chosen,
                connections=1,
                reserved=1,
                wait_s=wait_s,
            )
            held.push_async_callback(schemas[service].close)
        if not live:
            await _require_stopped(schemas)
        return await _raise_all(schemas, reason=reason.strip(), actor=actor, clock=chosen)


async def _require_stopped(schemas: Mapping[str, Database]) -> None:
    """Those that run have numbers of the epoch before in their memory, and would still write for a moment."""
    running = []
    for service, db in schemas.items():
        async with db.transaction(read_only=True) as tx:
            row = await tx.one(Q.epoch_sessions, f"intertie-{service}")
        if row is not None and row["number"]:
            running.append(service)
    if running:
        raise Conflict(
            "hub.services_run",
            f"connected to the database: {', '.join(running)}",
            next_step="stop the services first; with --live they end by themselves and are started again by what supervises them",
        )


async def _raise_all(schemas: Mapping[str, Database], *, reason: str, actor: str, clock: Clock) -> Restored:
    own: dict[str, int] = {}
    told: dict[str, int] = {}
    for service, db in schemas.items():
        await db.migrate("intertie.store", through="pre", enter=False)
        async with db.transaction() as tx:
            own[service] = (await epochs.load(tx)).number
            for site, epoch in (await epochs.told_by_sites(tx)).items():
                told[site] = max(told.get(site, 0), epoch)
    now = clock.now()
    credible = epochs.believed(told.values(), now)
    number, floor = epochs.target(own.values(), credible, now), max(credible, default=0)
    done = []
    for service, db in schemas.items():
        async with db.transaction() as tx:
            done.append(await _raise_one(tx, service, number, floor, reason, actor, clock))
    return Restored(done, floor, sorted(site for site, epoch in told.items() if epoch not in credible))


async def _raise_one(tx: Tx, service: str, number: int, floor: int, reason: str, actor: str, clock: Clock) -> Raised:
    known = await epochs.load(tx, lock=True)
    if known.reason == reason and known.number >= floor and known.place == await epochs.find_place(tx):
        return Raised(service, known.number, known.number)
    await epochs.raise_to(tx, max(number, known.number + 1), reason=reason, actor=actor, service=service, at=clock.now())
    return Raised(service, known.number, max(number, known.number + 1))
