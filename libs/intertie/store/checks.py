"""For tests of every service: its SQL parsed by PostgreSQL itself, against its own migrated schema."""

from __future__ import annotations

import asyncpg

from intertie.store.pg import Database
from intertie.store.queries import Queries


async def check_queries(db: Database, queries: Queries) -> list[str]:
    """What is wrong with a package's queries, one line each; empty if nothing: statements that PostgreSQL refuses, names that the sources
    use and `queries.sql` lacks, and the reverse."""
    wrong = queries.misnamed()
    for query in queries:
        try:
            async with db.transaction() as tx:
                await tx.prepare(query)
        except asyncpg.PostgresError as err:
            wrong.append(f"{query.name}: {err}")
    return wrong
