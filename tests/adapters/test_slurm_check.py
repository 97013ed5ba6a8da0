"""The owner's pre-flight beside a real Slurm: what is wrong has a line, and the line says what mends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.adapters.slurm_shell import rules_of
from tests.adapters.slurm_world import ACCOUNT, GUEST, Slurm

from intertie.agent.check import slurm as anywhere
from intertie.agent.check.machine import user
from intertie.agent.check.report import Line, Place
from intertie.agent.config import Folder
from intertie.agent.core.rules import Rules
from intertie.agent.slurm.check import slurm as looked
from intertie.agent.slurm.core.rules import Become, SlurmMap, SlurmRules


@pytest.fixture
def rules(lab: Slurm, tmp_path: Path) -> SlurmRules:
    return rules_of(lab, tmp_path)


def place(rules: SlurmRules | None, folder: Path) -> Place:
    return Place(folder=Folder(folder), rules=Rules(slurm=rules))


def told(lines: list[Line]) -> Iterator[str]:
    yield from (f"{one.level} {one.what}: {one.text} → {one.fix}" for one in lines)


async def test_a_site_where_all_is_right_fails_nowhere_and_names_what_it_saw(rules: SlurmRules, tmp_path: Path) -> None:
    lines = list(await looked(place(rules, tmp_path)))
    assert {one.level for one in lines} == {"ok"}, list(told(lines))
    assert {one.what for one in lines} == {"slurm", "queue train", f"account {GUEST}", "job folders"}
    assert any("Slurm 22.05" in one.text and "lab" in one.text for one in lines)
    assert any("clock" in one.text for one in lines)


WRONG: list[tuple[str, dict[str, object], str, str]] = [
    ("no such command", {"path": "/nowhere"}, "fail slurm", 'path = "/nowhere:'),
    ("another slurm.conf", {"conf": "/nowhere/slurm.conf"}, "fail slurm", "site.toml"),
    ("no such partition", {"partition": "gpu"}, "fail queue gpu", "train"),
    ("no such partition in the map", {"map": [SlurmMap(tenant="acme", partition="fast")]}, "fail queue fast", "train"),
    ("no such account", {"account": "lent"}, f"fail account {GUEST}", f"sacctmgr -i add user {GUEST} Account=lent"),
    (
        "an account of another cluster",
        {"account": "lent", "cluster": "lab"},
        f"fail account {GUEST}",
        f"add user {GUEST} Cluster=lab Account=lent",
    ),
    ("a QOS that is not theirs", {"qos": "gold"}, f"fail account {GUEST}", f"modify user {GUEST} where Account={ACCOUNT} set qos+=gold"),
    ("nobody's account", {"accounts": ["no-such-one"]}, "fail account no-such-one", "useradd"),
    ("root", {"accounts": ["root"]}, "fail account root", ""),
    ("no wrapper", {"become": Become.SUDO, "wrapper": "/nowhere/intertie-as"}, f"fail account {GUEST}", "intertie-agent slurm lines"),
    ("no job folders", {"folder": "/nowhere/jobs"}, "fail job folders", "intertie-agent slurm lines"),
    ("what contradicts itself", {"become": Become.REST}, "fail slurm", "site.toml"),
]


@pytest.mark.parametrize(("changed", "where", "mends"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
async def test_what_is_wrong_has_a_line_that_says_what_mends_it(
    rules: SlurmRules, tmp_path: Path, changed: dict[str, object], where: str, mends: str
) -> None:
    lines = list(told(list(await looked(place(msgspec.structs.replace(rules, **changed), tmp_path)))))
    assert [one for one in lines if one.startswith(where) and mends in one.partition("→")[2]], lines


async def test_a_controller_that_is_away_is_one_line_and_no_more(rules: SlurmRules, lab: Slurm, tmp_path: Path) -> None:
    lab.ctld.end()
    try:
        (line,) = await looked(place(msgspec.structs.replace(rules, timeout_s=20.0), tmp_path))
    finally:
        lab.ctld.start()
    assert line.level == "fail" and "scontrol ping" in line.fix


async def test_whoever_names_their_slurm_is_looked_at_by_that_way_alone(rules: SlurmRules, tmp_path: Path) -> None:
    assert await anywhere.slurm(place(rules, tmp_path)) == []
    assert await looked(place(None, tmp_path)) == []


async def test_an_ordinary_user_with_a_wrapper_is_not_told_that_it_is_alone(rules: SlurmRules, tmp_path: Path) -> None:
    (line,) = await user(place(msgspec.structs.replace(rules, become=Become.SUDO), tmp_path))
    assert line.level == "ok"
