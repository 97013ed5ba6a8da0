"""What a site's own tools say a pool has, beside what its owner declared: numbers that change with the hardware, not with the work."""

from __future__ import annotations

from typing import Annotated

import msgspec

from intertie.contracts.base import Contract, NonNegative, Text

Short = Annotated[str, msgspec.Meta(max_length=128)]


class PoolSeen(Contract, frozen=True, kw_only=True):
    """None and empty: could not be read."""

    models: dict[str, NonNegative] = {}
    """Devices of the pool by model."""
    others: dict[str, NonNegative] = {}
    """Devices on the same machines that stand in no pool, by model."""
    memory_mib: NonNegative | None = None
    """The smallest of the pool's devices."""
    links: NonNegative | None = None
    """The fewest active links (NVLink) of a device of the pool; 0: read, and none is active."""
    unread: dict[str, NonNegative] = {}
    """Metric (or source) → devices of which it could not be read for ten minutes or more, although they know it."""
    driver: Short = ""
    agent_version: Short = ""


class Drift(Contract, frozen=True, kw_only=True):
    """One thing in which a pool is not what was declared, or not what it was."""

    what: str
    """`count` · `model` · `memory` · `interconnect` · `lost` · `unread` · the name of a probe's measure."""
    declared: str
    observed: str
    text: Text
