"""Settings: typed, all problems at once, secrets from closed files only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from intertie.errors import Refused
from intertie.observe.redact import REDACTED, scrub
from intertie.runtime import HubSettings, hub_settings
from intertie.settings import load, read_secret


class Sample(msgspec.Struct, kw_only=True):
    name: str
    count: int = 3
    ratio: float = 0.5
    on: bool = False
    folder: Path | None = None
    names: list[str] = []
    ports: list[int] = []


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("NAME", " hub ", "name", "hub"),
        ("COUNT", "7", "count", 7),
        ("COUNT", "", "count", 3),
        ("RATIO", "2", "ratio", 2.0),
        ("ON", "yes", "on", True),
        ("ON", "0", "on", False),
        ("FOLDER", "/a/b", "folder", Path("/a/b")),
        ("NAMES", "a, b,,c", "names", ["a", "b", "c"]),
        ("PORTS", "1,2", "ports", [1, 2]),
    ],
)
def test_a_variable_becomes_what_its_field_is(variable: str, text: str, field: str, value: object) -> None:
    made = load(Sample, {"INTERTIE_NAME": "x", f"INTERTIE_{variable}": text})
    assert getattr(made, field) == value


def test_all_problems_are_told_at_once_each_with_its_variable_and_what_is_needed() -> None:
    environ = {"INTERTIE_COUNT": "many", "INTERTIE_ON": "perhaps", "INTERTIE_PORTS": "1,x", "INTERTIE_RATIO": "half"}
    with pytest.raises(Refused) as told:
        load(Sample, environ)
    problems = told.value.details["problems"]
    assert isinstance(problems, list) and len(problems) == 5 and told.value.next_step
    for variable, word in (
        ("NAME", "not set"),
        ("COUNT", "whole number"),
        ("ON", "true or false"),
        ("PORTS", "list"),
        ("RATIO", "a number"),
    ):
        assert any(f"INTERTIE_{variable}" in problem and word in problem for problem in problems), (variable, problems)


def test_a_wrong_value_of_a_secret_name_is_not_repeated() -> None:
    class Careless(msgspec.Struct):
        api_token: int

    with pytest.raises(Refused) as told:
        load(Careless, {"INTERTIE_API_TOKEN": "hunter22"})
    assert "hunter22" not in str(told.value)


def test_variables_of_others_are_not_looked_at() -> None:
    assert load(Sample, {"INTERTIE_NAME": "x", "INTERTIE_ELSE": "1", "COUNT": "9"}).count == 3


HUB = {
    "INTERTIE_BUS_URL": "nats://a:1,nats://b:2",
    "INTERTIE_DATABASE_URL": "postgresql://registry@h:5432/intertie",
    "INTERTIE_KEY_FILE": "/k",
    "INTERTIE_KEYS_FILE": "/ks",
    "INTERTIE_DATA_DIR": "/d",
}


def test_a_hub_process_reads_the_list_of_the_architecture_page() -> None:
    settings = hub_settings({**HUB, "INTERTIE_BEAT_S": "0.1"})
    assert settings == HubSettings(
        bus_url=["nats://a:1", "nats://b:2"],
        database_url="postgresql://registry@h:5432/intertie",
        key_file=Path("/k"),
        keys_file=Path("/ks"),
        data_dir=Path("/d"),
        beat_s=0.1,
    )


def test_a_password_in_the_database_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(Refused) as told:
        hub_settings({**HUB, "INTERTIE_DATABASE_URL": "postgresql://registry:hunter22@h/intertie"})
    assert "PASSWORD_FILE" in told.value.next_step and "hunter22" not in str(told.value)


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "secret"
    path.write_text("canary-7f3a\n", encoding="utf-8")
    path.chmod(0o600)
    yield path


def test_a_secret_is_read_without_its_newline_and_hidden_from_then_on(secret: Path) -> None:
    assert read_secret(secret) == "canary-7f3a"
    assert scrub("the word is canary-7f3a!") == f"the word is {REDACTED}!"


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o666])
def test_a_secret_open_to_every_user_is_refused(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    with pytest.raises(Refused) as told:
        read_secret(secret)
    assert told.value.code == "settings.secret" and f"chmod 600 {secret}" == told.value.next_step


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 70_000, b"\xff\xfe"], ids=["empty", "newline", "huge", "binary"])
def test_what_cannot_be_a_secret_is_refused(secret: Path, content: bytes) -> None:
    secret.write_bytes(content)
    with pytest.raises(Refused):
        read_secret(secret)


def test_a_missing_secret_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused) as told:
        read_secret(tmp_path / "nowhere")
    assert "nowhere" in told.value.text
