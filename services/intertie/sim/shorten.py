"""A failing scenario without what its failure does not need: fewer faults, less work, fewer sites are tried one by one, and kept out if it still
fails by the same invariant."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from intertie.sim.scenario import Scenario
from intertie.sim.world import Outcome, run

# Each is a whole run; a failure that needs more to be understood is read as it is.
TRIES = 120


def rule_of(outcome: Outcome) -> str:
    """What a violation is a violation of: its words up to the first colon."""
    return outcome.violations[0].partition(":")[0] if outcome.violations else ""


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    for part in ("faults", "work", "local"):
        held = getattr(scenario, part)
        for n in range(len(held)):
            yield msgspec.structs.replace(scenario, **{part: [*held[:n], *held[n + 1 :]]})


def shorten(outcome: Outcome, again: Callable[[Scenario], Outcome] = run, most: int = TRIES) -> Outcome:
    """The smallest that was found in `most` tries; at least one work stays, or nothing would happen."""
    rule, best, tries = rule_of(outcome), outcome, 0
    better = True
    while better and tries < most:
        better = False
        for scenario in _smaller(best.scenario):
            tries += 1
            found = again(scenario)
            if rule_of(found) == rule:
                best, better = found, True
                break
            if tries >= most:
                break
    return best
