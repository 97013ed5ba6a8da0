"""What it cost and why: statements, and the agreements behind them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal, InvalidOperation

import click
import msgspec

from intertie.cli.calls import tell_calls
from intertie.cli.client import Client
from intertie.cli.offerings import price_text
from intertie.cli.out import json_option, line, local, note, outcome_text, print_json, table
from intertie.cli.session import connect
from intertie.contracts.call_offerings import CallPrice
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import (
    AgreeSpec,
    AttemptBook,
    LostEntries,
    MeterSpec,
    Price,
    SitePeriod,
    SpecsReply,
    Statement,
    UsagePhase,
    WhoPays,
)
from intertie.rating.text import clause_in, formula_text, money_text
from intertie.text import language, say
from intertie.text.groups import Group


@click.command()
@click.option("--tenant", help="Tenant (default: your token's).")
@click.option("--period", default="", help="Such as 2026-12 (default: now).")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with Chinese headers in a Chinese locale.")
@json_option
def statement(tenant: str | None, period: str, as_csv: bool, as_json: bool) -> None:
    """What a tenant used and pays in a period: each amount unfolds to its formula."""
    client, query = connect(), {"tenant": tenant, "period": period}
    if as_csv:
        with client.open("GET", "/v1/statements", query={**query, "format": "csv", "lang": language()}) as response:
            click.echo(response.read().decode(), nl=False)
        return
    told = client.get("/v1/statements", Statement, query)
    if as_json:
        print_json(told)
    else:
        tell_statement(told)


def tell_statement(told: Statement) -> None:
    """A statement as lines: job, attempt, formula, clause, who pays."""
    lang = language()
    kind = say("cli.provisional" if told.provisional else "cli.final", lang)
    line(say("cli.statement", lang, tenant=told.tenant, period=told.period, zone=told.time_zone, kind=kind))
    if not told.lines and not told.calls:
        note(say("cli.no_lines", lang))
    for row in told.lines:
        line(f"\n{row.name}  {row.job}  {money_text(row.amount, told.currency)}")
        for number, book in enumerate(row.attempts, start=1):
            tell_book(number, book, row.attempts)
    tell_calls(told)
    line("\n" + say("cli.total", lang, amount=money_text(told.total, told.currency)))
    if told.paid_by_others:
        line(say("cli.total_others", lang, amount=money_text(told.paid_by_others, told.currency)))
    if told.disputed:
        line(say("cli.disputed", lang, amount=money_text(told.disputed, told.currency)))
    for what in told.incomplete:
        line(say("cli.incomplete", lang, what=what))
    if told.in_suspense:
        line(say("cli.suspense", lang, count=told.in_suspense))
    for over in told.beyond:
        hours = f"{Decimal(over.beyond_milli_us) / 3_600_000_000_000:.4f}"
        line(say(f"cli.beyond_{over.why}", lang, grant=over.grant, hours=hours))
    for site in told.sites:
        line(tell_site(site))
    for lost in told.lost:
        line(tell_lost(lost))


def tell_site(site: SitePeriod) -> str:
    """Whether all of a site's usage of a period is here."""
    heard = local(site.last_heard)
    return say(f"cli.site_{site.state}", language(), site=site.site, count=site.missing_segments, heard=heard)


def tell_lost(lost: LostEntries) -> str:
    """What nobody has any more."""
    return say("cli.lost_entries", language(), site=lost.site, count=lost.entries, journal=lost.journal, first=lost.first, last=lost.last)


def told_beside(number: int, book: AttemptBook, attempts: Sequence[AttemptBook]) -> list[str]:
    """Why this one is paid as it is, where its own end does not say it, and under which allowance it ran."""
    lang, said = language(), list[str]()
    if book.because == "replaced":
        other = next((n for n, one in enumerate(attempts, start=1) if one.attempt == book.other_attempt), 0)
        said.append(say("cli.not_the_result" if 0 < other < number else "cli.replaced", lang, number=other or book.other_attempt))
    elif book.because == "lost":
        said.append(say("cli.lost", lang))
    if book.refined:
        said.append(say("cli.refined", lang))
    if book.grant:
        said.append(say("cli.granted", lang, grant=book.grant))
    if book.grant_expired:
        said.append(say("cli.grant_expired", lang))
    return said


