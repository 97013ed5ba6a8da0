"""Plain numbered SQL, one own table of what was applied per schema. The common tables come first, then the package's own.

`migrations/0003_add_column.pre.sql` is safe while the code before it still runs; `0004_drop_old.post.sql` waits until that code is gone; a
file without either word is `pre`. A file that was applied is never edited: its checksum refuses the start with a sentence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import asyncpg

from intertie.errors import Refused

COMMON = "intertie.store"
Phase = Literal["pre", "post"]
_FILE = re.compile(r"(?P<number>\d{4})_(?P<name>[a-z0-9_]+)(?:\.(?P<phase>pre|post))?\.sql\Z")

_TABLE = """
CREATE TABLE IF NOT EXISTS schema_migration (
    package    text NOT NULL,
    number     integer NOT NULL,
    name       text NOT NULL,
    checksum   text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (package, number)
)"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered file."""

    package: str
    number: int
    name: str
    phase: Phase
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()

    def __str__(self) -> str:
        return f"{self.package}/migrations/{self.number:04}_{self.name}"


def parse_migrations(package: str, files: Mapping[str, str]) -> list[Migration]:
    """File name → text, as migrations in order. A name that does not fit, and a number used twice, are refused."""
    found: dict[int, Migration] = {}
    for filename, sql in sorted(files.items()):
        match = _FILE.match(filename)
        if match is None:
            raise Refused("store.migration_name", f"{package}/migrations/{filename} is not named NNNN_name[.pre|.post].sql")
        number = int(match["number"])
        phase: Phase = "post" if match["phase"] == "post" else "pre"
        if number in found:
            raise Refused("store.migration_name", f"{package}: the migration number {number:04} is used twice")
        found[number] = Migration(package, number, match["name"], phase, sql)
    return [found[number] for number in sorted(found)]


def load_migrations(package: str) -> list[Migration]:
    """The migrations that a package carries; none if it has no such folder."""
    folder = resources.files(package).joinpath("migrations")
    if not folder.is_dir():
        return []
    return parse_migrations(
        package, {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.name.endswith(".sql")}
    )


def pending(known: Sequence[Migration], applied: Mapping[int, tuple[str, str]], package: str, *, through: Phase) -> list[Migration]:
    """What is to be applied, given number → (name, checksum) of what was. Refuses a changed file and a database newer than this code."""
    by_number = {migration.number: migration for migration in known}
    for number, (name, checksum) in sorted(applied.items()):
        migration = by_number.get(number)
        if migration is None:
            raise Refused(
                "store.migration_unknown",
                f"the database has {package}/migrations/{number:04}_{name}, which this version does not know",
                next_step="run the version that made it, or a newer one",
            )
        if migration.checksum != checksum:
            raise Refused(
                "store.migration_changed",
                f"{migration} was changed after it was applied",
                next_step="restore the file as it was and put the change into a new number",
            )
    return [m for m in known if m.number not in applied and (m.phase == "pre" or through == "post")]


async def apply(connection: asyncpg.Connection[asyncpg.Record], schema: str, package: str, through: Phase) -> list[str]:
    """Bring the schema up to date inside the caller's transaction; the names of what was applied."""
    # One migrator at a time per schema; freed at the end of the transaction.
    await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 1))", f"migrate:{schema}")
    # Index builds on a grown table take longer than a session's ordinary statement limit.
    await connection.execute("SET LOCAL statement_timeout = 0")
    if await connection.fetchval("SELECT to_regnamespace(quote_ident($1)) IS NULL", schema):
        await connection.execute(f'CREATE SCHEMA "{schema}"')
    await connection.execute(_TABLE)
    done: list[str] = []
    for scope in dict.fromkeys((COMMON, package)):
        rows = await connection.fetch("SELECT number, name, checksum FROM schema_migration WHERE package = $1", scope)
        applied = {row["number"]: (row["name"], row["checksum"]) for row in rows}
        for migration in pending(load_migrations(scope), applied, scope, through=through):
            await connection.execute(migration.sql)
            await connection.execute(
                "INSERT INTO schema_migration (package, number, name, checksum) VALUES ($1, $2, $3, $4)",
                migration.package,
                migration.number,
                migration.name,
                migration.checksum,
            )
            done.append(str(migration))
    return done
