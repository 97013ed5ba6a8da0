"""An exporter's answer by its mapping: text in, a reading out. Pure, and never more than the text says: what is doubled, stale, blank or
impossible is unknown, with the reason beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from intertie.agent.core.xid import XidMeans, meaning
from intertie.agent.sources import mapping as maps
from intertie.agent.sources.reading import CELSIUS, MIB, MILLIWATT, CardReading, Reading, ranged
from intertie.errors import Refused

# Chips of one host; what tells more is no exporter of one machine.
MOST_CARDS = 1_024
MOST_SERIES = 100_000
# A label becomes a device's id, which stands in subjects' payloads, environment lists and file names.
DEVICE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}\Z")
MODEL_LENGTH = 100
NOTES = 16
# Numbers that no counter of a card reaches; beyond them a conversion is no longer exact.
MOST = 2**62


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    labels: Mapping[str, str]
    value: float
    at_s: float | None


@dataclass(slots=True)
class _Found:
    """A device and what was said of it: `is` → number in our unit, or why there is none."""

    labels: dict[str, str]
    parent: str = ""
    model: str = ""
    values: dict[str, int] = field(default_factory=dict)
    whys: dict[str, str] = field(default_factory=dict)
    said: dict[int, set[float]] = field(default_factory=dict)
    """By the metric's place in the mapping."""


def parse(text: str, names: frozenset[str]) -> list[Series]:
    """The series of these metrics. `Refused('agent.exposition')` for what is not Prometheus' text format, or was cut short."""
    if not text.endswith("\n"):
        raise Refused("agent.exposition", "the answer does not end with a line: it was cut short, or is no text of metrics")
    wanted = [line for line in text.split("\n") if (name := re.match(r"[a-zA-Z_:][a-zA-Z0-9_:]*", line.strip())) and name[0] in names]
    if len(wanted) > MOST_SERIES:
        raise Refused("agent.exposition", f"{len(wanted)} series, at most {MOST_SERIES}")
    found: list[Series] = []
    for line in wanted:
        try:
            for family in text_string_to_metric_families(line.strip() + "\n"):
                found += [Series(s.name, s.labels, s.value, _seconds(s.timestamp)) for s in family.samples]
        except Exception as err:  # The library raises what it comes upon; whatever it was, this line is none.
            raise Refused("agent.exposition", f"line {line.strip()[:120]!r} cannot be read: {err}"[:400]) from err
    return found


def _seconds(timestamp: object) -> float | None:
    return float(timestamp) if isinstance(timestamp, int | float) else None


def reading(series: Sequence[Series], mapping: maps.Mapping, *, now_s: float, max_age_s: float) -> Reading:
    """`now_s`: this host's wall clock as a Unix time; series that carry a time are believed within `max_age_s` of it."""
    notes: list[str] = []
    template = next((t for t in mapping.device.ids if any(maps.fill(t, s.labels) for s in series)), None)
    if template is None:
        return Reading(error=f"no series names a device by {' or '.join(mapping.device.ids)}")
    by_name: dict[str, list[int]] = {}
    for place, metric in enumerate(mapping.metric):
        by_name.setdefault(metric.name, []).append(place)
    found: dict[str, _Found] = {}
    for one in series:
        for place in by_name.get(one.name, ()):
            if all(one.labels.get(label) == value for label, value in mapping.metric[place].where.items()):
                _take(found, one, place, mapping, template, notes, now_s=now_s, max_age_s=max_age_s)
    if len(found) > MOST_CARDS:
        return Reading(error=f"{len(found)} devices, at most {MOST_CARDS}")
    for device in found.values():
        _decide(device, mapping)
    sliced = {device.parent for device in found.values() if device.parent}
    cards = [_card(number, name, device, mapping, sliced) for number, (name, device) in enumerate(sorted(found.items()))]
    drivers = {card.driver for card in cards if card.driver}
    return Reading(cards=cards, driver=drivers.pop() if len(drivers) == 1 else "", notes=notes[:NOTES])


def _take(
    found: dict[str, _Found],
    one: Series,
    place: int,
    mapping: maps.Mapping,
    template: str,
    notes: list[str],
    *,
    now_s: float,
    max_age_s: float,
) -> None:
    """One series to its device: a slice's to the slice, unless it is of the whole board."""
    metric, whole = mapping.metric[place], maps.fill(template, one.labels)
    part = maps.fill(mapping.slice.id, one.labels) if mapping.slice is not None else None
    for name in (n for n in (whole, part) if n is not None):
        if not DEVICE_ID.match(name):
            notes.append(f"{metric.name}: {name[:60]!r} is no name of a device")
            return
    if whole is None:
        notes.append(f"{metric.name}: a series without the labels of {template}")
        return
    if part is not None:
        device = found.setdefault(part, _Found(dict(one.labels), parent=whole))
        # A card of which only slices are told is there all the same.
        found.setdefault(whole, _Found({k: v for k, v in one.labels.items() if k not in _only(mapping, template)}))
        if metric.board:
            device.whys.setdefault(metric.what, "of the whole board")
            device = found[whole]
    else:
        device = found.setdefault(whole, _Found(dict(one.labels)))
    for label, value in one.labels.items():
        device.labels.setdefault(label, value)
    if one.at_s is not None and abs(now_s - one.at_s) > max_age_s:
        age = now_s - one.at_s
        device.whys[metric.what] = f"stale: said {age:.0f} s ago" if age > 0 else f"its time is {-age:.0f} s ahead"
        return
    device.said.setdefault(place, set()).add(one.value)


