"""The invariants of the link, asked of processes where they speak of processes and of disks where they speak of records. Numbers are those of the
design's list; each function says which it asks."""

from __future__ import annotations

import gzip
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING

from intertie.agent.core.model import OPEN, Attempt
from intertie.contracts.audit import AuditChainQuery
from intertie.contracts.base import EVENT_STREAM, Empty, decode
from intertie.contracts.job import AttemptRecord, JobState, OnSilence
from intertie.contracts.link import IslandedGrant, Lane
from intertie.contracts.usage import UsagePhase
from intertie.ids import AttemptId, Digest, TenantName
from intertie.lane.memory import MemoryLaneTables
from intertie.lifecycle import JOB_MOVES, JOB_TERMINAL
from intertie.link.journal import first_digest, next_digest
from intertie.metering.core import ledger
from intertie.metering.core.attribution import COUNTED, Reason
from intertie.metering.core.evidence import Received
from intertie.metering.service import Metering, trust
from intertie.scheduler.core.orders import Order, due
from intertie.scheduler.core.rows import AttemptState
from intertie.scheduler.core.sight import LIVE_S
from intertie.sim.disk import NEVER, MeteringDisk, SchedulerDisk
from intertie.sim.foreign import FORGED, KIND
from intertie.sim.host import Agent, Host
from intertie.sim.hub import OPERATOR
from intertie.sim.machine import SLOW_START_S, Machine, Process, processes
from intertie.store import MemoryChain, verify_chain

if TYPE_CHECKING:
    from intertie.sim.world import World

# The one price that scenarios agree on, per slot and hour, and half of what the agreement rounds to.
SLOT_HOUR = Decimal("3.6")
ROUNDING = Decimal("0.00005")
# How much longer than its process a run may look: from the last instruction to the record of it.
LIFE_US = 1_000_000
POISON = f'"{KIND}"'.encode()
LOST = b'"kind":"lost_range"'
# What may move a job of a silent site: two rules that were declared beforehand, and a named person.
DECLARED = ("rule if_site_silent=rerun", "rule lost_by", "a person's decision")
# Between the check of a go and what is written of it.
LATE_S = 5.0
# Audit rows of one service and run: a few for each job.
MOST_LINKS = 1_000
# Of an attempt of which its end is still to come.
OPEN_STATES = ("offered", "claimed", "staging", "running")
# A sample older than this says nothing about now: what the scheduler believes, and what a message may take.
SAMPLE_S = LIVE_S * 4 + 15.0


# --- at the instant of a start -----------------------------------------------------------------------------------------------------------


def at_start(world: World, machine: Machine, process: Process) -> Iterator[str]:
    """1: never two live process groups of a job that waits, nor of one that may run again and whose supervisor could have stopped it. 6: never two
    holders of a device, local work included."""
    mine = process.run.attempt
    waits = mine.spec.on_silence is not OnSilence.RERUN
    for host in world.hosts.values():
        for other in host.machine.live():
            if mine.local is not None and host.machine is not machine:
                continue  # The owner's own work on a copy of the owner's machine is the owner's matter.
            if other is not process and other.run.attempt.job == mine.job and (waits or not other.excused):
                yield f"invariant 1: {mine.job} runs twice: {other.run.attempt.id} at {host.site} and {mine.id} at {machine.name}"
    for other in machine.live():
        both = set(mine.devices) & set(other.run.attempt.devices)
        if other is not process and both:
            yield f"invariant 6: {other.run.attempt.id} and {mine.id} both run on {sorted(both)} of {machine.name}"
    row = world.scheduler_disk.attempt_rows.get(mine.id)
    if mine.local is not None:
        return
    agent = world.hosts[machine.name].agent
    if agent is not None and mine.id in agent.site.grants.taken:
        if agent.silent and mine.tenant is not None:
            yield from _within(agent, mine.tenant, sum(len(one.run.attempt.devices) for one in machine.live() if _is_of(one, mine.tenant)))
        return
    if mine.id in world.scheduler_disk.called_never or (row is not None and row.state in NEVER):
        yield f"invariant 2: {mine.id} starts, and the hub has called it {row.state if row else 'never started'}"
    if why := _go_is_over(mine, machine):
        yield f"invariant 1: {mine.id} starts by a go that stands no more: {why}"


