"""What waits for a person: usage in suspense, entries in quarantine; and the ledger's own proof."""

from __future__ import annotations

import click

from intertie.cli.money import tell_lost, tell_site
from intertie.cli.out import ago, json_option, line, note, print_json, reason_option, table
from intertie.cli.session import connect
from intertie.contracts.link import Lane
from intertie.contracts.quarantine import QuarantineReply, Reinterpret, Reinterpreted
from intertie.contracts.usage import AttemptBook, LedgerCheck, ReleaseSegment, SuspenseReply
from intertie.ids import JournalId, SegmentId, SiteName
from intertie.text import known, language, say
from intertie.text.groups import Group

SERVICES = click.Choice([lane.value for lane in Lane])


@click.group(cls=Group)
def quarantine() -> None:
    """Entries that are on disk at the hub and could not be interpreted: they stop nothing, and they are not forgotten."""


@quarantine.command("list")
@click.option("--service", type=SERVICES, default=None, help="Only those of this keeper (default: all three).")
@click.option("--site", default=None, help="Only those of this site.")
@json_option
def list_quarantine(service: str | None, site: str | None, as_json: bool) -> None:
    """What could not be interpreted, by keeper, oldest first, and why. JSON without --service is one object by keeper."""
    client = connect()
    names = [service] if service else [lane.value for lane in Lane]
    replies = {name: client.get(f"/v1/quarantine/{name}", QuarantineReply, {"site": site}) for name in names}
    if as_json:
        print_json(replies[service] if service else replies)
        return
    rows = [
        (name, e.site, f"{e.journal}/{e.seq}", e.kind or "-", ago(e.at), e.error) for name, told in replies.items() for e in told.entries
    ]
    table(("SERVICE", "SITE", "ENTRY", "KIND", "AGE", "ERROR"), rows, empty=say("cli.no_quarantine", language()))
    if more := sum(told.total - len(told.entries) for told in replies.values()):
        note(say("cli.more_quarantine", language(), count=more))


@quarantine.command()
@click.argument("site")
@click.option("--service", required=True, type=SERVICES, help="Which of the three keepers holds them.")
@click.option("--entry", default="", metavar="JOURNAL/SEQ", help="Only this one (default: all of the site).")
@reason_option("Why it may work now, such as an upgrade.")
@json_option
def retry(site: str, service: str, entry: str, reason: str, as_json: bool) -> None:
    """Read again what SITE said; what still fails comes back."""
    journal, slash, seq = entry.rpartition("/")
    if entry and not (journal and slash and seq.isascii() and seq.isdigit()):
        raise click.UsageError(f"--entry {entry!r}: write JOURNAL/SEQ, as `intertie quarantine list` shows it")
    ask = Reinterpret(site=SiteName(site), journal=JournalId(journal) if entry else None, seq=int(seq) if entry else None, reason=reason)
    told = connect().post(f"/v1/quarantine/{service}/retry", Reinterpreted, ask)
    if as_json:
        print_json(told)
    else:
        line(say("cli.reopened", language(), count=told.reopened))


@click.group(cls=Group)
def suspense() -> None:
    """Usage that is here and is not charged yet, each with the one thing that it waits for."""


@suspense.command("list")
@click.option("--site", default=None, help="Only that of this site.")
@json_option
def list_suspense(site: str | None, as_json: bool) -> None:
    """What waits, oldest first; `!` marks what no news can lift."""
    reply = connect().get("/v1/suspense", SuspenseReply, {"site": site})
    if as_json:
        print_json(reply)
        return
    lang = language()

    def why(reason: str, text: str) -> str:
        key = f"suspense.{reason}"
        return say(key, lang) if known(key) else text

    rows = [
        (s.segment, s.site, s.attempt, s.tenant or "-", ago(s.since), ("! " if s.needs_person else "") + why(s.reason, s.text))
        for s in reply.segments
    ]
    table(("SEGMENT", "SITE", "ATTEMPT", "TENANT", "AGE", "WAITS BECAUSE"), rows, empty=say("cli.no_suspense", lang))


@suspense.command()
@click.argument("segment")
@reason_option("Why it counts: kept with your name.")
@click.option("--digest", default="", help="Which, where two contents of this id wait.")
@json_option
def release(segment: str, reason: str, digest: str, as_json: bool) -> None:
    """Decide that SEGMENT counts: impossible times, beyond the wall limit, or a second content of one id. The segment itself stays as it is."""
    ask = ReleaseSegment(segment=SegmentId(segment), digest=digest, reason=reason)
    book = connect().post("/v1/suspense/release", AttemptBook, ask)
    if as_json:
        print_json(book)
    else:
        line(say("cli.released", language(), attempt=book.attempt, segments=book.segments))


@click.group(cls=Group)
def ledger() -> None:
    """The ledger: every entry sums to zero, and every attempt is posted as its segments say."""


@ledger.command()
@json_option
def check(as_json: bool) -> None:
    """Rate everything anew and compare; leaves with 1 if the ledger does not agree."""
    told, lang = connect().get("/v1/ledger/check", LedgerCheck), language()
    counts = {
        "closed_with_hold": told.closed_with_hold,
        "open_without_hold": told.open_without_hold,
        "differing": len(told.differing),
        "incomplete": len(told.incomplete),
        "suspense_segments": told.suspense_segments,
        "quarantined": told.quarantined,
    }
    good = told.sum == 0 and not any(counts[name] for name in ("closed_with_hold", "open_without_hold", "differing"))
    if as_json:
        print_json(told)
    else:
        line(say("cli.ledger_good", lang, postings=told.postings, sum=told.sum) if good else say("cli.ledger_bad", lang))
        for name, count in counts.items():
            if count:
                line(say("cli.ledger_count", lang, what=say(f"ledger.{name}", lang), count=count))
        for one in told.periods:
            line(f"{one.period}  {tell_site(one)}")
        for gone in told.lost:
            line(tell_lost(gone))
    if not good:
        raise SystemExit(1)
