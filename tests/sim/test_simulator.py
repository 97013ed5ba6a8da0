"""The federation in one loop: fixed seeds hold every invariant, a seed replays, and each mutant is seen by one of the first seeds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.sim.mutants import BREAKS, EDGES, LATER, MUTANTS, ROWS, SAME, Mutant
from tests.sim.mutants.money import a_cancel_voids_the_charge
from tests.sim.mutants.offers import an_old_offer_comes_through

from intertie.sim.__main__ import main
from intertie.sim.loop import Party, VirtualLoop
from intertie.sim.runs import Failed, failed_seeds, read_scenario
from intertie.sim.scenario import draw
from intertie.sim.shorten import shorten
from intertie.sim.world import run

# Fixed: a change of the product is tried on the same storms as before. `intertie sim run --fresh 100` tries others.
SEEDS = range(1, 1_001)
BLOCK = 50
HERE = Path(__file__).parent
FAILED = failed_seeds((HERE / "failed_seeds.txt").read_text("utf-8"))
SHOWN = sorted((HERE / "scenarios").glob("*.json"))


@pytest.mark.parametrize("first", SEEDS[::BLOCK])
def test_fixed_seeds_hold_every_invariant(first: int) -> None:
    failed = [outcome for seed in range(first, first + BLOCK) if (outcome := run(draw(seed))).violations]
    assert not failed, "\n\n".join(map(str, failed))


@pytest.mark.parametrize("once", FAILED, ids=lambda once: Path(once.file).stem or f"seed {once.seed}")
def test_whatever_failed_once_holds(once: Failed) -> None:
    outcome = run(once.scenario(HERE))
    assert not outcome.violations, f"{once.why}\n\n{outcome}"


def test_every_scenario_that_failed_once_is_named_with_its_reason() -> None:
    assert {one.file for one in FAILED if one.file} == {
        str(file.relative_to(HERE)) for file in (HERE / "scenarios" / "failed").glob("*.json")
    }
    assert all(one.why for one in FAILED)


@pytest.mark.parametrize("file", SHOWN, ids=lambda file: file.stem)
def test_a_scenario_that_was_written_down_leaves_by_its_named_way(file: Path) -> None:
    outcome = run(read_scenario(file))
    assert not outcome.violations, str(outcome)


def test_a_seed_replays_to_the_last_message() -> None:
    one, again = run(draw(7)), run(draw(7))
    assert (one.trace, one.steps, one.virtual_s) == (again.trace, again.steps, again.virtual_s)
    assert run(draw(8)).trace != one.trace


@pytest.mark.parametrize("hashing", ["0", "4711"])
def test_a_seed_replays_in_another_process(hashing: str) -> None:
    here = run(draw(11)).trace
    code = "from intertie.sim.world import run; from intertie.sim.scenario import draw; print(run(draw(11)).trace)"
    there = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": hashing}, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.row not in LATER], ids=lambda mutant: mutant.name)
def test_a_mutant_is_seen_by_its_scenario_by_an_invariant_that_it_breaks(mutant: Mutant) -> None:
    text = mutant.sight(read_scenario(mutant.file))
    assert text, f"{mutant.name} is not seen any more: python -m tests.sim.mutants.search {mutant.name}"
    print(f"{mutant.row:<90} {mutant.breaks:>6}  {text[:100]}")


@pytest.mark.parametrize("file", sorted((HERE / "scenarios" / "mutants").glob("*.json")), ids=lambda file: file.stem)
def test_the_product_holds_where_a_mutant_fails(file: Path) -> None:
    assert file.stem in {mutant.name for mutant in MUTANTS}, "a scenario of no mutant"
    outcome = run(read_scenario(file))
    assert not outcome.violations, str(outcome)


def test_where_every_other_guard_is_gone_the_generation_refuses_an_old_offer() -> None:
    """The witness of that mutant shows the generation, not the three guards that had to be taken away to see it."""
    with an_old_offer_comes_through():
        outcome = run(read_scenario(HERE / "scenarios" / "mutants" / "a_generation_is_not_checked.json"))
    assert not outcome.violations, str(outcome)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_breaks_what_its_row_of_the_table_says(mutant: Mutant) -> None:
    if mutant.row in BREAKS:
        assert mutant.invariants <= set(BREAKS[mutant.row].split(", ")), f"the table says {BREAKS[mutant.row]}"


def test_each_row_of_the_links_table_is_a_mutant_that_is_caught_or_says_why_not() -> None:
    caught = {mutant.row for mutant in MUTANTS if mutant.file.exists()}
    for row in ROWS:
        row = SAME.get(row, row)
        assert (row in caught) + (row in EDGES) + (row in LATER) == 1, f"{row}: caught {row in caught}, later {LATER.get(row)}"
    for test in EDGES.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (HERE.parents[1] / file).read_text("utf-8")


def test_a_failure_tells_its_seed_and_a_story_and_can_be_made_shorter() -> None:
    with a_cancel_voids_the_charge():
        failed = next(outcome for seed in range(1, 10) if (outcome := run(draw(seed))).violations)
        short = shorten(failed)
    assert f"seed {failed.scenario.seed}: " in str(failed) and "is to be cancelled" in str(failed)
    assert short.violations and len(short.scenario.faults) <= 1 and len(short.scenario.work) <= 2


@pytest.mark.parametrize("seed", [1, 6])
def test_two_copies_of_the_scheduler_know_the_same(seed: int) -> None:
    """Found here: facts went to one copy and to disk, and the copy that led never heard of them (no mapping, no pool, for ever)."""
    outcome = run(msgspec.structs.replace(draw(seed), schedulers=2))
    assert not outcome.violations, str(outcome)


def test_a_scenario_in_a_file_is_run_as_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "storm.json"
    file.write_bytes(msgspec.json.encode(draw(3)))
    assert main(["run", "--scenario", str(file)]) == 0
    assert "1 runs, 0 failed []" in capsys.readouterr().out


def test_time_jumps_and_costs_nothing() -> None:
    loop = VirtualLoop()
    loop.run_until_complete(asyncio.sleep(86_400))
    assert 86_400 <= loop.time() < 86_401
    loop.close()


def test_a_killed_party_does_nothing_more_and_a_paused_one_waits() -> None:
    loop = VirtualLoop()
    said: list[tuple[str, int]] = []

    async def ticks(name: str) -> None:
        while True:
            await asyncio.sleep(1)
            said.append((name, int(loop.time())))

    async def play() -> None:
        killed, paused = Party("killed"), Party("paused")
        killed.spawn(ticks("killed"))
        paused.spawn(ticks("paused"))
        await asyncio.sleep(1.5)
        killed.kill()
        paused.pause()
        await asyncio.sleep(5)
        paused.resume()
        await asyncio.sleep(1.2)
        paused.kill()

    loop.run_until_complete(play())
    assert said == [("killed", 1), ("paused", 1), ("paused", 6), ("paused", 7)]
    loop.close()
