"""Disks put back to what they were, and disks that are there twice: a hub's store restored or failed over, a site's disk restored, its journal
deleted, its machine cloned. And what was true before: a restore does not reach the simulator's own memory, by which numbers are checked across it.

`size` of each of these faults is how long ago the image was taken, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from intertie.agent.adapters.fake import Run
from intertie.agent.core.attempts import Exit
from intertie.contracts.base import decode
from intertie.contracts.link import Lane, SegmentClosed
from intertie.contracts.usage import Segment
from intertie.ids import AttemptId, JobId, JournalId, SiteName
from intertie.lane.memory import MemoryLaneTables
from intertie.scheduler.core.orders import Order
from intertie.sim.disk import Networked, SchedulerDisk
from intertie.sim.scenario import Fault
from intertie.store.epoch import target

if TYPE_CHECKING:
    from intertie.sim.host import Host
    from intertie.sim.world import World

IMAGED = ("restore_store", "failover", "restore_disk", "clone")
"""Faults that need an image of some time before."""
# From the word to stop to the last service gone; and between looks for a transaction that is still open.
STOP_S, LOOK_S = 0.5, 0.05
HUB = "hub"
"""Both stores at once: the PostgreSQL that they share."""


@dataclass(frozen=True, slots=True)
class SiteImage:
    """A site's disk at a moment: the journal's file, the note beside it, the job folders, and the last sign of life of each that ran."""

    journal: bytes
    note: tuple[JournalId | None, str]
    runs: dict[AttemptId, Run]
    alive_us: dict[AttemptId, int]


@dataclass
class History:
    """What was on the hub's disks before a restore took it away."""

    generations: dict[tuple[JobId, int, int], AttemptId] = field(default_factory=dict)
    instructions: dict[tuple[SiteName, int, int], tuple[AttemptId, Order]] = field(default_factory=dict)
    events: dict[tuple[str, str, int, int], str] = field(default_factory=dict)
    entries: dict[tuple[Lane, SiteName, JournalId, int], bytes] = field(default_factory=dict)
    jobs: set[JobId] = field(default_factory=set)
    attempts: set[AttemptId] = field(default_factory=set)
    cancelled: set[JobId] = field(default_factory=set)
    restored: set[str] = field(default_factory=set)
    """Services whose store was ever put back."""
    unsaid: set[AttemptId] = field(default_factory=set)
    """Of which usage lay on a disk that was lost, and nowhere else: what they used stays incomplete, and metering says so."""
    only_kept: dict[tuple[Lane, SiteName, JournalId, int], AttemptId] = field(default_factory=dict)
    """Usage that lay on a disk that was lost, and that metering has: put back to before it, nobody has it any more."""
    begun_unheard: set[AttemptId] = field(default_factory=set)
    """Attempts whose start only a disk knew that was put back to before it."""
    disks_lost: set[SiteName] = field(default_factory=set)
    """Sites of which a disk was put back, copied or deleted."""

    def take(self, disk: Networked) -> list[str]:
        """Learn what is on this disk now; what was used for another thing before (invariants 3 and 11)."""
        found = [
            f"invariant 11: {what} number {key} was {before} and is {now}"
            for what, told, known in (
                ("event", _events(disk), self.events),
                *((("generation", _generations(disk), self.generations),) if isinstance(disk, SchedulerDisk) else ()),
                *((("instruction", _instructions(disk), self.instructions),) if isinstance(disk, SchedulerDisk) else ()),
            )
            for key, now in told
            if (before := known.setdefault(key, now)) != now
        ]
        for key, entry in MemoryLaneTables(disk).entries.items():
            if self.entries.setdefault(key, entry.raw) != entry.raw:
                found.append(f"invariant 3: entry {key[3]} of journal {key[2]} of {key[1]}/{key[0]} is another than it was")
        if isinstance(disk, SchedulerDisk):
            self.jobs |= disk.jobs.keys()
            self.attempts |= disk.attempt_rows.keys()
            self.cancelled |= {job.job for job in disk.jobs.values() if job.cancel is not None}
        return found


def _events(disk: Networked) -> Iterator[tuple[Any, Any]]:
    for row in disk.rows.values():
        if row.number:
            yield (disk.service, row.event.noun, row.epoch, row.number), row.event.event_id


