"""`ops/bench`: what it lists, the shape of what it prints, and the arithmetic of its numbers. What they come to is never tested here."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from ops.lib import bench_main, bench_proc
from ops.lib.bench_report import Benchmark, Beside, Machine, Measure, ProcessRow, Report, measure, median, number, percentile, text_of

from intertie.errors import Unavailable

ROOT = Path(__file__).resolve().parents[2]

MACHINE = Machine(cores=2, memory_mib=4096, kernel="6.1", python="3.11.7", load_before=0.1, load_after=1.2)
REPORT = Report(
    benchmark="probe",
    at="2026-12-01T00:00:00+00:00",
    rounds=3,
    machine=MACHINE,
    measures=[
        measure("submit → running", 120.0, "ms", over=[100.0, 140.0], beside=Beside(name="fork+exec", value=2.0), target=150.0),
        measure("jobs", 4.5, "jobs/s", target=5.0, at_least=True),
        measure("reported", 1.0, "MiB"),
    ],
    processes=[
        ProcessRow(part="hub", pid=pid, name="postgres: worker", pss_mib=1.5, private_mib=1.0, cpu_percent=0.25) for pid in (10, 11)
    ],
    notes=["a note"],
)


def test_without_a_name_the_benchmarks_are_listed() -> None:
    done = subprocess.run([sys.executable, "-m", "ops.lib.bench_main"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [one.name for one in bench_main.BENCHMARKS]
    assert "spine" in done.stdout


def test_a_name_that_is_none_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench_main.main(["nothing-such"])
    assert left.value.code == 2
    assert "spine" in capsys.readouterr().err


async def _measured(rounds: int) -> Report:
    return msgspec.structs.replace(REPORT, rounds=rounds)


async def _away(rounds: int) -> Report:
    raise Unavailable("probe.away", f"no hub for {rounds} rounds", next_step="start one")


def test_json_is_the_report_and_missed_targets_are_no_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_main, "BENCHMARKS", (Benchmark("probe", "a probe", 3, _measured),))
    assert bench_main.main(["probe", "--json", "--rounds", "7"]) == 0
    printed = capsys.readouterr().out
    assert msgspec.json.decode(printed, type=Report) == asyncio.run(_measured(7))
    first = json.loads(printed)["measures"][0]
    assert first["beside"] == {"name": "fork+exec", "value": 2.0}
    assert (first["ratio"], first["target"], first["verdict"]) == (60.0, 150.0, "ok")


def test_a_benchmark_that_could_not_run_leaves_with_1_and_says_what_next(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_main, "BENCHMARKS", (Benchmark("probe", "a probe", 3, _away),))
    assert bench_main.main(["probe"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "probe could not run: no hub for 3 rounds [probe.away]\nnext: start one\n"


def test_the_table_shows_ratio_target_and_verdict_and_folds_equal_processes() -> None:
    lines = text_of(REPORT).splitlines()
    row = next(line for line in lines if line.startswith("submit"))
    assert row.split() == "submit → running 120 ms 100–140 fork+exec 2.00 60.0× ≤ 150 ok".split()
    assert next(line for line in lines if line.startswith("jobs")).split()[-3:] == ["≥", "5.00", "missed"]
    assert next(line for line in lines if "postgres: worker" in line).split()[-4:] == ["2", "3.0", "2.0", "0.50"]
    assert lines[-1] == "a note"


@pytest.mark.parametrize(
    ("value", "target", "at_least", "verdict"),
    [
        (150.0, 150.0, False, "ok"),
        (150.1, 150.0, False, "missed"),
        (5.0, 5.0, True, "ok"),
        (4.9, 5.0, True, "missed"),
        (math.nan, 5.0, True, "missed"),
        (math.nan, 5.0, False, "missed"),
        (1e9, None, False, "none"),
    ],
)
def test_a_verdict_is_the_target_met_and_a_number_that_is_missing_misses_it(
    value: float, target: float | None, at_least: bool, verdict: str
) -> None:
    told: Measure = measure("m", value, "ms", target=target, at_least=at_least)
    assert told.verdict == verdict


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5.0], 99, 5.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 75, 3.0),
        ([4.0, 3.0, 2.0, 1.0], 100, 4.0),
        ([float(n) for n in range(1, 101)], 99, 99.0),
        ([float(n) for n in range(1, 102)], 99, 100.0),
    ],
)
def test_a_percentile_is_a_value_that_was_seen(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_nothing_measured_is_not_zero() -> None:
    assert math.isnan(percentile([], 99)) and math.isnan(median([]))
    assert number(math.nan) == "-"
    with pytest.raises(ValueError, match="above 0"):
        percentile([1.0], 0)


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (0.02671, "0.0267"), (5.864, "5.86"), (33.14, "33.1"), (515.2, "515")])
def test_numbers_are_read_with_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_stat_line_counts_from_the_last_bracket() -> None:
    stat = bench_proc.parse_stat("42 (a) b) (c)) S 7 42 42 0 -1 4194560 100 0 0 0 30 20 5 5 20 0 1 0 12345 1 2 3\n")
    assert (stat.pid, stat.parent, stat.start_ticks, stat.name) == (42, 7, 12345, "a) b) (c)")
    assert stat.cpu_s == pytest.approx(60 / bench_proc.TICKS)


def test_processor_time_of_who_came_in_between_counts_whole() -> None:
    def stat(pid: int, start: int, cpu_s: float) -> bench_proc.Stat:
        return bench_proc.Stat(pid=pid, parent=1, start_ticks=start, name="x", cpu_s=cpu_s)

    # 3 is a new process under an old number.
    used = bench_proc.cpu_between([stat(2, 10, 1.0), stat(3, 10, 9.0)], [stat(2, 10, 1.5), stat(3, 99, 0.25)])
    assert used == {2: 0.5, 3: 0.25}


def test_a_tree_is_a_root_and_all_below_it() -> None:
    def stat(pid: int, parent: int) -> bench_proc.Stat:
        return bench_proc.Stat(pid=pid, parent=parent, start_ticks=0, name="x", cpu_s=0.0)

    known = {one.pid: one for one in (stat(1, 0), stat(5, 1), stat(6, 5), stat(7, 1), stat(8, 6))}
    assert [one.pid for one in bench_proc.below(5, known)] == [5, 6, 8]
    assert bench_proc.below(99, known) == []


def test_this_process_takes_memory_and_has_a_name() -> None:
    own = bench_proc.processes()[os.getpid()]
    took = bench_proc.memory(own.pid)
    assert took is not None and 0 < took.private_mib <= took.pss_mib
    assert bench_proc.part_name(own.pid, own)
