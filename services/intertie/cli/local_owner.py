"""`intertie local status | pause | resume | reclaim | statement`: what a site's owner looks at and decides, with everything else gone."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import click

from intertie.cli.local_door import call, find_socket
from intertie.cli.local_texts import TEXTS, say_local
from intertie.cli.out import ago, json_option, line, local, note, now, print_json, reason_option, table
from intertie.contracts.local import (
    Absence,
    Known,
    LaneWaits,
    LentWork,
    LocalPause,
    LocalPaused,
    LocalReclaim,
    LocalStatement,
    LocalStatus,
    PreviewLine,
)
from intertie.errors import Refused
from intertie.rating.text import money_text

# Rows of one kind on one screen; --json has all.
ROWS = 12
SPAN = re.compile(r"(\d{1,4})\s*(m|min|h|d)\Z")
CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\Z")
UNITS = {"m": timedelta(minutes=1), "min": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}


def until_of(text: str, moment: datetime) -> datetime:
    """`18:00` (the next one), `2h`, or `2026-12-31T18:00`, as a moment; `moment` is now, in the reader's own time zone."""
    if found := SPAN.match(text):
        return moment + int(found[1]) * UNITS[found[2]]
    if found := CLOCK.match(text):
        at = moment.replace(hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0)
        return at if at > moment else at + timedelta(days=1)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise Refused("local.until", f"{text[:60]!r} is no time", next_step="--until 18:00, 2h or 2026-12-31T18:00") from None
    return at if at.tzinfo is not None else at.replace(tzinfo=moment.tzinfo)


@click.command()
@click.option("--until", metavar="18:00|2h|2026-12-31T18:00", help="It ends by itself then; without it when you say so.")
@click.option("--reason", default="", help="Why; the hub's operator reads it.")
@json_option
@click.pass_obj
def pause(data: str | None, until: str | None, reason: str, as_json: bool) -> None:
    """The owner's red button: nothing new is lent. Works with everything else gone; what runs goes on."""
    end = until_of(until, now().astimezone()) if until is not None else None
    told = call(find_socket(data), "POST", "/v1/pause", LocalPaused, LocalPause(until=end, reason=reason))
    if as_json:
        print_json(told)
    else:
        _show_pause(told)


@click.command()
@json_option
@click.pass_obj
def resume(data: str | None, as_json: bool) -> None:
    """Lend again."""
    told = call(find_socket(data), "POST", "/v1/resume", LocalPaused)
    if as_json:
        print_json(told)
    else:
        line(say_local("resumed"))


@click.command()
@click.argument("attempt")
@reason_option("Why; the job's tenant reads it.")
@click.option("--grace", "grace_s", type=click.IntRange(0, 3600), default=10, show_default=True, help="Seconds before it is killed.")
@json_option
@click.pass_obj
def reclaim(data: str | None, attempt: str, reason: str, grace_s: int, as_json: bool) -> None:
    """Take devices back: lent work ATTEMPT is stopped and ends as preempted, by the owner's right."""
    path = f"/v1/lent/{attempt}/reclaim"
    told = call(find_socket(data), "POST", path, LentWork, LocalReclaim(reason=reason, grace_s=grace_s))
    if as_json:
        print_json(told)
    else:
        line(say_local("reclaimed", attempt=told.attempt))


@click.command()
@click.option("--period", default="", metavar="2026-12", help="Another month than this one.")
@json_option
@click.pass_obj
def statement(data: str | None, period: str, as_json: bool) -> None:
    """What this site lent this month by its own record, priced with its own agreement if it has one."""
    told = call(find_socket(data), "GET", f"/v1/statement?period={period}", LocalStatement)
    if as_json:
        print_json(told)
        return
    line(say_local("preview", period=told.period, site=told.site, zone=told.time_zone))
    rows = [_preview_row(one, told.currency) for one in told.lines]
    table(say_local("preview_columns").split(","), rows, empty=say_local("preview_none", period=told.period))
    if told.more:
        line(say_local("preview_more", count=told.more))
    for pool in told.pools:
        line(say_local("preview_pool", pool=pool.pool, attempts=pool.attempts, hours=card_hours(pool.quantity_milli_us)))
    hours = card_hours(told.quantity_milli_us)
    if told.total is not None:
        line(say_local("preview_total", hours=hours, amount=money_text(told.total, told.currency), agreement=told.agreement))
        if told.unpriced:
            line(say_local("preview_note", why=told.unpriced))
    elif not told.agreement:
        line(say_local("preview_no_agreement", hours=hours))
    else:
        line(say_local("preview_usage", hours=hours, why=told.unpriced))
    line(say_local("preview_untold", count=told.untold_segments))
    note(say_local("preview_counts"))


def _preview_row(one: PreviewLine, currency: str) -> tuple[str, ...]:
    marks = [
        say_local(f"mark.{name}") for name, so in (("running", one.running), ("islanded", one.islanded), ("untold", not one.told)) if so
    ]
    amount = money_text(one.amount, currency) if one.amount is not None else "-"
    run = f"{one.run_us / 1e6:.3f}s"
    return one.job, one.attempt, one.pool, local(one.start), run, card_hours(one.quantity_milli_us), amount, ", ".join(marks)


def card_hours(milli_us: int) -> str:
    """Thousandths of a device × microseconds as card-hours, to the hundred-thousandth."""
    return f"{milli_us / 3_600_000_000_000:.5f}"


