"""What is decided about a pool: its mode, its onboarding phase, its downtimes. The record itself is `contracts.site.PoolRecord`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from intertie.contracts.base import Contract, Instant, NonNegative
from intertie.contracts.site import AccessMode, Downtime, DowntimeEffect, ModeDecision, Phase, PoolRecord
from intertie.ids import PoolName, SiteName, TenantName

Reason = Annotated[str, msgspec.Meta(min_length=3, max_length=1_000, pattern=r"^[^\x00]+\Z")]
"""Kept and read by others; no table holds a NUL."""


class ModeBody(Contract, frozen=True, kw_only=True):
    """`PUT /v1/sites/{site}/pools/{pool}/mode`: the two answers and the mode that they support."""

    mode: AccessMode
    outsider_decides: bool
    response_time_held: bool
    reason: Reason


class DecideMode(ModeBody, frozen=True, kw_only=True):
    """`cmd.registry.decide_mode`: a decision on record. A change of mode wants a drained pool at which nothing of ours runs."""

    site: SiteName
    pool: PoolName


class PhaseBody(Contract, frozen=True, kw_only=True):
    """`POST /v1/sites/{site}/pools/{pool}/phase`. `tenants`: while pilot or parallel only these; null leaves the list as it is, `[]` empties it."""

    phase: Phase
    reason: Reason
    tenants: Annotated[list[TenantName], msgspec.Meta(max_length=1_000)] | None = None


class MovePhase(PhaseBody, frozen=True, kw_only=True):
    """`cmd.registry.move_phase`: to the next onboarding phase, as `lifecycle.PHASE_MOVES` allows."""

    site: SiteName
    pool: PoolName


class DowntimeBody(Contract, frozen=True, kw_only=True):
    """`POST /v1/sites/{site}/pools/{pool}/downtimes`."""

    start: Instant
    end: Instant
    effect: DowntimeEffect = DowntimeEffect.FULL
    reason: Reason


class DeclareDowntime(DowntimeBody, frozen=True, kw_only=True):
    """`cmd.registry.declare_downtime`: planned if it is declared at least 24 h ahead. The same window twice is one."""

    site: SiteName
    pool: PoolName


class RemoveDowntime(Contract, frozen=True, kw_only=True):
    """`cmd.registry.remove_downtime`: it does not take place, or ends now."""

    site: SiteName
    pool: PoolName
    id: str


class PoolMove(Contract, frozen=True, kw_only=True):
    """One move of a pool's phase, with the evidence that it went by."""

    before: Phase
    after: Phase
    reason: str
    spec: str = ""
    """The agreed meter spec that the move rests on, `spec-… rev 2`; empty where none is asked."""


class PoolHistoryRow(Contract, frozen=True, kw_only=True):
    """One thing decided about a pool; exactly one of decision, move, downtime is set."""

    number: NonNegative
    at: Instant
    by: str
    decision: ModeDecision | None = None
    move: PoolMove | None = None
    downtime: Downtime | None = None
    removed: bool = False
    """The downtime was taken back."""


class PoolQuery(Contract, frozen=True, kw_only=True):
    """`qry.registry.pool_history`: all that was decided about a pool, newest first."""

    site: SiteName
    pool: PoolName
    limit: Annotated[int, msgspec.Meta(ge=1, le=500)] = 100


class PoolHistory(Contract, frozen=True, kw_only=True):
    """A pool and its decisions."""

    record: PoolRecord
    rows: list[PoolHistoryRow]
