"""Look for the seeds that see each mutant, and write them down: `python -m tests.sim.mutants.search [NAME …] [--most SEEDS] [--jobs N]`.

A change of what is drawn, or of the order in which things happen, moves the seeds: then this is run again. It writes `witnesses.txt`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys

from tests.sim.mutants import MUTANTS, witnesses
from tests.sim.mutants.base import WITNESSES

from intertie.sim.world import run

# Kept for each: the first of all, and two more that see it if a small change of the product moves the first.
KEPT = 3


def _look(task: tuple[int, int]) -> tuple[str, list[int], str]:
    mutant, most = MUTANTS[task[0]], task[1]
    found, why = list[int](), ""
    for seed in range(1, most + 1):
        try:
            text = mutant.sight(mutant.scenario(seed))
        except Exception as err:  # noqa: BLE001  # told, not hidden
            return mutant.name, found, f"broke: {err!r}"
        # A storm that the product itself does not weather shows nothing.
        if text and not run(mutant.scenario(seed)).violations:
            found.append(seed)
            why = why or text
        if len(found) == KEPT:
            break
    return mutant.name, found, why


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--most", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args(arguments)
    tasks = [(n, asked.most) for n, mutant in enumerate(MUTANTS) if not asked.names or mutant.name in asked.names]
    known = witnesses() if WITNESSES.exists() else {}
    with multiprocessing.get_context("fork").Pool(asked.jobs) as pool:
        for name, seeds, why in pool.imap_unordered(_look, tasks):
            print(f"{name}: {seeds} {why[:160]}", flush=True)
            known.pop(name, None)
            if seeds:
                known[name] = seeds
    lines = [f"{mutant.name} {' '.join(map(str, known[mutant.name]))}\n" for mutant in MUTANTS if mutant.name in known]
    WITNESSES.write_text(
        "# Written by tests.sim.mutants.search: mutant, then the seeds that see it, the first of all first.\n" + "".join(lines)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
