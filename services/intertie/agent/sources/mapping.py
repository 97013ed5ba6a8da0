"""A mapping: which metric of an exporter is what, in which unit, and which labels name a device. TOML, refused at the start with line and field.

    [device]                               # one device for each set of these labels
    ids = ["{UUID}"]                       # several: the first that any series of the answer can fill names all devices of it
    model = ["{modelName}"]
    model_drop = ["NVIDIA "]
    index = "{gpu}"

    [slice]                                # series that also carry these labels are of a slice, a device of its own
    id = "MIG-{UUID}/{GPU_I_ID}/0"
    model = "{modelName} MIG {GPU_I_PROFILE}"

    [[metric]]                             # of several with one `is`, the first that is known counts
    is = "memory_used"
    name = "DCGM_FI_DEV_FB_USED"
    unit = "MiB"

    [idle]                                 # where no source knows processes: what a card that nobody uses may show
    utilisation_percent = 0
    memory_mib = 1024

`blank = "dcgm"` reads DCGM's blank values as unknown; `blanks = [-1]` names others. `board = true`: the value is of the whole card, and is never
a slice's, however often it is repeated (BR-088).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping as Map
from importlib.resources import files
from typing import Annotated, Literal

import msgspec

from intertie.agent.core.xid import DRAINS
from intertie.errors import Refused

# A mapping is a page; what is larger is another file.
MOST_BYTES = 256 * 1024
FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
METRIC = r"^[a-zA-Z_:][a-zA-Z0-9_:]*$"

Template = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]

# Unit → (what it measures, numerator, denominator): the value in our unit (MiB, thousandths, °C, mW, mJ, 1) is value × numerator / denominator.
UNITS: Map[str, tuple[str, int, int]] = {
    "B": ("memory", 1, 1024**2),
    "kB": ("memory", 1000, 1024**2),
    "KiB": ("memory", 1, 1024),
    "MB": ("memory", 1000**2, 1024**2),
    "MiB": ("memory", 1, 1),
    "GB": ("memory", 1000**3, 1024**2),
    "GiB": ("memory", 1024, 1),
    "%": ("share", 10, 1),
    "ratio": ("share", 1000, 1),
    "C": ("temperature", 1, 1),
    "W": ("power", 1000, 1),
    "mW": ("power", 1, 1),
    "J": ("energy", 1000, 1),
    "mJ": ("energy", 1, 1),
    "Wh": ("energy", 3_600_000, 1),
    "": ("number", 1, 1),
}

Is = Literal[
    "utilisation",
    "memory_used",
    "memory_free",
    "memory_reserved",
    "memory_total",
    "temperature",
    "power",
    "energy",
    "processes",
    "healthy",
    "xid",
    "present",
]

MEASURES: Map[str, str] = {
    "utilisation": "share",
    "memory_used": "memory",
    "memory_free": "memory",
    "memory_reserved": "memory",
    "memory_total": "memory",
    "temperature": "temperature",
    "power": "power",
    "energy": "energy",
    "processes": "number",
    "healthy": "number",
    "xid": "number",
    "present": "number",
}
"""`healthy`: 1 is well, 0 is not. `xid`: NVIDIA's last error code. `present`: any value; only its labels count."""


class DeviceNames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ids: Annotated[list[Template], msgspec.Meta(min_length=1, max_length=8)]
    model: list[Template] = []
    model_drop: list[str] = []
    """Taken away from what `model` gives; then `model_prefix` is put before it."""
    model_prefix: str = ""
    index: str = ""
    driver: str = ""


class SliceNames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: Template
    model: Template


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"what": "is"}):
    what: Is
    name: Annotated[str, msgspec.Meta(pattern=METRIC, max_length=200)]
    unit: str = ""
    board: bool = False
    where: dict[str, str] = {}
    """Only series whose labels have these values."""


class Idle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    utilisation_percent: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0
    memory_mib: Annotated[int, msgspec.Meta(ge=0)] = 0


