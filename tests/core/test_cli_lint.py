"""`intertie submit --dry-run` at the command line: each finding with its line and every site's word, for people in both languages and for programs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from intertie.cli.__main__ import cli
from intertie.cli.lint import judged
from intertie.cli.lint_texts import TEXTS
from intertie.clock import SystemClock
from intertie.contracts.base import encode
from intertie.contracts.facts import SiteFacts
from intertie.contracts.job import JobSpec, SubmitReply
from intertie.contracts.site import (
    Freshness,
    Lendable,
    Phase,
    PoolInventory,
    PoolProfile,
    PoolRecord,
    SiteKind,
    SitesReply,
    TaskType,
)
from intertie.ids import PoolName, SiteName

SCRIPT = "#!/bin/bash\nmodule load cuda/12.4\npython a.py --data /mnt/sets/x\n#SBATCH --time=1\n"


def pool(site: str, facts: SiteFacts | None) -> PoolRecord:
    profile = PoolProfile(
        pool=PoolName("p"),
        accelerator="none",
        count=1,
        memory_mib=1,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=1),
    )
    return PoolRecord(
        site=SiteName(site),
        pool=PoolName("p"),
        kind=SiteKind.MACHINES,
        profile=profile,
        phase=Phase.PILOT,
        cordoned=False,
        draining=False,
        cordon_reason="",
        freshness=Freshness.FRESH,
        last_heard=None,
        inventory=PoolInventory(pool=PoolName("p"), devices=[], running=0, waiting=0, facts=facts),
        inventory_at=SystemClock().now(),
        version=1,
    )


class Hub(BaseHTTPRequestHandler):
    """Says what a hub would: two sites, one of which told."""

    def do_GET(self) -> None:
        facts = SiteFacts(modules=["gcc"], folders=["/mnt/sets"])
        self.answer(200, SitesReply(sites=[], pools=[pool("told", facts), pool("silent", None)]))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        msgspec.convert(body["spec"], JobSpec)
        self.answer(201, SubmitReply(job=None, fits=["told/p", "silent/p"]))

    def answer(self, status: int, value: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(encode(value))

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def at_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("INTERTIE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("INTERTIE_TOKEN", "t")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT, encoding="utf-8")
    yield script
    server.shutdown()
    server.server_close()


def test_each_line_is_judged_for_every_site_before_money_is_spent(at_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERTIE_LANG", "en")
    done = CliRunner().invoke(cli, ["submit", "--no-work", "--dry-run", str(at_hub)])
    assert done.exit_code == 0, done.output
    assert f"{at_hub}:2: module cuda/12.4 (silent: not told · told: absent)  → " in done.output
    assert f"{at_hub}:3: /mnt/sets/x is a path of one machine (silent: not told · told: is there)" in done.output
    assert f"{at_hub}:4: --time=1 stands after the first command" in done.output


def test_it_is_said_in_chinese_too(at_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERTIE_LANG", "zh")
    done = CliRunner().invoke(cli, ["submit", "--no-work", "--dry-run", str(at_hub)])
    assert f"{at_hub}:2:模块 cuda/12.4 (silent: 未知 · told: 没有)" in done.output


def test_programs_get_every_finding_with_its_verdicts(at_hub: Path) -> None:
    done = CliRunner().invoke(cli, ["submit", "--no-work", "--dry-run", "--json", str(at_hub)])
    told = json.loads(done.stdout)
    assert told["fits"] == ["told/p", "silent/p"]
    assert [(one["line"], one["kind"], one["verdicts"]) for one in told["lint"]] == [
        (2, "module", {"told": "absent", "silent": "unknown"}),
        (3, "path", {"told": "exists", "silent": "unknown"}),
        (4, "late", {}),
    ]


def test_a_submit_warns_of_what_would_fail_and_goes_on(at_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERTIE_LANG", "en")
    done = CliRunner().invoke(cli, ["submit", "--no-work", str(at_hub)])
    assert done.exit_code == 0, done.output
    assert f"{at_hub}:2: module cuda/12.4" in done.stderr and "--time" not in done.stderr


@pytest.mark.parametrize("key", sorted(TEXTS))
def test_both_languages_say_it_with_the_same_fields(key: str) -> None:
    english, chinese = TEXTS[key]
    fields = [
        {field for field in ("{what}", "{script}", "{count}", "{sites}", "{line}", "{text}", "{instead}") if field in text}
        for text in (english, chinese)
    ]
    if key.startswith("what.") or "{" in english:
        assert fields[0] == fields[1]
    assert not any("\u4e00" <= c <= "\u9fff" for c in english)


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        ({}, ""),
        ({"a": "unknown"}, "a: not told"),
        ({"a": "unknown", "b": "unknown"}, "every site: not told"),
        ({"b": "absent", "a": "exists"}, "a: is there · b: absent"),
        ({**dict.fromkeys("abcdef", "unknown"), "x": "absent"}, "x: absent · a, b, c +3: not told"),
    ],
)
def test_many_sites_take_one_line(monkeypatch: pytest.MonkeyPatch, verdicts: dict[str, str], told: str) -> None:
    monkeypatch.setenv("INTERTIE_LANG", "en")
    assert judged(verdicts) == told


def test_a_directive_is_told_once_and_what_is_not_known_is_explained(at_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERTIE_LANG", "en")
    at_hub.write_text("#!/bin/sh\n#SBATCH --partition=secret\n#SBATCH --qos=high\nmodule load cuda\n", encoding="utf-8")
    done = CliRunner().invoke(cli, ["submit", "--no-work", "--dry-run", str(at_hub)])
    assert (done.output.count(f"{at_hub}:2:"), done.output.count(f"{at_hub}:3:")) == (1, 1), done.output
    assert "not told: that site has not said what it has" in done.output
