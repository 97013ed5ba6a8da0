"""A node's desk: the same desk as a site's, whose hub is the head. What differs is little, and all of it is here.

The head has judged tenants, lending and money already; a node judges whether the account may run here and whether its devices are free and well. It
speaks on one lane: what it meters is measured again by its head, which alone speaks to the hub. Its supervisors end leased work when the head's
own lease of it ends, whoever is dead.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from intertie.agent.adapters.house import House
from intertie.agent.adapters.process import ProcessAdapter
from intertie.agent.core import leases
from intertie.agent.core.attempts import Exit
from intertie.agent.core.devices import Pool
from intertie.agent.core.leases import Deadline
from intertie.agent.core.model import OPEN, Attempt
from intertie.agent.core.offers import Terms
from intertie.agent.core.placed import seen_of
from intertie.agent.journal import Also
from intertie.agent.leases import Leases
from intertie.agent.site import Site
from intertie.bus.port import Bus
from intertie.contracts.base import decode, encode
from intertie.contracts.job import ResultRef, WorkRef
from intertie.contracts.link import Ended, EntryBase, Lane
from intertie.contracts.machines import PackPart, Part, ResultPart, Went
from intertie.contracts.site import Device, DeviceKind, PoolProfile, plain_model
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId, DeviceId, TenantName
from intertie.link.journal import Build, NextSeq
from intertie.observe import log

LOG = log.get("machines.node")
T = TypeVar("T")

PART = 256 * 1024
PART_S = 10.0


def slot_id(node: str, number: int) -> DeviceId:
    """A slot of a node: unique in the whole pool, and its node can be read from it."""
    return DeviceId(f"{node}.slot-{number}")


def node_pools(profiles: Sequence[PoolProfile], gpus: Sequence[Device], node: str, slots: int) -> list[Pool]:
    """The site's pools with this node's devices in them. How much of a pool is lent is the head's to count, over all nodes."""
    pools: list[Pool] = []
    for profile in profiles:
        if profile.accelerator == "none":
            devices = [Device(id=slot_id(node, number), kind=DeviceKind.SLOT, node=node) for number in range(1, slots + 1)]
        else:
            devices = [gpu for gpu in gpus if plain_model(gpu.model) == plain_model(profile.accelerator)]
        whole = msgspec.structs.replace(profile, lendable=msgspec.structs.replace(profile.lendable, devices=len(devices), windows=[]))
        pools.append(Pool(whole, devices))
    return pools


class _HeadSays(frozenset[tuple[TenantName, str]]):
    """Which tenant is which account is the head's to know; it offers nothing else."""

    def __contains__(self, pair: object) -> bool:
        return True


class NodeLeases(Leases):
    """What is left of a lease is the head's word for each attempt, and may be less than was left before."""

    async def told(self, left_ms: Mapping[AttemptId, int], sent_boot_s: float) -> None:
        """An answer of the head: so much is left from the sending of the sync that it answers."""
        for name, left in left_ms.items():
            attempt = self._site.books.attempts.get(name)
            if attempt is None or attempt.state not in OPEN or attempt.stop is not None or name in self._ending:
                continue
            held = await self.until(attempt)
            until = leases.deadline(left / 1000, sent_boot_s, self._site.moment())
            if leases.is_over(held, self._site.moment()) or not _worth(held, until, attempt):
                continue
            try:
                if name in self._said:
                    await self._site.adapter.renew(name, until)
            except Unavailable as err:
                LOG.warning("a lease is not renewed", attempt=name, code=err.code, text=err.text)
                continue
            self._until[name] = until
        self._forget()


def _worth(held: Deadline, until: Deadline, attempt: Attempt) -> bool:
    """A later one that gains something, or an earlier one that is more than the round trip's doing."""
    gain_s = until.boot_s - held.boot_s
    return gain_s > leases.WORTH_IT * attempt.lease_s or gain_s < -1.0


