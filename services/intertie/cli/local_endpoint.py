"""`intertie local endpoint list | pause | resume`: the owner's switch of each call offering, through the agent's socket."""

from __future__ import annotations

import click

from intertie.cli.call_texts import say_calls
from intertie.cli.local_door import call, find_socket
from intertie.cli.out import json_option, note, print_json, table
from intertie.contracts.calls import LocalEndpoint, LocalEndpoints
from intertie.text.groups import Group


@click.group(cls=Group)
def endpoint() -> None:
    """Call offerings of this site: how they are, and the switch of each. `intertie local pause` stops them all."""


@endpoint.command("list")
@json_option
@click.pass_obj
def list_endpoints(data: str | None, as_json: bool) -> None:
    """What is offered, how its upstream is, and how many calls are under way."""
    _tell(call(find_socket(data), "GET", "/v1/endpoints", LocalEndpoints), as_json)


@endpoint.command()
@click.argument("name")
@json_option
@click.pass_obj
def pause(data: str | None, name: str, as_json: bool) -> None:
    """Take no more calls of NAME; those under way go on."""
    _tell(call(find_socket(data), "POST", f"/v1/endpoints/{name}/pause", LocalEndpoints), as_json)


@endpoint.command()
@click.argument("name")
@json_option
@click.pass_obj
def resume(data: str | None, name: str, as_json: bool) -> None:
    """Take calls of NAME again."""
    _tell(call(find_socket(data), "POST", f"/v1/endpoints/{name}/resume", LocalEndpoints), as_json)


def _tell(told: LocalEndpoints, as_json: bool) -> None:
    if as_json:
        print_json(told)
        return
    if told.problem:
        note(say_calls("endpoint_problem", problem=told.problem))
    rows = [(one.name, one.upstream, _state(one), f"{one.under_way}/{one.concurrency}", one.calls, one.refused) for one in told.endpoints]
    table(say_calls("endpoint_columns").split(","), rows, empty=say_calls("no_endpoints"))


def _state(one: LocalEndpoint) -> str:
    if one.paused:
        return say_calls("paused")
    return say_calls("available") if one.available else say_calls("unavailable", reason=one.reason)
