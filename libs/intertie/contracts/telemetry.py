"""Live device telemetry: MessagePack on `intertie.v1.tel.gpu.<site>.<node>`, one message per node and beat, never answered, never kept."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from intertie.contracts.base import PREFIX, Contract, Instant, NonNegative
from intertie.contracts.site import DeviceKind, DeviceState
from intertie.errors import Refused
from intertie.ids import DeviceId, PoolName


class DeviceSample(Contract, frozen=True, kw_only=True):
    """One device now. A metric that could not be read is None, never 0; `errors` says which and why."""

    id: DeviceId
    pool: PoolName
    kind: DeviceKind
    state: DeviceState
    index: NonNegative | None = None
    model: str = ""
    memory_total_mib: NonNegative | None = None
    memory_used_mib: NonNegative | None = None
    utilisation_percent: NonNegative | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    our_processes: NonNegative | None = None
    foreign_processes: NonNegative | None = None
    memory_kind: Annotated[str, msgspec.Meta(max_length=32)] = ""
    """`unified`: it uses the host's memory and has none of its own (`host_memory_mib` of the node). Empty: its own."""
    sampled: Instant | None = None
    """When it was read, where its source is slower than the sample; None: with the sample."""
    every_s: float = 0.0
    """Seconds between looks of its source; 0: those of the sample."""
    errors: dict[str, str] = {}


class NodeSample(Contract, frozen=True, kw_only=True):
    """All devices of one node."""

    node: str
    sampled: Instant
    """The site's wall clock; corrected by the lane's offset estimate before it is called fresh."""
    sequence: NonNegative
    devices: list[DeviceSample]
    every_s: float = 0.0
    """Seconds between this node's samples; 0: not said. The hub believes it within bounds of its own."""
    host_memory_mib: NonNegative | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(NodeSample)
T = TypeVar("T")


def encode_sample(sample: NodeSample) -> bytes:
    return _encoder.encode(sample)


def decode_sample(data: bytes) -> NodeSample:
    """`Refused('contract.invalid')` for anything that is not a sample."""
    try:
        return _decoder.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as err:
        raise Refused("contract.invalid", f"telemetry sample is not valid: {err}") from err


def telemetry_subject(site: str, node: str) -> str:
    return f"{PREFIX}.tel.gpu.{site}.{node}"


def local_telemetry_subject(node: str) -> str:
    return f"tel.gpu.{node}"


class DeviceUse(Contract, frozen=True, kw_only=True):
    """How one device was used by the one attempt that held it alone. What was not seen is unknown: it is in no mean, and no zero.

    Means are over the time in which the metric was read, `seen_us` of the attempt's `ran_us`.
    """

    device: DeviceId
    model: str = ""
    mean_milli: Annotated[int, msgspec.Meta(ge=0, le=1000)] | None = None
    """Utilisation, thousandths."""
    max_milli: Annotated[int, msgspec.Meta(ge=0, le=1000)] | None = None
    mean_memory_mib: NonNegative | None = None
    max_memory_mib: NonNegative | None = None
    memory_total_mib: NonNegative | None = None
    energy_mj: NonNegative | None = None
    """By the device's own counter, from the first look to the last one."""
    seen_us: NonNegative = 0
    unseen_us: NonNegative = 0
    """Of the run: nobody looked, or it could not be read."""
    shared_us: NonNegative = 0
    """Of the run: a process that is not ours was on it too; counted for nobody."""
    samples: NonNegative = 0
