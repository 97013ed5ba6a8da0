"""A small world for metering's tests: one scheduler, sites with keys, attempts and the segments that their sites would send."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec

from intertie.contracts.base import encode
from intertie.contracts.identity import SiteKeyChanged, SiteKeyRecord
from intertie.contracts.job import AttemptRecord, AttemptSnapshot, Attribution, Cause
from intertie.contracts.link import Sealed
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import Anchor, MeterSpec, Price, Segment, UsagePhase
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SegmentId, SiteName, SpecId, TenantName
from intertie.metering.core.evidence import Received, received
from intertie.metering.core.reckon import Trust

T0 = datetime(2026, 12, 1, 9, 0, tzinfo=UTC)
SITE, OTHER_SITE = SiteName("site-a"), SiteName("site-b")
POOL = PoolName("main")
TENANT = TenantName("lab")
SPEC = SpecId("spec-1")
SCHEDULER_KEY = "U-scheduler"
JOURNAL = "jnl-1"


def site_key(site: SiteName) -> str:
    return f"U-{site}"


def sealed(payload: bytes, key: str) -> Sealed:
    """A toy seal: good enough to tell who signed which bytes; the real ones are tried at the edges."""
    return Sealed(payload=payload.decode(), signer=key, signature=hashlib.sha256(key.encode() + payload).hexdigest())


def verify(seal: Sealed, key: str) -> bool:
    return seal == sealed(seal.payload.encode(), key)


TRUST = Trust(frozenset({SCHEDULER_KEY}), verify)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def spec(**changes: Any) -> MeterSpec:
    standard = MeterSpec(
        spec=SPEC,
        revision=1,
        title="standard",
        provider="platform",
        consumer="*",
        currency="CNY",
        prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal("6.00"))],
        effective_from=T0 - timedelta(days=30),
    )
    return msgspec.structs.replace(standard, **changes)


def record(number: int = 1, *, state: str = "offered", **changes: Any) -> AttemptRecord:
    """The scheduler's record of attempt `number`, of job `number`."""
    standard = AttemptRecord(
        attempt=AttemptId(f"att-{number}"),
        job=JobId(f"job-{number}"),
        tenant=TENANT,
        number=1,
        epoch=1,
        generation=1,
        site=SITE,
        pool=POOL,
        devices=[DeviceId("slot-0")],
        kind=DeviceKind.SLOT,
        account="lab",
        state=state,
        why_here="",
        spec=SPEC,
        spec_revision=1,
        offered_at=T0,
        version=1,
    )
    return msgspec.structs.replace(standard, **changes)


def ended(
    start: AttemptRecord, segments: list[Segment], *, outcome: str = "succeeded", cause: Cause | None = None, last: int = 0
) -> AttemptRecord:
    """The record after the ending entry that names exactly these segments."""
    return msgspec.structs.replace(
        start,
        state="ended",
        started_at=min((s.start for s in segments), default=None),
        ended_at=max((s.end for s in segments), default=T0),
        outcome=outcome,
        cause=cause,
        segments=len(segments),
        quantity_milli_us=sum(s.quantity_milli * ((s.end - s.start) // timedelta(microseconds=1)) for s in segments),
        last_metering_seq=last or len(segments),
        version=start.version + 1,
    )


def snapshot(of: AttemptRecord, wall_s: int = 3_600) -> AttemptSnapshot:
    return AttemptSnapshot(record=of, wall_s=wall_s)


def attribution(of: AttemptRecord, **changes: Any) -> Attribution:
    standard = Attribution(
        tenant=of.tenant, job=of.job, attempt=of.attempt, site=of.site, pool=of.pool, spec=of.spec, spec_revision=of.spec_revision
    )
    return msgspec.structs.replace(standard, **changes)


def segment(of: AttemptRecord, start: float, end: float, **changes: Any) -> Segment:
    """[start, end) seconds of one slot, attributed by the scheduler's seal."""
    standard = Segment(
        id=SegmentId(f"seg-{of.attempt}-{start}-{end}"),
        site=of.site,
        pool=of.pool,
        attempt=of.attempt,
        phase=UsagePhase.RUN,
        kind=DeviceKind.SLOT,
        devices=of.devices,
        quantity_milli=1_000 * len(of.devices),
        start=at(start),
        end=at(end),
        last=False,
        anchor=Anchor(utc=T0, boot_s=0.0, kernel_boot="boot"),
        attribution=sealed(encode(attribution(of)), SCHEDULER_KEY),
    )
    return msgspec.structs.replace(standard, **changes)


def come(what: Segment, seq: int = 1, *, lane: SiteName | None = None, key: str = "", journal: str = JOURNAL) -> Received:
    """A segment as it comes on a site's lane, sealed by the site it names unless another key is given."""
    seal = sealed(encode(what), key or site_key(what.site))
    return received(lane or what.site, journal, seq, seal, T0)


def key_event(site: SiteName = SITE, *, key: str = "", version: int = 1, revoked: bool = False) -> SiteKeyChanged:
    keys = SiteKeyRecord(site=site, site_key=key or site_key(site), signing_key="A-s", account="A-a", revoked=revoked)
    return SiteKeyChanged(version=version, record=keys)
