"""What an operator rules where the link leaves something open: preempt a job, wait no longer for an attempt, grant an islanded allowance."""

from __future__ import annotations

import click

from intertie.cli.jobs import state_text
from intertie.cli.out import json_option, line, note, print_json, reason_option, table
from intertie.cli.session import connect
from intertie.contracts.http import CloseAttemptBody, CloseBody, GrantBody
from intertie.contracts.job import GrantsReply, JobRecord
from intertie.contracts.site import DeviceKind
from intertie.text import language, say
from intertie.text.groups import Group


@click.command()
@click.argument("job_id", metavar="JOB")
@reason_option("For whose sake; shown in the job's story.")
@json_option
def preempt(job_id: str, reason: str, as_json: bool) -> None:
    """Stop JOB's run for somebody else's sake. Restartable work is queued again; the platform pays what ran."""
    _told(connect().post(f"/v1/jobs/{job_id}/preempt", JobRecord, CloseBody(reason=reason)), say("cli.preempted", language()), as_json)


@click.command("close-attempt")
@click.argument("attempt")
@reason_option("Who says so and why; shown in the job's story.")
@click.option("--site-gone", is_flag=True, help="The site has left for good: its devices are counted no longer.")
@json_option
def close_attempt(attempt: str, reason: str, site_gone: bool, as_json: bool) -> None:
    """Wait no longer for ATTEMPT at a silent site: it is lost now, and later evidence may refine it once."""
    record = connect().post(f"/v1/attempts/{attempt}/close", JobRecord, CloseAttemptBody(reason=reason, site_gone=site_gone))
    _told(record, say("cli.attempt_closed", language(), attempt=attempt), as_json)


def _told(record: JobRecord, words: str, as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    line(f"{record.job}  {state_text(record)}")
    note(words)


@click.group(cls=Group)
def grant() -> None:
    """Islanded allowances: what a tenant may use at a site while that site is alone."""


@grant.command("set")
@click.argument("tenant")
@click.argument("site")
@click.option("--kind", type=click.Choice([k.value for k in DeviceKind]), default="gpu", show_default=True, help="Of which devices.")
@click.option("--devices", type=click.IntRange(0), required=True, help="At once, what the hub has placed there included; 0 takes it away.")
@click.option("--card-hours", type=click.IntRange(1), default=None, help="In all, per absence.")
@click.option("--days", type=click.IntRange(1, 366), default=30, show_default=True, help="For how long it is valid.")
@json_option
def set_grant(tenant: str, site: str, kind: str, devices: int, card_hours: int | None, days: int, as_json: bool) -> None:
    """What TENANT may use at SITE while it is alone. It counts as used while SITE is silent."""
    body = GrantBody(kind=DeviceKind(kind), devices=devices, card_hours=card_hours, valid_days=days)
    _grants(connect().put(f"/v1/tenants/{tenant}/grants/{site}", GrantsReply, body), as_json)


@grant.command("list")
@json_option
def list_grants(as_json: bool) -> None:
    """Those in force."""
    _grants(connect().get("/v1/grants", GrantsReply), as_json)


def _grants(reply: GrantsReply, as_json: bool) -> None:
    if as_json:
        print_json(reply)
        return
    rows = [(g.tenant, g.site, g.kind, g.devices, g.card_hours or "-", f"{g.valid_until:%Y-%m-%d}", g.set_by) for g in reply.grants]
    table(("TENANT", "SITE", "KIND", "DEVICES", "CARD-HOURS", "UNTIL", "SET BY"), rows, empty=say("cli.no_grants", language()))
