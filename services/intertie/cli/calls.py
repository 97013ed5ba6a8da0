"""`intertie calls`: each call with its two records, its price and its formula; and the calls of a statement."""

from __future__ import annotations

import click

from intertie.cli.call_texts import say_calls, word
from intertie.cli.out import json_option, line, local, note, print_json, reason_option, table
from intertie.cli.session import connect
from intertie.contracts.calls import CallBook, CallsReply, DecideCallBody
from intertie.contracts.usage import Statement
from intertie.ids import SiteName
from intertie.rating.text import money_text


@click.command()
@click.argument("call", required=False)
@click.option("--offering", default="", metavar="SITE/NAME", help="Of this offering only.")
@click.option("--day", default="", help="Of this day of the settlement time zone, such as 2026-12-01.")
@click.option("--tenant", help="Of this tenant.")
@click.option("--state", type=click.Choice(["settled", "waiting", "suspense"]), default=None, help="Only those that stand so.")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True, help="At most so many.")
@click.option("--after", default="", help="Go on after this call.")
@json_option
def calls(call: str | None, offering: str, day: str, tenant: str | None, state: str | None, limit: int, after: str, as_json: bool) -> None:
    """Calls of offerings, newest first; with CALL, all that is known of one."""
    query = {"call": call, "offering": offering, "day": day, "tenant": tenant, "state": state, "limit": limit, "after": after}
    reply = connect().get("/v1/calls", CallsReply, query)
    if as_json:
        print_json(reply)
        return
    if call is not None and reply.calls:
        tell_call(reply.calls[0])
        return
    rows = [
        (
            book.call,
            local(book.accepted),
            f"{book.site}/{book.offering}",
            word("outcome", book.outcome.value),
            book.duration_ms,
            tokens(book),
            stands(book),
            money_text(book.amount, book.currency) if book.amount is not None else "-",
        )
        for book in reply.calls
    ]
    table(say_calls("call_columns").split(","), rows, empty=say_calls("no_calls"))
    if reply.next:
        note(say_calls("more", after=reply.next))


@click.command("decide-call")
@click.argument("call")
@click.option("--site", required=True, help="The site that answered it.")
@click.option("--input", "given", type=click.IntRange(0), required=True, help="Tokens of the request.")
@click.option("--output", "made", type=click.IntRange(0), required=True, help="Tokens of the answer.")
@reason_option("Why; it stands on the call.")
@json_option
def decide_call(call: str, site: str, given: int, made: int, reason: str, as_json: bool) -> None:
    """Decide how many tokens a call used, of which nobody counted them; it is priced at once."""
    body = DecideCallBody(site=SiteName(site), input_tokens=given, output_tokens=made, reason=reason)
    book = connect().post(f"/v1/calls/{call}/decision", CallBook, body)
    if as_json:
        print_json(book)
    else:
        tell_call(book)


def tell_call(book: CallBook) -> None:
    """One call, as lines."""
    status = f" {book.status}" if book.status is not None else ""
    code = f"  [{book.code}]" if book.code else ""
    line(f"{book.call}  {local(book.accepted)}  {book.site}/{book.offering}  {word('outcome', book.outcome.value)}{status}{code}")
    first = "-" if book.first_byte_ms is None else str(book.first_byte_ms)
    line(
        f"  {book.duration_ms} ms (first byte {first} ms) · {book.request_bytes} B → {book.response_bytes} B · {book.model or '-'} · {tokens(book)}"
    )
    line(f"  {stands(book)}")
    if book.formula:
        line(f"  {book.formula}")
    if book.decided:
        line(f"  {book.decided}")
    for what in book.missed:
        line("  " + say_calls("promise_missed", what=what))
    if book.differences:
        line("  " + say_calls("differs", what=", ".join(book.differences)))


def tokens(book: CallBook) -> str:
    """`120 → 40`; unknown is said so."""
    unknown = say_calls("tokens_unknown")
    given, made = (unknown if count is None else str(count) for count in (book.input_tokens, book.output_tokens))
    return f"{given} → {made}"


def stands(book: CallBook) -> str:
    """Settled, or what it waits for."""
    return word("state", book.state) if not book.reason else say_calls("waits", reason=word("reason", book.reason))


def tell_calls(told: Statement) -> None:
    """A statement's calls, per offering and day."""
    if told.calls:
        line("\n" + say_calls("statement_title"))
    for row in told.calls:
        amount = money_text(row.amount, told.currency)
        line(
            "  "
            + say_calls(
                "statement_line",
                day=row.day,
                site=row.site,
                offering=row.offering,
                calls=row.calls,
                given=row.input_tokens,
                made=row.output_tokens,
                amount=amount,
            )
        )
        if row.waiting:
            line(say_calls("statement_waiting", count=row.waiting, site=row.site, offering=row.offering, day=row.day))
