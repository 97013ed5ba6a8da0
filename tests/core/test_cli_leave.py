"""What `intertie site leave` takes away at its end."""

from __future__ import annotations

from pathlib import Path

from intertie.cli.leave import remove


def test_nothing_of_ours_is_left_behind_and_what_was_set_aside_least(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    for name in ("keys", "jobs/att-1", "packs"):
        (folder / name).mkdir(parents=True)
    for name in ("journal.db", "journal.db-wal", "journal.db.id", "journal.db.damaged-1", "journal.db.damaged-1-wal"):
        (folder / name).touch()
    for name in ("site.json", "pools.json", "site.toml", "agent.json", "upgrade.json", "agent.lock", "jobs/att-1/env.json"):
        (folder / name).touch()
    remove(folder)
    assert not folder.exists()


def test_what_is_another_s_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "journal.db").touch()
    remove(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