def _generations(disk: SchedulerDisk) -> Iterator[tuple[Any, Any]]:
    for name, row in disk.attempt_rows.items():
        yield (row.record.job, row.record.epoch, row.record.generation), name


def _instructions(disk: SchedulerDisk) -> Iterator[tuple[Any, Any]]:
    for (name, order), (epoch, number) in disk.numbers.items():
        if name in disk.attempt_rows:
            yield (disk.attempt_rows[name].record.site, epoch, number), (name, order)


# --- images ------------------------------------------------------------------------------------------------------------------------------


def plan(world: World, fault: Fault) -> None:
    """Take the image that a fault will need, when its time comes."""
    if fault.what in IMAGED:
        world.loop.call_at(max(0.0, fault.at - fault.size), _take, world, fault, context=world.fate.context())


def _take(world: World, fault: Fault) -> None:
    if fault.who in world.hosts:
        # A journal that is deleted at this moment leaves nothing to copy: the fault does not happen then.
        if world.hosts[fault.who].has_journal:
            world.images[fault] = site_image(world.hosts[fault.who])
        return
    disks = disks_of(world, fault.who)
    if any(disk.busy for disk in disks):
        world.loop.call_later(LOOK_S, _take, world, fault, context=world.fate.context())
        return
    world.images[fault] = [(disk, disk.image()) for disk in disks]


def disks_of(world: World, who: str) -> list[Networked]:
    return [world.scheduler_disk, world.metering_disk] if who == HUB else [world.disk_of(who)]


def site_image(host: Host) -> SiteImage:
    machine = host.machine
    alive = {one.run.attempt.id: max(0, int((one.alive_s - one.began_s) * 1e6)) for one in machine.live()}
    return SiteImage(host.image(), host.note, {name: _copy(run) for name, run in machine.disk.runs.items()}, alive)


def _copy(run: Run) -> Run:
    return Run(
        run.attempt,
        log=run.log,
        files=dict(run.files),
        fenced=run.fenced,
        trimmed=run.trimmed,
        deadline=run.deadline,
        started=run.started,
        exit=run.exit,
    )


def folders(image: SiteImage) -> dict[AttemptId, Run]:
    """Job folders as a kernel finds them that has just begun: what ran when the image was taken runs nowhere."""
    found = {}
    for name, kept in image.runs.items():
        run = found[name] = _copy(kept)
        if run.started is not None:
            run.exit = run.exit or Exit(certain=False, rebooted=True, ran_us=image.alive_us.get(name, 0))
            run.over.set()
    return found


# --- the hub's --------------------------------------------------------------------------------------------------------------------------------


def restore_store(world: World, fault: Fault) -> None:
    """Services are stopped, the store is put back, `intertie hub restored` raises every service's epoch, services are started."""
    stopped = [name for name in world.services]

    def raised() -> None:
        disks = [world.scheduler_disk, world.metering_disk]
        told = [MemoryLaneTables(disk).sites_kept.values() for disk in disks]
        number = target([disk.service_epoch for disk in disks], [row.epoch_told for rows in told for row in rows], world.hub_clock.now())
        for disk in disks:
            disk.raise_epoch(number)

    _put_back(world, fault, stopped, raised)


def failover(world: World, fault: Fault) -> None:
    """A standby without the last commits is promoted: each service finds another timeline under it, and raises its epoch by itself."""
    disks = disks_of(world, fault.who)
    stopped = [name for name in world.services if world.disk_of(name) in disks]

    def raised() -> None:
        for disk in disks:
            told = [row.epoch_told for row in MemoryLaneTables(disk).sites_kept.values()]
            disk.raise_epoch(target([disk.service_epoch], told, world.hub_clock.now()))

    _put_back(world, fault, stopped, raised)


