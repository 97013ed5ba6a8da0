"""What is generated is valid by other people's rules: OpenAPI 3.1 by its validator, each message by JSON Schema's own schema, references by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

SCHEMAS = Path(__file__).resolve().parents[2] / "schemas"
MESSAGES = sorted(SCHEMAS.glob("messages/*.json"))


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_http_api_is_valid_openapi() -> None:
    validate(load(SCHEMAS / "openapi.json"))


@pytest.mark.parametrize("path", MESSAGES, ids=lambda path: path.stem)
def test_a_message_s_schema_is_a_schema(path: Path) -> None:
    Draft202012Validator.check_schema(load(path))


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


@pytest.mark.parametrize("name", ["asyncapi.json", "openapi.json"])
def test_every_reference_of_a_document_leads_somewhere(name: str) -> None:
    document = load(SCHEMAS / name)
    found = set(references(document))
    assert found
    for reference in found:
        here = document
        for part in reference.removeprefix("#/").split("/"):
            here = here[part.replace("~1", "/").replace("~0", "~")]
        assert here


def test_a_message_that_breaks_its_schema_is_seen() -> None:
    schema = load(SCHEMAS / "messages/cancel_job.json")
    assert not list(Draft202012Validator(schema).iter_errors({"job": "job-1", "reason": "enough"}))
    assert list(Draft202012Validator(schema).iter_errors({"job": 5}))
