"""Migrations on a real PostgreSQL: in order, once, all or nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.conftest import PgDatabase

from intertie.errors import Refused
from intertie.store import Database, Violated
from intertie.store.migrate import load_migrations

FIRST = "CREATE TABLE thing (id text PRIMARY KEY);"
COMMON = [str(migration) for migration in load_migrations("intertie.store")]
SECOND = "ALTER TABLE thing ADD COLUMN n bigint NOT NULL DEFAULT 1;"

Write = Callable[[Mapping[str, str]], str]


@pytest.fixture
def package(short_folder: Path, unique: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a package with these migrations; its name."""
    monkeypatch.syspath_prepend(str(short_folder))

    def write(files: Mapping[str, str]) -> str:
        folder = short_folder / f"package_{unique}" / "migrations"
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / "__init__.py").touch()
        for name, sql in files.items():
            (folder / name).write_text(sql)
        return folder.parent.name

    yield write
    for name in [name for name in sys.modules if name.startswith("package_")]:
        del sys.modules[name]


@pytest.fixture
async def db(pg: PgDatabase) -> AsyncIterator[Database]:
    found = await Database.open(pg.url, password=pg.password, schema="brandnew")
    yield found
    await found.close()


async def columns(db: Database) -> set[str]:
    async with db.transaction() as tx:
        rows = await tx.all(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = $1 AND table_name = 'thing'", db.schema
        )
    return {row["column_name"] for row in rows}


async def test_the_common_tables_come_first_then_the_packages_own_and_nothing_twice(db: Database, package: Write) -> None:
    name = package({"0001_first.sql": FIRST})
    assert await db.migrate(name) == [*COMMON, f"{name}/migrations/0001_first"]
    assert await db.migrate(name) == []
    package({"0002_second.sql": SECOND})
    assert await db.migrate(name) == [f"{name}/migrations/0002_second"]
    assert await columns(db) == {"id", "n"}


async def test_a_changed_file_refuses_the_start_with_a_sentence(db: Database, package: Write) -> None:
    name = package({"0001_first.sql": FIRST})
    await db.migrate(name)
    package({"0001_first.sql": FIRST + " -- a harmless word"})
    with pytest.raises(Refused) as caught:
        await db.migrate(name)
    assert (caught.value.code, caught.value.text) == (
        "store.migration_changed",
        f"{name}/migrations/0001_first was changed after it was applied",
    )


async def test_a_file_that_fails_leaves_the_schema_as_it_was(db: Database, package: Write) -> None:
    name = package({"0001_first.sql": FIRST, "0002_bad.sql": "INSERT INTO thing VALUES ('a'), ('a');"})
    with pytest.raises(Violated):
        await db.migrate(name)
    assert await columns(db) == set()
    package({"0002_bad.sql": SECOND})
    await db.migrate(name)
    assert await columns(db) == {"id", "n"}


async def test_replicas_that_start_together_migrate_once(pg: PgDatabase, package: Write) -> None:
    name = package({"0001_first.sql": FIRST, "0002_second.sql": SECOND})
    replicas = [await Database.open(pg.url, password=pg.password, schema="brandnew") for _ in range(4)]
    try:
        done = await asyncio.gather(*(replica.migrate(name) for replica in replicas))
    finally:
        for replica in replicas:
            await replica.close()
    assert sorted(len(names) for names in done) == [0, 0, 0, len(COMMON) + 2]


async def test_a_drop_waits_for_the_end_of_the_code_before(db: Database, package: Write) -> None:
    name = package({"0001_first.sql": FIRST, "0002_second.sql": SECOND, "0003_drop.post.sql": "ALTER TABLE thing DROP COLUMN n;"})
    await db.migrate(name, through="pre")
    assert await columns(db) == {"id", "n"}
    await db.migrate(name)
    assert await columns(db) == {"id"}


async def test_statements_prepared_before_a_migration_work_after_it(db: Database, package: Write) -> None:
    """asyncpg keeps prepared statements; a changed table outdates them. The call that meets it is told to decide again, the next works."""
    name = package({"0001_first.sql": FIRST})
    await db.migrate(name)

    async def read() -> int:
        async with db.transaction() as tx:
            return len(await tx.all("SELECT * FROM thing"))

    assert await read() == 0
    package({"0002_second.sql": SECOND})
    await db.migrate(name)
    try:
        await read()
    except Exception as err:
        assert getattr(err, "code", "") == "store.conflict", err
    assert await read() == 0