def tell_book(number: int, book: AttemptBook, attempts: Sequence[AttemptBook] = ()) -> None:
    """One attempt of a statement, among the attempts of its job."""
    lang = language()
    line(f"  {say('page.attempt', lang, number=number)}  {book.site}  {outcome_text(book.outcome)}  {book.run_us / 1e6:.3f} s")
    for charge in book.charges:
        line(f"    {formula_text(charge.formula, lang)}  {say(f'payer.{charge.payer}', lang)}")
        line(f"    {clause_in(charge.formula.clause, lang)}" + (f"  · {say('page.islanded', lang)}" if charge.islanded else ""))
    for what in told_beside(number, book, attempts):
        line(f"    {what}")
    if not book.complete and book.because != "lost":
        line(f"    {say('page.not_complete', lang, missing=book.missing)}")


@click.group(cls=Group)
def meterspec() -> None:
    """Agreements between two named parties: what is counted, when the clock runs, who pays which end."""


def read_price(text: str) -> Price:
    """`gpu=12.50`, `gpu:A100=20`, `slot=6`."""
    what, equals, amount = text.partition("=")
    kind, _, model = what.partition(":")
    try:
        if not equals:
            raise ValueError("no '='")
        price = Price(kind=DeviceKind(kind), model=model, per_hour=Decimal(amount))
        if not price.per_hour.is_finite() or price.per_hour < 0:
            raise ValueError("not an amount")
    except (ValueError, InvalidOperation) as err:
        raise click.UsageError(
            f"--price {text!r}: write KIND[:MODEL]=AMOUNT per device-hour, such as gpu:A100=20.00 or slot=6 ({err})"
        ) from err
    return price


def read_call_price(text: str) -> CallPrice:
    """`lab/chat:per_1m_input=2.00,per_1m_output=6.00`; without SITE/NAME it is every offering's."""
    offering, colon, parts = text.rpartition(":")
    amounts: dict[str, Decimal] = {}
    try:
        for part in parts.split(","):
            name, equals, amount = part.partition("=")
            if not equals or name not in ("per_call", "per_1m_input", "per_1m_output", "per_second"):
                raise ValueError(f"{part!r} is no part of a price")
            amounts[name] = Decimal(amount)
            if not amounts[name].is_finite() or amounts[name] < 0:
                raise ValueError(f"{amount!r} is not an amount")
    except (ValueError, InvalidOperation) as err:
        how = "write [SITE/NAME:]PART=AMOUNT[,…], PART one of per_call, per_1m_input, per_1m_output, per_second"
        raise click.UsageError(f"--call-price {text!r}: {how} ({err})") from err
    return msgspec.convert({"offering": offering, **amounts}, CallPrice)


