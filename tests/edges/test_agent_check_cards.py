"""The pre-flight before cards: our own NVML library under the real binding. What is seen becomes a profile, and a card that is lost a line that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.fakes.gpus import Rack, has_compiler

from intertie.agent.check.pools import judged, seen_here
from intertie.agent.check.report import Place
from intertie.agent.config import Folder
from intertie.agent.join import read_profiles

pytestmark = pytest.mark.skipif(not has_compiler(), reason="the fake library needs gcc")


def check(rack: Rack, *options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "intertie.agent", "check", *map(str, options)]
    return subprocess.run(command, env={"PATH": os.environ["PATH"], **rack.env}, capture_output=True, text=True, timeout=60, check=False)


def test_cards_become_a_profile_that_join_reads(tmp_path: Path) -> None:
    rack = Rack(tmp_path / "rack", ["A100-SXM4-80GB", "A100-SXM4-80GB", "H20"])
    file = tmp_path / "pools.toml"
    done = check(rack, "--detect", file, "--interconnect", "nvlink")
    assert done.returncode == 0, done.stderr
    found = {one.accelerator: one for one in read_profiles(file)}
    assert (found["A100-SXM4-80GB"].count, found["H20"].count, found["A100-SXM4-80GB"].memory_mib) == (2, 1, 81_920)
    assert found["A100-SXM4-80GB"].lendable.devices == 2 and found["none"].interconnect == "none"
    # An owner's answers are never written over.
    before = file.read_bytes()
    again = check(rack, "--detect", file, "--interconnect", "pcie")
    assert again.returncode == 1 and "is there already" in again.stderr and file.read_bytes() == before


def test_cards_that_are_linked_say_so_themselves(tmp_path: Path) -> None:
    rack = Rack(tmp_path / "rack", ["A100-SXM4-80GB"] * 2)
    for card in (0, 1):
        rack.say(card, links="12")
    done = check(rack, "--detect", "-")
    assert done.returncode == 0 and 'interconnect = "nvlink"' in done.stdout, done.stderr


def test_a_report_for_programs_is_one_document_on_standard_output(tmp_path: Path) -> None:
    rack = Rack(tmp_path / "rack", ["H20"])
    done = check(rack, "--json", "--data", tmp_path / "none")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["worst"] == "warn" and done.stderr == ""
    assert {one["what"] for one in told["lines"]} >= {"versions", "user", "disk", "federation"}


async def test_a_lost_card_is_one_fewer_than_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rack = Rack(tmp_path / "rack", ["H20", "H20"])
    monkeypatch.setenv("LD_LIBRARY_PATH", rack.env["LD_LIBRARY_PATH"])
    profiles = read_profiles(rack.profile(interconnect="pcie"))
    place = Place(folder=Folder(tmp_path))
    cards = [one for one in profiles if one.accelerator != "none"]
    assert [one.level for one in judged(cards, await seen_here(place), 1, "pools.json")] == ["ok"]
    rack.lose(1)
    [found] = judged(cards, await seen_here(place), 1, "pools.json")
    assert (found.level, "only 1 seen" in found.text) == ("fail", True)


def test_cards_are_detected_by_the_exporter_that_the_owner_named(tmp_path: Path) -> None:
    device = '{gpu="0",UUID="GPU-1",modelName="NVIDIA A100-SXM4-80GB"}'
    text = f"DCGM_FI_DEV_FB_USED{device} 100\nDCGM_FI_DEV_FB_FREE{device} 81000\nDCGM_FI_DEV_GPU_UTIL{device} 0\n"
    with serving(text) as url:
        folder = tmp_path / "data"
        folder.mkdir(0o700)
        (folder / "site.toml").write_text(f'[[telemetry]]\nsource = "dcgm"\nurl = "{url}/metrics"\n', encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "intertie.agent",
            "check",
            "--data",
            folder,
            "--detect",
            tmp_path / "pools.toml",
            "--interconnect",
            "none",
        ]
        env = {"PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1"}
        done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = {one.accelerator: one.count for one in read_profiles(tmp_path / "pools.toml")}
    assert found["A100-SXM4-80GB"] == 1


@contextmanager
def serving(text: str) -> Iterator[str]:
    """An exporter that always says `text`; its address."""

    class Exporter(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Exporter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
