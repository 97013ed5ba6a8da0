"""compose.yaml as the real Compose reads it: valid, hardened, and telling each service exactly what an embedded hub tells it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from intertie.clock import SystemClock
from intertie.embedded.hub import SERVICES, environment, init_hub

ROOT = Path(__file__).resolve().parents[2]


def read(*options: str, **environ: str) -> dict[str, Any]:
    command = [str(Path(sys.executable).parent / "docker-compose"), "-f", "compose.yaml", *options, "config", "--format", "json"]
    env = {**os.environ, **environ}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return read()


def test_every_service_of_the_hub_is_there_once(config: dict[str, Any]) -> None:
    assert set(config["services"]) == {*SERVICES, "init", "nats", "postgres"}
    assert len({config["services"][name]["image"] for name in (*SERVICES, "init")}) == 1


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_least_rights_and_an_honest_health_check(config: dict[str, Any], service: str) -> None:
    told = config["services"][service]
    assert told["read_only"] is True
    assert told["cap_drop"] == ["ALL"]
    assert told["security_opt"] == ["no-new-privileges:true"]
    assert told["healthcheck"]["test"]
    assert not told.get("privileged")


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_told_what_an_embedded_hub_tells_it(config: dict[str, Any], service: str, short_folder: Path) -> None:
    wanted = {name for name in environment(init_hub(short_folder / "hub", SystemClock().now()), service) if name.startswith("INTERTIE_")}
    given = {name for name in config["services"][service]["environment"] if name.startswith("INTERTIE_")}
    assert given == wanted


@pytest.mark.parametrize("service", SERVICES)
def test_no_secret_stands_in_the_file(config: dict[str, Any], service: str) -> None:
    for name, value in config["services"][service]["environment"].items():
        assert "@" not in value.partition("://")[2] or ":" not in value.partition("://")[2].partition("@")[0], f"{name} holds a password"


def test_only_gateway_and_bus_are_published_and_the_bus_to_this_machine_alone(config: dict[str, Any]) -> None:
    published = {name: told["ports"] for name, told in config["services"].items() if told.get("ports")}
    assert published.keys() == {"gateway", "nats"}
    assert [port["host_ip"] for port in published["nats"]] == ["127.0.0.1"]


def test_a_service_may_be_scaled_since_nothing_of_it_is_named_or_published_once(config: dict[str, Any]) -> None:
    for service in set(SERVICES) - {"gateway"}:
        told = config["services"][service]
        assert "container_name" not in told and not told.get("ports"), service
        assert told["environment"]["INTERTIE_READY_FILE"].startswith("/tmp/"), "each copy marks itself ready in its own container"


def test_the_profile_cluster_adds_two_nodes_that_differ_only_in_their_configuration() -> None:
    urls = "nats://nats:4222,nats://nats-2:4222,nats://nats-3:4222"
    told = read("--profile", "cluster", INTERTIE_BUS_NODES="3", INTERTIE_BUS_REPLICAS="3", INTERTIE_BUS_URLS=urls)["services"]
    assert "--bus-nodes=3" in told["init"]["command"]
    assert told["identity"]["environment"]["INTERTIE_BUS_REPLICAS"] == "3"
    assert all(told[service]["environment"]["INTERTIE_BUS_URL"] == urls for service in SERVICES)
    first = {**told["nats"], "command": None, "ports": None}
    for node in ("nats-2", "nats-3"):
        assert told[node]["command"][1] == f"/hub/{node}/nats.conf" and not told[node].get("ports")
        assert {**told[node], "command": None, "ports": None, "profiles": None} == {**first, "profiles": None}
