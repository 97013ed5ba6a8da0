"""`intertie audit verify FILE`: without a hub, what was changed is named by service, number and row, and the exit code says so."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from click.testing import CliRunner, Result
from tests.core.test_audit_chain import chain, row

from intertie.cli.audit import audit
from intertie.contracts.audit import AuditAnchor, AuditExport, AuditHead, AuditLink, ServiceChain
from intertie.contracts.base import encode
from intertie.trust.chain import sign_anchor
from intertie.trust.keys import Key

KEY = Key.new("U")
AT = datetime(2026, 3, 1, 8, 0, 10, tzinfo=UTC)


def anchor(link: AuditLink) -> AuditAnchor:
    head = AuditHead(service="metering", epoch=link.epoch, number=link.number, digest=link.digest, at=AT)
    return sign_anchor(KEY, head, AT + timedelta(seconds=1))


def written(folder: Path, links: list[AuditLink], anchors: list[AuditAnchor]) -> Path:
    export = AuditExport(hub="https://hub.example", made_at=AT, chains=[ServiceChain(service="metering", links=links)], anchors=anchors)
    file = folder / "audit.json"
    file.write_bytes(encode(export))
    return file


def verify(*words: object) -> Result:
    return CliRunner().invoke(audit, ["verify", *map(str, words)], env={"INTERTIE_LANG": "en"})


LINKS = chain([row(number) for number in range(1, 7)])


def test_a_whole_export_verifies_and_says_what_it_does_not_cover(tmp_path: Path) -> None:
    done = verify(written(tmp_path, LINKS, [anchor(LINKS[3])]))
    assert done.exit_code == 0, done.output
    assert f"6 rows in 1 chains follow from one another and from 1 anchors, signed by {KEY.public}" in done.output
    assert "metering: 2 rows are younger than its last anchor" in done.output
    assert "pass --key" in done.output


def test_a_changed_row_is_named_and_the_exit_code_is_one(tmp_path: Path) -> None:
    changed = [*LINKS[:2], msgspec.structs.replace(LINKS[2], found=row(3, actor="wang")), *LINKS[3:]]
    done = verify(written(tmp_path, changed, [anchor(LINKS[3])]))
    assert done.exit_code == 1
    assert "changed\tmetering\t(1, 3)\t3\t" in done.output
    assert "actor was 'li', is 'wang'" in done.output
    told = json.loads(verify(written(tmp_path, changed, []), "--json").output)
    assert [(f["kind"], f["service"], f["number"], f["audit"]) for f in told["findings"]] == [("changed", "metering", 3, 3)]


def test_a_head_that_was_kept_outside_finds_what_all_of_the_hubs_own_word_hides(tmp_path: Path) -> None:
    """Whoever rules the database and identity cut the chain back and took the anchor away with it."""
    heads = tmp_path / "heads"
    heads.write_bytes(encode(anchor(LINKS[5])) + b"\n")
    cut = written(tmp_path, LINKS[:4], [anchor(LINKS[3])])
    assert verify(cut).exit_code == 0
    done = verify(cut, "--heads", heads)
    assert done.exit_code == 1
    assert "cut\tmetering\t(1, 6)" in done.output


def test_a_key_that_is_known_must_have_signed_the_anchors(tmp_path: Path) -> None:
    file = written(tmp_path, LINKS, [anchor(LINKS[3])])
    assert verify(file, "--key", KEY.public).exit_code == 0
    assert verify(file, "--key", Key.new("U").public).exit_code == 1