class Mapping(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    device: DeviceNames
    metric: Annotated[list[Metric], msgspec.Meta(min_length=1, max_length=200)]
    slice: SliceNames | None = None
    idle: Idle | None = None
    blank: Literal["", "dcgm"] = ""
    blanks: list[float] = []
    xid_drains: Annotated[list[int], msgspec.Meta(max_length=200)] = msgspec.field(default_factory=lambda: sorted(DRAINS))
    """Codes after which a card takes no work until they are gone."""

    def names(self) -> frozenset[str]:
        return frozenset(one.name for one in self.metric)


def read(text: bytes, where: str) -> Mapping:
    """`Refused('agent.mapping')` with the file, the line or field, and what is wrong there."""
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"has {len(text)} bytes, at most {MOST_BYTES}")
        made = msgspec.convert(tomllib.loads(text.decode("utf-8")), Mapping)
        _check(made)
    except (ValueError, RecursionError) as err:  # msgspec, TOML and UTF-8 errors are ValueErrors that say where
        raise Refused(
            "agent.mapping", f"{where}: {err}", next_step="mend the mapping; ops/docs/telemetry.md says what each field means"
        ) from err
    return made


def shipped(name: str) -> Mapping:
    """`dcgm` or `ascend`."""
    return read(files("intertie.agent.sources").joinpath(f"{name}.toml").read_bytes(), f"{name}.toml")


def _check(mapping: Mapping) -> None:
    """What the types cannot say: units, templates, and names that would be read twice."""
    for place, metric in enumerate(mapping.metric):
        at = f"at `$.metric[{place}]` ({metric.what})"
        if metric.unit not in UNITS:
            raise ValueError(f"unit {metric.unit!r} is none of {', '.join(sorted(u for u in UNITS if u))} - {at}")
        measures = UNITS[metric.unit][0]
        if measures != MEASURES[metric.what]:
            raise ValueError(f"unit {metric.unit!r} is of {measures}, {metric.what} is of {MEASURES[metric.what]} - {at}")
        if any(other == metric for other in mapping.metric[:place]):
            raise ValueError(f"{metric.name} stands twice - {at}")
    for place, template in enumerate(mapping.device.ids):
        if not FIELD.search(template):
            raise ValueError(f"{template!r} names no label, so that all devices would be one - at `$.device.ids[{place}]`")
    if mapping.slice is not None and not set(FIELD.findall(mapping.slice.id)) - set(FIELD.findall(mapping.device.ids[0])):
        raise ValueError("names no label that a whole device has not - at `$.slice.id`")
    templates = [*mapping.device.ids, *mapping.device.model, mapping.device.index, mapping.device.driver]
    for template in [*templates, *([mapping.slice.id, mapping.slice.model] if mapping.slice else [])]:
        if "{" in FIELD.sub("", template) or "}" in FIELD.sub("", template):
            raise ValueError(f"{template!r} has a brace without a label's name in it")


def fill(template: str, labels: Map[str, str]) -> str | None:
    """The template with labels put in; None if one is missing or empty: an empty label is none."""
    if not template or any(not labels.get(field) for field in FIELD.findall(template)):
        return None
    return FIELD.sub(lambda found: labels[found[1]], template)


def blank(value: float, mapping: Mapping) -> str:
    """Why this number is none; empty if it is one. DCGM's come as integers of 32 and 64 bits and as floating point, which has no last digits."""
    if value in mapping.blanks:
        return "blank"
    if mapping.blank != "dcgm":
        return ""
    for first in DCGM_FIRST:
        if first <= value < first + len(DCGM_BLANKS):
            return DCGM_BLANKS[int(value) - first]
    # What lies above (a float that stands for a 64-bit blank is rounded up) is no measurement either.
    return "blank" if value >= DCGM_FIRST[-1] else ""


DCGM_FIRST = (2_147_483_632, 9_223_372_036_854_775_792, 140_737_488_355_328)
"""As an integer of 32 bits, of 64 bits, and as floating point; the reasons follow one another."""
DCGM_BLANKS = ("blank", "not found", "not supported", "no permission")
