"""Rows, syncs and journals for the tests of the link's pure machines."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from intertie.contracts.link import Clocks, Lane, Sync
from intertie.ids import AttemptId, Digest, JournalId, SessionId, SiteName
from intertie.link.journal import first_digest, next_digest
from intertie.link.keeper import SiteRow

SITE = SiteName("site-a")
JOURNAL = JournalId("jnl-a")
SESSION = SessionId("ses-1")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def raw(seq: int, text: str = "said") -> bytes:
    """An entry's bytes; another `text` is another content under the same number."""
    return f'{{"kind":"{text}","seq":{seq}}}'.encode()


def chain(count: int, *, journal: JournalId = JOURNAL, other_from: int = 0) -> list[Digest]:
    """d(0) … d(count). Entries from `other_from` on have another content: a journal that went its own way there."""
    digests = [first_digest(journal)]
    for seq in range(1, count + 1):
        digests.append(next_digest(digests[-1], raw(seq, "other" if other_from and seq >= other_from else "said")))
    return digests


def row(
    ack: int = 10,
    *,
    session: str = SESSION,
    journal: JournalId = JOURNAL,
    last_nonce: int = 5,
    taken_nonce: int = 4,
    boot_s: float = 100.0,
    kernel_boot: str = "boot-1",
    heard: int = 7,
    safe: int | None = None,
    clock: tuple[float, float] = (0.0, 1.0),
) -> SiteRow:
    return SiteRow(
        site=SITE,
        lane=Lane.SCHEDULER,
        session=SessionId(session),
        journal=journal,
        ack_through=ack,
        digest=chain(ack, journal=journal)[ack],
        safe_through=ack if safe is None else safe,
        interpreted_through=ack,
        heard=heard,
        last_heard=NOON,
        last_nonce=last_nonce,
        taken_nonce=taken_nonce,
        at_head=True,
        running=(),
        instruction_epoch=1,
        instruction_mark=3,
        settings_revision=0,
        clocks=Clocks(utc=NOON, boot_s=boot_s, kernel_boot=kernel_boot),
        clock_offset_s=clock[0],
        clock_error_s=clock[1],
    )


def sync(
    first: int = 11,
    last: int = 10,
    *,
    nonce: int = 6,
    taken: int = 5,
    session: str = SESSION,
    journal: JournalId = JOURNAL,
    other_from: int = 0,
    at_head: bool = True,
    forgotten: int = 0,
    running: Sequence[str] | None = ("att-1",),
    epoch: int = 1,
    boot_s: float = 105.0,
    kernel_boot: str = "boot-1",
    utc: datetime = NOON + timedelta(seconds=5),
) -> Sync:
    """Entries `first` … `last` of a journal's chain (none if `last` < `first`)."""
    return Sync(
        site=SITE,
        session=SessionId(session),
        lane=Lane.SCHEDULER,
        nonce=nonce,
        taken_nonce=taken,
        journal=journal,
        first_seq=first,
        digest_before=chain(first - 1, journal=journal, other_from=other_from)[first - 1],
        forgotten_through=forgotten,
        entries=[msgspec.Raw(raw(seq, "other" if other_from and seq >= other_from else "said")) for seq in range(first, last + 1)],
        at_head=at_head,
        running=None if running is None or not at_head else [AttemptId(one) for one in running],
        instruction_epoch=epoch,
        instruction_mark=3,
        clocks=Clocks(utc=utc, boot_s=boot_s, kernel_boot=kernel_boot),
    )
