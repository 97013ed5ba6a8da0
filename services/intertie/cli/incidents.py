"""Incidents: what a person must know, take, and close with a reason."""

from __future__ import annotations

import click

from intertie.cli.out import ago, json_option, line, local, print_json, reason_option, table
from intertie.cli.session import connect
from intertie.contracts.base import Empty
from intertie.contracts.http import CloseBody
from intertie.contracts.incident import IncidentRecord, IncidentsReply, IncidentState
from intertie.errors import NotFound
from intertie.text import language, say
from intertie.text.groups import Group

# As many as the hub lists at once.
MOST = 1_000


@click.group(cls=Group)
def incident() -> None:
    """Open faults: list, show, take, close."""


@incident.command("list")
@click.option("--state", type=click.Choice([s.value for s in IncidentState]), default=None, help="Only those in this state.")
@click.option("--site", default=None, help="Only those of this site.")
@json_option
def list_incidents(state: str | None, site: str | None, as_json: bool) -> None:
    """Incidents, newest first."""
    reply = connect().get("/v1/incidents", IncidentsReply, {"state": state, "site": site})
    if as_json:
        print_json(reply)
        return
    rows = [
        (
            i.incident,
            i.severity,
            i.state,
            i.title,
            f"×{i.times}",
            ago(i.opened_at),
            i.acknowledged_by or "-",
            "yes" if i.recovered_at else "no",
        )
        for i in reply.incidents
    ]
    table(
        ("INCIDENT", "SEVERITY", "STATE", "TITLE", "TIMES", "AGE", "TAKEN BY", "RECOVERED"), rows, empty=say("cli.no_incidents", language())
    )


@incident.command()
@click.argument("incident_id", metavar="INCIDENT")
@json_option
def show(incident_id: str, as_json: bool) -> None:
    """One INCIDENT: what is wrong, where, since when, and whose it is."""
    reply = connect().get("/v1/incidents", IncidentsReply, {"limit": MOST})
    record = next((one for one in reply.incidents if one.incident == incident_id), None)
    if record is None:
        raise NotFound("incident.not_found", f"there is no incident {incident_id}", next_step="intertie incident list")
    if as_json:
        print_json(record)
        return
    line(f"{record.incident}  {record.severity}  {record.state}  ×{record.times}")
    line(record.title)
    line(record.text)
    line(f"{local(record.opened_at)} – {local(record.last_seen_at)}  {record.site or '-'}  {record.tenant or '-'}  {record.kind}")
    if record.acknowledged_by:
        line(f"{record.acknowledged_by}  {local(record.acknowledged_at)}")
    if record.closed_by:
        line(f"{record.closed_by}  {local(record.closed_at)}  {record.close_reason}")


@incident.command()
@click.argument("incident_id", metavar="INCIDENT")
@json_option
def ack(incident_id: str, as_json: bool) -> None:
    """Take INCIDENT: you look after it from now on."""
    _tell(connect().post(f"/v1/incidents/{incident_id}/acknowledge", IncidentRecord, Empty()), as_json)


@incident.command()
@click.argument("incident_id", metavar="INCIDENT")
@reason_option("What it was and what was done.")
@json_option
def close(incident_id: str, reason: str, as_json: bool) -> None:
    """Close INCIDENT with a reason."""
    _tell(connect().post(f"/v1/incidents/{incident_id}/close", IncidentRecord, CloseBody(reason=reason)), as_json)


def _tell(record: IncidentRecord, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        line(f"{record.incident}  {record.state}  {record.title}")
