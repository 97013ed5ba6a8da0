"""The map of the rooms (`ops/docs/architecture.md`) is of the house as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ops/docs/architecture.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([\w/.-]+)`", PAGE))
# What every service has, and what the page says of all of them at once.
COMMON = {"__init__", "__main__", "service", "core", "store", "pg", "memory"}


def row(first: str) -> set[str]:
    """The names in backticks of the table row that begins with `first`, but its own."""
    (found,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{first}` |")]
    return set(re.findall(r"`([\w/.-]+)`", found)) - {first}


@pytest.mark.parametrize("service", ["agent", "registry", "scheduler", "metering", "identity", "incident"])
def test_every_room_of_a_service_is_on_the_map(service: str) -> None:
    rooms = {file.stem for file in (ROOT / "services/intertie" / service).glob("*.py")} - COMMON
    assert rooms <= NAMED, rooms - NAMED


@pytest.mark.parametrize("service", ["registry", "scheduler", "metering", "identity", "gateway"])
def test_every_room_on_the_map_of_a_service_is_there(service: str) -> None:
    folder = ROOT / "services/intertie" / service
    known = {file.stem for file in [*folder.glob("*.py"), *folder.glob("core/*.py")]} | {"core"}
    rooms = {name.removeprefix("core/") for name in row(service)}
    assert rooms <= known, rooms - known


def test_every_library_is_on_the_map() -> None:
    libraries = {folder.name for folder in (ROOT / "libs/intertie").iterdir() if (folder / "__init__.py").exists()}
    assert libraries <= NAMED, libraries - NAMED


def test_the_agents_table_names_rooms_that_are_there() -> None:
    folder = ROOT / "services/intertie/agent"
    table = PAGE.partition("| for | rooms |")[2].partition("\n\n")[0]
    rooms = {name for name in re.findall(r"`([\w.]+)`", table) if not name.endswith(".json")}
    known = {file.stem for file in [*folder.glob("*.py"), *folder.glob("adapters/*.py")]} | {"adapters"}
    assert len(rooms) > 30 and rooms <= known, rooms - known