def _is_of(process: Process, tenant: TenantName) -> bool:
    return process.run.attempt.local is None and process.run.attempt.tenant == tenant


def _allowed(agent: Agent, tenant: TenantName) -> int | None:
    """Slots of a tenant's islanded allowance, as the site was told last; None if of none."""
    grants = (decode(sealed.payload, IslandedGrant, what="grant") for sealed in agent.site.settings.grants)
    return next((grant.devices for grant in grants if grant.tenant == tenant), None)


def _within(agent: Agent, tenant: TenantName, slots: int) -> Iterator[str]:
    allowed = _allowed(agent, tenant) or 0
    if slots > allowed:
        yield f"invariant 12: {tenant} has {slots} slots of {agent.host.site}, which is alone and may give it {allowed}"


def _held_of(agent: Agent, tenant: TenantName) -> int:
    books = agent.site.books
    return sum(len(a.devices) for a in books.attempts.values() if a.local is None and a.tenant == tenant and a.state in OPEN)


def taken_alone(agent: Agent, tenant: TenantName) -> Iterator[str]:
    """12: while it is alone a site gives a tenant no more than its allowance, what the hub placed there included."""
    if agent.silent:
        yield from _within(agent, tenant, _held_of(agent, tenant))


def refused_alone(agent: Agent, tenant: TenantName, slots: int, code: str) -> Iterator[str]:
    """12: what the allowance holds and the devices allow is not refused, and whatever else is refused says so rightly. At this instant."""
    site, allowed = agent.site, _allowed(agent, tenant)
    waiting = any(a.local is not None and a.state == "waiting" for a in site.books.attempts.values())
    free = len(agent.host.pool.devices) - len(site.books.holds.holder)
    rightly = {
        "grant.not_islanded": not agent.silent,
        "grant.account": site.settings.revision == 0,
        "grant.none": allowed is None,
        "grant.devices": allowed is not None and _held_of(agent, tenant) + slots > allowed,
        "device_busy": free < slots or waiting,
        "agent.disk_full": agent.host.disk_full,
    }
    if not rightly.get(code):
        yield f"invariant 12: {tenant} asks for {slots} slots of {agent.host.site}, which is alone, and is refused: {code}"


def _go_is_over(attempt: Attempt, machine: Machine) -> str:
    """A go is of one kernel boot, taken within `start_within` of the sync that brought the offer, and good until `start_by` after it."""
    if attempt.kernel_boot != machine.clock.kernel_boot:
        return f"it was claimed in {attempt.kernel_boot}, this is {machine.clock.kernel_boot}"
    if attempt.go_boot_s is None:
        return "there was none"
    if attempt.go_boot_s - attempt.offer_sent_boot_s > attempt.start_within_s + LATE_S:
        return f"it came {attempt.go_boot_s - attempt.offer_sent_boot_s:.1f} s after the sync of its offer, {attempt.start_within_s} s are allowed"
    waited_s = machine.clock.boot_s() - attempt.go_boot_s
    return f"{waited_s:.0f} s ago, {attempt.start_by_s} s are allowed" if waited_s > attempt.start_by_s + SLOW_START_S * 3 else ""


def beside(world: World) -> list[tuple[AttemptId, AttemptId]]:
    """1: pairs of runs of one job, on machines that do not stand still, at sites whose agents live and are heard now."""
    live = [one.run.attempt for host in world.hosts.values() if _is_told(host) for one in host.machine.live()]
    return [(one.id, other.id) for one, other in itertools.combinations(live, 2) if one.job == other.job and one.local is None]


def _is_told(host: Host) -> bool:
    agent = host.agent
    return agent is not None and not (agent.party.dead or agent.party.paused or host.machine.party.paused or agent.silent)


