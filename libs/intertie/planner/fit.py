"""Which devices: best fit, so that big holes stay whole. Whole devices only; a job stays inside one pool of one site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from intertie.ids import DeviceId
from intertie.planner.model import DeviceView, PoolView


@dataclass(frozen=True, slots=True)
class Fit:
    """A choice inside one pool. Lower `rank` is better: fewest nodes, then fewest devices left over on the last node, then in the pool."""

    devices: tuple[DeviceId, ...]
    nodes: int
    left_on_node: int
    left_in_pool: int

    @property
    def rank(self) -> tuple[int, int, int]:
        return self.nodes, self.left_on_node, self.left_in_pool


def best_fit(free: Sequence[DeviceView], count: int) -> Fit:
    """`count` of the `free` devices (there are enough). One node if any holds them, the fullest that does; else the emptiest nodes first,
    so that as few as possible are used, and the last of them again by best fit. Equal choices fall by name: the same input, the same answer.
    """
    names = sorted({d.node for d in free})
    by_node = {name: sorted(d.id for d in free if d.node == name) for name in names}
    holds: npt.NDArray[np.int64] = np.array([len(by_node[name]) for name in names], dtype=np.int64)
    order: list[int] = []
    left = count
    while left > 0:
        enough = np.flatnonzero(holds >= left)
        index = int(enough[np.argmin(holds[enough])]) if enough.size else int(np.argmax(holds))
        order.append(index)
        left -= min(left, int(holds[index]))
        holds[index] = -1
    chosen: list[DeviceId] = []
    for index in order:
        chosen += by_node[names[index]][: count - len(chosen)]
    available = sum(len(by_node[names[index]]) for index in order)
    return Fit(devices=tuple(chosen), nodes=len(order), left_on_node=available - count, left_in_pool=len(free) - count)


def choose(candidates: Sequence[tuple[PoolView, Fit]]) -> tuple[PoolView, Fit]:
    """The best of at least one candidate; equal ones by name."""
    return min(candidates, key=lambda c: (c[1].rank, c[0].site, c[0].pool))
