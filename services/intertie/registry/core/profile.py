"""What a pool may be declared to be. A vague profile is refused: nobody can place work, or price it, on "some GPUs".

Each rule is one function in `LADDER`, judged in that order; the first objection is the answer, and its code is API.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from intertie.contracts.site import Freshness as F
from intertie.contracts.site import Phase, PoolProfile, PoolRecord, SiteKind
from intertie.errors import Refused
from intertie.ids import SiteName, name

NO_ACCELERATOR = "none"

# Words that people write when they do not know; none of them names a model or a link.
VAGUE = frozenset(
    {"", "?", "-", "any", "gpu", "gpus", "nvidia", "amd", "cuda", "accelerator", "card", "unknown", "yes", "true", "default", "tbd", "n/a"}
)

# The smallest card that is sold for computing today holds more; less is a unit mistaken (GiB for MiB).
SMALLEST_MEMORY_MIB = 1_024

# A pool is one kind of hardware under one rule; more devices than any site has is a mistyped number.
MOST_DEVICES = 65_536
MOST_WINDOWS = 32

_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-(?:([01]\d|2[0-3]):([0-5]\d)|24:00)\Z")

Objection = Refused | None


def _name(profile: PoolProfile) -> Objection:
    try:
        name(profile.pool, "pool")
    except Refused as refusal:
        return refusal
    return None


def _accelerator(profile: PoolProfile) -> Objection:
    if profile.accelerator.strip().lower() in VAGUE:
        return _refusal(
            "accelerator", profile, f"names no model ({profile.accelerator!r})", "give the model, such as A100-SXM4-80GB, or 'none'"
        )
    return None


def _count(profile: PoolProfile) -> Objection:
    if profile.count > MOST_DEVICES:
        return _refusal("count", profile, f"counts {profile.count} devices, more than {MOST_DEVICES}", "give the number of devices")
    return None


def _memory(profile: PoolProfile) -> Objection:
    if profile.accelerator != NO_ACCELERATOR and profile.memory_mib < SMALLEST_MEMORY_MIB:
        return _refusal(
            "memory", profile, f"gives {profile.memory_mib} MiB of accelerator memory", "give the memory of one accelerator in MiB"
        )
    return None


def _interconnect(profile: PoolProfile) -> Objection:
    if profile.interconnect.strip().lower() in VAGUE:
        return _refusal(
            "interconnect", profile, f"says {profile.interconnect!r} of its interconnect", "give nvlink, pcie, infiniband … or 'none'"
        )
    return None


def _task_types(profile: PoolProfile) -> Objection:
    if len(set(profile.task_types)) != len(profile.task_types):
        return _refusal("task_types", profile, "names a task type twice", "name each task type once")
    return None


def _share(profile: PoolProfile) -> Objection:
    """A whole card is a thousand; a slot is no part of one."""
    if profile.accelerator == NO_ACCELERATOR and profile.share_milli != 1000:
        return _refusal("share", profile, "gives CPU slots a share of a card", "leave share_milli out")
    return None


def _lendable(profile: PoolProfile) -> Objection:
    if profile.lendable.devices > profile.count:
        text = f"lends {profile.lendable.devices} of {profile.count} devices"
        return _refusal("lendable", profile, text, "lend at most what the pool holds")
    return None


def _windows(profile: PoolProfile) -> Objection:
    if len(profile.lendable.windows) > MOST_WINDOWS:
        return _refusal("window", profile, f"has more than {MOST_WINDOWS} lending windows", "join windows that touch")
    for window in profile.lendable.windows:
        if not _WINDOW.match(window) or window[:5] == window[6:]:
            return _refusal("window", profile, f"has the lending window {window!r}", "write HH:MM-HH:MM, such as 20:00-08:00")
    return None


LADDER: Sequence[Callable[[PoolProfile], Objection]] = (
    _name,
    _accelerator,
    _count,
    _memory,
    _interconnect,
    _task_types,
    _share,
    _lendable,
    _windows,
)


def _refusal(what: str, profile: PoolProfile, text: str, next_step: str) -> Refused:
    return Refused(f"registry.profile.{what}", f"the profile of pool {profile.pool} {text}", next_step=next_step)


def objection(profile: PoolProfile) -> Objection:
    """The first rule that the profile breaks, as the refusal to raise; None if it may stand."""
    return next((found for rule in LADDER if (found := rule(profile)) is not None), None)


def declare(
    current: PoolRecord | None, profile: PoolProfile, *, site: SiteName, kind: SiteKind, freshness: F, by: str, version: int = 1
) -> PoolRecord:
    """The pool's record after the owner declared `profile`; the same record if it says nothing new.

    A new pool starts as a pilot, with `version`. The revision is the registry's own count: what the site wrote there does not matter. Raises the first
    objection of the ladder; the previous revision then stands.
    """
    if (refusal := objection(profile)) is not None:
        raise refusal
    if current is None:
        return PoolRecord(
            site=site,
            pool=profile.pool,
            kind=kind,
            profile=msgspec.structs.replace(profile, revision=1, declared_by=by),
            phase=Phase.PILOT,
            cordoned=False,
            draining=False,
            cordon_reason="",
            freshness=freshness,
            last_heard=None,
            inventory=None,
            inventory_at=None,
            version=version,
        )
    known = current.profile
    if msgspec.structs.replace(profile, revision=known.revision, declared_by=known.declared_by) == known:
        return current
    return msgspec.structs.replace(
        current,
        profile=msgspec.structs.replace(profile, revision=known.revision + 1, declared_by=by),
        version=current.version + 1,
    )


def fits(record: PoolRecord, *, accelerator: str | None, task_type: str | None) -> bool:
    """True if the pool has the capability asked for; None asks for nothing. Models compare without regard to case."""
    if accelerator is not None and record.profile.accelerator.lower() != accelerator.lower():
        return False
    return task_type is None or task_type in record.profile.task_types
