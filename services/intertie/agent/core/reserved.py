"""Present holders of devices: who, which, until when. What is held for a name is offered to nobody else, and is theirs through the owner's door.

A reservation ends by itself. The hub is told that a device is in other hands and until when, never in whose.
"""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from intertie.contracts.machines import Reservation, Reservations
from intertie.contracts.site import Device, DeviceState
from intertie.errors import Refused
from intertie.ids import DeviceId

COLUMNS = ("person", "node", "devices", "until", "reason")


@dataclass(frozen=True, slots=True)
class Note:
    """Why a device is not to be had, and until when if that is known."""

    text: str
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A device that is kept for somebody; `state` is what it is apart from that."""

    reservation: Reservation
    state: DeviceState


def in_force(
    reservations: Iterable[Reservation], devices: Iterable[Device], observed: Mapping[DeviceId, DeviceState], now: datetime
) -> dict[DeviceId, Held]:
    """Of the devices that are here, those that are kept for somebody now. Of two that name the same device the later end counts."""
    found: dict[DeviceId, Held] = {}
    known = list(devices)
    for one in sorted(reservations, key=lambda each: each.until):
        if one.until <= now:
            continue
        for device in known:
            if device.node == one.node and (not one.devices or device.id in one.devices):
                free = DeviceState.FREE if device.kind == "slot" else DeviceState.UNKNOWN
                found[device.id] = Held(one, observed.get(device.id, free))
    return found


def hidden(observed: Mapping[DeviceId, DeviceState], held: Mapping[DeviceId, Held]) -> dict[DeviceId, DeviceState]:
    """What may be used by anybody: what is kept for somebody is in other hands. A lost or unknown device stays what it is."""
    kept = {name: DeviceState.FOREIGN for name, one in held.items() if one.state not in (DeviceState.LOST, DeviceState.UNKNOWN)}
    return {**observed, **kept}


def seen_by(person: str, observed: Mapping[DeviceId, DeviceState], held: Mapping[DeviceId, Held]) -> dict[DeviceId, DeviceState]:
    """What this person may use: also what is kept for them."""
    theirs = {name: one.state for name, one in held.items() if one.reservation.person == person}
    return {**observed, **theirs}


def notes(held: Mapping[DeviceId, Held], *, named: bool) -> dict[DeviceId, Note]:
    """In words; `named` at the site alone."""
    whom = {name: f"reserved for {one.reservation.person}" if named else "reserved by the site's owner" for name, one in held.items()}
    return {name: Note(text, held[name].reservation.until) for name, text in whom.items()}


# --- what the owner writes -----------------------------------------------------------------------------------------------------------------


def read_reservations(text: str, *, kind: str, zone: datetime) -> list[Reservation]:
    """CSV (`person,node,devices,until,reason`; devices apart by blanks) or TOML (`[[reservation]]`); columns alone, or `reservation = []`, end all.

    A time without an offset is of the machine's own zone, which `zone` (any moment of now) shows. `Refused('machines.reservation')` names line and
    field.
    """
    try:
        rows = tomllib.loads(text).get("reservation") if kind == "toml" else _csv(text)
    except (tomllib.TOMLDecodeError, csv.Error) as err:
        raise _refused(f"this is no {kind}: {err}") from err
    if not isinstance(rows, list):
        raise _refused("it holds no reservation; to end all of them write the columns alone, or reservation = []")
    return [_reservation(row, number, zone) for number, row in enumerate(rows, start=1)]


def _csv(text: str) -> list[dict[str, object]] | None:
    """None: not even columns."""
    reader = csv.DictReader(io.StringIO(text.lstrip("\ufeff")), strict=True)
    if unknown := set(reader.fieldnames or ()) - set(COLUMNS):
        raise _refused(f"unknown columns: {', '.join(sorted(map(str, unknown)))}")
    if reader.fieldnames is None:
        return None
    rows = []
    for row in reader:
        found: dict[str, object] = {key: (value or "").strip() for key, value in row.items() if key is not None}
        found["devices"] = str(found.get("devices", "")).split()
        rows.append(found)
    return rows


def _reservation(row: object, number: int, zone: datetime) -> Reservation:
    if not isinstance(row, dict):
        raise _refused(f"entry {number} is no table")
    made = dict(row)
    until = made.get("until")
    try:
        moment = datetime.fromisoformat(until) if isinstance(until, str) else until
    except ValueError as err:
        raise _refused(f"entry {number}: until {str(until)[:40]!r} is no time such as 2026-12-31T18:00+08:00") from err
    if not isinstance(moment, datetime):
        raise _refused(f"entry {number}: until must be a date and a time")
    made["until"] = moment if moment.tzinfo is not None else moment.replace(tzinfo=zone.tzinfo)
    try:
        return msgspec.convert(made, Reservation)
    except msgspec.ValidationError as err:
        raise _refused(f"entry {number}: {err}") from err


def _refused(text: str) -> Refused:
    return Refused("machines.reservation", text, next_step=f"columns, or fields of [[reservation]]: {', '.join(COLUMNS)}")


def checked(asked: Reservations, nodes: Sequence[str], devices: Iterable[DeviceId]) -> Reservations:
    """`Refused('machines.reservation')` for a node or device that is not here: what holds nothing would protect nobody."""
    known = set(devices)
    for one in asked.reservations:
        if one.node not in nodes:
            raise _refused(f"there is no node {one.node[:80]!r} here; nodes: {', '.join(nodes)}")
        if strange := [device for device in one.devices if device not in known]:
            raise _refused(f"node {one.node} has no device {', '.join(strange)[:200]}")
    return asked