def at_placement(world: World, record: AttemptRecord, sampled_s: float | None) -> Iterator[str]:
    """5, 6: a site gets new work only once it was at head with this leader, and only by a live sample, `sampled_s` old here."""
    if not world.scheduler_disk.at_head(record.site):
        yield f"invariant 5: {record.attempt} is placed at {record.site}, which was not at head with this leader"
    if sampled_s is None or sampled_s > SAMPLE_S:
        age = "none ever came" if sampled_s is None else f"the last came {sampled_s:.0f} s ago"
        yield f"invariant 6: {record.attempt} is placed at {record.site} without a live sample: {age}"


def at_gone(world: World, attempt: AttemptId) -> Iterator[str]:
    """5: what a site's list does not name is gone only if the site has no more to say of it: not while its end is on the way."""
    site = world.scheduler_disk.attempt_rows[attempt].record.site
    row, host = MemoryLaneTables(world.scheduler_disk).row(Lane.SCHEDULER, site), world.hosts[site]
    if row is None or row.journal != host.journal:
        return
    waiting = host.database.execute("SELECT body FROM entry WHERE lane = 'scheduler' AND seq > ?", (row.interpreted_through,))
    if any(attempt.encode() in bytes(body) and b'"outcome"' in bytes(body) for (body,) in waiting):
        yield f"invariant 5: {attempt} is called gone by a list of {site}, and {site} has its end still to tell"


def after_power(world: World, host: Host) -> Iterator[str]:
    """3: what a keeper has of a journal is on that journal's platter, whenever the power goes."""
    if host.site in world.history.disks_lost:
        return
    for lane, on_disk in ((Lane.SCHEDULER, world.scheduler_disk), (Lane.METERING, world.metering_disk)):
        row, head = MemoryLaneTables(on_disk).row(lane, host.site), _lane_row(host, lane)[0] - 1
        if row is not None and row.journal == host.journal and row.ack_through > head:
            yield f"invariant 3: after a power loss lane {lane} of {host.site} ends at {head}, and its keeper has it through {row.ack_through}"


# --- settled ---------------------------------------------------------------------------------------------------------------------------------


def unsettled(world: World) -> str:
    """15: what is not at rest yet; empty when everything is."""
    store, books = world.scheduler_disk, world.metering_disk
    if world.asked < len(world.scenario.work):
        return f"{len(world.scenario.work) - world.asked} requests have no answer"
    if waiting := [f"{job.job} is {job.state}" for job in store.jobs.values() if job.state not in JOB_TERMINAL]:
        return "; ".join(waiting)
    if live := [f"{row.record.attempt} is live and {row.state}" for row in store.attempt_rows.values() if row.live]:
        return "; ".join(live)
    for host in world.standing():
        if text := _site_unsettled(host, store, books):
            return text
    for name, row in store.attempt_rows.items():
        if _open_orders(store, name):
            return f"{name} has instructions without an answer: {_open_orders(store, name)}"
        held = books.attempts.get(name)
        if held is None or held.snapshot is None or held.snapshot.record.version != row.record.version:
            return f"metering has another version of {name} than the scheduler"
        if row.state is AttemptState.ENDED and held.settled is None and name not in world.history.unsaid:
            return f"{name} has ended and is not settled"
    stream = world.broker.streams.state(EVENT_STREAM)
    for disk in (store, books):
        mark = disk.marks.get(EVENT_STREAM)
        if stream is None or mark is None or mark.created != stream.created:
            return f"{disk.service} has not seen yet that its stream is another one"
        if any(row.generation != mark.generation for row in disk.rows.values()):
            return f"events of {disk.service} are not sent"
        if len(disk.audit_links) < len(disk.audits):
            return f"audit rows of {disk.service} are not chained"
    return ""


