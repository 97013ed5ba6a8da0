"""A database of the first release, with rows in it, is brought up to date by a start of this version: nothing of it is lost or refused."""

from __future__ import annotations

from importlib import import_module

import asyncpg
import pytest
from tests.conftest import PgDatabase

from intertie.store import Database
from intertie.store.migrate import COMMON, load_migrations

SERVICES = ("registry", "scheduler", "metering", "identity", "incident")
AT = "'2026-10-01T08:00:00Z'"

# As the first release made it.
APPLIED = """
CREATE TABLE schema_migration (
    package text NOT NULL, number integer NOT NULL, name text NOT NULL, checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (package, number)
)"""

EVERYWHERE = f"""
INSERT INTO audit (at, actor, action, target, reason, result, trace_id) VALUES ({AT}, 'li', 'job.cancel', 'job-1', 'why', 'done', '');
INSERT INTO lane_site (site, lane, session, journal, digest, ack_through, last_heard) VALUES ('lab1', 'scheduler', 's', 'jnl-1', 'd', 7, {AT});
"""
ROWS = {
    "registry": """INSERT INTO site (site, record) VALUES ('lab1', '{"site": "lab1", "version": 1}')""",
    "scheduler": f"""
        INSERT INTO job (job, tenant, submitted_by, spec, client_key, content, state, submitted_at, queued_at, version)
            VALUES ('job-1', 'demo', 'li', '{{}}', 'k', 'c', 'running', {AT}, {AT}, 3);
        INSERT INTO attempt (attempt, job, tenant, site, pool, kind, state, generation, epoch, wall_s, live, owed, offered_at, record, version)
            VALUES ('att-1', 'job-1', 'demo', 'lab1', 'cpu', 'cpu', 'ended', 1, 1, 60, false, false, {AT}, '{{}}', 4),
                   ('att-2', 'job-1', 'demo', 'lab1', 'cpu', 'cpu', 'running', 2, 1, 60, true, false, {AT}, '{{}}', 2);
        INSERT INTO site_settings (site, revision, content) VALUES ('lab1', 5, 'digest')""",
    "metering": f"""
        INSERT INTO attempt (attempt, revision, complete) VALUES ('att-1', 1, false);
        INSERT INTO segment (id, digest, site, attempt, journal, seq, phase, device_kind, model, quantity_milli, starts_at, ends_at, payload, signer,
                             signature, received_at, proven)
            VALUES ('seg-1', 'd', 'lab1', 'att-1', 'jnl-1', 1, 'run', 'cpu', '', 1000, {AT}, {AT}, '{{}}', 'k', 's', {AT}, true);
        INSERT INTO entry (attempt, kind, reason, charges) VALUES ('att-1', 'hold', '', '[]'), ('att-1', 'post', '', '[]'), ('att-1', 'release', '', '[]');
        INSERT INTO posting (entry, account, currency, amount)
            VALUES (1, 'tenant:demo', 'CNY', -2), (1, 'held:demo', 'CNY', 2)""",
    "identity": """INSERT INTO tenant (tenant, record, version) VALUES ('demo', '{"tenant": "demo"}', 1)""",
    "incident": "",
}  # fmt: skip
# What must be true of those rows afterwards; each is one boolean.
TRUE_OF_ALL = {
    "its audit rows wait for the chainer": "SELECT array_agg(audit) = (SELECT array_agg(id) FROM audit) FROM audit_unchained",
    "its lanes are where they were": "SELECT (ack_through, journal, state, place, moves, epoch_told, version) "
    "= (7, 'jnl-1', 'ok', '', '{}'::timestamptz[], 0, 1) FROM lane_site",
    "its epoch is the first, and now of this PostgreSQL": "SELECT epoch = 1 AND system_identifier IS NOT NULL FROM service_epoch",
}
TRUE_OF = {
    "registry": {"no owner has said anything about drills": "SELECT count(*) = 1 FROM site LEFT JOIN drill_consent USING (site) WHERE consent IS NULL"},
    "scheduler": {
        "what was live holds its devices": "SELECT array_agg(holding ORDER BY attempt) = '{false,true}' FROM attempt",
        "no attempt has a lease or a journal": "SELECT bool_and(lease_s = 0 AND journal IS NULL AND stop_cause IS NULL) FROM attempt",
        "its job is of the first epoch": "SELECT epoch = 1 AND survivor IS NULL AND delivered IS NULL FROM job",
        "its settings go on from their revision": "SELECT revision = 5 AND known = 0 FROM site_settings",
    },
    "metering": {
        "its ledger is what it was": "SELECT array_agg(kind ORDER BY id) = '{hold,post,release}' AND bool_and(cites IS NULL) FROM entry",
        "its segments are what they were": "SELECT count(*) = 1 FROM segment",
    },
    "identity": {"its tenants are what they were": "SELECT count(*) = 1 FROM tenant"},
    "incident": {},
}  # fmt: skip


async def first_release(pg: PgDatabase, service: str) -> None:
    """The tables of the first release in this service's schema, filled."""
    connection = await asyncpg.connect(pg.url, password=pg.password)
    try:
        await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {service}; SET search_path TO {service}; {APPLIED}")
        for package in (COMMON, f"intertie.{service}"):
            first = load_migrations(package)[0]
            await connection.execute(first.sql)
            await connection.execute(
                "INSERT INTO schema_migration (package, number, name, checksum) VALUES ($1, $2, $3, $4)",
                package, first.number, first.name, first.checksum,
            )  # fmt: skip
        await connection.execute(EVERYWHERE + ROWS[service])
    finally:
        await connection.close()


@pytest.mark.parametrize("service", SERVICES)
async def test_a_database_of_the_first_release_keeps_its_rows(pg: PgDatabase, service: str) -> None:
    await first_release(pg, service)
    db = await Database.open(pg.url, password=pg.password, schema=service)
    try:
        package = import_module(f"intertie.{service}").__name__
        later = [str(migration) for scope in (COMMON, package) for migration in load_migrations(scope)[1:]]
        assert await db.migrate(package) == later
        async with db.transaction() as tx:
            for what, query in (TRUE_OF_ALL | TRUE_OF[service]).items():
                row = await tx.one(query)
                assert row is not None and row[0] is True, what
    finally:
        await db.close()


def test_numbers_of_migrations_have_no_gap() -> None:
    """A number that is missing today is taken by somebody later, and comes after higher ones where those were applied already."""
    for package in (COMMON, *(f"intertie.{service}" for service in SERVICES)):
        numbers = [migration.number for migration in load_migrations(package)]
        assert numbers == list(range(1, len(numbers) + 1)), package