@meterspec.command()
@click.option("--title", required=True, help="What people call the agreement.")
@click.option("--provider", default="platform", show_default=True, help="`platform`, or a site's name.")
@click.option(
    "--consumer", default="*", show_default=True, help="A tenant, `platform`, or `*` for every tenant without an agreement of its own."
)
@click.option("--currency", default="CNY", show_default=True, help="Three letters of ISO 4217.")
@click.option("--price", "prices", multiple=True, required=True, help="KIND[:MODEL]=AMOUNT per device-hour; may be repeated.")
@click.option(
    "--call-price",
    "call_prices",
    multiple=True,
    help="[SITE/NAME:]PART=AMOUNT[,…] of a call, such as lab/chat:per_1m_output=6.00; may be repeated.",
)
@click.option(
    "--charge", "phases", multiple=True, type=click.Choice([p.value for p in UsagePhase]), help="Clocks that cost money (default: run)."
)
@click.option("--pays", "payers", multiple=True, help="END=WHO, such as job=tenant or site=site; the others as usual.")
@click.option("--rounding", default="0.0001", show_default=True, help="Money is rounded to this, once per attempt.")
@click.option("--minimum", "minimum_s", type=click.IntRange(0), default=0, help="Seconds charged at least.")
@click.option("--time-zone", help="Cuts the periods (default: as its provider's other agreements do; the first: Asia/Shanghai).")
@click.option(
    "--from",
    "effective",
    type=click.DateTime(["%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%d"]),
    default=None,
    help="From when it holds (default: now); without an offset, in the agreement's time zone.",
)
@json_option
def agree(
    title: str,
    provider: str,
    consumer: str,
    currency: str,
    prices: tuple[str, ...],
    call_prices: tuple[str, ...],
    phases: tuple[str, ...],
    payers: tuple[str, ...],
    rounding: str,
    minimum_s: int,
    time_zone: str | None,
    effective: datetime | None,
    as_json: bool,
) -> None:
    """Agree a meter spec, or the next revision of the one between the same two parties."""
    client = connect()
    zone = time_zone or _zone_of(client, provider, consumer)
    pays: dict[str, WhoPays] = {}
    for pair in payers:
        end, _, who = pair.partition("=")
        try:
            pays[end] = WhoPays(who)
        except ValueError as err:
            raise click.UsageError(f"--pays {pair!r}: WHO is one of {', '.join(WhoPays)}") from err
    if effective is not None and effective.tzinfo is None:
        from zoneinfo import ZoneInfo

        effective = effective.replace(tzinfo=ZoneInfo(zone))
    body = AgreeSpec(
        title=title,
        provider=provider,
        consumer=consumer,
        currency=currency,
        prices=[read_price(p) for p in prices],
        charged_phases=[UsagePhase(p) for p in phases] or [UsagePhase.RUN],
        pays=pays or None,
        rounding=Decimal(rounding),
        minimum_us=minimum_s * 1_000_000,
        time_zone=zone,
        effective_from=effective,
        call_prices=[read_call_price(p) for p in call_prices],
    )
    spec = client.post("/v1/meter-specs", MeterSpec, body)
    if as_json:
        print_json(spec)
    else:
        line(f"{spec.spec} revision {spec.revision}")


def _zone_of(client: Client, provider: str, consumer: str) -> str:
    """The time zone of what was agreed with this provider already, with this consumer above all: periods of one tenant are cut in one way."""
    known = [spec for spec in client.get("/v1/meter-specs", SpecsReply, {"party": provider}).specs if spec.provider == provider]
    last = max(known, key=lambda spec: (spec.consumer == consumer, spec.effective_from), default=None)
    return last.time_zone if last is not None else "Asia/Shanghai"


@meterspec.command("list")
@click.option("--party", default="", help="Only agreements of this party: a tenant, a site, `platform`.")
@json_option
def list_specs(party: str, as_json: bool) -> None:
    """Agreed meter specs."""
    reply = connect().get("/v1/meter-specs", SpecsReply, {"party": party})
    if as_json:
        print_json(reply)
        return
    rows = [
        (
            s.spec,
            s.revision,
            s.title,
            f"{s.provider} → {s.consumer}",
            ", ".join(
                [
                    *(f"{p.kind}{':' + p.model if p.model else ''} {money_text(p.per_hour, s.currency)}/h" for p in s.prices),
                    *(f"{p.offering or '*'} {price_text(p, s.currency)}" for p in s.call_prices),
                ]
            ),
        )
        for s in reply.specs
    ]
    table(("SPEC", "REV", "TITLE", "BETWEEN", "PRICES"), rows, empty=say("cli.no_specs", language()))
