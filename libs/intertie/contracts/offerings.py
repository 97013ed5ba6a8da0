"""Job offerings: bounded, priced job requests that a site's owner accepts or declines, by a rule of theirs or by hand, giving no control away.

The owner declares an offering in `site.toml`; the site tells its public part (`contracts.site.JobOffering`) on the registry lane. A request is a
job whose spec names an offering: it travels as an offer without cards, and the site's claim is the owner's yes. The rule itself, the queue and the
cards stay at the site.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

import msgspec

from intertie.contracts.base import Contract, Instant, NonNegative, Positive, Text
from intertie.contracts.job import JobSpec
from intertie.ids import AttemptId, JobId, TenantName


class RequestBody(Contract, frozen=True, kw_only=True):
    """`POST /v1/job-offerings/{site}/{offering}/requests`: a job that asks its owner. `budget`: at most this, at the owner's price."""

    spec: JobSpec
    budget: Decimal | None = None
    env: dict[str, str] = {}
    tenant: TenantName | None = None
    dry_run: bool = False


# --- the owner's door --------------------------------------------------------------------------------------------------------------------


class LocalRequest(Contract, frozen=True, kw_only=True):
    """A request as its owner sees it."""

    attempt: AttemptId
    job: JobId
    offering: str
    tenant: TenantName
    name: str
    devices: Positive
    wall_s: Positive
    budget: Decimal | None
    received: Instant
    answer_by: Instant
    """Promised."""
    word: Annotated[str, msgspec.Meta(pattern="^(waiting|accepted)$")]
    """`accepted`: it begins as soon as cards are free, until `answer_by`."""
    text: Text = ""


class LocalRequests(Contract, frozen=True, kw_only=True):
    """Requests that are not answered to the hub yet, oldest first."""

    requests: list[LocalRequest]
    count: NonNegative = 0


class LocalDecline(Contract, frozen=True, kw_only=True):
    """The owner's words go back to who asked."""

    reason: Annotated[str, msgspec.Meta(min_length=3, max_length=1_000)]
