"""The check of an audit chain: each way of tampering is found, and named by service, number and row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from intertie.contracts.audit import AuditAnchor, AuditFinding, AuditHead, AuditLink, ServiceChain
from intertie.contracts.identity import AuditRow
from intertie.store import verify_chain
from intertie.trust.chain import GENESIS, anchor_holds, link_digest, row_bytes, sign_anchor, verify_chains
from intertie.trust.keys import Key

KEY = Key.new("U")
AT = datetime(2026, 3, 1, 8, tzinfo=UTC)
Links = list[AuditLink]


def row(number: int, **changed: object) -> AuditRow:
    made = AuditRow(
        id=number,
        at=AT + timedelta(seconds=number),
        actor="li",
        action="job.cancel",
        target=f"job-{number}",
        reason="",
        result="ok",
        trace_id="",
    )
    return msgspec.structs.replace(made, **changed)


def chain(rows: Sequence[AuditRow], *, epochs: Sequence[int] = ()) -> Links:
    links: Links = []
    digest, number, before = GENESIS, 0, 1
    for one, epoch in zip(rows, epochs or [1] * len(rows), strict=True):
        number = number + 1 if epoch == before else 1
        before, data = epoch, row_bytes(one)
        digest = link_digest(digest, epoch, number, data)
        links.append(AuditLink(epoch=epoch, number=number, audit=one.id, digest=digest.hex(), row=data.decode(), found=one))
    return links


def anchor(link: AuditLink, at: datetime = AT + timedelta(minutes=1)) -> AuditAnchor:
    return sign_anchor(KEY, AuditHead(service="scheduler", epoch=link.epoch, number=link.number, digest=link.digest, at=at), at)


def kinds(found: Sequence[AuditFinding]) -> list[tuple[str, int, int]]:
    return [(finding.kind, finding.number, finding.audit) for finding in found]


ROWS = [row(n) for n in range(1, 7)]


def test_a_whole_chain_has_nothing_wrong() -> None:
    links = chain(ROWS)
    assert verify_chain("scheduler", links, [anchor(links[2]), anchor(links[5])]) == []
    assert verify_chain("scheduler", []) == []


def test_a_late_committer_is_numbered_late_and_is_no_fault() -> None:
    links = chain([row(1), row(3), row(2)])
    assert verify_chain("scheduler", links, [anchor(links[1])]) == []


def test_an_epoch_goes_on_from_the_last_digest_of_the_one_before() -> None:
    links = chain(ROWS, epochs=[1, 1, 1, 7, 7, 9])
    assert [(link.epoch, link.number) for link in links] == [(1, 1), (1, 2), (1, 3), (7, 1), (7, 2), (9, 1)]
    assert verify_chain("scheduler", links, [anchor(links[2]), anchor(links[4])]) == []
    without = links[:2] + links[3:]
    assert kinds(verify_chain("scheduler", without)) == [("broken", 1, 4)]
    assert ("cut", 3, 0) in kinds(verify_chain("scheduler", without, [anchor(links[2])]))


def changed_row(links: Links) -> Links:
    links[2] = msgspec.structs.replace(links[2], found=row(3, actor="wang"))
    return links


def removed_row(links: Links) -> Links:
    links[2] = msgspec.structs.replace(links[2], found=None)
    return links


def removed_link(links: Links) -> Links:
    return links[:2] + links[3:]


def changed_link(links: Links) -> Links:
    other = row(3, actor="wang")
    links[2] = msgspec.structs.replace(links[2], found=other, row=row_bytes(other).decode())
    return links


def swapped(links: Links) -> Links:
    a, b = links[2], links[3]
    links[2] = msgspec.structs.replace(b, number=a.number)
    links[3] = msgspec.structs.replace(a, number=b.number)
    return links


def first_taken_away(links: Links) -> Links:
    return links[1:]


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        (changed_row, [("changed", 3, 3)]),
        (removed_row, [("missing", 3, 3)]),
        (removed_link, [("gap", 4, 4), ("broken", 4, 4)]),
        (changed_link, [("broken", 3, 3)]),
        (swapped, [("broken", 3, 4), ("broken", 4, 3), ("broken", 5, 5)]),
        (first_taken_away, [("gap", 2, 2), ("broken", 2, 2)]),
    ],
)
def test_a_tampering_is_found_where_it_is(tamper: Callable[[Links], Links], found: list[tuple[str, int, int]]) -> None:
    assert kinds(verify_chain("scheduler", tamper(chain(ROWS)))) == found


def test_a_chain_that_was_written_anew_contradicts_its_anchor() -> None:
    kept = anchor(chain(ROWS)[4])
    forged = chain([row(1), row(2), row(3, actor="wang"), row(4), row(5), row(6)])
    assert verify_chain("scheduler", forged) == []
    assert kinds(verify_chain("scheduler", forged, [kept])) == [("anchor", 5, 5)]


def test_a_chain_cut_back_below_an_anchor_is_found_and_above_it_is_not() -> None:
    links = chain(ROWS)
    kept = [anchor(links[1]), anchor(links[4])]
    assert verify_chain("scheduler", links[:5], kept) == []
    assert kinds(verify_chain("scheduler", links[:4], kept)) == [("cut", 5, 0)]
    assert kinds(verify_chain("scheduler", [], kept)) == [("cut", 2, 0)]


def test_a_row_that_says_it_is_older_than_an_anchor_that_knew_nothing_of_it_was_put_in() -> None:
    links = chain([*ROWS, row(7, at=AT - timedelta(hours=2))])
    assert kinds(verify_chain("scheduler", links, [anchor(links[5], at=AT + timedelta(hours=1))])) == [("inserted", 7, 7)]


def test_a_row_that_the_chainer_does_not_know_of_is_found_and_one_that_waits_is_not() -> None:
    assert verify_chain("scheduler", chain(ROWS), unchained=[row(7)], waiting=[7]) == []
    assert kinds(verify_chain("scheduler", chain(ROWS), unchained=[row(7)])) == [("unchained", 0, 7)]


def test_an_anchor_that_its_key_did_not_sign_is_found() -> None:
    links = chain(ROWS)
    forged = msgspec.structs.replace(anchor(links[5]), signature=anchor(links[4]).signature)
    assert not anchor_holds(forged)
    assert kinds(verify_chain("scheduler", links, [forged])) == [("anchor", 6, 0)]
    other = Key.new("U").public
    assert kinds(verify_chain("scheduler", links, [anchor(links[5])], key=other)) == [("anchor", 6, 0)]


def test_rows_after_the_last_anchor_are_counted_because_they_could_be_removed_unseen() -> None:
    links = chain(ROWS)
    verdict = verify_chains([ServiceChain(service="scheduler", links=links)], [anchor(links[3])])
    assert (verdict.rows, verdict.after_anchor, verdict.findings) == (6, {"scheduler": 2}, [])
    gone = verify_chains([], [anchor(links[3])])
    assert kinds(gone.findings) == [("cut", 4, 0)]


def test_the_bytes_of_a_row_are_what_they_always_were() -> None:
    """A changed wording would break every chain that exists."""
    data = b'{"v":1,"id":1,"at":"2026-03-01T08:00:01.000000Z","actor":"li","action":"job.cancel","target":"job-1","reason":"","result":"ok","trace_id":""}'
    assert row_bytes(row(1)) == data
    east = AT.astimezone(tz=datetime.fromisoformat("2026-01-01T00:00:00+08:00").tzinfo) + timedelta(seconds=1)
    assert row_bytes(row(1, at=east)) == data
    assert link_digest(GENESIS, 1, 1, data).hex() == "13a9cc217caa3e37a9b09b2c005b84b4a1cc51b00bf8f06dc4698e376d58adad"
