"""What a keeper holds and cannot interpret: who may look at it, and how it is tried again. Each keeper of a lane serves the same two calls."""

from __future__ import annotations

from typing import Annotated

import msgspec

from intertie.contracts.base import Contract, Instant, NonNegative, Positive, Text
from intertie.ids import JournalId, SiteName


class QuarantinedEntry(Contract, frozen=True, kw_only=True):
    """One entry that is on disk at its keeper and could not be interpreted. It stops nothing, and is not forgotten."""

    site: SiteName
    journal: JournalId
    seq: Positive
    kind: str
    """The entry's own tag, such as `segment`; empty if it has none."""
    error: Text
    size: NonNegative
    at: Instant
    """When it was set aside."""


class QuarantineQuery(Contract, frozen=True, kw_only=True):
    """`qry.<service>.quarantine`: oldest first."""

    site: SiteName | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=500)] = 100


class QuarantineReply(Contract, frozen=True, kw_only=True):
    entries: list[QuarantinedEntry]
    total: NonNegative
    """Of the site asked for, or of all."""


class Reinterpret(Contract, frozen=True, kw_only=True):
    """`cmd.<service>.reinterpret`: try one entry again, or all of a site, for example after an upgrade. What still fails is set aside again."""

    site: SiteName
    journal: JournalId | None = None
    """With `seq`: that entry alone."""
    seq: Positive | None = None
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=4_000)]


class Reinterpreted(Contract, frozen=True, kw_only=True):
    """So many entries stand open again; they are interpreted within seconds."""

    reopened: NonNegative
