"""When a pool is probed, on which device, and what the job's own words prove. The words are a job's: read like any stranger's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec

from intertie.agent.core.devices import Holds, Pool, state_of
from intertie.agent.core.model import Attempt, EndedRecord, Failing, State
from intertie.contracts.probe import ProbeOutcome
from intertie.contracts.site import DeviceKind, DeviceState, plain_model
from intertie.ids import DeviceId

MARK = "INTERTIE-PROBE "
# The drivers keep some of a card's memory to themselves.
MEMORY_SHARE = 0.95
MOST_MEASURE = 2**53
WALL_S = 120


class ProbeRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[probe]` in `site.toml`: the owner's say about the small job that proves what a pool declares."""

    on: bool = True
    every_h: Annotated[float, msgspec.Meta(ge=0.1, le=24 * 31)] = 24.0
    first_after_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 300.0
    """After the agent's start; work that waits comes first anyway."""
    while_paused: bool = False
    """Also while lending is paused."""
    account: str = ""
    """Local account that it runs as; empty: `probe` if there is one, else the first that a tenant is mapped to."""
    pools: list[str] = []
    """Only these; empty: all."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one pool's probes here."""

    last_at: datetime | None = None
    """End of the last that ran to its end."""


def due(rules: ProbeRules, pool: Pool, known: Known, *, started: datetime, now: datetime) -> bool:
    if not rules.on or (rules.pools and pool.name not in rules.pools):
        return False
    if now - started < timedelta(seconds=rules.first_after_s):
        return False
    return known.last_at is None or not timedelta(0) <= now - known.last_at < timedelta(hours=rules.every_h)


def pick(
    pool: Pool,
    holds: Holds,
    attempts: Collection[Attempt],
    observed: Mapping[DeviceId, DeviceState],
    last: DeviceId | None,
    *,
    paused: bool,
) -> DeviceId | str:
    """A free device of the pool, another than last time where there is one, or why there is none now. Whoever waits comes first."""
    if paused:
        return "lending is paused"
    if any(a.state is State.WAITING and a.kind is pool.kind for a in attempts):
        return "the owner's own work waits for devices"
    if any(a.state in (State.CLAIMED, State.STAGING) and a.pool == pool.name for a in attempts):
        return "work is about to start in this pool"
    if any(device.id.startswith("lent-") for device in pool.devices):
        return "the pool lies behind a queue of the site's own"
    free = [d.id for d in pool.devices if state_of(pool.name, d, holds, {}, observed) is DeviceState.FREE]
    if not free:
        return "no device of the pool is free"
    if last in free:
        at = free.index(last)
        return free[at - 1]
    # From the end: work is placed from the beginning.
    return free[-1]


class _Said(msgspec.Struct, frozen=True):
    visible: Annotated[int, msgspec.Meta(ge=0, le=100_000)] | None = None
    model: Annotated[str, msgspec.Meta(max_length=256)] = ""
    measures: Annotated[dict[str, Any], msgspec.Meta(max_length=32)] = {}
    not_measured: Annotated[dict[str, Annotated[str, msgspec.Meta(max_length=2_000)]], msgspec.Meta(max_length=32)] = {}
    wrong: Annotated[list[Annotated[str, msgspec.Meta(max_length=2_000)]], msgspec.Meta(max_length=32)] = []


@dataclass(frozen=True, slots=True)
class Proven:
    outcome: ProbeOutcome
    reason: str
    model: str = ""
    visible: int | None = None
    measures: Mapping[str, int] = field(default_factory=dict)
    not_measured: Mapping[str, str] = field(default_factory=dict)


def prove(pool: Pool, ended: EndedRecord | None, log: str) -> Proven:
    """What this run proves of the pool. An end that nobody saw, or a log without the job's line, proves nothing."""
    if ended is None or ended.outcome == "unknown":
        return Proven(ProbeOutcome.UNPROVEN, "nobody saw how it ended")
    if ended.outcome != "succeeded":
        return Proven(ProbeOutcome.FAILED, ended.reason[:1_000])
    line = next((line for line in reversed(log.splitlines()) if line.startswith(MARK)), None)
    if line is None:
        return Proven(ProbeOutcome.UNPROVEN, "it ended well and printed nothing that it had measured")
    try:
        said = msgspec.json.decode(line.removeprefix(MARK), type=_Said)
    except (msgspec.MsgspecError, ValueError) as err:
        return Proven(ProbeOutcome.FAILED, f"what it printed cannot be read: {err}"[:1_000])
    measures = {
        name[:64]: value
        for name, value in said.measures.items()
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_MEASURE
    }
    wrong = [*said.wrong, *_contradicts(pool, said, measures)]
    seen = bool(measures) if pool.kind is DeviceKind.SLOT else said.visible is not None
    outcome = ProbeOutcome.FAILED if wrong else ProbeOutcome.PASSED if seen else ProbeOutcome.UNPROVEN
    reason = "; ".join(wrong) or ("" if seen else said.not_measured.get("device", "nothing in the job could see its device"))
    return Proven(
        outcome, reason[:1_000], said.model[:128], said.visible, measures, {k[:64]: v[:200] for k, v in said.not_measured.items()}
    )


def not_begun(why: Failing) -> Proven:
    """What never started through a fault of the site is a failure; through anything else it proves nothing."""
    return Proven(ProbeOutcome.FAILED if why.fault else ProbeOutcome.UNPROVEN, f"it did not start: {why.text} ({why.code})"[:1_000])


def _contradicts(pool: Pool, said: _Said, measures: Mapping[str, int]) -> list[str]:
    """What the job saw against what was declared."""
    found: list[str] = []
    if pool.kind is DeviceKind.SLOT:
        return found
    profile = pool.profile
    if said.visible is not None and said.visible != 1:
        found.append(f"it was given one device and sees {said.visible}")
    model = plain_model(said.model)
    if model and model != plain_model(profile.accelerator):
        found.append(f"the device is {model}, {profile.accelerator} is declared")
    memory = measures.get("memory_mib")
    if memory is not None and memory < profile.memory_mib * MEMORY_SHARE:
        found.append(f"the device has {memory} MiB, {profile.memory_mib} are declared")
    return found
