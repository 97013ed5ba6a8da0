"""The wheels' servers as children: who they run as, what each role may see, what they survive."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import asyncpg
import nats
import pytest
from tests.conftest import PgDatabase, PgServer

from intertie.embedded.nats import Nats
from intertie.embedded.postgres import running_postgres


async def test_a_service_cannot_read_another_services_schema(pg: PgDatabase) -> None:
    url, password = pg.role("metering")
    owner = await asyncpg.connect(url, password=password)
    await owner.execute("CREATE TABLE metering.charge (amount bigint); INSERT INTO metering.charge VALUES (7)")
    await owner.close()
    url, password = pg.role("scheduler")
    other = await asyncpg.connect(url, password=password)
    try:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await other.fetch("SELECT amount FROM metering.charge")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await other.execute("CREATE TABLE public.shared (a int)")
        await other.execute("CREATE TABLE scheduler.job (a int)")
    finally:
        await other.close()


async def test_the_tester_role_works_in_every_schema(pg: PgDatabase) -> None:
    connection = await asyncpg.connect(pg.url, password=pg.password)
    try:
        for service in ("registry", "scheduler", "metering", "identity", "incident", "gateway"):
            await connection.execute(f"CREATE TABLE {service}.thing (a int)")
        await connection.execute("CREATE SCHEMA own; CREATE TABLE own.thing (a int)")
    finally:
        await connection.close()


async def test_a_wrong_password_is_refused(pg: PgDatabase) -> None:
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(pg.url, password="not-the-password")


def test_the_database_runs_as_an_account_of_its_own(postgres_server: PgServer) -> None:
    server = postgres_server.server
    assert server.child is not None
    uid = os.stat(f"/proc/{server.child.pid}").st_uid
    assert uid == (server.account.uid if server.account else os.geteuid())
    assert uid != 0


async def test_what_was_committed_survives_kill_9(short_folder: Path) -> None:
    with running_postgres(short_folder, fast=True) as server:
        server.query("CREATE TABLE kept (a int); INSERT INTO kept VALUES (1)")
        server.kill()
        server.start()
        assert server.query("SELECT a FROM kept") == "1"


async def test_the_plain_nats_server_has_jetstream(nats_url: str, unique: str) -> None:
    client = await nats.connect(nats_url)
    try:
        stream = client.jetstream()
        await stream.add_stream(name=unique, subjects=[f"{unique}.>"])
        assert (await stream.publish(f"{unique}.a", b"x")).seq == 1
    finally:
        await client.close()


async def test_clients_are_not_told_of_other_addresses(nats_server: Nats) -> None:
    info = await asyncio.to_thread(nats_server.info)
    assert "connect_urls" not in info
    assert info["max_payload"] == 1024 * 1024