def _only(mapping: maps.Mapping, template: str) -> set[str]:
    """Labels that a slice has and its card has not."""
    assert mapping.slice is not None
    return set(maps.FIELD.findall(mapping.slice.id + mapping.slice.model)) - set(
        maps.FIELD.findall(template + "".join(mapping.device.model))
    )


def _decide(device: _Found, mapping: maps.Mapping) -> None:
    """Of several metrics of one meaning the first that is known counts; a value that was said in two ways is none."""
    for place, metric in enumerate(mapping.metric):
        values = device.said.get(place)
        if values is None or metric.what in device.values:
            continue
        if len(values) > 1 and metric.what != "present":
            device.whys[metric.what] = f"said in {len(values)} ways: {', '.join(f'{v:g}' for v in sorted(values)[:3])}"
            continue
        try:
            device.values[metric.what] = number(next(iter(values)), metric, mapping)
        except ValueError as err:
            device.whys.setdefault(metric.what, str(err))


LIMITS: Mapping[str, tuple[int, int]] = {
    "utilisation": (0, 1_000),
    "memory_used": MIB,
    "memory_free": MIB,
    "memory_reserved": MIB,
    "memory_total": (1, MIB[1]),
    "temperature": CELSIUS,
    "power": MILLIWATT,
    "energy": (0, MOST),
    "processes": (0, 1_000_000),
    "healthy": (0, 1),
    "xid": (0, 100_000),
    "present": (-MOST, MOST),
}


def number(value: float, metric: maps.Metric, mapping: maps.Mapping) -> int:
    """In our unit, rounded to the nearest whole; `ValueError` with why it is none."""
    if not math.isfinite(value):
        raise ValueError(f"no number: {value}")
    if why := maps.blank(value, mapping):
        raise ValueError(why)
    if abs(value) > MOST:
        raise ValueError(f"impossible reading {value:g}")
    _, times, through = maps.UNITS[metric.unit]
    if isinstance(value, int):
        return ranged((value * times * 2 + through) // (2 * through), LIMITS[metric.what])
    scaled = value * times / through
    if metric.what == "utilisation" and scaled > LIMITS["utilisation"][1]:
        raise ValueError(f"impossible reading {value:g}")  # 100.04 % is not rounded into the range.
    return ranged(math.floor(scaled + 0.5), LIMITS[metric.what])


def _card(number: int, name: str, device: _Found, mapping: maps.Mapping, sliced: Iterable[str]) -> CardReading:
    values, labels = device.values, device.labels
    total = values.get("memory_total")
    if total is None and "memory_used" in values and "memory_free" in values:
        total = values["memory_used"] + values["memory_free"] + values.get("memory_reserved", 0)
    used, milli, power = values.get("memory_used"), values.get("utilisation"), values.get("power")
    errors = {key: why for key, why in device.whys.items() if key not in values}
    if used is not None and total is not None and used > total:
        errors["memory_used"], used = f"impossible reading {used} of {total} MiB", None
    xid = values.get("xid", 0)
    if xid:
        errors["xid"] = f"last error code {xid}: {meaning(xid, mapping.xid_drains)}"
    if values.get("healthy") == 0:
        errors["healthy"] = "the exporter says that it is not well"
    index = maps.fill(mapping.device.index, labels)
    return CardReading(
        index=int(index) if index is not None and index.isdecimal() and len(index) < 6 and not device.parent else 100_000 + number,
        uuid=name,
        name=_model(device, mapping),
        memory_total_mib=total or None,
        memory_used_mib=used,
        utilisation_percent=None if milli is None else (milli + 5) // 10,
        utilisation_milli=milli,
        temperature_c=values.get("temperature"),
        power_w=None if power is None else power / 1000,
        energy_mj=values.get("energy"),
        processes=values.get("processes"),
        in_use=_in_use(values, mapping.idle),
        lost=values.get("healthy") == 0 or (xid > 0 and meaning(xid, mapping.xid_drains) is XidMeans.DRAIN),
        parent=device.parent or None,
        sliced=name in sliced,
        driver=maps.fill(mapping.device.driver, labels) or "",
        errors={key: why[:200] for key, why in errors.items()},
    )


def _model(device: _Found, mapping: maps.Mapping) -> str | None:
    templates = [mapping.slice.model] if device.parent and mapping.slice is not None else mapping.device.model
    model = next((filled for t in templates if (filled := maps.fill(t, device.labels)) is not None), None)
    if model is None:
        return None
    for part in mapping.device.model_drop:
        model = model.replace(part, "")
    model = f"{mapping.device.model_prefix}{model.strip()}"
    return model[:MODEL_LENGTH] if model.isprintable() else None


def _in_use(values: Mapping[str, int], idle: maps.Idle | None) -> bool | None:
    """Whether somebody uses it, by processes if they are counted, else by what its owner calls idle; None if neither can be said."""
    if "processes" in values:
        return values["processes"] > 0
    if idle is None:
        return None
    busy: list[bool] = []
    if (milli := values.get("utilisation")) is not None:
        busy.append(milli > idle.utilisation_percent * 10)
    if (used := values.get("memory_used")) is not None:
        busy.append(used > idle.memory_mib)
    # Only both together say that nobody is there: a job that waits for data uses no core, and one that begins holds no memory.
    return True if any(busy) else False if len(busy) == 2 else None
