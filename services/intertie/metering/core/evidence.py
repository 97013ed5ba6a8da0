"""What metering knows about one attempt, as loaded from its store: everything that `reckon` may look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from intertie.contracts.base import decode
from intertie.contracts.job import AttemptRecord, AttemptSnapshot
from intertie.contracts.link import IslandedGrant, Sealed
from intertie.contracts.usage import MeterSpec, Segment, WhoPays
from intertie.ids import AttemptId, Digest, SegmentId, SiteName, SpecId, TenantName, digest

Money = tuple[str, str]
"""(account, currency)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A named person's word that a segment counts although the rule `lifts` holds it back."""

    lifts: str
    who: str
    why: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Received:
    """One segment as it came on a site's lane: the sealed bytes, what they say, and what was made of them so far."""

    site: SiteName
    """Whose lane brought it: named by the server, not by the payload."""
    journal: str
    seq: int
    sealed: Sealed
    segment: Segment
    received_at: datetime
    digest: Digest
    proven: bool = False
    """Both seals were verified once; keys that change later do not undo it."""
    tenant: TenantName | None = None
    """Of its sealed attribution, once proven."""
    number: int = 0
    """Of metering's own row; 0 if it is not stored yet."""
    suspense: str = ""
    """Why it waits (`attribution.Reason`); empty if it counts."""
    decisions: tuple[Decision, ...] = ()
    """What named persons decided about it."""
    grant: IslandedGrant | None = None
    """The islanded allowance that its attribution is, once proven; read from the sealed bytes, stored nowhere else."""

    def lifted(self, reason: str) -> datetime | None:
        """When a person decided that this reason holds it back no longer; None if nobody did."""
        return max((decision.at for decision in self.decisions if decision.lifts == reason), default=None)

    @property
    def key(self) -> tuple[SegmentId, Digest, SiteName]:
        """Its identity: the same bytes from the same site are the same fact."""
        return (self.segment.id, self.digest, self.site)


def received(site: SiteName, journal: str, seq: int, sealed: Sealed, at: datetime) -> Received:
    """Parse a sealed segment; `contract.invalid` if its payload is none. Nothing is believed yet."""
    segment = decode(sealed.payload, Segment, what="segment")
    return Received(site, journal, seq, sealed, segment, at, digest(sealed.payload.encode()))


@dataclass(frozen=True, slots=True)
class SiteKeys:
    """The public keys that speak, or once spoke, for a site; revoked ones prove nothing any more."""

    valid: frozenset[str] = frozenset()
    revoked: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Settled:
    """What was last told as `settlement.completed`."""

    version: int
    amount: Decimal
    currency: str
    payer: WhoPays
    segments: int
    quantity_milli_us: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """All of one attempt. `revision` is of metering's own row (0: not there yet) and fences what is decided from this."""

    attempt: AttemptId
    revision: int = 0
    snapshot: AttemptSnapshot | None = None
    received: Sequence[Received] = ()
    """In the order of arrival."""
    balances: Mapping[Money, Decimal] = field(default_factory=dict)
    """Of this attempt's postings, zero ones left out."""
    specs: Sequence[MeterSpec] = ()
    """Every revision that might price it."""
    keys: Mapping[SiteName, SiteKeys] = field(default_factory=dict)
    priced_by: tuple[SpecId, int] | None = None
    """The revision that priced what is posted; it stays, whatever is agreed later."""
    settled: Settled | None = None
    lane_through: int = 0
    """Last metering entry of the attempt's site that is here: tells late from missing."""
    renumbered: frozenset[str] = frozenset()
    """Journals of its site that took the place of another: what the old one held was said again in them under other numbers."""
    closed: bool = False
    """It was closed when last reckoned: what changes its postings from then on is an adjustment."""
    last_entry: int = 0
    """Its newest ledger entry, for an adjustment to cite; 0 if there is none."""
    first_version: int = 1
    """A settlement that is told now has no lower version: what was told before a restore is not known here."""

    @property
    def record(self) -> AttemptRecord | None:
        return self.snapshot.record if self.snapshot else None
