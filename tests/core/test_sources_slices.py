"""Slices of a card: devices of their own, measured in thousandths of the card, with the profile that lets either share be told again."""

from __future__ import annotations

import msgspec
from tests.fakes.agents import attempt, pool

from intertie.agent.config import make_pools
from intertie.agent.core import usage
from intertie.agent.core.model import StartedRecord
from intertie.agent.core.usage import Span
from intertie.contracts.site import Device, DeviceKind
from intertie.contracts.usage import UsagePhase
from intertie.ids import DeviceId, SiteName
from intertie.registry.core.profile import objection

HOUR_US = 3_600_000_000
MODEL = "A100-SXM4-80GB MIG 1g.10gb"


def test_br_087_slice_hours_are_thousandths_of_card_hours_and_keep_the_slice_s_name() -> None:
    """Two slices of seven for three hours are six slice-hours: 0.858 card-hours in thousandths (0.857143 exactly), by the declared share."""
    held = attempt(
        kind=DeviceKind.GPU,
        devices=("MIG-1", "MIG-2"),
        model=MODEL,
        share_milli=143,
        started=StartedRecord(utc_ns=1_700_000_000_000_000_000, boot_ns=0, native_id="1"),
    )
    spans = [Span(UsagePhase.RUN, 0, 3 * HOUR_US)]
    (segment,) = usage.segments(held, SiteName("lab"), spans, after=0, islanded=False)
    assert (segment.quantity_milli, segment.model, segment.devices) == (286, MODEL, ["MIG-1", "MIG-2"])
    assert usage.counts(held, spans).quantity_milli_us == 286 * 3 * HOUR_US


def test_a_pool_of_slices_holds_slices_and_never_their_card() -> None:
    profile = msgspec.structs.replace(pool(gpus=("a", "b")).profile, accelerator=MODEL, share_milli=143)
    found = [
        Device(id=DeviceId("GPU-1"), kind=DeviceKind.GPU, model="A100-SXM4-80GB"),
        Device(id=DeviceId("MIG-1"), kind=DeviceKind.GPU, model=MODEL),
        Device(id=DeviceId("MIG-2"), kind=DeviceKind.GPU, model=f"NVIDIA {MODEL}"),
    ]
    (made,) = make_pools([profile], found, "node-1")
    assert [device.id for device in made.devices] == ["MIG-1", "MIG-2"]


def test_a_share_of_a_card_is_no_property_of_slots() -> None:
    refused = objection(msgspec.structs.replace(pool(2).profile, share_milli=500))
    assert refused is not None and refused.code == "registry.profile.share"
