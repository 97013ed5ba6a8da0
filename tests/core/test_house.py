"""The house's rules cannot be kept by matching nothing, and what is generated is fresh."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import metadata, packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS: dict[str, dict[str, Any]] = {row["name"]: row for row in PYPROJECT["tool"]["importlinter"]["contracts"]}


def rooms(half: str) -> set[str]:
    return {f"intertie.{p.parent.name}" for p in (ROOT / half / "intertie").glob("*/__init__.py")}


def test_every_service_is_named_in_the_rule() -> None:
    """The simulator puts services together in one loop: it may import them, and nobody may import it."""
    services = rooms("services") - {"intertie.sim"}
    assert set(CONTRACTS["services never import each other"]["modules"]) == services
    assert set(CONTRACTS["nobody imports the simulator"]["source_modules"]) == services


def test_every_library_is_named_in_the_rule() -> None:
    rule = CONTRACTS["libs never import services"]
    assert set(rule["source_modules"]) == rooms("libs")
    assert set(rule["forbidden_modules"]) == rooms("services")


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_every_pattern_of_a_rule_matches_something(name: str) -> None:
    rule = CONTRACTS[name]
    for pattern in [*rule.get("modules", []), *rule.get("source_modules", [])]:
        parts = pattern.split(".")[1:]
        found = [
            p for half in ("libs", "services") for p in (ROOT / half / "intertie").glob("/".join(parts) + "*") if p.suffix in ("", ".py")
        ]
        assert found, f"{pattern} names nothing"
    for module in rule.get("forbidden_modules", []):
        assert import_module(module), f"{module} is not installed, so the rule could never be broken"


def test_the_core_rule_covers_every_core() -> None:
    cores = {p.parent.name for p in (ROOT / "services/intertie").glob("*/core*") if p.name in ("core", "core.py")}
    assert cores >= {"agent", "identity", "incident", "metering", "registry", "scheduler"}
    assert "intertie.*.core" in CONTRACTS["a core knows no clock, no chance, no network and no disk"]["source_modules"]


def test_architecture_is_kept() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("banned", sorted(PYPROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]))
def test_a_banned_call_is_caught(banned: str) -> None:
    module, _, name = banned.rpartition(".")
    text = f"import {module.partition('.')[0]}\n\nvalue = {module}.{name}()\n"
    done = subprocess.run(
        [Path(sys.executable).parent / "ruff", "check", "--no-cache", "--stdin-filename", "libs/intertie/pack/probe.py", "-"],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "banned-api" in done.stdout or "TID251" in done.stdout, done.stdout


def test_the_roots_stay_a_namespace() -> None:
    assert not (ROOT / "libs/intertie/__init__.py").exists()
    assert not (ROOT / "services/intertie/__init__.py").exists()


@pytest.mark.parametrize("half", ["libs", "services"])
def test_every_room_says_that_it_is_typed(half: str) -> None:
    missing = [p.parent.name for p in (ROOT / half / "intertie").glob("*/__init__.py") if not (p.parent / "py.typed").exists()]
    assert not missing


def test_nothing_else_stands_at_the_root() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    allowed = {
        "services",
        "libs",
        "schemas",
        "tests",
        "ops",
        "pyproject.toml",
        "README.md",
        "README.zh.md",
        "compose.yaml",
        "LICENSE",
        "requirements.lock",
    }
    roots = {name.partition("/")[0] for name in listed}
    assert {name for name in roots if not name.startswith(".")} <= allowed


def test_schemas_are_what_the_contracts_say() -> None:
    done = subprocess.run([sys.executable, ROOT / "ops/schemas", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_everything_installed_is_locked_with_its_hash() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    wanted = list(PYPROJECT["project"]["dependencies"])
    for extra in PYPROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    for requirement in wanted:
        name = re.split(r"[\[<>=;! ]", requirement)[0].lower().replace("_", "-")
        assert re.search(rf"^{re.escape(name)}==\S+ \\\n    --hash=sha256:", lock, re.MULTILINE | re.IGNORECASE), f"{name} is not locked"


# What each room may count on being installed. A library that only hub services import may need what the `hub` extra brings.
EXTRAS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("lane", "observe", "planner", "store"), ("hub",)),
    **dict.fromkeys(("gateway", "identity", "incident", "metering", "registry", "scheduler"), ("hub",)),
    "agent": ("agent", "agent-kubernetes"),
    "embedded": ("embedded",),
}
# Tried, and done without: metrics and traces are the hub's, and their library is the agent's too.
DONE_WITHOUT = {"prometheus-client", "opentelemetry-exporter-otlp-proto-http"}


def distribution(requirement: str) -> str:
    return re.split(r"[\[<>=;! ]", requirement)[0].lower().replace("_", "-")


def declared(*extras: str) -> set[str]:
    project = PYPROJECT["project"]
    return {distribution(r) for r in project["dependencies"]} | {
        distribution(r) for e in extras for r in project["optional-dependencies"][e]
    }


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_file(name: str) -> Path | None:
    places = [ROOT / half / name.replace(".", "/") for half in ("libs", "services")]
    found = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return found[0] if found else None


def foreign(modules: Iterator[str]) -> set[str]:
    """The distributions that these imports come from; several where a namespace is shared (`opentelemetry`): any of them counts."""
    names = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names) - {"intertie"}
    return {"|".join(sorted({owner.lower().replace("_", "-") for owner in packages_distributions()[name]})) for name in names}


def undeclared(needed: set[str], *extras: str) -> set[str]:
    return {one for one in needed if not set(one.split("|")) & declared(*extras)}


@pytest.mark.parametrize(
    "room", sorted(path.parent for half in ("libs", "services") for path in (ROOT / half / "intertie").glob("*/__init__.py"))
)
def test_a_room_imports_only_what_its_extra_declares(room: Path) -> None:
    used = foreign(name for path in room.rglob("*.py") for name in imports(path))
    assert not undeclared(used, *EXTRAS.get(room.name, ()))


@pytest.mark.parametrize(("start", "extras"), [("intertie.cli", ()), ("intertie.agent", ("agent", "agent-kubernetes"))])
def test_the_command_line_and_the_agent_run_without_the_hubs_packages(start: str, extras: tuple[str, ...]) -> None:
    """All that can be reached from any of their files, also inside a function."""
    todo = [f"{start}.{path.stem}" for path in (ROOT / "services" / start.replace(".", "/")).rglob("*.py")]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        file = module_file(name)
        if name in seen or file is None:
            continue
        seen.add(name)
        todo += [found for found in imports(file) if found.startswith("intertie.")] + [name.rpartition(".")[0]]
    assert "intertie.errors" in seen, "the walk went somewhere"
    used = foreign(found for name in seen if (file := module_file(name)) for found in imports(file))
    assert undeclared(used, *extras) <= DONE_WITHOUT


@pytest.mark.parametrize("package", sorted(declared("hub", "agent", "agent-kubernetes", "embedded")))
def test_nothing_that_is_brought_binds_who_passes_it_on_to_the_gpl(package: str) -> None:
    """Ours is Apache-2.0, and agents are handed on (ADR 0010). The Lesser GPL of what is only called is another matter."""
    about = metadata(package)
    terms = [term for name in ("License", "License-Expression", "Classifier") for term in about.get_all(name) or ()]
    # Where one may choose (asyncssh), the other is chosen.
    binding = [
        one for one in terms if all(re.search(r"\bA?GPL|GNU (Affero )?General Public", way) for way in one.partition("\n")[0].split(" OR "))
    ]
    assert not binding


@pytest.mark.parametrize("package", sorted(declared("hub", "agent", "embedded") - {"tzdata"}))
def test_every_package_that_is_installed_is_used(package: str) -> None:
    """`tzdata` is data: `zoneinfo` finds it by itself. A wheel that brings a program, no module, is named in words."""
    modules = [package] + [
        module for module, owners in packages_distributions().items() if package in {o.lower().replace("_", "-") for o in owners}
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for half in ("libs", "services") for path in (ROOT / half).rglob("*.py"))
    assert any(re.search(rf"\b{re.escape(module)}\b", text) for module in modules), f"nothing imports {package}"


@pytest.mark.parametrize("path", ["ops/quickstart", "ops/check", "ops/bench", "ops/schemas", ".ci/run"])
def test_the_commands_of_the_readme_can_be_run(path: str) -> None:
    assert os.access(ROOT / path, os.X_OK)


def test_no_path_of_one_machine_is_in_the_tree() -> None:
    found = subprocess.run(
        ["git", "grep", "-nIE", r"(^|[^a-z_.])/(work|root|home/[a-z]+)/", "--", ":!tests/core/test_house.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert not found, found


@pytest.mark.parametrize("blind", ["key_value", "create_key_value", "ordered_consumer"])
def test_nothing_waits_on_what_is_blind_after_a_restart(blind: str) -> None:
    """BR-114: key-value watches and ordered consumers of the pinned client hear nothing for some 19 s and say nothing of it."""
    calls = re.compile(rf"\.{blind}\(|ordered_consumer=True")
    found = [
        path for half in ("libs", "services") for path in (ROOT / half).rglob("*.py") if calls.search(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_the_deprecated_namesake_of_the_nvml_binding_is_not_installed_beside_it() -> None:
    """BR-101: both bring a module `pynvml`; which one answers would be chance."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert re.search(r"^nvidia-ml-py==", lock, re.MULTILINE) and not re.search(r"^pynvml==", lock, re.MULTILINE)
    owners = packages_distributions()["pynvml"]
    assert set(owners) == {"nvidia-ml-py"}
