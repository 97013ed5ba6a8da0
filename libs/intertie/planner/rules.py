"""The ladder: why a pool does not take a job, asked in this order, the first that applies is told.

The order is that of `WaitReason`: first what can never fit, then whose word is missing, then what is merely not now. So the pool that got
furthest down the ladder is the one nearest to taking the job, and its reason is the job's canonical wait reason. Each rule answers with
numbers: what was needed, what was found.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from intertie.contracts.job import Rejection, WaitReason
from intertie.contracts.site import RIGHT, AccessMode, DeviceKind, DeviceState, Freshness, Phase
from intertie.planner import requests
from intertie.planner.model import DeviceView, PoolView, QueuedJob
from intertie.planner.room import HEALTHY, Room

NO_ACCELERATOR = "none"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule holds against a pool."""

    text: str
    needed: str = ""
    found: str = ""


Judge = Callable[[QueuedJob, PoolView, Room], Finding | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rung. `lasting` rules judge what the pool is declared to be: waiting does not change their answer."""

    name: str
    reason: WaitReason
    judge: Judge
    lasting: bool = False


PIN = "pin"
"""The rule of pools that the job did not name: its user knows why."""


def _site_pin(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    if job.site is not None and job.site != pool.site:
        return Finding(f"the job names site {job.site}", needed=job.site, found=pool.site)
    if job.pool is not None and job.pool != pool.pool:
        return Finding(f"the job names pool {job.pool}", needed=job.pool, found=pool.pool)
    return None


def _access_mode(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    if pool.mode is None:
        other = AccessMode.SERVICE if pool.profile.mode is AccessMode.MANAGED else AccessMode.MANAGED
        return Finding(
            f"its mode was decided as {other}, and the owner declares {pool.profile.mode}: nothing new begins until they agree",
            needed=AccessMode.MANAGED.value,
            found=f"{other} and {pool.profile.mode}",
        )
    if job.offering:
        return _offering(job, pool)
    if pool.profile.mode is not AccessMode.MANAGED:
        return Finding(
            "the owner offers a service here and decides alone what runs", needed=AccessMode.MANAGED.value, found=pool.profile.mode.value
        )
    return None


def _offering(job: QueuedJob, pool: PoolView) -> Finding | None:
    if not requests.serves(pool):
        return Finding(
            "the hub places work here itself: submit it as a job", needed=AccessMode.SERVICE.value, found=pool.profile.mode.value
        )
    offering = pool.offering(job.offering)
    if offering is None:
        offered = ", ".join(one.name for one in pool.offerings) or "none"
        return Finding(f"the owner makes no offering {job.offering} here (there: {offered})", needed=job.offering, found=offered)
    if (passed := requests.bound(job, offering)) is not None:
        text, needed, found = passed
        return Finding(text, needed=needed, found=found)
    return None


def _closed(_: QueuedJob, pool: PoolView, __: Room) -> Finding | None:
    if pool.phase is Phase.CLOSED:
        return Finding("the pool has left the federation", needed="an open phase", found=pool.phase.value)
    return None


def _task_type(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    if job.task_type in pool.profile.task_types:
        return None
    offered = ", ".join(pool.profile.task_types)
    return Finding(f"the pool does not take {job.task_type} jobs, it takes: {offered}", needed=job.task_type.value, found=offered)


def words_of(model: str) -> frozenset[str]:
    """The words of a GPU model's name: `A100-SXM4-80GB` → a100, sxm4, 80gb."""
    return frozenset(re.split(r"[\s_-]+", model.lower())) - {""}


def _accelerator_model(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    """`A100` asks for any A100; `A100-80GB` for one of 80 GB: every word that was asked must be in the pool's model."""
    declared = pool.profile.accelerator
    if job.resources.kind is DeviceKind.SLOT:
        if declared.lower() == NO_ACCELERATOR:
            return None
        return Finding(f"a pool of {declared} lends GPUs, not CPU slots", needed="CPU slots", found=declared)
    wanted = job.resources.gpu_model or ""
    if declared.lower() == NO_ACCELERATOR:
        return Finding("the pool has no accelerator", needed=wanted or "a GPU", found=NO_ACCELERATOR)
    if words_of(wanted) <= words_of(declared):
        return None
    return Finding(f"the accelerator here is {declared}", needed=wanted, found=declared)


def _accelerator_memory(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    wanted = job.resources.gpu_memory_mib
    if job.resources.kind is DeviceKind.SLOT or wanted <= pool.profile.memory_mib:
        return None
    return Finding(
        f"one {pool.profile.accelerator} here has {pool.profile.memory_mib} MiB",
        needed=f"{wanted} MiB",
        found=f"{pool.profile.memory_mib} MiB",
    )


def _interconnect(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    wanted = job.resources.interconnect
    if wanted is None or wanted.lower() == pool.profile.interconnect.lower():
        return None
    return Finding(f"the interconnect here is {pool.profile.interconnect}", needed=wanted, found=pool.profile.interconnect)


def _count(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    wanted, has = job.resources.count, pool.profile.count
    if wanted <= has:
        return None
    return Finding(f"the pool has {has} in all, and a job is never split over pools", needed=str(wanted), found=str(has))


def _lent_in_all(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    wanted, lent = job.resources.count, pool.profile.lendable.devices
    if wanted <= lent:
        return None
    return Finding(f"the owner lends {lent} of {pool.profile.count} at most", needed=str(wanted), found=str(lent))


def _image(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    """By the site's own word; one that has not said a word may still say it (`_image_untold`)."""
    if not job.image or pool.images is None or pool.images.takes(job.image):
        return None
    some = bool(pool.images.runtime and pool.images.sources)
    text = f"images are taken from elsewhere at {pool.site}" if some else f"{pool.site} runs no images that a job names"
    return Finding(text, needed=job.image, found=pool.images.told)


def _image_untold(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    """An agent that does not tell would run the job without its image."""
    if not job.image or pool.images is not None:
        return None
    return Finding(f"{pool.site} has not told whether it runs images that a job names", needed=job.image, found="not told")


def _self_stop(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    """No lasting rule: an agent can be upgraded."""
    if not job.rerun or pool.self_stop:
        return None
    return Finding(
        f"nothing at {pool.site} stops work at the end of its lease without the agent, as if_site_silent=rerun needs",
        needed="supervisors that stop it",
        found="none",
    )


def _mapping(job: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    if pool.single_user:
        if job.tenant == pool.owner_tenant:
            return None
        return Finding(
            f"the agent runs as its owner's own user and takes only tenant {pool.owner_tenant}", needed=job.tenant, found=pool.owner_tenant
        )
    if room.accounts.get((pool.site, job.tenant)):
        return None
    return Finding(f"tenant {job.tenant} has no local account at {pool.site}", needed="a mapping", found="none")


def _quota(job: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    broken = room.broken_quota(job, pool.site)
    if broken is None:
        return None
    quota, used = broken
    where = quota.site or "all sites together"
    unit = "GPUs" if quota.kind is DeviceKind.GPU else "CPU slots"
    return Finding(
        f"quota of tenant {job.tenant} at {where} is {quota.limit} {unit}, {used} in use",
        needed=str(job.resources.count),
        found=str(max(quota.limit - used, 0)),
    )


def _price(job: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    """A limited allowance cannot be guarded without a price; without a limit nothing needs to be priced beforehand."""
    budget = room.budgets.get(job.tenant)
    if budget is None or budget.amount is None or room.ceiling(job, pool) is not None:
        return None
    return Finding(f"no agreement with tenant {job.tenant} prices {pool.profile.accelerator}", needed="a price", found="none")


def _budget(job: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    budget = room.budgets.get(job.tenant)
    if budget is None or budget.amount is None:
        return None
    if budget.valid_until is not None and room.now >= budget.valid_until:
        return Finding(
            f"the allowance of tenant {job.tenant} ended at {_clock(budget.valid_until)}", needed="a valid allowance", found="an ended one"
        )
    ceiling, left = room.ceiling(job, pool), budget.amount - room.committed[job.tenant]
    if ceiling is None or ceiling <= left:
        return None
    return Finding(
        f"tenant {job.tenant} may still spend {left:.2f} {budget.currency}, this could cost {ceiling:.2f}",
        needed=f"{ceiling:.2f} {budget.currency}",
        found=f"{left:.2f} {budget.currency}",
    )


def _clock(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _since(pool: PoolView) -> str:
    return f"last heard {_clock(pool.last_heard)}" if pool.last_heard else "never heard"


def _unsure(job: QueuedJob, _: PoolView, __: Room) -> Finding | None:
    if not job.unsure:
        return None
    named = ", ".join(job.unsure[:4]) + (f" and {len(job.unsure) - 4} more" if len(job.unsure) > 4 else "")
    return Finding(
        f"the hub was restored, and {named} has not told yet whether this job runs there: cancel and submit again if it cannot wait",
        needed="every site's word",
        found=f"{len(job.unsure)} silent",
    )


def _freshness(_: QueuedJob, pool: PoolView, __: Room) -> Finding | None:
    if pool.freshness is Freshness.FRESH:
        return None
    return Finding(
        f"what we know of {pool.site} is {pool.freshness}: {_since(pool)}", needed=Freshness.FRESH.value, found=pool.freshness.value
    )


def _unheard(_: QueuedJob, pool: PoolView, __: Room) -> Finding | None:
    if pool.heard:
        return None
    return Finding(f"{pool.site} is not heard on its scheduler lane: {_since(pool)}", needed="an answered sync", found="silence")


def _catching_up(_: QueuedJob, pool: PoolView, __: Room) -> Finding | None:
    if pool.caught_up:
        return None
    return Finding(f"{pool.site} has not yet told all that happened there", needed="its lane at head", found="catching up")


def _suspended(_: QueuedJob, pool: PoolView, __: Room) -> Finding | None:
    if pool.phase is Phase.SUSPENDED:
        return Finding("the pool is suspended", needed="a working phase", found=pool.phase.value)
    return None


def _unproven(_: QueuedJob, pool: PoolView, __: Room) -> Finding | None:
    if pool.unproven:
        return Finding(f"what {pool.name} declares is not proven: {pool.unproven}", needed="a probe that passed", found=pool.unproven)
    return None


def _candidate(_: QueuedJob, pool: PoolView, __: Room) -> Finding | None:
    if pool.phase is Phase.CANDIDATE:
        return Finding("the pool is a candidate: no outside work before its pilot", needed=Phase.PILOT.value, found=pool.phase.value)
    return None


def _phase_tenants(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    if not pool.tenants or pool.phase not in (Phase.PILOT, Phase.PARALLEL) or job.tenant in pool.tenants:
        return None
    return Finding(
        f"the pool is in its phase {pool.phase}, and takes {', '.join(pool.tenants[:4])} only", needed=job.tenant, found="not named for it"
    )


def _downtime(job: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    """What would run into it is not begun: by its wall-time limit, since nobody knows when it will end."""
    for down in pool.downtimes:
        left_s = (down.start - room.now).total_seconds()
        if room.now < down.end and job.wall_s > left_s:
            began = "is down since" if left_s <= 0 else "goes down at"
            fits = f"; a job of at most {int(left_s)} s would still be placed" if left_s >= 1 else ""
            return Finding(
                f"the pool {began} {_clock(down.start)}, until {_clock(down.end)}: {down.why}{fits}",
                needed=f"{job.wall_s} s",
                found=f"{max(0, int(left_s))} s",
            )
    return None


def _cordoned(_: QueuedJob, pool: PoolView, __: Room) -> Finding | None:
    if pool.draining or pool.cordoned:
        word = "draining" if pool.draining else "cordoned"
        return Finding(f"the pool is {word}: {pool.cordon_reason or 'no reason given'}", needed="open", found=word)
    return None


def _accepting(_: QueuedJob, pool: PoolView, __: Room) -> Finding | None:
    if pool.accepting:
        return None
    return Finding("the owner has paused lending", needed="accepting", found="paused")


def _paused(_: QueuedJob, pool: PoolView, __: Room) -> Finding | None:
    if not pool.paused:
        return None
    return Finding(f"the owner of {pool.site} has paused lending{pool.pause_told}", needed="lending", found="paused")


def _condition(_: QueuedJob, pool: PoolView, __: Room) -> Finding | None:
    if not pool.condition:
        return None
    return Finding(f"{pool.site} takes no new work now: {pool.condition}", needed="room for work", found="none")


def _window(_: QueuedJob, pool: PoolView, __: Room) -> Finding | None:
    if pool.lending_now:
        return None
    windows = ", ".join(pool.profile.lendable.windows)
    return Finding(f"the owner lends only during {windows}", needed="an open window", found="closed")


def device_states(pool: PoolView, kind: DeviceKind) -> str:
    """`2 free, 1 lost, 1 not live`: what the devices of a kind are, in words."""
    counts = Counter(d.state.value if d.live else "without live telemetry" for d in pool.devices if d.kind is kind)
    return ", ".join(f"{n} {word}" for word, n in sorted(counts.items())) or "no device seen"


def _unhealthy(job: QueuedJob, pool: PoolView, _: Room) -> Finding | None:
    kind = job.resources.kind
    healthy = sum(1 for d in pool.devices if d.kind is kind and _is_well(d))
    if healthy >= job.resources.count:
        return None
    ill = [f"{d.id} {d.state.value if d.live else 'without live telemetry'}" for d in pool.devices if d.kind is kind and not _is_well(d)]
    named = ", ".join(ill[:4]) + (f" and {len(ill) - 4} more" if len(ill) > 4 else "")
    return Finding(
        f"{healthy} healthy of {pool.profile.count}: {named or 'no device seen'}", needed=str(job.resources.count), found=str(healthy)
    )


def _is_well(device: DeviceView) -> bool:
    """What its owner keeps for somebody is well, too, and so is what the people of a site with a queue of its own are using."""
    return device.live and (device.state in HEALTHY or device.reserved_until is not None or _own_use(device))


def _own_use(device: DeviceView) -> bool:
    """A right to queue that is worth nothing now, since the site's own users have the cards. (A card itself in other hands is a fault.)"""
    return device.live and device.state is DeviceState.FOREIGN and device.id.startswith(RIGHT)


def _own_users(job: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    """Enough would be free if the site's own users had none of it: ordinary load, and no fault."""
    kind, wanted = job.resources.kind, job.resources.count
    theirs = sum(1 for d in pool.devices if d.kind is kind and _own_use(d))
    free = len(room.free(pool, kind))
    if not theirs or free >= wanted or free + theirs < wanted:
        return None
    return Finding(
        f"the site's own users have {theirs} of the {pool.profile.lendable.devices} that it lends", needed=str(wanted), found=str(free)
    )


def _reserved(job: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    """Enough would be free if the owner kept none of it for their own people."""
    kind, wanted = job.resources.kind, job.resources.count
    kept = [d.reserved_until for d in pool.devices if d.kind is kind and d.live and d.reserved_until is not None]
    free = len(room.free(pool, kind))
    if not kept or free >= wanted or free + len(kept) < wanted:
        return None
    return Finding(
        f"the owner keeps {len(kept)} for present holders, the first of them until {_clock(min(kept))}", needed=str(wanted), found=str(free)
    )


def _one_node(job: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    """Devices of several machines are not one machine's: a run there lives on one node."""
    if not pool.one_node:
        return None
    by_node = Counter(d.node for d in room.free(pool, job.resources.kind))
    most, node = max(((count, name) for name, count in by_node.items()), default=(0, ""))
    if most >= job.resources.count:
        return None
    return Finding(
        f"a run lives on one node there, and the most that is free on one is {most}" + (f" ({node})" if node else ""),
        needed=f"{job.resources.count} on one node",
        found=str(most),
    )


def _free(job: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    kind = job.resources.kind
    free = len(room.free(pool, kind))
    if free >= job.resources.count:
        return None
    return Finding(
        f"{free} to be had: federation jobs hold {room.held(pool)}; the site sees {device_states(pool, kind)}",
        needed=str(job.resources.count),
        found=str(free),
    )


def _lent_now(job: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    lent, held = pool.profile.lendable.devices, room.held(pool)
    if held + job.resources.count <= lent:
        return None
    return Finding(f"the owner lends {lent}, our jobs hold {held}", needed=str(job.resources.count), found=str(max(lent - held, 0)))


def _requests_open(job: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    """Its owner has enough to answer."""
    if not job.offering or (held := room.held(pool)) + job.resources.count <= requests.MOST_OPEN:
        return None
    text = f"requests for {held} devices are with the owner of {pool.site} already"
    return Finding(text, needed=str(job.resources.count), found=str(max(requests.MOST_OPEN - held, 0)))


def _avoided(job: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    for one in job.avoided:
        if one.site == pool.site and room.now < one.until:
            left_s = (one.until - room.now).total_seconds()
            return Finding(
                f"this job keeps away from {pool.site} for {left_s:.0f} s more: {one.why}", needed="no recent fault", found="back-off"
            )
    return None


def _back_off(_: QueuedJob, pool: PoolView, room: Room) -> Finding | None:
    if pool.back_off_until is None or room.now >= pool.back_off_until:
        return None
    left_s = (pool.back_off_until - room.now).total_seconds()
    return Finding(
        f"{pool.site} is left alone for {left_s:.0f} s more after a fault: {pool.back_off_why}", needed="no recent fault", found="back-off"
    )


W = WaitReason
RULES: Sequence[Rule] = (
    Rule(PIN, W.NO_SITE_FITS, _site_pin, lasting=True),
    Rule("access_mode", W.NO_SITE_FITS, _access_mode, lasting=True),
    Rule("closed", W.NO_SITE_FITS, _closed, lasting=True),
    Rule("task_type", W.NO_SITE_FITS, _task_type, lasting=True),
    Rule("accelerator_model", W.NO_SITE_FITS, _accelerator_model, lasting=True),
    Rule("accelerator_memory", W.NO_SITE_FITS, _accelerator_memory, lasting=True),
    Rule("interconnect", W.NO_SITE_FITS, _interconnect, lasting=True),
    Rule("count", W.NO_SITE_FITS, _count, lasting=True),
    Rule("lent_in_all", W.NO_SITE_FITS, _lent_in_all, lasting=True),
    Rule("image", W.NO_SITE_FITS, _image, lasting=True),
    Rule("image_untold", W.NO_SITE_FITS, _image_untold),
    Rule("self_stop", W.NO_SITE_FITS, _self_stop),
    Rule("mapping", W.NO_MAPPING, _mapping),
    Rule("phase_tenants", W.NO_MAPPING, _phase_tenants),
    Rule("quota", W.QUOTA, _quota),
    Rule("price", W.BUDGET, _price),
    Rule("budget", W.BUDGET, _budget),
    Rule("unsure", W.SITES_SILENT, _unsure),
    Rule("stale", W.SITES_SILENT, _freshness),
    Rule("unheard", W.SITES_SILENT, _unheard),
    Rule("catching_up", W.SITES_SILENT, _catching_up),
    Rule("candidate", W.CORDONED, _candidate),
    Rule("unproven", W.CORDONED, _unproven),
    Rule("suspended", W.CORDONED, _suspended),
    Rule("downtime", W.CORDONED, _downtime),
    Rule("cordoned", W.CORDONED, _cordoned),
    Rule("paused", W.CORDONED, _paused),
    Rule("site_condition", W.CORDONED, _condition),
    Rule("not_accepting", W.CORDONED, _accepting),
    Rule("lending_window", W.CORDONED, _window),
    Rule("devices_unhealthy", W.DEVICES_UNHEALTHY, _unhealthy),
    Rule("reserved", W.DEVICES_BUSY, _reserved),
    Rule("own_users", W.DEVICES_BUSY, _own_users),
    Rule("no_free_device", W.DEVICES_BUSY, _free),
    Rule("one_node", W.DEVICES_BUSY, _one_node),
    Rule("lendable_share", W.DEVICES_BUSY, _lent_now),
    Rule("requests_open", W.DEVICES_BUSY, _requests_open),
    Rule("avoided", W.BACK_OFF, _avoided),
    Rule("back_off", W.BACK_OFF, _back_off),
)
LASTING: Sequence[Rule] = tuple(rule for rule in RULES if rule.lasting)
PASSING: Sequence[Rule] = tuple(rule for rule in RULES if not rule.lasting)
"""The ladder in its two halves; every lasting rule stands before every passing one."""
OF_CARDS = frozenset(
    {"lent_in_all", "lending_window", "devices_unhealthy", "reserved", "own_users", "no_free_device", "one_node", "lendable_share"}
)
"""Rules that look at a pool's cards, which of a request is its owner's business."""
REASONS = {rule.name: rule.reason for rule in RULES}


def reject(job: QueuedJob, pool: PoolView, room: Room, rules: Sequence[Rule] = RULES) -> Rejection | None:
    """The first rule that rejects the pool for the job; None if none does."""
    for rule in rules:
        if job.offering and rule.name in OF_CARDS:
            continue
        finding = rule.judge(job, pool, room)
        if finding is not None:
            return Rejection(site=pool.site, pool=pool.pool, rule=rule.name, text=finding.text, needed=finding.needed, found=finding.found)
    return None
