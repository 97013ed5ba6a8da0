"""`python -m intertie.sim run …`: exit 0 if nothing is wrong, 1 with seed and story otherwise, 130 after Ctrl-C."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from intertie.clock import SystemClock
from intertie.sim.faults import FAULTS
from intertie.sim.runs import cores, draws, each, failed_seeds, read_scenario, write_scenario
from intertie.sim.scenario import Scenario, draw
from intertie.sim.shorten import shorten
from intertie.sim.world import Outcome

# A person who watches wants to see it move; a terminal need not be written to at each run.
PROGRESS_S = 0.5
INTERRUPTED = 130


def seeds_of(text: str) -> range:
    """`A..B`, both included."""
    first, dots, last = text.partition("..")
    if not dots or not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
        raise argparse.ArgumentTypeError(f"{text!r} is not A..B")
    return range(int(first), int(last) + 1)


def kinds_of(text: str) -> list[str]:
    kinds = [kind for kind in text.split(",") if kind]
    if unknown := [kind for kind in kinds if kind not in FAULTS]:
        raise argparse.ArgumentTypeError(f"no fault is called {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    return kinds


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="intertie sim", description=__doc__)
    what = parser.add_subparsers(required=True).add_parser("run", help="let scenarios happen and ask the invariants")
    what.add_argument("--seed", type=int, help="one seed, with its whole story")
    what.add_argument("--seeds", type=seeds_of, metavar="A..B", help="many, and a story for each that fails")
    what.add_argument("--fresh", type=int, metavar="N", help="N seeds that nobody has tried, drawn by the time of day, and printed")
    what.add_argument("--failed", type=Path, metavar="FILE", help="all that ever failed: lines of SEED [only=KINDS] WHY or FILE.json WHY")
    what.add_argument("--scenario", type=Path, metavar="FILE", action="append", default=[], help="a scenario written down before")
    what.add_argument("--only", type=kinds_of, default=[], metavar="KINDS", help="faults of these kinds and no others, with commas between")
    what.add_argument("--jobs", type=int, default=cores(), metavar="N", help="processes; one for each core if not said")
    what.add_argument("--shorten", action="store_true", help="leave out what a failure does not need, and write sim-SEED.json")
    what.add_argument("--json", action="store_true", help="one line of JSON for each run, and one for all")
    asked = parser.parse_args(arguments)
    if asked.seed is None and asked.seeds is None and asked.fresh is None and asked.failed is None and not asked.scenario:
        parser.error("say what to run: --seed, --seeds, --fresh, --failed or --scenario")
    return asked


def scenarios(asked: argparse.Namespace) -> Iterator[Scenario]:
    """In the order of the options."""
    if asked.seed is not None:
        yield draw(asked.seed, asked.only)
    yield from draws(asked.seeds or (), asked.only)
    if asked.fresh:
        first = int(SystemClock().now().timestamp() * 1000)
        print(f"fresh seeds {first}..{first + asked.fresh - 1}", file=sys.stderr)
        yield from draws(range(first, first + asked.fresh), asked.only)
    if asked.failed is not None:
        yield from (one.scenario(asked.failed.parent) for one in failed_seeds(asked.failed.read_text("utf-8")))
    yield from map(read_scenario, asked.scenario)


class Telling:
    """What is said while it runs, and at the end."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.clock = asked, SystemClock()
        self.began_s = self.told_s = self.clock.monotonic_s()
        self.done, self.failed = 0, list[int]()
        self.whole = asked.seed is not None or bool(asked.scenario)

    @property
    def rate(self) -> float:
        return self.done / max(1e-9, self.clock.monotonic_s() - self.began_s)

    def outcome(self, outcome: Outcome) -> None:
        self.done += 1
        if outcome.violations:
            self.failed.append(outcome.scenario.seed)
        if self.asked.json:
            print(msgspec.json.encode(outcome.told()).decode(), flush=True)
        elif outcome.violations or self.whole:
            self._line("")
            print(outcome, flush=True)
        if outcome.violations and self.asked.shorten:
            self._shorten(outcome)
        if self.clock.monotonic_s() - self.told_s > PROGRESS_S:
            self.told_s = self.clock.monotonic_s()
            self._line(f"{self.done} runs, {len(self.failed)} failed, {self.rate:.1f} runs/s")

    def _shorten(self, outcome: Outcome) -> None:
        file = Path(f"sim-{outcome.scenario.seed}.json")
        write_scenario(file, shorten(outcome).scenario)
        print(f"shortened: {file}", file=sys.stderr if self.asked.json else sys.stdout, flush=True)

    def _line(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def over(self) -> None:
        self._line("")
        if self.asked.json:
            print(msgspec.json.encode({"runs": self.done, "failed": self.failed, "runs_per_s": round(self.rate, 1)}).decode())
        else:
            print(f"{self.done} runs, {len(self.failed)} failed {self.failed}, {self.rate:.1f} runs/s")


def main(arguments: list[str]) -> int:
    asked = parse(arguments)
    telling, all_of_them = Telling(asked), scenarios(asked)
    few = list(itertools.islice(all_of_them, 2))
    outcomes = each(itertools.chain(few, all_of_them), asked.jobs if len(few) > 1 else 1)
    try:
        for outcome in outcomes:
            telling.outcome(outcome)
    except KeyboardInterrupt:
        telling.over()
        return INTERRUPTED
    telling.over()
    return 1 if telling.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
