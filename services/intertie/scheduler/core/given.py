"""What the store gives to the rules: one round's worth of rows, and facts that other keepers told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from intertie.contracts.job import QuotaRecord, WaitReason
from intertie.contracts.site import DeviceKind
from intertie.ids import Digest, JobId, PoolName, SiteName, TenantName
from intertie.scheduler.core.backoff import BackOff
from intertie.scheduler.core.grants import Grant
from intertie.scheduler.core.rows import Attempt, Job


@dataclass(frozen=True, slots=True)
class Used:
    """What ended attempts of a tenant, which the tenant pays, have used in one pool."""

    tenant: TenantName
    site: SiteName
    pool: PoolName
    kind: DeviceKind
    quantity_milli_us: int


@dataclass(frozen=True, slots=True)
class Waited:
    """What a job was last told, so that the same is not written again."""

    digest: Digest
    reason: WaitReason
    since: datetime


@dataclass(frozen=True, slots=True)
class RoundInput:
    """What the store knows for one round."""

    queue: Sequence[Job]
    live: Sequence[Attempt]
    """Attempts that are their job's holder, or hold devices although they are not: replaced, lost, stray."""
    quotas: Sequence[QuotaRecord] = ()
    back_offs: Mapping[SiteName, BackOff] = field(default_factory=dict)
    used: Sequence[Used] = ()
    waited: Mapping[JobId, Waited] = field(default_factory=dict)
    avoided: Mapping[JobId, Sequence[BackOff]] = field(default_factory=dict)
    """Of jobs in the queue: the sites that each keeps away from."""
    grants: Sequence[Grant] = ()


@dataclass(frozen=True, slots=True)
class Fact:
    """One entity of another service's, as its keeper last told it."""

    noun: str
    entity: str
    version: int
    body: bytes
    at: datetime
