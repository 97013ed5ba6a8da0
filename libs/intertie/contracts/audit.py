"""The audit chain: what a service's chainer writes beside its audit rows, and what identity keeps of it so that nobody can cut it back unseen."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from intertie.contracts.base import Contract, Event, Instant, NonNegative, Positive
from intertie.contracts.identity import AuditRow

Digest64 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
"""SHA-256, 64 hex digits."""


class AuditHead(Contract, frozen=True, kw_only=True):
    """Where a service's chain ended at a moment: everything that was committed by then is in it."""

    service: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    epoch: Positive
    number: Positive
    digest: Digest64
    at: Instant
    """By the clock of the service that says it, which is the clock of its rows."""


class AnchorAudit(Contract, frozen=True, kw_only=True):
    """`cmd.identity.anchor_audit`: keep this head. A service anchors its own chain only; a head below one that is kept, or another digest for
    the same number, is refused and reported: the chain was cut back or rewritten."""

    head: AuditHead


class AuditAnchor(Contract, frozen=True, kw_only=True):
    """A head that identity keeps, with its signature over `intertie.trust.chain.anchor_bytes`."""

    head: AuditHead
    anchored_at: Instant
    key: str
    """Identity's public nkey."""
    signature: str
    """64 bytes of Ed25519, base64."""


class AuditAnchored(Event, frozen=True, kw_only=True):
    """A head was anchored: whoever keeps this outside the hub can prove later that the chain was at least so long, and what was in it."""

    TYPE: ClassVar[str] = "io.intertie.audit.anchored.v1"
    SERVICE: ClassVar[str] = "identity"

    anchor: AuditAnchor

    @property
    def entity(self) -> str:
        return f"audit/{self.anchor.head.service}"


class AuditAnchorsQuery(Contract, frozen=True, kw_only=True):
    """`qry.identity.audit_anchors`: one service's, oldest first, after (epoch, number); `newest` asks for the last one of every service instead."""

    service: str = ""
    after_epoch: NonNegative = 0
    after_number: NonNegative = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=2_000)] = 1_000
    newest: bool = False


class AuditAnchorsReply(Contract, frozen=True, kw_only=True):
    anchors: list[AuditAnchor]
    more: bool = False


class AuditLink(Contract, frozen=True, kw_only=True):
    """One link of a chain, with the row that it speaks of as that stands now."""

    epoch: Positive
    number: Positive
    audit: NonNegative
    """Id of the row."""
    digest: Digest64
    row: str
    """The exact bytes (UTF-8) that were chained."""
    found: AuditRow | None
    """The row as it is in the service's table now; None if it is gone."""


class AuditChainQuery(Contract, frozen=True, kw_only=True):
    """`qry.<service>.audit_chain`: links after (epoch, number)."""

    after_epoch: NonNegative = 0
    after_number: NonNegative = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 500


class AuditChainReply(Contract, frozen=True, kw_only=True):
    service: str
    links: list[AuditLink]
    more: bool = False
    unchained: list[AuditRow] = []
    """With the last page: rows that no link speaks of (a hundred at most). Younger than some seconds they wait for the chainer."""
    waiting: list[NonNegative] = []
    """Ids among them that the chainer knows of and will take."""


class ServiceChain(Contract, frozen=True, kw_only=True):
    """All of one service's chain."""

    service: str
    links: list[AuditLink]
    unchained: list[AuditRow] = []
    waiting: list[NonNegative] = []


class AuditExport(Contract, frozen=True, kw_only=True):
    """`intertie audit export`: everything that `intertie audit verify FILE` needs, without a hub."""

    v: Positive = 1
    hub: str
    made_at: Instant
    chains: list[ServiceChain]
    anchors: list[AuditAnchor]


class AuditFinding(Contract, frozen=True, kw_only=True):
    """One thing that is wrong with a chain. kind: `missing` · `changed` · `broken` · `gap` · `inserted` · `unchained` · `cut` · `anchor`."""

    kind: str
    service: str
    epoch: NonNegative
    number: NonNegative
    audit: NonNegative
    """Id of the row; 0 if none is meant."""
    text: str


class AuditVerdict(Contract, frozen=True, kw_only=True):
    """What a check of all chains found."""

    rows: NonNegative
    anchors: NonNegative
    after_anchor: dict[str, NonNegative]
    """Per service: rows younger than its last anchor. These could be removed unseen."""
    findings: list[AuditFinding]
    key: str = ""
    """The key that signed the anchors."""
