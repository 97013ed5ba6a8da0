"""Many runs at once: one process for each core, outcomes in the order of their scenarios, whatever ended first. Ctrl-C ends all of them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from intertie.sim.scenario import Scenario, draw
from intertie.sim.world import Outcome, run

# What a worker is given at once: a few seconds of work, so that the last one does not run alone for long.
CHUNK = 8
# A run makes much that dies young: looking for cycles less often is a tenth of its time.
COLLECT_AFTER = 50_000


class Failed(msgspec.Struct, frozen=True):
    """What failed once: a seed, with the kinds of fault to which its storm was narrowed (`only`), or a scenario in a file."""

    seed: int
    only: tuple[str, ...]
    why: str
    file: str = ""

    def scenario(self, folder: Path) -> Scenario:
        """`folder`: where the list lies that names it."""
        return read_scenario(folder / self.file) if self.file else draw(self.seed, self.only)


def failed_seeds(text: str) -> list[Failed]:
    """Lines of `SEED [only=a,b] why` or `FILE.json why`, `#` begins a comment."""
    found = []
    for line in text.splitlines():
        told = line.partition("#")[0].split(maxsplit=1)
        if not told:
            continue
        if told[0].endswith(".json"):
            found.append(Failed(0, (), told[1] if len(told) > 1 else "", told[0]))
            continue
        words = told[1].split(maxsplit=1) if len(told) > 1 else []
        only = tuple(words[0].removeprefix("only=").split(",")) if words and words[0].startswith("only=") else ()
        why = words[1] if only and len(words) > 1 else " ".join(words) if not only else ""
        found.append(Failed(int(told[0]), only, why))
    return found


def read_scenario(file: Path) -> Scenario:
    return msgspec.json.decode(file.read_bytes(), type=Scenario)


def write_scenario(file: Path, scenario: Scenario) -> None:
    """As a person reads it, less what is as by default."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(scenario)) + b"\n")


def draws(seeds: Iterable[int], only: Sequence[str] = ()) -> Iterator[Scenario]:
    return (draw(seed, only) for seed in seeds)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def each(scenarios: Iterable[Scenario], jobs: int) -> Iterator[Outcome]:
    """Every outcome, in order. With one job everything happens in this process, where a debugger can see it."""
    if jobs <= 1:
        yield from map(run, scenarios)
        return
    # Forked, so that a mutant that was put in before is in every worker too.
    with closing(multiprocessing.get_context("fork").Pool(jobs, _begin)) as pool:
        try:
            yield from pool.imap(run, scenarios, CHUNK)
        except BaseException:
            pool.terminate()
            raise
    pool.join()


def _begin() -> None:
    """The first process is told of Ctrl-C, and tells the others by ending them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(COLLECT_AFTER, 20, 100)