def stalled(world: World) -> Iterator[str]:
    """4: long after faults have stopped each instruction that was handed out has its answer, and each lane is at its head."""
    for name in world.scheduler_disk.attempt_rows:
        if orders := _open_orders(world.scheduler_disk, name):
            yield f"invariant 4: {name} has instructions without an answer: {orders}"
    for host in world.standing():
        for lane, on_disk in ((Lane.SCHEDULER, world.scheduler_disk), (Lane.METERING, world.metering_disk)):
            if text := _lane_unsettled(host, lane, on_disk):
                yield f"invariant 4: {text}"


def _open_orders(store: SchedulerDisk, name: str) -> list[str]:
    row = next(row for key, row in store.attempt_rows.items() if key == name)
    if row.state is AttemptState.LOST:
        return []  # Its date has come, or a person said so: where it lay nobody answers any more.
    cancelled = store.jobs[row.record.job].cancel is not None
    return [order for order in due(row, cancelled=cancelled) if order is not Order.SETTLE]


def _site_unsettled(host: Host, store: SchedulerDisk, books: MeteringDisk) -> str:
    agent = host.agent
    if agent is None or agent.party.dead or not agent.ready:
        return f"the agent of {host.site} is not up"
    if agent.silent:
        return f"{host.site} is islanded"
    if open_ones := [f"{a.id} is {a.state} at {host.site}" for a in agent.site.books.attempts.values() if a.state in (*OPEN, "waiting")]:
        return "; ".join(open_ones)
    if agent.site.books.holds.holder:
        return f"devices of {host.site} have holders: {agent.site.books.holds.holder}"
    for lane, on_disk in ((Lane.SCHEDULER, store), (Lane.METERING, books)):
        if text := _lane_unsettled(host, lane, on_disk):
            return text
    return ""


def _lane_unsettled(host: Host, lane: Lane, on_disk: SchedulerDisk | MeteringDisk) -> str:
    row = MemoryLaneTables(on_disk).row(lane, host.site)
    head = _lane_row(host, lane)[0] - 1
    if row is not None and (row.ack_through, row.interpreted_through) == (head, head) and row.at_head:
        return ""
    told = f"{row.ack_through} acknowledged, {row.interpreted_through} interpreted, at head {row.at_head}" if row else "nothing"
    return f"lane {lane} of {host.site} ends at {head}, its keeper has {told}"


def _lane_row(host: Host, lane: Lane) -> tuple[int, str, int, str]:
    """next_seq, head_digest, base_seq, base_digest."""
    row = host.database.execute("SELECT next_seq, head_digest, base_seq, base_digest FROM lane WHERE name = ?", (lane.value,)).fetchone()
    return int(row[0]), str(row[1]), int(row[2]), str(row[3])


# --- afterwards ------------------------------------------------------------------------------------------------------------------------------


async def after_all(world: World) -> list[str]:
    """Everything that is asked of disks once all is at rest."""
    asked = (_never_ran, _kept, _lanes, _moved_by_someone, _segments, _events, _success_wins, _results, _numbers, _audited, _settled_once)
    found = list(itertools.chain.from_iterable(ask(world) for ask in asked))
    return [*found, *await _ledger(world), *await _chained(world)]


def _never_ran(world: World) -> Iterator[str]:
    """2: what was refused, withdrawn or given up has no process and no usage."""
    ran = {one.run.attempt.id for one in processes([host.machine for host in world.hosts.values()])}
    used = {item.segment.attempt for item in world.metering_disk.segments if not item.segment.id.startswith(FORGED)}
    for name, row in world.scheduler_disk.attempt_rows.items():
        if row.state in NEVER and name in ran and name not in world.history.begun_unheard:
            yield f"invariant 2: {name} is {row.state} and had a process"
        if row.state in NEVER and name in used:
            yield f"invariant 2: {name} is {row.state} and has usage"
        if row.state is AttemptState.ENDED and name not in ran:
            yield f"invariant 2: {name} ended and never had a process"


