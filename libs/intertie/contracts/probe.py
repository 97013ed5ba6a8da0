"""The probe job: a small known job that proves what a pool declares, at joining and daily, and whose results are the trend."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from intertie.contracts.base import Contract, Instant, NonNegative, Text
from intertie.contracts.observed import Drift
from intertie.contracts.site import DeviceKind
from intertie.ids import DeviceId, PoolName, SiteName


class ProbeOutcome(StrEnum):
    """passed: the device was seen in the job and everything that was measured is right. failed: something is not.
    unproven: it ran, and nothing in it could see the device."""

    PASSED = "passed"
    FAILED = "failed"
    UNPROVEN = "unproven"


Name = Annotated[str, msgspec.Meta(max_length=64)]


class ProbeReport(Contract, frozen=True, kw_only=True):
    """One run, as the site signs it. Never charged, and no job of any tenant's."""

    probe: Annotated[str, msgspec.Meta(max_length=128)]
    site: SiteName
    pool: PoolName
    kind: DeviceKind
    device: DeviceId
    account: Name
    at: Instant
    """The site's wall clock at its end."""
    outcome: ProbeOutcome
    reason: Text = ""
    """Why it failed, or what could not be seen."""
    ran_us: NonNegative = 0
    model: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """As the job saw the device; empty: it could not."""
    visible: NonNegative | None = None
    """Devices that the job saw; None: it had no means to see any."""
    measures: Annotated[dict[str, NonNegative], msgspec.Meta(max_length=32)] = {}
    """By name, the unit last: `memory_mib`, `device_copy_mib_s`, `to_device_mib_s`, `cpu_hash_mib_s`, `disk_write_mib_s`, `start_us`."""
    not_measured: Annotated[dict[str, Text], msgspec.Meta(max_length=32)] = {}
    """Measure → why not."""
    driver: Annotated[str, msgspec.Meta(max_length=128)] = ""
    agent_version: Name = ""
    profile_revision: NonNegative = 0


class PoolProof(Contract, frozen=True, kw_only=True):
    """What probes and readings say of one pool."""

    site: SiteName
    pool: PoolName
    last: ProbeReport | None = None
    """None: none has been told."""
    passed_at: Instant | None = None
    """The last that passed."""
    trend: list[ProbeReport] = []
    """Newest first."""
    drift: list[Drift] = []


class ProofsQuery(Contract, frozen=True, kw_only=True):
    """`qry.registry.proofs`: the pools of a site."""

    site: SiteName
    pool: PoolName | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 8
    """Probes told of each pool."""


class ProofsReply(Contract, frozen=True, kw_only=True):
    pools: list[PoolProof]


class LocalProbe(Contract, frozen=True, kw_only=True):
    """One pool's probe, as the site's own door tells it."""

    pool: PoolName
    last: ProbeReport | None = None
    waits: Text = ""
    """Why the next one has not run although it is due; empty: it is not due, or runs now."""
    running: bool = False
