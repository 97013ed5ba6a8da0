"""`python -m intertie.sim run --seed N | --seeds A..B [--scenario FILE] [--shorten]`: exit 0 if nothing is wrong, 1 with seed and story otherwise."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from intertie.clock import SystemClock
from intertie.sim.scenario import Scenario, draw
from intertie.sim.shorten import shorten
from intertie.sim.world import Outcome, run


def seeds_of(text: str) -> range:
    """`A..B`, both included."""
    first, dots, last = text.partition("..")
    if not dots or not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
        raise argparse.ArgumentTypeError(f"{text!r} is not A..B")
    return range(int(first), int(last) + 1)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m intertie.sim", description=__doc__)
    what = parser.add_subparsers(required=True).add_parser("run", help="let scenarios happen and ask the invariants")
    which = what.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="one seed, with its whole story")
    which.add_argument("--seeds", type=seeds_of, metavar="A..B", help="many, and a story for each that fails")
    which.add_argument("--scenario", type=Path, metavar="FILE", help="a scenario written down before")
    what.add_argument("--only", default="", help="faults of these kinds and no others, with commas between")
    what.add_argument("--shorten", action="store_true", help="leave out what a failure does not need, and write FILE.json")
    return parser.parse_args(arguments)


def scenarios(asked: argparse.Namespace) -> Iterable[Scenario]:
    if asked.scenario is not None:
        return [msgspec.json.decode(asked.scenario.read_bytes(), type=Scenario)]
    only = [kind for kind in asked.only.split(",") if kind]
    return (draw(seed, only) for seed in (asked.seeds if asked.seeds is not None else [asked.seed]))


def main(arguments: list[str]) -> int:
    asked, clock = parse(arguments), SystemClock()
    began_s, done, failed = clock.monotonic_s(), 0, list[Outcome]()
    for scenario in scenarios(asked):
        outcome = run(scenario)
        done += 1
        if outcome.violations:
            failed.append(outcome)
            print(outcome, flush=True)
            if asked.shorten:
                file = Path(f"sim-{scenario.seed}.json")
                file.write_bytes(msgspec.json.format(msgspec.json.encode(shorten(outcome).scenario)))
                print(f"shortened: {file}", flush=True)
        elif asked.seeds is None:
            print(outcome)
    took_s = clock.monotonic_s() - began_s
    print(f"{done} runs, {len(failed)} failed {[one.scenario.seed for one in failed]}, {done / took_s:.1f} runs/s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