def size_text(count: int) -> str:
    """Bytes for people."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"


# --- status ------------------------------------------------------------------------------------------------------------------------------


def show_status(told: LocalStatus) -> None:
    """One screen: the link, the button, the machine, what will be told, what it works by, the last absence."""
    if told.islanded_since is None:
        line(f"{told.site} ({told.node}): {say_local('hub_heard')}")
    else:
        why = say_local(f"why.{told.islanded_why or 'start'}")
        alone = say_local("alone", since=local(told.islanded_since), ago=ago(told.islanded_since), why=why)
        line(f"{told.site} ({told.node}): {alone}")
        line(say_local("alone_means"))
    if told.single_user:
        line(say_local("single_user"))
    if told.paused is not None and told.paused.paused:
        _show_pause(told.paused)
    if told.disk is not None and not told.disk.accepting:
        line(say_local("disk_closed", text=told.disk.text, code=told.disk.code))
    if told.requests:
        line(say_local("requests", count=told.requests))
    _show_machine(told)
    _show_lanes(told.waits)
    if told.disk is not None:
        line(say_local("disk", free=size_text(told.disk.free_bytes), journal=size_text(told.disk.journal_bytes)))
    _show_known(told.known)
    if told.absence is not None and told.absence.ended is not None:
        _show_absence(told.absence)


def _show_pause(told: LocalPaused) -> None:
    until = say_local("until", at=local(told.until)) if told.until else ""
    reason = f" ({told.reason})" if told.reason else ""
    line(say_local("paused", by=told.by, until=until, reason=reason, lent=len(told.lent)))
    for attempt in told.lent[:ROWS]:
        line(f"  {attempt}")
    line(say_local("pause_how"))


def _show_machine(told: LocalStatus) -> None:
    for pool in told.pools:
        states: dict[str, int] = {}
        for device in pool.devices:
            states[device.state.value] = states.get(device.state.value, 0) + 1
        held = ", ".join(f"{count} {say_local(f'device.{state}')}" for state, count in sorted(states.items()))
        line(f"  {pool.pool}: {len(pool.devices)} ({held})")
        for seen in [each for each in pool.devices if each.reason][:ROWS]:
            until = say_local("device.until", at=local(seen.reserved_until)) if seen.reserved_until else ""
            line(f"    {seen.device.id}: {seen.reason}{until}")
    if told.no_gpu:
        line(f"  {say_local('no_gpu', why=told.no_gpu)}")
    line(say_local("lent", count=told.lent_jobs))
    for one in told.lent[:ROWS]:
        since = say_local("since", at=local(one.started)) if one.started else ""
        by = say_local("by_allowance") if one.by_allowance else ""
        where = f"{one.pool}: {', '.join(one.devices)}"
        line(say_local("lent_row", attempt=one.attempt, where=where, word=say_local(f"word.{one.word}"), since=since, by=by))
    line(say_local("own", running=told.local_running, waiting=told.local_waiting))
    for job in told.local[:ROWS]:
        where = f"{job.pool}: {', '.join(job.devices)}" if job.devices else "-"
        line(say_local("own_row", job=job.job, name=job.name, user=job.user, where=where, word=say_local(f"word.{job.word}")))


def _show_lanes(waits: list[LaneWaits]) -> None:
    for lane in waits:
        if lane.state not in ("heard", "silent", "not_started"):
            key = f"trouble.{lane.state}" if f"trouble.{lane.state}" in TEXTS else "trouble.other"
            values = {"lane": say_local(f"lane.{lane.lane}")} | ({"state": lane.state} if key == "trouble.other" else {})
            line(say_local(key, **values))
    full = [lane for lane in waits if lane.entries]
    if waits and not full:
        line(say_local("told_all"))
    if full:
        line(say_local("to_tell"))
    for lane in full:
        name = say_local(f"lane.{lane.lane}")
        line(say_local("to_tell_row", lane=name, entries=lane.entries, size=size_text(lane.size), oldest=local(lane.oldest)))


def _show_known(known: list[Known]) -> None:
    if not known:
        return
    line(say_local("known"))
    for one in known[: 2 * ROWS]:
        key = f"known.{one.what}"
        if one.what == "allowance" and one.lapsed:
            key = "known.allowance_lapsed"
        if one.what == "settings" and one.as_of is None and one.name == "revision 0":
            key = "known.no_settings"
        value = one.value or (say_local("known.own_user") if one.what == "mapping" else "")
        name = say_local("known.revision", number=one.name.removeprefix("revision ")) if one.what == "settings" else one.name
        values = {"name": name, "as_of": local(one.as_of), "ago": ago(one.as_of) if one.as_of else "?", "value": value}
        line("  " + say_local(key, **values, valid_until=local(one.valid_until)))


def _show_absence(gone: Absence) -> None:
    assert gone.ended is not None
    lasted = took(gone.ended - gone.since)
    line(say_local("absence", since=local(gone.since), ended=local(gone.ended), lasted=lasted, why=say_local(f"why.{gone.why}")))
    line(say_local("absence_lent", started=gone.lent_started, ended=gone.lent_ended))
    line(say_local("absence_local", local=gone.local_ran))
    line(say_local("absence_allowance", taken=gone.by_allowance, refused=gone.refused))
    if gone.told is not None:
        line(say_local("absence_told", entries=gone.entries, took=took(gone.told - gone.ended)))
    else:
        line(say_local("absence_telling", entries=gone.entries))
    line(say_local("absence_settled", settled=gone.settled, count=gone.to_settle))


def took(span: timedelta) -> str:
    """`0.4 s`, `12 s`, `3m 20s`, `5h 10m`."""
    seconds = max(0.0, span.total_seconds())
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes}m {int(seconds % 60)}s" if minutes < 120 else f"{minutes // 60}h {minutes % 60}m"
