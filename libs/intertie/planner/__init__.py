"""Placement as a pure function: `plan(snapshot, now) -> Plan(decisions, report)`.

`model` holds what goes in and comes out, `rules` the ordered ladder of reasons why a pool does not take a job, `fit` the choice of devices,
`place` the round itself, `check` an independent second look at a finished plan. The scheduler loads, saves and publishes; nothing here
knows a clock, a network or a disk.
"""

from __future__ import annotations

from intertie.planner.check import objections
from intertie.planner.model import (
    Avoided,
    Budget,
    Decision,
    DeviceView,
    Down,
    Holding,
    Plan,
    PoolView,
    QueuedJob,
    Report,
    Reserved,
    Snapshot,
    Verdict,
)
from intertie.planner.place import canonical, plan
from intertie.planner.prices import cost_ceiling, spec_in_force
from intertie.planner.suit import Suitability, nearest, never_fits, suitability

__all__ = [
    "Avoided",
    "Budget",
    "Decision",
    "DeviceView",
    "Down",
    "Holding",
    "Plan",
    "PoolView",
    "QueuedJob",
    "Report",
    "Reserved",
    "Snapshot",
    "Suitability",
    "Verdict",
    "canonical",
    "cost_ceiling",
    "nearest",
    "never_fits",
    "objections",
    "plan",
    "spec_in_force",
    "suitability",
]