class NodeAdapter(ProcessAdapter):
    """Remembers how work ended until its entry is made."""

    def __init__(self, folder: Path, *, cgroups: Path | None = None, house: House | None = None) -> None:
        super().__init__(folder, cgroups=cgroups, house=house)
        self.ends: dict[AttemptId, Exit] = {}

    async def ended(self, attempt: Attempt) -> Exit:
        self.ends[attempt.id] = end = await super().ended(attempt)
        return end

    async def trim(self, attempt: AttemptId) -> None:
        self.ends.pop(attempt, None)
        await super().trim(attempt)


class NodeSite(Site):
    """`site.lanes` is one lane; entries of the others are made and not kept."""

    leases: NodeLeases
    adapter: NodeAdapter

    def __init__(self, **parts: object) -> None:
        super().__init__(**parts)  # type: ignore[arg-type]  # the parts of a site, named by who makes it
        self.leases = NodeLeases(self)

    def terms(self) -> Terms:
        found = super().terms()
        return Terms(
            site=found.site,
            pools=found.pools,
            owner_tenant=found.owner_tenant,
            single_user=found.single_user,
            mappings=_HeadSays(),
            cordoned=found.cordoned,
            may_run_as=found.may_run_as,
            owner_first=False,
            closed=found.closed,
            self_stop=found.self_stop,
        )

    async def append(self, entries: Build, also: Also | None = None) -> None:
        def build(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            return {Lane.SCHEDULER: [self._with_exit(entry) for entry in entries(following).get(Lane.SCHEDULER, ())]}

        await super().append(build, also)

    def _with_exit(self, entry: EntryBase) -> EntryBase:
        """An end with what its supervisor saw: the head judges it."""
        if not isinstance(entry, Ended):
            return entry
        end = self.adapter.ends.get(entry.attempt)
        return entry if end is None else msgspec.structs.replace(entry, seen=seen_of(end))


class LineTransfer:
    """`Transfer` over the line: packs from the head, results to it, in parts, by digest."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def fetch(self, work: WorkRef, target: Path) -> None:
        part = target.with_name(f".{target.name}.part")
        try:
            with await asyncio.to_thread(part.open, "wb") as file:
                at = 0
                while at < work.size or at == 0:
                    found = await self._ask("up.pack", PackPart(work=work, offset=at, limit=PART), Part)
                    if not found.data:
                        break
                    await asyncio.to_thread(file.write, found.data)
                    at += len(found.data)
            await asyncio.to_thread(_check, part, work)
            part.rename(target)
        except OSError as err:
            raise Unavailable("agent.disk_full", f"the pack cannot be written: {err.strerror}", retry_after_s=10) from err
        finally:
            part.unlink(missing_ok=True)

    async def store(self, result: ResultRef, source: Path) -> None:
        try:
            with await asyncio.to_thread(source.open, "rb") as file:
                at = 0
                while True:
                    await asyncio.to_thread(file.seek, at)
                    data = await asyncio.to_thread(file.read, PART)
                    went = await self._ask("up.result", ResultPart(result=result, offset=at, data=data), Went)
                    if went.whole:
                        return
                    if went.later:
                        raise Unavailable("agent.head_not_ready", "the head has not read the end of it yet", retry_after_s=0.5)
                    if went.offset == at and not data:
                        raise Unavailable("agent.result_damaged", "the head holds another result than this", retry_after_s=5)
                    at = went.offset
        except FileNotFoundError as err:
            raise Refused("agent.result_gone", f"{source} is not there any more") from err
        except OSError as err:
            raise Unavailable("agent.disk_broken", f"{source} cannot be read: {err.strerror}", retry_after_s=10) from err

    async def _ask(self, subject: str, asked: PackPart | ResultPart, kind: type[T]) -> T:
        answer = await self._bus.request(subject, encode(asked), timeout_s=PART_S)
        return decode(answer.body, kind, what="the head's answer")


def _check(part: Path, work: WorkRef) -> None:
    with part.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if part.stat().st_size != work.size or f"sha256:{found}" != work.digest:
        raise Unavailable("agent.pack_damaged", f"the pack {work.digest} did not arrive whole", retry_after_s=2)
