"""Bodies that exist only over HTTP: where the path already names what the body is about, or where the gateway itself answers."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

import msgspec

from intertie.contracts.base import Contract, Instant, NonNegative, Text
from intertie.contracts.identity import Role
from intertie.contracts.job import JobSpec
from intertie.contracts.site import DeviceKind
from intertie.ids import Digest, PoolName, SiteName, TenantName


class SubmitBody(Contract, frozen=True, kw_only=True):
    """`POST /v1/jobs`. `Idempotency-Key` makes a repeat safe; `tenant` is yours unless you may act for others."""

    spec: JobSpec
    env: dict[str, str] = {}
    """Any variable but those that the site sets for each job: `INTERTIE_*`, `CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER`, `TRACEPARENT`. `PATH`,
    `LD_PRELOAD` and the like are in force from the job's own exec on, under its own account."""
    tenant: TenantName | None = None
    dry_run: bool = False


class CordonBody(Contract, frozen=True, kw_only=True):
    """`POST /v1/sites/{site}/cordon`: `on` false lifts it; without a pool the whole site."""

    pool: PoolName | None = None
    on: bool = True
    drain: bool = False
    reason: Text


class MappingBody(Contract, frozen=True, kw_only=True):
    """`PUT /v1/tenants/{tenant}/mappings/{site}`: the local account; null removes the mapping."""

    account: str | None


class AllowanceBody(Contract, frozen=True, kw_only=True):
    """`PUT /v1/tenants/{tenant}/allowance`: null is without limit."""

    amount: Decimal | None


class QuotaBody(Contract, frozen=True, kw_only=True):
    """`PUT /v1/tenants/{tenant}/quota`: null removes it."""

    site: SiteName | None = None
    kind: DeviceKind
    limit: NonNegative | None


class ConsentBody(Contract, frozen=True, kw_only=True):
    """`PUT /v1/sites/{site}/drill-consent`: the owner's consent to drills, until then and no longer each; `allowed` false takes it back."""

    allowed: bool = True
    until: Instant | None = None
    longest_s: Annotated[int, msgspec.Meta(ge=5, le=3_600)] = 900


class CloseAttemptBody(Contract, frozen=True, kw_only=True):
    """`POST /v1/attempts/{attempt}/close`."""

    reason: Annotated[str, msgspec.Meta(min_length=3, max_length=1_000)]
    site_gone: bool = False


class GrantBody(Contract, frozen=True, kw_only=True):
    """`PUT /v1/tenants/{tenant}/grants/{site}`: an islanded allowance; `devices` 0 takes it away."""

    kind: DeviceKind
    devices: NonNegative
    card_hours: Annotated[int, msgspec.Meta(ge=1)] | None = None
    valid_days: Annotated[int, msgspec.Meta(ge=1, le=366)] = 30


class ReasonBody(Contract, frozen=True, kw_only=True):
    """Cancel, revoke: why, if you wish."""

    reason: Text = ""


class CloseBody(Contract, frozen=True, kw_only=True):
    """`POST /v1/incidents/{incident}/close`, `POST /v1/sites/{site}/revoke`: why is mandatory."""

    reason: Annotated[str, msgspec.Meta(min_length=3, max_length=1_000)]


class Whoami(Contract, frozen=True, kw_only=True):
    """`GET /v1/whoami`: whom your token speaks for."""

    name: str
    roles: list[Role]
    tenant: TenantName | None = None
    site: SiteName | None = None


class Link(Contract, frozen=True, kw_only=True):
    """`POST /v1/jobs/{job}/link`: an address that shows one job to whoever holds it, until it ends."""

    url: str
    expires_at: Instant


class Stored(Contract, frozen=True, kw_only=True):
    """`PUT /v1/objects/{digest}`: the object is here."""

    digest: Digest
    size: NonNegative
    repeated: bool = False


class Health(Contract, frozen=True, kw_only=True):
    """`GET /healthz`: `bus` is a round trip made just now."""

    ok: bool
    bus: bool
    version: str
