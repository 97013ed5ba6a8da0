"""Look for a storm that sees each mutant, make it short, and write it down: `python -m tests.sim.mutants.search [NAME …] [--most SEEDS]`.

Without a name: for those mutants whose scenario no longer sees them, or is no longer weathered by the product itself. A change of the order in
which things happen can do that: then this is run again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from dataclasses import replace

from tests.sim.mutants import MUTANTS
from tests.sim.mutants.base import SCENARIOS, Mutant, invariant_of

from intertie.sim.runs import read_scenario, write_scenario
from intertie.sim.scenario import Scenario
from intertie.sim.shorten import shorten
from intertie.sim.world import Outcome, run

# Tries to leave something out, each of two runs.
TRIES = 40


def seen(mutant: Mutant, scenario: Scenario) -> Outcome:
    """How this scenario sees it: by violations of what the mutant breaks, and by none if the product itself does not weather it."""
    honest = run(scenario)
    if honest.violations:
        return replace(honest, violations=())
    with mutant.make():
        outcome = run(scenario)
    return replace(outcome, violations=tuple(text for text in outcome.violations if invariant_of(text) in mutant.invariants))


def _look(task: tuple[int, int, bool]) -> tuple[str, str]:
    number, most, anew = task
    mutant = MUTANTS[number]
    if not anew and mutant.file.exists() and seen(mutant, read_scenario(mutant.file)).violations:
        return mutant.name, "is seen by its scenario"
    for seed in range(1, most + 1):
        found = seen(mutant, mutant.scenario(seed))
        if found.violations:
            short = shorten(found, lambda scenario: seen(mutant, scenario), TRIES)
            write_scenario(mutant.file, short.scenario)
            return mutant.name, f"seed {seed}: {short.violations[0]}"
    return mutant.name, f"was not seen by {most} seeds"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--most", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args(arguments)
    tasks = [
        (n, asked.most, mutant.name in asked.names) for n, mutant in enumerate(MUTANTS) if not asked.names or mutant.name in asked.names
    ]
    SCENARIOS.mkdir(exist_ok=True)
    with multiprocessing.get_context("fork").Pool(asked.jobs) as pool:
        for name, told in pool.imap_unordered(_look, tasks):
            print(f"{name}: {told[:200]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
