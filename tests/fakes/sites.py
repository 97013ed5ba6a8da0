"""A whole site without a hub: real journal, any adapter, a gateway in memory, and a scheduler's key to seal with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tests.fakes.agents import GUEST, pool

from intertie.agent.adapters.port import Adapter
from intertie.agent.adapters.process import ProcessAdapter
from intertie.agent.core.devices import Pool
from intertie.agent.core.rules import Rules
from intertie.agent.journal import SqliteJournal
from intertie.agent.site import Site
from intertie.clock import Clock, SystemClock, kernel_boot
from intertie.contracts.base import decode, encode
from intertie.contracts.identity import Joined
from intertie.contracts.job import Cause, ResultRef, WorkRef
from intertie.contracts.link import (
    AccountMapping,
    EntryBase,
    Go,
    Instruction,
    Lane,
    MeteringEntry,
    Offer,
    OfferBody,
    RegistryEntry,
    SchedulerEntry,
    Settle,
    SiteSettings,
    Stop,
    Withdraw,
)
from intertie.errors import Refused, Unavailable
from intertie.ids import Digest, InstructionId, JournalId, SiteName, TenantName, digest, mint
from intertie.trust.keys import Key
from intertie.trust.seal import seal

E = TypeVar("E", bound=EntryBase)
KINDS: Mapping[Lane, Any] = {Lane.SCHEDULER: SchedulerEntry, Lane.METERING: MeteringEntry, Lane.REGISTRY: RegistryEntry}


@dataclass
class MemoryGateway:
    """Bytes by digest; `away` plays a hub that cannot be reached."""

    objects: dict[Digest, bytes] = field(default_factory=dict)
    away: bool = False
    tries: int = 0

    def add(self, data: bytes) -> WorkRef:
        self.objects[digest(data)] = data
        return WorkRef(digest=digest(data), size=len(data))

    async def fetch(self, work: WorkRef, target: Path) -> None:
        self._answer()
        if work.digest not in self.objects:
            raise Refused("agent.gateway_refused", "no such object")
        await asyncio.to_thread(target.write_bytes, self.objects[work.digest])

    async def store(self, result: ResultRef, source: Path) -> None:
        self._answer()
        self.objects[result.digest] = await asyncio.to_thread(source.read_bytes)

    def _answer(self) -> None:
        self.tries += 1
        if self.away:
            raise Unavailable("agent.gateway_away", "played to be away")


@dataclass
class World:
    """The site, and both sides' knowledge of it."""

    site: Site
    journal: SqliteJournal
    scheduler: Key
    gateway: MemoryGateway
    clock: Clock
    number: int = 0

    def _next(self) -> dict[str, object]:
        self.number += 1
        return {"id": InstructionId(mint("ins")), "number": self.number, "epoch": 1}

    def offered(self, body: OfferBody, key: Key | None = None) -> Offer:
        """With its copy without values of the environment, if it has any."""
        signer = key or self.scheduler
        kept = seal(signer, encode(msgspec.structs.replace(body, env={})), "scheduler") if body.env else None
        return Offer(**self._next(), attempt=body.attempt, sealed=seal(signer, encode(body), "scheduler"), adoption=kept)  # type: ignore[arg-type]

    def go(self, body: OfferBody, journal: JournalId | None = None) -> Go:
        return Go(**self._next(), attempt=body.attempt, job=body.job, generation=body.generation, journal=journal)  # type: ignore[arg-type]

    def stop(self, body: OfferBody, reason: str = "cancelled", cause: Cause = Cause.CANCELLED) -> Stop:
        named = {"attempt": body.attempt, "job": body.job, "generation": body.generation}
        return Stop(**self._next(), **named, reason=reason, grace_s=1, cause=cause)  # type: ignore[arg-type]

    def withdraw(self, body: OfferBody) -> Withdraw:
        return Withdraw(**self._next(), attempt=body.attempt, job=body.job, generation=body.generation)  # type: ignore[arg-type]

    def settle(self, body: OfferBody) -> Settle:
        return Settle(**self._next(), attempt=body.attempt)  # type: ignore[arg-type]

    async def tell(self, *instructions: Instruction, sent_boot_s: float | None = None) -> None:
        """As a lane hands them over: stored, then acted on; everything journalled so far is acknowledged."""
        fresh = await self.journal.take(instructions)
        sent = self.clock.boot_s() if sent_boot_s is None else sent_boot_s
        await self.site.take(fresh, sent_boot_s=sent, acknowledged=1 << 40)

    async def run(self, body: OfferBody) -> None:
        """Offer and go."""
        await self.tell(self.offered(body))
        await self.tell(self.go(body))

    async def entries(self, lane: Lane = Lane.SCHEDULER) -> Sequence[EntryBase]:
        batch = await self.journal.batch(lane, 0, 1 << 24)
        return [decode(raw, KINDS[lane]) for raw in batch.entries]

    async def kinds(self, lane: Lane = Lane.SCHEDULER) -> list[str]:
        return [type(entry).__name__ for entry in await self.entries(lane)]

    async def first(self, kind: type[E], limit_s: float = 15.0) -> E:
        """The first entry of that kind, waited for."""
        lane = next(lane for lane, kinds in KINDS.items() if kind.__name__ in str(kinds))
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        while True:
            for entry in await self.entries(lane):
                if isinstance(entry, kind):
                    return entry
            assert loop.time() < until, f"no {kind.__name__} among {await self.kinds(lane)}"
            await asyncio.sleep(0.02)


def settings(*tenants: str, revision: int = 1, account: str = GUEST) -> SiteSettings:
    mappings = [AccountMapping(tenant=TenantName(tenant), account=account) for tenant in tenants]
    return SiteSettings(revision=revision, site=SiteName("lab"), mappings=mappings)


@asynccontextmanager
async def a_site(
    folder: Path,
    *,
    adapter: Adapter | None = None,
    pools: Sequence[Pool] | None = None,
    clock: Clock | None = None,
    gateway: MemoryGateway | None = None,
    scheduler: Key | None = None,
    boot: str | None = None,
    rules: Rules | None = None,
) -> AsyncIterator[World]:
    """A site in `folder`; entering again with the same folder is a restart of the agent."""
    key, owner = scheduler or Key.new("U"), Key.new("U")
    journal = await SqliteJournal.open(folder / "journal.db")
    clock, gateway = clock or SystemClock(), gateway or MemoryGateway()
    packs = folder / "packs"
    packs.mkdir(mode=0o700, exist_ok=True)  # noqa: ASYNC240  # a test's own folder
    joined = Joined(
        site=SiteName("lab"),
        account="A",
        bus_urls=[],
        gateway_url="http://127.0.0.1:1",
        service_keys={"scheduler": key.public},
        owner_tenant=TenantName("acme"),
    )
    site = Site(
        joined=joined,
        key=owner,
        journal=journal,
        adapter=adapter or ProcessAdapter(folder / "jobs", boot=boot),
        clock=clock,
        transfer=gateway,
        pools=pools if pools is not None else [pool()],
        packs=packs,
        boot=boot or kernel_boot(),
        rules=rules,
    )
    await site.recover()
    if site.settings.revision == 0:
        told = settings("acme", "beta")
        await site.apply(seal(key, encode(told), "scheduler"), told.revision)
    try:
        yield World(site, journal, key, gateway, clock)
    finally:
        await site.close()
        await journal.close()
