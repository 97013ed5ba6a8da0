"""The audit chain without I/O: which bytes of a row are hashed, how a link follows from the one before, what an anchor signs, and the check that
finds what was changed. Whoever holds links and anchors can run it: the command line, an auditor with a file, the simulator.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from intertie.contracts.audit import AuditAnchor, AuditExport, AuditFinding, AuditHead, AuditLink, AuditVerdict, ServiceChain
from intertie.contracts.identity import AuditRow
from intertie.trust.keys import Key, verify

GENESIS = bytes(32)
"""What the first link of a service follows from."""
# No transaction of ours lasts longer than a minute, and a chainer that anchors has taken all that was committed: a row that claims to be
# older than an anchor by more than this, and was chained after it, was not written when it says.
LATE = timedelta(minutes=5)
# Wording of the bytes below. A new field of AuditRow changes no old digest: it would need a version here.
ROW_VERSION = 1


def row_bytes(row: AuditRow) -> bytes:
    """The exact bytes of a row that are chained and stored: JSON, these keys in this order, UTC with microseconds."""
    return msgspec.json.encode(
        {
            "v": ROW_VERSION,
            "id": row.id,
            "at": _utc(row.at),
            "actor": row.actor,
            "action": row.action,
            "target": row.target,
            "reason": row.reason,
            "result": row.result,
            "trace_id": row.trace_id,
        }
    )


def link_digest(before: bytes, epoch: int, number: int, row: bytes) -> bytes:
    """SHA-256 of the digest before, the link's own number and the row's bytes."""
    return hashlib.sha256(before + epoch.to_bytes(8, "big") + number.to_bytes(8, "big") + row).digest()


def anchor_bytes(head: AuditHead, anchored_at: datetime) -> bytes:
    """What identity signs."""
    said = {"service": head.service, "epoch": head.epoch, "number": head.number, "digest": head.digest, "at": _utc(head.at)}
    return b"intertie audit anchor 1\n" + msgspec.json.encode({**said, "anchored_at": _utc(anchored_at)})


def sign_anchor(key: Key, head: AuditHead, anchored_at: datetime) -> AuditAnchor:
    signature = base64.b64encode(key.sign(anchor_bytes(head, anchored_at))).decode("ascii")
    return AuditAnchor(head=head, anchored_at=anchored_at, key=key.public, signature=signature)


def anchor_holds(anchor: AuditAnchor) -> bool:
    """True if the anchor's own key signed it. Whose key that is, the caller compares."""
    try:
        signature = base64.b64decode(anchor.signature, validate=True)
    except (binascii.Error, ValueError):
        return False
    return verify(anchor.key, anchor_bytes(anchor.head, anchor.anchored_at), signature)


def verify_chain(
    service: str,
    links: Iterable[AuditLink],
    anchors: Sequence[AuditAnchor] = (),
    *,
    unchained: Sequence[AuditRow] = (),
    waiting: Sequence[int] = (),
    key: str = "",
) -> list[AuditFinding]:
    """Everything wrong with one service's chain; empty if it is whole. `links` in order of (epoch, number), from the very first.

    key: identity's public key, if the caller knows it; else any one key that signed all anchors is taken.
    """
    check = ChainCheck(service, anchors, key=key)
    for link in links:
        check.take(link)
    return check.finish(unchained, waiting)


