"""`ops/bench`: lists the benchmarks, or runs one and prints its report."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import msgspec
from ops.lib import bench_bus, bench_bus_loss, bench_calls, bench_link, bench_spine
from ops.lib.bench_report import Benchmark, text_of

from intertie.errors import IntertieError
from intertie.observe import log

BENCHMARKS: tuple[Benchmark, ...] = (bench_bus.BUS, bench_link.LINK, bench_bus_loss.BUS_LOSS, bench_spine.SPINE, bench_calls.CALLS)


def listing() -> str:
    width = max(len(one.name) for one in BENCHMARKS)
    return "\n".join(f"{one.name.ljust(width)}  {one.says}" for one in BENCHMARKS)


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 whatever was measured, 1 if it could not be, 2 on usage."""
    parser = argparse.ArgumentParser(prog="ops/bench", description="Benchmarks that print ratios. Without a name: the list.")
    parser.add_argument("name", nargs="?", choices=[one.name for one in BENCHMARKS])
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="rounds, 1 to 100 (default: the benchmark's own)")
    asked = parser.parse_args(argv)
    if asked.name is None:
        print(listing())
        return 0
    chosen = next(one for one in BENCHMARKS if one.name == asked.name)
    if not 0 <= asked.rounds <= 100:
        parser.error("--rounds lies between 1 and 100")
    try:
        report = asyncio.run(chosen.run(asked.rounds or chosen.rounds))
    except IntertieError as err:
        print(
            f"{chosen.name} could not run: {err.text} [{err.code}]" + (f"\nnext: {err.next_step}" if err.next_step else ""), file=sys.stderr
        )
        return 1
    print(msgspec.json.encode(report).decode() if asked.json else text_of(report))
    return 0


if __name__ == "__main__":
    log.setup("bench", "ERROR")  # What is killed on purpose is said as warnings; the report alone goes to standard output.
    sys.exit(main(sys.argv[1:]))
