"""`intertie quickstart --once`, as the README says it: from nothing to a priced statement, twice in the same folder, in both languages."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.journeys.stack import new_folder

from intertie.embedded.process import free_port


@pytest.fixture
def folder() -> Iterator[Path]:
    made = new_folder()
    yield made
    shutil.rmtree(made, ignore_errors=True)


def quickstart(data: Path, ports: list[int], *more: str, lang: str = "en") -> subprocess.CompletedProcess[str]:
    gateway, bus, database = map(str, ports)
    command = [sys.executable, "-m", "intertie.cli", "quickstart", "--once", "--data", str(data)]
    command += ["--port", gateway, "--bus-port", bus, "--database-port", database, *more]
    env = {**os.environ, "INTERTIE_LANG": lang}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)


def test_from_nothing_to_a_priced_statement_and_again(folder: Path) -> None:
    ports = [free_port(), free_port(), free_port()]
    first = quickstart(folder / "d", ports)
    assert first.returncode == 0, first.stdout + first.stderr
    shown = first.stdout
    assert len(shown.splitlines()) <= 40
    assert socket.gethostname() in shown
    for part in ("postgres", "nats", "identity", "registry", "scheduler", "metering", "incident", "gateway", "agent"):
        assert re.search(rf"\b{part}\s+pid \d+", shown), f"{part} is not shown with its pid\n{shown}"
    assert re.search(r"\d+\.\d{3} s × 1 slot × ¥6\.00/card-hour = ¥0\.0\d{3}", shown), shown
    assert re.search(r"0\.000\d{3} s  difference", shown), shown
    assert "8 × A100-SXM4-80GB" in shown
    assert "exit 3" in shown
    result = re.search(r"sha256sum (\S+)", shown)
    assert result is not None
    checked = subprocess.run(["sha256sum", result[1]], capture_output=True, text=True, check=True).stdout
    assert checked.startswith(re.search(r"([0-9a-f]{12})…", shown)[1])  # type: ignore[index]  # shown above

    second = quickstart(folder / "d", ports, lang="zh")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "卡时" in second.stdout
    assert "三本账" in second.stdout


def test_a_port_in_use_is_one_clear_sentence(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = quickstart(folder / "d", [port, free_port(), free_port()])
    assert done.returncode != 0
    assert f"port {port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_users_own_script_runs(folder: Path) -> None:
    script = folder / "own.sh"
    script.write_text("#!/bin/sh\n#SBATCH --job-name=mine\n#SBATCH --mail-type=END\necho mine\n")
    done = quickstart(folder / "d", [free_port(), free_port(), free_port()], "--job", str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine" in done.stdout
    assert f"{script}:3:" in done.stderr


@pytest.mark.parametrize(("lang", "alone", "same"), [("en", "works alone since", "Unchanged: ¥"), ("zh", "自治运行", "账单不受影响")])
def test_the_dare_kills_the_bus_under_a_ticking_job_and_the_statement_is_the_same(folder: Path, lang: str, alone: str, same: str) -> None:
    done = quickstart(folder / "d", [free_port(), free_port(), free_port()], "--dare", lang=lang)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout[done.stdout.index("The dare" if lang == "en" else "断线演示") :]
    assert alone in shown and "still here" in shown and "20" in shown
    assert same in shown
    assert re.search(r"tick (\d+) \S+ → tick (\d+)", shown), shown
