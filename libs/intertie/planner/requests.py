"""Requests: what a pool of service access is asked, and by which rules of the ladder. Nothing here knows what is free there; its owner does."""

from __future__ import annotations

from decimal import Decimal

from intertie.contracts.site import AccessMode, JobOffering
from intertie.ids import DeviceId
from intertie.planner.model import PoolView, QueuedJob

# Requests of one pool that wait for their owner at once: more is no dialogue with a person, and each is an instruction that is repeated.
MOST_OPEN = 200
PREFIX = "req-"
"""Of the names that stand for a request's cards: they are nobody's UUID."""


def cost(job: QueuedJob, offering: JobOffering) -> Decimal:
    """The most that the request can cost at the owner's price."""
    return offering.price_per_hour * job.resources.count * job.wall_s / 3_600


def bound(job: QueuedJob, offering: JobOffering) -> tuple[str, str, str] | None:
    """The first bound of the offering that the request passes: (text, needed, found)."""
    name = offering.name
    if job.resources.count > offering.max_devices:
        return f"{name} gives {offering.max_devices} devices to one request", str(job.resources.count), str(offering.max_devices)
    if job.wall_s > offering.max_wall_s:
        return f"{name} runs work for {offering.max_wall_s} s at most", f"{job.wall_s} s", f"{offering.max_wall_s} s"
    if job.task_type not in offering.task_types:
        return f"{name} does not take {job.task_type} work", job.task_type.value, ", ".join(offering.task_types)
    if job.budget is not None and cost(job, offering) > job.budget:
        asked = f"{cost(job, offering):.2f} {offering.currency}"
        return f"it could cost {asked} at {name}, its budget is {job.budget:.2f}", asked, f"{job.budget:.2f}"
    return None


def names(job: QueuedJob) -> tuple[DeviceId, ...]:
    """Names for the cards that it asks for: so many are counted and paid, and which they are stays at the site."""
    return tuple(DeviceId(f"{PREFIX}{job.job}-{n}") for n in range(1, job.resources.count + 1))


def serves(pool: PoolView) -> bool:
    """The owner decides there, and it was decided so."""
    return pool.mode is not None and pool.profile.mode is AccessMode.SERVICE
