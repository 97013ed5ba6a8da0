"""The OpenAPI 3.1 document, generated from the table of routes and the contracts; committed as `schemas/openapi.json`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from intertie.contracts.call_offerings import PATHS
from intertie.contracts.http import Stored
from intertie.contracts.usage import Statement
from intertie.gateway.routes import ROUTES, Route

PROBLEM: dict[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "trace_id"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string", "description": "Stable, dotted: what to program against."},
        "kind": {"type": "string"},
        "next_step": {"type": "string", "description": "What to do about it."},
        "details": {"type": "object"},
        "trace_id": {"type": "string"},
    },
}
_REF = "#/components/schemas/{name}"
_BYTES = {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}


def document(version: str) -> dict[str, Any]:
    """The whole API."""
    kinds: list[type[Any]] = [Stored, Statement]
    for route in ROUTES:
        kinds += [route.endpoint.reply, *([route.body] if route.body else [])]
    refs, components = msgspec.json.schema_components(list(dict.fromkeys(kinds)), ref_template=_REF)
    schema = dict(zip(dict.fromkeys(kinds), refs, strict=True))
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema)
    paths["/v1/statements"] = {"get": _statement(schema[Statement])}
    paths["/v1/objects/{digest}"] = _objects(schema[Stored])
    paths["/v1/jobs/{job}/result"] = {"get": _bytes("job_result", "A job's declared outputs", "job", ("attempt",))}
    for path in sorted({path for of in PATHS.values() for path in of}):
        paths[f"/v1/offerings/{{site}}/{{name}}{path}"] = {"post": _call(path)}
    paths["/v1/offerings/{site}/{name}/v1/models"] = {"get": _models()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Intertie",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Joins GPU clusters that already exist into one federation.",
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Problem": PROBLEM},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "An API token."}},
            "responses": {
                "Problem": {
                    "description": "Refused or failed",
                    "content": {"application/problem+json": {"schema": {"$ref": _REF.format(name="Problem")}}},
                }
            },
        },
    }


def _operation(route: Route, schema: dict[type[Any], Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation or f"{route.endpoint.service}_{route.endpoint.verb}",
        "summary": route.summary,
        "tags": [route.endpoint.service],
        "parameters": _parameters(route.path, route.query),
        "responses": {
            str(route.status): {"description": "Done", "content": {"application/json": {"schema": schema[route.endpoint.reply]}}},
            "default": {"$ref": "#/components/responses/Problem"},
        },
    }
    if route.body:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema[route.body]}}}
    if route.path == "/v1/jobs" and route.method == "POST":
        operation["parameters"].append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "schema": {"type": "string", "maxLength": 128},
                "description": "The same key gives the same job.",
            }
        )
        operation["responses"]["200"] = {**operation["responses"]["201"], "description": "A repeat, or a dry run"}
    if route.anonymous:
        operation["security"] = []
    return operation


def _parameters(path: str, query: tuple[str, ...]) -> list[dict[str, Any]]:
    in_path = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in re.findall(r"{(\w+)}", path)]
    return in_path + [{"name": name, "in": "query", "schema": {"type": "string"}} for name in query]


def _statement(reply: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": "metering_statement",
        "summary": "A period's statement, to the job and attempt",
        "tags": ["metering"],
        "parameters": _parameters("", ("tenant", "period", "format", "lang")),
        "responses": {
            "200": {"description": "Done", "content": {"application/json": {"schema": reply}, "text/csv": {"schema": {"type": "string"}}}},
            "default": {"$ref": "#/components/responses/Problem"},
        },
    }


def _objects(stored: dict[str, Any]) -> dict[str, Any]:
    put = {
        "operationId": "object_put",
        "summary": "Store a work pack or a result under its digest",
        "tags": ["files"],
        "parameters": _parameters("{digest}", ()),
        "requestBody": {"required": True, "content": _BYTES},
        "responses": {
            "201": {"description": "Stored", "content": {"application/json": {"schema": stored}}},
            "200": {"description": "Was here already", "content": {"application/json": {"schema": stored}}},
            "default": {"$ref": "#/components/responses/Problem"},
        },
    }
    return {"put": put, "get": _bytes("object_get", "A pack, to a site that was told its digest", "digest", ())}


def _call(path: str) -> dict[str, Any]:
    body = {"application/json": {"schema": {"type": "object"}}}
    streamed = {**body, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "operationId": f"call{path.removeprefix('/v1').replace('/', '_')}",
        "summary": "One call of an offering: the site's server answers, its bytes are handed on unchanged",
        "tags": ["calls"],
        "parameters": _parameters("{site}{name}", ()),
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "The answer", "content": streamed}, "default": {"$ref": "#/components/responses/Problem"}},
    }


def _models() -> dict[str, Any]:
    return {
        "operationId": "offering_models",
        "summary": "What an offering serves",
        "tags": ["calls"],
        "parameters": _parameters("{site}{name}", ()),
        "responses": {
            "200": {"description": "Done", "content": {"application/json": {"schema": {"type": "object"}}}},
            "default": {"$ref": "#/components/responses/Problem"},
        },
    }


def _bytes(name: str, summary: str, parameter: str, query: tuple[str, ...]) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "tags": ["files"],
        "parameters": _parameters(f"{{{parameter}}}", query),
        "responses": {"200": {"description": "The bytes", "content": _BYTES}, "default": {"$ref": "#/components/responses/Problem"}},
    }
