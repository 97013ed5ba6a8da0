"""The agent as a service, and its going: a unit under which jobs outlive it, and an uninstall that takes what is ours and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

import pytest
from click.testing import CliRunner

from intertie.agent import procs
from intertie.agent.__main__ import cli as agent_cli
from intertie.agent.config import Folder, write_whole
from intertie.agent.install import MARK, install, unit_of
from intertie.agent.uninstall import OURS, Receipt, held_by, require_idle, running_work, told, uninstall
from intertie.contracts.base import encode
from intertie.contracts.identity import Joined
from intertie.errors import Refused
from intertie.ids import SiteName, TenantName

ANALYZE = shutil.which("systemd-analyze")
NOW = datetime(2026, 12, 1, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    # No systemctl there: nothing of this machine's own is touched.
    monkeypatch.setenv("PATH", str(tmp_path))
    made = Folder(tmp_path / "data")
    made.make()
    return made


def away(folder: Folder, site: SiteName | None = None, prefix: Path | None = None) -> Receipt:
    return uninstall(folder, NOW, site, prefix=prefix, system=folder.root.parent / "etc")


def lines(text: str) -> dict[str, str]:
    return dict(row.split("=", 1) for row in text.splitlines() if "=" in row and not row.startswith("#"))


@pytest.mark.parametrize("user", [False, True], ids=["system", "user"])
def test_jobs_outlive_the_unit_and_are_bound_by_nothing_that_binds_it(folder: Folder, user: bool) -> None:
    unit = unit_of(folder, user=user)
    assert unit.path.parent.parts[1] == "etc" or user
    said = lines(unit.text)
    assert (
        said["KillMode"] == "process" and said["OOMPolicy"] == "continue" and said["Delegate"] == "yes" and said["TasksMax"] == "infinity"
    )
    assert said["ExecStart"].endswith(f"run --data {folder.root}") and said["Restart"] == "on-failure"
    assert said["WantedBy"] == ("default.target" if user else "multi-user.target")
    inherited = {"ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectClock", "NoNewPrivileges", "DynamicUser", "User"}
    assert not inherited & said.keys()


@pytest.mark.skipif(ANALYZE is None, reason="systemd is not installed here")
def test_systemd_itself_reads_the_unit(folder: Folder, tmp_path: Path) -> None:
    unit = unit_of(folder, user=False, system=tmp_path / "etc")
    install(unit)
    done = subprocess.run([str(ANALYZE), "verify", unit.path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and unit.path.name not in done.stderr, done.stderr


def test_another_s_unit_is_never_overwritten_and_never_removed(folder: Folder) -> None:
    unit = unit_of(folder, user=True)
    unit.path.parent.mkdir(parents=True)
    unit.path.write_text("[Service]\nExecStart=/bin/true\n", encoding="utf-8")
    with pytest.raises(Refused, match="not ours"):
        install(unit)
    away(folder)
    assert unit.path.exists()


def test_the_unit_of_another_folder_stays(folder: Folder, tmp_path: Path) -> None:
    other = Folder(tmp_path / "other")
    install(unit_of(other, user=True))
    away(folder)
    assert MARK in unit_of(other, user=True).path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["a b", 'a"b', "a%b", "a$b", "a\nb"])
def test_a_folder_that_a_unit_cannot_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused, match="cannot carry"):
        unit_of(Folder(tmp_path / name), user=True)


def test_all_of_ours_goes_and_what_is_the_owner_s_stays_and_is_said(folder: Folder, tmp_path: Path) -> None:
    for name in (
        "site.toml",
        "pools.json",
        "journal.db",
        "journal.db-wal",
        "journal.db.damaged-1",
        "agent.lock",
        "keys/site.nk",
        "notes.txt",
    ):
        (folder.root / name).write_text("x", encoding="utf-8")
    (folder.jobs / "att-1").mkdir(parents=True)
    install(unit_of(folder, user=True))
    prefix = tmp_path / "prefix"
    (prefix / "versions/1").mkdir(parents=True)
    (prefix / ".intertie-agent").touch()
    receipt = away(folder, SiteName("site-a"), prefix=prefix)
    assert [path.name for path in folder.root.iterdir()] == ["notes.txt"]
    assert receipt.stays == [str(folder.root / "notes.txt")] and not prefix.exists()
    assert str(unit_of(folder, user=True).path) in receipt.removed and str(folder.root / "keys") in receipt.removed
    text = told(receipt)
    assert "it was site site-a" in text and "notes.txt" in text and "nothing of it runs on" in text


def test_every_name_that_an_agent_gives_in_its_folder_is_one_that_goes() -> None:
    """By its code: `root / "name"`, and the paths of `Folder`. A room that adds a name adds it to `OURS`, or this fails."""
    named = set()
    for file in (Path(__file__).parents[2] / "services/intertie/agent").rglob("*.py"):
        named |= set(re.findall(r'\b(?:root|data) / "([^"]+)"', file.read_text(encoding="utf-8")))
    assert named >= {"keys", "jobs", "journal.db", "agent.lock"}
    left = {name for name in named if not any(fnmatch(name, pattern) for pattern in OURS)}
    assert not left


def test_a_folder_that_is_no_prefix_is_not_touched(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "mine/bin").mkdir(parents=True)
    receipt = away(folder, prefix=tmp_path / "mine")
    assert (tmp_path / "mine/bin").exists() and not any("mine" in path for path in receipt.removed)


def test_what_leaving_took_away_already_is_told_too(folder: Folder) -> None:
    (folder.root / "pools.json").write_text("[]", encoding="utf-8")
    held = held_by(folder)
    assert str(folder.root) in held
    shutil.rmtree(folder.root)
    told_of = uninstall(folder, NOW, SiteName("lab"), prefix=None, system=folder.root.parent / "etc", held=held)
    assert told_of.removed == held and held_by(folder) == []


def test_a_site_is_asked_before_it_leaves_and_no_changes_nothing(folder: Folder) -> None:
    joined = Joined(site=SiteName("lab"), account="A", bus_urls=[], gateway_url="", service_keys={}, owner_tenant=TenantName("acme"))
    folder.site.write_bytes(encode(joined))
    done = CliRunner().invoke(agent_cli, ["uninstall", "--drain", "--data", str(folder.root)], input="n\n")
    # Had it tried to leave, its hub that is nowhere would have been an error.
    assert done.exit_code == 1 and "leave the federation as lab" in done.output and "error" not in done.output
    assert folder.site.exists()


def test_a_second_call_finds_nothing_and_says_so(folder: Folder) -> None:
    away(folder)
    assert away(folder) == Receipt(version=away(folder).version, at=NOW, site=None, removed=[], stays=[])


def test_it_is_refused_while_work_runs_and_no_longer_when_it_ended(folder: Folder) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        place = folder.jobs / "att-1"
        place.mkdir(parents=True)
        write_whole(place / "supervisor.json", procs.identity(child.pid))
        assert running_work(folder) == ["att-1"]
        with pytest.raises(Refused) as refused:
            require_idle(folder)
        assert refused.value.code == "uninstall.work_runs" and "--drain" in refused.value.next_step
    finally:
        child.kill()
        child.communicate()
    require_idle(folder)
    (folder.jobs / "att-2").mkdir()
    (folder.jobs / "att-2" / "supervisor.json").write_text("{not json", encoding="utf-8")
    assert running_work(folder) == []


def test_it_is_refused_while_an_agent_holds_the_folder(folder: Folder) -> None:
    handle = folder.lock()
    try:
        with pytest.raises(Refused, match="works in"):
            away(folder)
    finally:
        os.close(handle)
