"""`intertie offerings`, `intertie offering show`: what can be called, what it is asked for and promised, and what was measured."""

from __future__ import annotations

from contextlib import suppress

import click

from intertie.cli.call_texts import say_calls
from intertie.cli.client import Client
from intertie.cli.out import json_option, line, print_json, table
from intertie.cli.session import connect
from intertie.contracts.call_offerings import CallOffering, CallPrice, CallProtocol, OfferingRecord, OfferingsReply
from intertie.contracts.calls import Attainment
from intertie.errors import NotFound
from intertie.rating.text import money_text
from intertie.text.groups import Group


def listed(client: Client, site: str | None) -> list[OfferingRecord]:
    """All of them, page by page."""
    found: list[OfferingRecord] = []
    after = ""
    while True:
        reply = client.get("/v1/offerings", OfferingsReply, {"site": site, "after": after or None})
        found += reply.offerings
        if reply.next <= after:
            return found
        after = reply.next


@click.command()
@click.option("--site", help="Of this site only.")
@json_option
def offerings(site: str | None, as_json: bool) -> None:
    """Call offerings that you may call: protocol, models, state, price, promise."""
    reply = OfferingsReply(offerings=listed(connect(), site))
    if as_json:
        print_json(reply)
        return
    rows = [
        (
            one.id,
            one.offering.protocol.value,
            ", ".join(one.offering.models) or "-",
            state_of(one),
            asked(one.offering),
            promised(one.offering),
        )
        for one in reply.offerings
    ]
    table(say_calls("offering_columns").split(","), rows, empty=say_calls("no_offerings"))


@click.group(cls=Group)
def offering() -> None:
    """One call offering, in full."""


@offering.command()
@click.argument("name", metavar="SITE/NAME")
@click.option("--month", default="", help="Measured in this month, such as 2026-12 (default: now).")
@json_option
def show(name: str, month: str, as_json: bool) -> None:
    """How to call it, its limits, what is promised and what was measured."""
    client = connect()
    site, slash, own = name.partition("/")
    if not slash:
        raise click.UsageError(f"{name!r}: write SITE/NAME, as `intertie offerings` shows it")
    record = next((one for one in listed(client, site) if one.offering.name == own), None)
    if record is None:
        raise NotFound("call.unknown_offering", say_calls("no_such_offering", id=name), next_step="intertie offerings")
    measured: Attainment | None = None
    with suppress(NotFound):
        # A tenant sees what was measured once it has called.
        measured = client.get(f"/v1/offerings/{site}/{own}/attainment", Attainment, {"month": month})
    if as_json:
        print_json({"offering": record, "attainment": measured})
        return
    told, limits = record.offering, record.offering.limits
    line(f"{record.id}  {told.title}  {state_of(record)}")
    base = f"{client.url}/v1/offerings/{record.id}"
    if told.protocol is CallProtocol.OPENAI:
        line(say_calls("base_url", url=f"{base}/v1"))
    else:
        line(say_calls("post_url", url=f"{base}/call"))
    line(f"{', '.join(told.models) or '-'}  ·  {asked(told)}  ·  {promised(told)}")
    line(
        say_calls(
            "limits",
            body=limits.max_body_bytes // 1024,
            duration=limits.max_duration_s,
            stall=limits.stall_s,
            concurrency=limits.concurrency,
            minute=limits.per_minute,
        )
    )
    if measured is not None:
        tell_attainment(measured)


def tell_attainment(measured: Attainment) -> None:
    """Promise against measurement, as lines."""

    def known(value: object) -> object:
        return "-" if value is None else value

    line(
        say_calls(
            "month",
            month=measured.month,
            calls=measured.calls,
            answered=measured.answered,
            failed=measured.failed,
            availability=known(measured.availability_percent),
        )
    )
    response, first = known(measured.response_p95_ms), known(measured.first_byte_p95_ms)
    line(say_calls("measured", response=response, first=first, kept=measured.kept, missed=measured.missed))
    if measured.missing_records:
        line(say_calls("missing_records", count=measured.missing_records))


def state_of(record: OfferingRecord) -> str:
    """One word, or the reason."""
    if record.withdrawn:
        return say_calls("withdrawn")
    if record.paused:
        return say_calls("paused")
    return say_calls("available") if record.available else say_calls("unavailable", reason=record.reason)


def asked(offering: CallOffering) -> str:
    """What the owner asks."""
    return price_text(offering.price, offering.currency)


def price_text(price: CallPrice, currency: str) -> str:
    """The parts of a price that are not nothing."""
    parts = ((price.per_call, ""), (price.per_1m_input, "/M in"), (price.per_1m_output, "/M out"), (price.per_second, "/s"))
    return " + ".join(f"{money_text(amount, currency)}{unit}" for amount, unit in parts if amount) or "-"


def promised(offering: CallOffering) -> str:
    """What is promised, in words."""
    promise = offering.promise
    said = [
        say_calls("promise_response", ms=promise.response_p95_ms) if promise.response_p95_ms is not None else "",
        say_calls("promise_first", ms=promise.first_byte_p95_ms) if promise.first_byte_p95_ms is not None else "",
        say_calls("promise_availability", percent=promise.availability_percent) if promise.availability_percent is not None else "",
    ]
    return " · ".join(part for part in said if part) or say_calls("nothing_promised")