def _put_back(world: World, fault: Fault, stopped: list[str], raised: Callable[[], None]) -> None:
    image = world.images.get(fault)
    for name in stopped:
        world.kill(name, back_in=max(fault.lasts, STOP_S * 2))
    if image is None or any(disk.busy for disk, _ in image):
        world.loop.call_later(LOOK_S, _put_back, world, fault, stopped, raised, context=world.fate.context())
        return
    for disk, held in image:
        for text in world.history.take(disk):
            world.wrong(text)
        world.history.restored.add(disk.service)
        disk.restore(held)
        if disk is world.metering_disk:
            kept = MemoryLaneTables(disk).entries
            world.history.unsaid |= {attempt for key, attempt in world.history.only_kept.items() if key not in kept}
    raised()
    world.tell(f"{fault.who} is as it was {fault.size:.1f} s before, in epochs {[disk.service_epoch for disk, _ in image]}")
    if any(disk is world.scheduler_disk for disk, _ in image):
        world.ask_again()


# --- a site's ----------------------------------------------------------------------------------------------------------------------------------


def _lose(world: World, host: Host) -> None:
    """What this disk alone knew of usage."""
    kept = MemoryLaneTables(world.metering_disk).entries
    if not host.has_journal:
        return
    for seq, body in host.database.execute("SELECT seq, body FROM entry WHERE lane = ?", (Lane.METERING.value,)):
        key = (Lane.METERING, host.site, host.journal, seq)
        if msgspec.json.decode(bytes(body)).get("kind") != "segment":
            continue  # Also of what no keeper can read.
        said = decode(bytes(body), SegmentClosed, what="entry")
        attempt = decode(said.sealed.payload, Segment, what="segment").attempt
        if key in kept:
            world.history.only_kept[key] = attempt
        else:
            world.history.unsaid.add(attempt)


def _cuts(host: Host) -> set[tuple[str, str]]:
    """What its journal knows of running attempts' segments through the last border of a period."""
    return set(host.database.execute("SELECT key, value FROM setting WHERE key LIKE 'cut/%'"))


def restore_disk(world: World, fault: Fault) -> None:
    """The whole disk of a site's machine is put back, and the machine is started from it."""
    host, image = world.hosts[fault.who], world.images.get(fault)
    if image is None:
        return
    _lose(world, host)
    world.history.disks_lost.add(host.site)
    world.history.begun_unheard |= _begun_unheard(world, host, image)
    world.lose_power(fault.who, back_in=max(fault.lasts, STOP_S * 2))
    cut = _cuts(host) if host.has_journal else set()
    host.restore(image.journal)
    # Told through a border that the disk put back does not know: its end is measured with other bounds, and waits for a person.
    world.history.unsaid |= {AttemptId(key.removeprefix("cut/")) for key, _ in cut - _cuts(host)}
    host.note = image.note
    host.machine.disk.runs = folders(image)


def _begun_unheard(world: World, host: Host, image: SiteImage) -> set[AttemptId]:
    """What this disk alone knows to have begun: put back, it looks to everybody like a claim that a reboot has ended before its start."""
    began = {name for name, run in host.machine.disk.runs.items() if run.started is not None}
    kept = {name for name, run in image.runs.items() if run.started is not None}
    rows = world.scheduler_disk.attempt_rows
    return {name for name in began - kept if name in rows and rows[name].record.started_at is None}


def gone(world: World, fault: Fault) -> None:
    """Somebody deletes the journal's file, the note and the job folders stay; what runs goes on."""
    host = world.hosts[fault.who]
    world.history.disks_lost.add(host.site)
    world.kill(fault.who, back_in=max(fault.lasts, STOP_S * 2))
    _lose(world, host)
    host.lose_journal()


def clone(world: World, fault: Fault) -> None:
    """The machine is started a second time from a copy of its disk, at another place."""
    name = f"{fault.who}'"
    if name in world.hosts or fault not in world.images:
        return
    host = world.hosts[fault.who]
    world.history.disks_lost.add(host.site)
    twin = world.copy_host(fault.who, name, same_boot=fault.same_boot)
    image: SiteImage = world.images[fault]
    twin.restore(image.journal)
    twin.note = image.note
    twin.machine.disk.runs = folders(image)
    world.begin_agent(name)


def end_clone(world: World, fault: Fault) -> None:
    """A person stops the copy, restarts the first, and says of what the copy had begun that nobody will hear of it again."""
    name = f"{fault.who}'"
    if (twin := world.hosts.get(name)) is None or twin.ended:
        return
    twin.ended = True
    _lose(world, twin)
    twin.machine.lose_power()
    world.kill(name, back_in=0.0)
    world.kill(fault.who, back_in=1.0)
    world.close_attempts_of(twin)
