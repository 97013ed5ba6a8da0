"""The operator's page (`ops/docs/operate.md`) says of every fault that this product reports what is to be done."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from intertie.contracts.link import LaneState
from intertie.incident.core import SILENT
from intertie.lane.keeper import RECOVERING, STANDING

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ops/docs/operate.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("| kind |")[2].partition("\n\n")[0]
NAMED = {name for line in TABLE.splitlines() for name in re.findall(r"`([\w.*]+)`", line.split("|")[1] if "|" in line else "")}


def reported() -> Iterator[str]:
    """Kinds that stand in the code as words: `ReportIncident(kind="…")`, and the helpers that make one."""
    for file in [*ROOT.glob("libs/intertie/**/*.py"), *ROOT.glob("services/intertie/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name not in ("ReportIncident", "_report", "_report_once"):
                continue
            places = [word.value for word in node.keywords if word.arg == "kind"] if name == "ReportIncident" else node.args[:2]
            for place in places:
                if isinstance(place, ast.Constant) and isinstance(place.value, str):
                    yield place.value


def test_every_kind_of_fault_is_on_the_operators_page() -> None:
    found = {*reported(), *RECOVERING, SILENT}
    assert len(found) > 15
    assert found <= NAMED, found - NAMED


def test_no_kind_on_the_page_is_one_that_nobody_reports() -> None:
    found = {*reported(), *RECOVERING, SILENT, "audit.cut", "audit.rewritten", "link.*", "contract.invalid"}
    assert found >= NAMED, NAMED - found


def test_a_lane_that_stands_is_told() -> None:
    """All but those that mend themselves within a try or two."""
    assert set(LaneState) - set(STANDING) == {LaneState.OK, LaneState.BEHIND, LaneState.BUSY}
