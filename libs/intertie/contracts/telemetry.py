"""Live device telemetry: MessagePack on `intertie.v1.tel.gpu.<site>.<node>`, one message per node and beat, never answered, never kept."""

from __future__ import annotations

from typing import TypeVar

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
    errors: dict[str, str] = {}


class NodeSample(Contract, frozen=True, kw_only=True):
    """All devices of one node."""

    node: str
    sampled: Instant
    """The site's wall clock; corrected by the lane's offset estimate before it is called fresh."""
    sequence: NonNegative
    devices: list[DeviceSample]


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