def _kept(world: World) -> Iterator[str]:
    """3: what an agent has forgotten, or was told is safe, is at the keeper byte for byte, and what both have is the same."""
    for disk in (world.scheduler_disk, world.metering_disk):
        yield from world.history.take(disk)
        for (lane, site, journal, seq), said in MemoryLaneTables(disk).entries.items():
            if LOST in said.raw:
                yield f"invariant 3: entry {seq} of journal {journal} of {site}/{lane} tells of a lost range, and nothing here is old enough to be forgotten"
    for host in world.standing():
        for lane, on_disk in ((Lane.SCHEDULER, world.scheduler_disk), (Lane.METERING, world.metering_disk)):
            tables = MemoryLaneTables(on_disk)
            row, (following, head, base, base_digest) = tables.row(lane, host.site), _lane_row(host, lane)
            digest = first_digest(host.journal)
            for seq, body in host.database.execute("SELECT seq, body FROM entry WHERE lane = ?", (lane.value,)):
                kept = tables.entries.get((lane, host.site, host.journal, seq))
                if kept is None or kept.raw != bytes(body):
                    yield f"invariant 3: entry {seq} of lane {lane} of {host.site} is {'another' if kept else 'not'} at its keeper"
            for seq in range(1, base + 1):
                entry = tables.entries.get((lane, host.site, host.journal, seq))
                if entry is None:
                    yield f"invariant 3: {host.site} forgot entry {seq} of lane {lane}, and its keeper does not have it"
                    return
                digest = next_digest(digest, entry.raw)
            if base and digest != base_digest:
                yield f"invariant 3: the entries 1 to {base} of lane {lane} that {host.site} forgot are others than its keeper has"
            if row is not None and (row.ack_through, row.digest) == (following - 1, Digest(head)):
                continue
            yield f"invariant 3: lane {lane} of {host.site} ends at {following - 1}, its keeper at {row.ack_through if row else 0}, or otherwise"


def _lanes(world: World) -> Iterator[str]:
    """4: what cannot be read is in quarantine, and nothing else is; no event was given up."""
    for on_disk in (world.scheduler_disk, world.metering_disk):
        tables = MemoryLaneTables(on_disk)
        poison = {key for key, entry in tables.entries.items() if POISON in entry.raw}
        for key, why in tables.quarantined.items():
            if key not in poison:
                yield f"invariant 4: entry {key[3]} of {key[1]}/{key[0]} is in quarantine: {why}"
        for key in poison - tables.quarantined.keys():
            yield f"invariant 4: entry {key[3]} of {key[1]}/{key[0]} cannot be read, and is not in quarantine"
        for letter in on_disk.dead_letters:
            yield f"invariant 9: an event was given up: {letter.type}: {letter.error}"


def _moved_by_someone(world: World) -> Iterator[str]:
    """5: each state follows from the one before by the table, and the line that says so names who and by which evidence."""
    reachable = {(before, after) for (before, _), after in JOB_MOVES.items()}
    for job, lines in world.scheduler_disk.lines.items():
        for before, after in itertools.pairwise(lines):
            if before.state is after.state:
                continue
            if (before.state, after.state) not in reachable:
                yield f"invariant 5: {job} went from {before.state} to {after.state}"
            by_site = after.actor.startswith("site/")
            if not after.actor or (by_site or after.what == "placed") and not after.evidence:
                yield f"invariant 5: {job} went from {before.state} to {after.state} and nobody knows why: {after}"
            declared = after.evidence.startswith(DECLARED)
            if not by_site and not declared and before.state in (JobState.STAGING, JobState.RUNNING, JobState.FINISHING):
                yield f"invariant 5: {job} left {before.state} on the word of {after.actor}, not of its site"