class ChainCheck:
    """The same, link by link, for a chain that comes in pages."""

    def __init__(self, service: str, anchors: Sequence[AuditAnchor] = (), *, key: str = "") -> None:
        self.service = service
        self.findings: list[AuditFinding] = []
        self.rows = 0
        self.after_anchor = 0
        """Rows since the last anchor that was met."""
        self._epoch = self._number = 0
        self._digest = GENESIS
        self._anchors = sorted((a for a in anchors if a.head.service == service), key=lambda a: (a.head.epoch, a.head.number))
        self._due = 0
        self._last: AuditAnchor | None = None
        self._check_signatures(key)

    def take(self, link: AuditLink) -> None:
        """The next link."""
        self.rows += 1
        self.after_anchor += 1
        self._pass_anchors(link)
        self._check_place(link)
        stored = link.row.encode("utf-8")
        digest = bytes.fromhex(link.digest)
        if link_digest(self._digest, link.epoch, link.number, stored) != digest:
            self._find(
                "broken", link, "its digest does not follow from the link before it: a link was changed, put in, taken out or moved here"
            )
        self._check_row(link, stored)
        # From here on by its own digest: one tampering is one finding, not one for each row after it.
        self._epoch, self._number, self._digest = link.epoch, link.number, digest
        self._meet_anchors(link)

    def finish(self, unchained: Sequence[AuditRow] = (), waiting: Sequence[int] = ()) -> list[AuditFinding]:
        """After the last link: anchors above the chain's end, and rows without a link."""
        for anchor in self._anchors[self._due :]:
            self._lost(anchor)
            break
        for row in unchained:
            if row.id not in waiting:
                self._note("unchained", 0, 0, row.id, "the row is in the table and in no link, and the chainer does not know of it")
        return self.findings

    # --- one link ---

    def _check_place(self, link: AuditLink) -> None:
        here, before = (link.epoch, link.number), (self._epoch, self._number)
        if here <= before:
            self._find("broken", link, f"it stands after ({before[0]}, {before[1]})")
        elif link.epoch == self._epoch and link.number != self._number + 1:
            self._find("gap", link, f"the numbers {self._number + 1} to {link.number - 1} before it are missing")
        elif link.epoch > self._epoch and link.number != 1:
            self._find("gap", link, f"the numbers 1 to {link.number - 1} of its epoch are missing")

    def _check_row(self, link: AuditLink, stored: bytes) -> None:
        claimed = _claimed_id(stored)
        if claimed != link.audit:
            self._find("broken", link, f"the bytes that were chained are those of row {claimed}")
        if link.found is None:
            self._find("missing", link, f"the row is gone; it said: {link.row}")
            return
        if row_bytes(link.found) != stored:
            self._find("changed", link, f"the row is not what was chained: {_difference(stored, row_bytes(link.found))}")
        if self._last is not None and link.found.at < self._last.head.at - LATE:
            at = self._last.head
            self._find(
                "inserted",
                link,
                f"it says {_utc(link.found.at)}, but was not there at the anchor ({at.epoch}, {at.number}) of {_utc(at.at)}",
            )

    # --- anchors ---

    def _check_signatures(self, key: str) -> None:
        for anchor in self._anchors:
            key = key or anchor.key
            if anchor.key != key or not anchor_holds(anchor):
                head = anchor.head
                self._note("anchor", head.epoch, head.number, 0, f"the anchor is not signed by {key}")

    def _pass_anchors(self, link: AuditLink) -> None:
        """Anchors between the last link and this one name a link that is not there."""
        while self._due < len(self._anchors) and _place(self._anchors[self._due]) < (link.epoch, link.number):
            self._lost(self._anchors[self._due])
            self._due += 1

    def _meet_anchors(self, link: AuditLink) -> None:
        while self._due < len(self._anchors) and _place(self._anchors[self._due]) == (link.epoch, link.number):
            anchor = self._anchors[self._due]
            if anchor.head.digest != link.digest:
                self._find(
                    "anchor", link, f"identity keeps another digest for it, of {_utc(anchor.anchored_at)}: the chain was written anew"
                )
            self._last, self.after_anchor = anchor, 0
            self._due += 1

    def _lost(self, anchor: AuditAnchor) -> None:
        head = anchor.head
        end = f"({self._epoch}, {self._number})"
        text = f"identity anchored ({head.epoch}, {head.number}) at {_utc(anchor.anchored_at)}, and the chain has no such link; it ends or goes on from {end}"
        self._note("cut", head.epoch, head.number, 0, text)

    # --- findings ---

    def _find(self, kind: str, link: AuditLink, text: str) -> None:
        self._note(kind, link.epoch, link.number, link.audit, text)

    def _note(self, kind: str, epoch: int, number: int, audit: int, text: str) -> None:
        self.findings.append(AuditFinding(kind=kind, service=self.service, epoch=epoch, number=number, audit=audit, text=text))


def verify_export(export: AuditExport, *, key: str = "", kept: Sequence[AuditAnchor] = ()) -> AuditVerdict:
    """All chains of an export. kept: anchors that were kept outside, which count beside those in it."""
    anchors = [*export.anchors, *kept]
    return verify_chains(export.chains, anchors, key=key)


def verify_chains(chains: Sequence[ServiceChain], anchors: Sequence[AuditAnchor], *, key: str = "") -> AuditVerdict:
    """Every service's chain against the anchors of all."""
    key = key or (anchors[0].key if anchors else "")
    findings: list[AuditFinding] = []
    rows, after = 0, {}
    for chain in chains:
        check = ChainCheck(chain.service, anchors, key=key)
        for link in chain.links:
            check.take(link)
        findings += check.finish(chain.unchained, chain.waiting)
        rows += check.rows
        after[chain.service] = check.after_anchor
    known = {chain.service for chain in chains}
    for service in sorted({a.head.service for a in anchors} - known):
        findings += ChainCheck(service, anchors, key=key).finish()
    return AuditVerdict(rows=rows, anchors=len(anchors), after_anchor=after, findings=findings, key=key)


def _place(anchor: AuditAnchor) -> tuple[int, int]:
    return anchor.head.epoch, anchor.head.number


def _utc(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _claimed_id(stored: bytes) -> int:
    try:
        return int(msgspec.json.decode(stored)["id"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return 0


def _difference(stored: bytes, now: bytes) -> str:
    try:
        before, after = msgspec.json.decode(stored), msgspec.json.decode(now)
        return "; ".join(
            f"{name} was {before.get(name)!r}, is {after.get(name)!r}" for name in after if before.get(name) != after.get(name)
        )
    except (msgspec.DecodeError, AttributeError):
        return "its bytes cannot be read"