def _segments(world: World) -> Iterator[str]:
    """7: the segments of an attempt are those of its ending, without a gap or an overlap, and its run is as long as its process was."""
    by_attempt = defaultdict(list)
    lives = defaultdict(list)
    for one in processes([host.machine for host in world.hosts.values()]):
        lives[one.run.attempt.id].append(one)
    for item in world.metering_disk.segments:
        if _told_twice(world, item) or item.suspense == Reason.SAID_AGAIN:
            continue
        if not item.segment.id.startswith(FORGED):
            by_attempt[item.segment.attempt].append(item)
        elif item.suspense in COUNTED:
            yield f"invariant 8: {item.segment.id} counts, which carries no signed attribution"
    for name, row in world.scheduler_disk.attempt_rows.items():
        if row.state is not AttemptState.ENDED:
            continue
        items = by_attempt.pop(name, [])
        if name in world.history.unsaid:
            continue  # Its usage lay on a disk that is lost: metering says that it is incomplete.
        if late := [item.suspense for item in items if item.suspense not in COUNTED]:
            yield f"invariant 7: segments of {name} wait in suspense: {late}"
        segments = sorted((item.segment for item in items), key=lambda s: (s.start, s.end))
        quantity = sum(s.quantity_milli * ((s.end - s.start) // timedelta(microseconds=1)) for s in segments)
        if (len(segments), quantity) != (row.record.segments, row.record.quantity_milli_us):
            yield f"invariant 7: {name} has {len(segments)} segments of {quantity}, its ending says {row.record.segments} of {row.record.quantity_milli_us}"
        for earlier, later in itertools.pairwise(segments):
            if earlier.end != later.start:
                yield f"invariant 7: {name} has a segment that ends {earlier.end} and one that begins {later.start}"
        ran_us = sum((s.end - s.start) // timedelta(microseconds=1) for s in segments if s.phase is UsagePhase.RUN)
        lived_us = sum(int((one.ended_s - one.began_s) * 1e6) for one in lives.get(name, ()) if one.ended_s is not None)
        if ran_us > lived_us + LIFE_US:
            yield f"invariant 7: {name} is billed for {ran_us} µs, and its processes lived {lived_us}"
        if ran_us != row.record.ran_us:
            yield f"invariant 7: {name} ran {row.record.ran_us} µs by its ending and {ran_us} µs by its segments"
    for name in by_attempt:
        known = world.scheduler_disk.attempt_rows.get(name)
        if known is None or known.state is not AttemptState.LOST:
            yield f"invariant 2: {name} has usage and never ended"


def _told_twice(world: World, item: Received) -> bool:
    """The way out of what a restored disk tells of its lost life: the first word stands, the other waits for a person, as `conflict`."""
    return item.suspense == Reason.CONFLICT and item.site in world.history.disks_lost


async def holding(world: World) -> list[str]:
    """8, while it storms: what metering knows to be open holds money."""
    disk = world.metering_disk
    service = Metering(disk, MemoryLaneTables(disk), trust(world.key.public), world.hub_clock)
    check = await service.check(Empty(), OPERATOR)
    found = [f"invariant 8: {check.open_without_hold} open attempts hold nothing"] if check.open_without_hold else []
    return [*found, *[f"invariant 8: {name} is open and holds nothing" for name in await _unheld(disk)]]


async def _unheld(disk: MeteringDisk) -> list[AttemptId]:
    """By hand: attempts that are open by metering's own record, whose price is agreed, and for which no money is set aside."""
    found = []
    for evidence in await disk.load(list(disk.attempts)):
        record = evidence.record
        is_open = record is not None and record.state in OPEN_STATES and not record.refined and evidence.settled is None
        if is_open and record is not None and record.spec is not None and ledger.held(evidence.balances) <= 0:
            found.append(evidence.attempt)
    return found


def _settled_once(world: World) -> Iterator[str]:
    """8: an attempt is told to be settled once, unless it was closed as lost before its site came back."""
    for name, held in world.metering_disk.attempts.items():
        row = world.scheduler_disk.attempt_rows.get(name)
        if held.settled is not None and held.settled.version > 1 and row is not None and not row.record.refined:
            yield f"invariant 8: {name} was settled {held.settled.version} times"


async def _ledger(world: World) -> list[str]:
    """8: sums are zero, postings are what segments rate to, closed attempts hold nothing. The ledger's own proof, and one by hand."""
    disk = world.metering_disk
    sums: Counter[str] = Counter()
    for entry in disk.entries:
        for leg in entry.legs:
            sums[leg.currency] += leg.amount  # type: ignore[assignment]  # a Counter of decimals
    found = [f"invariant 8: {currency} sums to {amount}" for currency, amount in sums.items() if amount != Decimal(0)]
    service = Metering(disk, MemoryLaneTables(disk), trust(world.key.public), world.hub_clock)
    for name, row in world.scheduler_disk.attempt_rows.items():
        posted = -sum(
            (leg.amount for e in disk.entries if e.attempt == name for leg in e.legs if leg.account.startswith("usage/")), Decimal(0)
        )
        if name in world.history.unsaid or row.state is AttemptState.LOST:
            continue  # What was proven of it is posted, by the ledger's own proof below; how long it ran nobody knows.
        owed = Decimal(row.record.ran_us) * len(row.record.devices) * SLOT_HOUR / 3_600_000_000
        if abs(posted - owed) > ROUNDING:
            found.append(
                f"invariant 8: {name} ran {row.record.ran_us} µs on {len(row.record.devices)} slots, {posted} is posted, {owed} is owed"
            )
    check = await service.check(Empty(), OPERATOR)
    forged = sum(1 for item in disk.segments if item.segment.id.startswith(FORGED) or _told_twice(world, item))
    figures = (check.sum, check.closed_with_hold, check.open_without_hold, check.suspense_segments - forged)
    if any(figures) or check.differing or world.scheduler_disk.attempt_rows.keys() & set(check.incomplete) - world.history.unsaid:
        found.append(f"invariant 8: {check}")
    return found


def _events(world: World) -> Iterator[str]:
    """9: the read model is the keeper's table; the stream holds the outbox, gapless per noun, no number with two contents."""
    streams = world.broker.streams
    stream = streams._streams.get(EVENT_STREAM)
    seen: dict[tuple[str, str, int, int], bytes] = {}
    for stored in stream.messages.values() if stream else ():
        message = stored.message
        place = message.subject.split(".")
        key = (place[3], place[4], int(message.headers["intertie-epoch"]), int(message.headers["intertie-number"]))
        if seen.setdefault(key, message.body) != message.body:
            yield f"invariant 9: number {key} has two contents"
    for disk in (world.scheduler_disk, world.metering_disk):
        numbers = defaultdict(list)
        for row in disk.rows.values():
            numbers[(row.event.noun, row.epoch)].append(row.number)
            if not world.broker.streams.purged and seen.get((disk.service, row.event.noun, row.epoch, row.number)) != row.event.body:
                yield f"invariant 9: {row.event.noun} {row.number} of {disk.service} is not in the stream as it is in the outbox"
        for noun, given in numbers.items():
            if sorted(given) != list(range(1, len(given) + 1)):
                yield f"invariant 9: numbers of {disk.service} {noun} have a gap: {sorted(given)}"
    for name, attempt in world.scheduler_disk.attempt_rows.items():
        held = world.metering_disk.attempts.get(name)
        told = held.snapshot.record if held and held.snapshot else None
        if told is not None and (told.state, told.segments, told.outcome) != (
            attempt.record.state,
            attempt.record.segments,
            attempt.record.outcome,
        ):
            yield f"invariant 9: metering's record of {name} is not the scheduler's"


def _success_wins(world: World) -> Iterator[str]:
    """10: no job failed while a success of it lies on a disk that answered; who survives and whose result is delivered is written once."""
    for host in world.standing():
        for run in host.machine.disk.runs.values():
            job = world.scheduler_disk.jobs.get(run.attempt.job)
            if job is None or run.exit is None or not run.exit.certain or run.exit.code != 0:
                continue
            if job.state is not JobState.SUCCEEDED:
                yield f"invariant 10: {run.attempt.id} succeeded at {host.site} and {job.job} is {job.state}"
    for text in world.scheduler_disk.chosen_twice:
        yield f"invariant 10: {text}"


def _results(world: World) -> Iterator[str]:
    """10: only a success survives, and what fetch brings of a job is what the attempt made whose result it is said to be."""
    rows = world.scheduler_disk.attempt_rows
    for job in world.scheduler_disk.jobs.values():
        if job.survivor is not None and rows[job.survivor].record.outcome != "succeeded":
            yield f"invariant 10: {job.survivor} survives of {job.job}, and it {rows[job.survivor].record.outcome}"
        result = rows[job.delivered].record.result if job.delivered is not None else None
        if job.delivered is None or result is None:
            continue
        stored = world.stored.get(result.digest)
        if stored is None or job.delivered.encode() not in gzip.decompress(stored):
            yield f"invariant 10: the result of {job.job} is that of {job.delivered}, and what is fetched is {'another' if stored else 'nothing'}"


def _numbers(world: World) -> Iterator[str]:
    """11: leaders' writes do not mix; no generation and no instruction number is used for two things."""
    disk = world.scheduler_disk
    for (_, one, _), (_, other, _) in itertools.pairwise(disk.rounds):
        if (other.epoch, other.number) < (one.epoch, one.number):
            yield f"invariant 11: a write of leader {one.number} is followed by one of leader {other.number}"
    generations = Counter((row.record.job, row.record.epoch, row.record.generation) for row in disk.attempt_rows.values())
    numbers = Counter((disk.attempt_rows[name].record.site, *number) for (name, _), number in disk.numbers.items())
    for thing, times in [*generations.items(), *numbers.items()]:
        if times > 1:
            yield f"invariant 11: {thing} is used {times} times"


def _audited(world: World) -> Iterator[str]:
    """13: each job that was taken in has exactly one row that says so, and each cancel that changed something too."""
    rows = Counter((row.action, row.target) for row in world.scheduler_disk.audits if row.result == "ok")
    alone = {row.record.job for row in world.scheduler_disk.attempt_rows.values() if row.record.islanded_submit}
    known, lost = world.scheduler_disk.jobs.keys() - alone, world.history.jobs
    for job in (world.scheduler_disk.jobs[name] for name in sorted(known)):
        if rows[("job.submit", job.job)] != 1 and not (rows[("job.submit", job.job)] == 0 and job.job in lost):
            yield f"invariant 13: {rows[('job.submit', job.job)]} rows say that {job.job} was submitted"
        if job.cancel is not None and rows[("job.cancel", job.job)] != 1:
            yield f"invariant 13: {rows[('job.cancel', job.job)]} rows say that {job.job} was cancelled"
    agreed = [row for row in world.metering_disk.audits if row.action == "spec.agree"]
    if len(agreed) != len(world.metering_disk.agreed):
        yield f"invariant 13: {len(agreed)} rows say that {len(world.metering_disk.agreed)} prices were agreed"
    asked = set(world.jobs.values())
    if len(asked) != len(world.scenario.work) or asked - known - lost or known - asked - lost:
        yield f"invariant 13: {len(world.scenario.work)} requests became {len(known)} jobs"


async def _chained(world: World) -> list[str]:
    """13: each service's rows are in its chain, the chain verifies, and it is not behind any head that was anchored."""
    found = []
    for disk in (world.scheduler_disk, world.metering_disk):
        page = await MemoryChain(disk).page(AuditChainQuery(limit=MOST_LINKS))
        # A store that was put back lacks rows that were anchored, and a verification says so, rightly.
        anchors = [] if disk.service in world.history.restored else world.anchors
        wrong = verify_chain(disk.service, page.links, anchors, unchained=page.unchained, waiting=page.waiting, key=world.key.public)
        for finding in wrong:
            # What a restore took was anchored, and that it is missing must be told: in an epoch that is over.
            if finding.kind != "cut" or disk.service not in world.history.restored or finding.epoch == disk.service_epoch:
                found.append(f"invariant 13: the audit chain of {disk.service}: {finding}")
        if page.unchained or page.more:
            found.append(f"invariant 13: {len(page.unchained)} rows of {disk.service} are in no link, {len(page.links)} are")
    return found
