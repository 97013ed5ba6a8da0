"""Epochs on a real PostgreSQL (LINK D3): raised by a person after a copy was put back, by the service itself on another cluster or timeline."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.conftest import SERVICES, PgDatabase
from tests.edges.store_world import emit, opened, running, until

from intertie.bus.nats import NatsBus
from intertie.bus.port import ConsumerSpec, Message, StreamSpec
from intertie.clock import ManualClock, SystemClock
from intertie.contracts.base import EVENT_STREAM, PREFIX
from intertie.embedded.nats import running_nats
from intertie.embedded.postgres import Postgres, RolePassword, running_postgres
from intertie.embedded.process import free_port
from intertie.errors import Conflict, Refused, Stale, Unavailable
from intertie.store import Database, Relay
from intertie.store import epoch as epochs
from intertie.store.restore import KEEPERS, Login, restored

NOW = datetime(2026, 5, 1, tzinfo=UTC)
NOW_S = epochs.by_clock(NOW)
CLOCK = SystemClock()
PASSWORD = "epoch-test-password"


@pytest.mark.parametrize(
    ("own", "told", "wanted"),
    [
        ([1, 1], [], NOW_S),
        ([1, NOW_S + 5], [], NOW_S + 6),
        ([1], [NOW_S + 40], NOW_S + 41),
        ([NOW_S - 9], [3], NOW_S),
        ([1], [2**62], NOW_S),
    ],
    ids=["the clock is above what nobody remembers", "above its own", "above a site's", "the highest counts", "a lie is not followed"],
)
def test_a_raised_epoch_is_above_all_that_is_known(own: list[int], told: list[int], wanted: int) -> None:
    assert epochs.target(own, told, NOW) == wanted


def logins(pg: PgDatabase) -> dict[str, Login]:
    return {service: Login(*pg.role(service)) for service in KEEPERS}


async def migrated(pg: PgDatabase) -> None:
    for service in KEEPERS:
        url, password = pg.role(service)
        db = await Database.open(url, password=password, schema=service)
        await db.migrate(f"intertie.{service}")
        await db.close()


async def tell(pg: PgDatabase, service: str, site: str, epoch: int) -> None:
    async with opened(pg, service=service) as db, db.transaction() as tx:
        await tx.run(
            "INSERT INTO lane_site (site, lane, session, journal, digest, last_heard, instruction_epoch) VALUES ($1, $2, '', '', '', now(), $3)",
            site,
            service,
            epoch,
        )


async def test_a_restore_raises_every_service_to_one_epoch_above_what_any_site_tells(pg: PgDatabase) -> None:
    await migrated(pg)
    clock = ManualClock()
    told = epochs.by_clock(clock.now()) + 1_000
    await tell(pg, "scheduler", "site-a", told)
    await tell(pg, "metering", "site-liar", 2**62)
    done = await restored(logins(pg), reason="restored to 03:00", actor="ops", clock=clock)
    assert [(one.service, one.before, one.after) for one in done.services] == [(service, 1, told + 1) for service in KEEPERS]
    assert (done.told, list(done.doubted)) == (told, ["site-liar"])
    again = await restored(logins(pg), reason="restored to 03:00", actor="ops", clock=clock)
    assert [(one.before, one.after) for one in again.services] == [(told + 1, told + 1)] * len(KEEPERS)
    other = await restored(logins(pg), reason="restored again", actor="ops", clock=clock)
    assert all(one.after > told + 1 for one in other.services)
    async with opened(pg, service="registry") as db:
        async with db.transaction() as tx:
            found = await tx.all("SELECT actor, reason FROM audit WHERE action = 'epoch.raise' ORDER BY id")
    assert [(row["actor"], row["reason"]) for row in found] == [("ops", "restored to 03:00"), ("ops", "restored again")]


async def test_a_restore_needs_a_reason_and_stopped_services(pg: PgDatabase) -> None:
    await migrated(pg)
    with pytest.raises(Refused, match="needs a reason"):
        await restored(logins(pg), reason=" ", actor="ops")
    url, password = pg.role("registry")
    service = await Database.open(url, password=password, schema="registry")
    try:
        with pytest.raises(Conflict, match="registry"):
            await restored(logins(pg), reason="a restore", actor="ops")
        await service.migrate("intertie.registry")
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(_ends(service))
            assert (await restored(logins(pg), reason="a restore", actor="ops", live=True)).services
        assert ended.result().code == "store.epoch_raised" and "a restore" in ended.result().text
    finally:
        await service.close()


async def _ends(db: Database) -> Stale:
    with pytest.raises(Stale) as ended:
        await db.keep_epoch(beat_s=0.05)
    return ended.value


async def test_an_administrators_login_becomes_every_service(pg: PgDatabase) -> None:
    await migrated(pg)
    done = await restored({service: Login(pg.admin_url, None, service) for service in KEEPERS}, reason="by the administrator", actor="ops")
    assert len({one.after for one in done.services}) == 1
    await migrated(pg)


async def test_a_leader_of_the_epoch_before_writes_nothing_more(pg: PgDatabase) -> None:
    """LINK D26, invariant 11: the raise itself turns leaders out, before any other has taken office."""
    async with opened(pg) as db:
        async with db.leading("planner") as leader:
            await restored({"scheduler": Login(pg.url, pg.password)}, reason="a restore", actor="ops", live=True)
            with pytest.raises(Stale):
                async with db.transaction() as tx:
                    await tx.fence(leader)
        async with db.leading("planner") as later:
            assert (later.epoch, later.number) > (leader.epoch, leader.number) and later.number == 1


# --- whole servers -----------------------------------------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """A PostgreSQL of one test, which may be copied, put back and promoted."""

    folder: Path
    server: Postgres

    def service(self) -> str:
        return self.server.url("scheduler")

    def provision(self) -> None:
        self.server.provision([RolePassword(name, PASSWORD) for name in SERVICES])


@pytest.fixture
def cluster(short_folder: Path) -> Iterator[Cluster]:
    with running_postgres(short_folder / "first", fast=True) as server:
        made = Cluster(short_folder, server)
        made.provision()
        yield made


async def open_at(url: str) -> Database:
    return await Database.open(url, password=PASSWORD, schema="scheduler", wait_s=20)


async def test_a_copy_put_back_numbers_nothing_twice_on_a_real_stream(cluster: Cluster) -> None:
    """Show 5 in small: PostgreSQL set back to an hour ago by a copied folder, which no system identifier shows; the stream saw the lost hour."""
    cluster.server.stop()
    shutil.copytree(cluster.server.cluster, cluster.folder / "hour-ago", symlinks=True)
    cluster.server.start()
    db = await open_at(cluster.service())
    await db.migrate("intertie.store")
    await emit(db, "kept")
    with running_nats(cluster.folder / "nats") as nats:
        bus = await NatsBus.connect(nats.url, name="relay")
        try:
            await _relay(db, bus, 1)
            await db.close()
            cluster.server.stop()
            _copy(cluster.server.cluster, cluster.folder / "backup")
            cluster.server.start()
            db = await open_at(cluster.service())
            await db.migrate("intertie.store")
            await emit(db, "lost-1", "lost-2")
            await _relay(db, bus, 2)
            await db.close()
            cluster.server.stop()
            _put_back(cluster.folder / "backup", cluster.server.cluster)
            cluster.server.start()
            login = Login(cluster.service(), PASSWORD)
            (raised,) = (await restored({"scheduler": login}, reason="set back an hour", actor="ops")).services
            assert raised.before == 1 and raised.after > 1
            db = await open_at(cluster.service())
            await db.migrate("intertie.store")
            await emit(db, "new-1", "new-2")
            await _relay(db, bus, 2, stream=_stream(raised.after))
            got = await _read(bus, 3)
        finally:
            await bus.close()
            await db.close()
    assert sorted((epoch == 1, number, name) for (epoch, number), name in got.items()) == [
        (False, 1, "new-1"),
        (False, 2, "new-2"),
        (True, 1, "kept"),
    ]


def _stream(epoch: int) -> StreamSpec:
    return StreamSpec(EVENT_STREAM, (f"{PREFIX}.evt.>",), epoch=epoch)


async def _relay(db: Database, bus: NatsBus, count: int, *, stream: StreamSpec | None = None) -> None:
    """Relay until so many more events than before were published; identity's part, the making of the stream, is played here."""
    await bus.ensure_stream(stream or _stream(1))
    relay = Relay(db, bus, "scheduler", beat_s=0.1)
    async with running(relay.run()):
        await until(lambda: relay.published >= count, f"{count} published")


async def _read(bus: NatsBus, count: int) -> dict[tuple[int, int], str]:
    """(epoch, number) → what it says; a number with two contents fails."""
    got: dict[tuple[int, int], str] = {}

    async def read(message: Message) -> None:
        key = (int(message.headers["intertie-epoch"]), int(message.headers["intertie-number"]))
        name = message.headers["ce-subject"]
        assert got.setdefault(key, name) == name, f"{key} is {got[key]} and {name}"

    async def dead(message: Message, error: BaseException, tries: int) -> None:
        raise AssertionError(str(error))

    subscription = await bus.consume(ConsumerSpec(EVENT_STREAM, "reader", (f"{PREFIX}.evt.scheduler.probe.>",)), read, dead)
    await until(lambda: len(got) >= count, f"{count} events read")
    await subscription.close()
    return got


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", source, target], check=True)


def _put_back(backup: Path, cluster: Path) -> None:
    shutil.rmtree(cluster)
    _copy(backup, cluster)


async def test_a_dump_restored_into_another_cluster_raises_the_epoch_by_itself(cluster: Cluster) -> None:
    db = await open_at(cluster.service())
    await db.migrate("intertie.store")
    await db.close()
    dump = _run([cluster.server.binaries / "pg_dump", "-Fc", "-d", cluster.server.admin_url()])
    with running_postgres(cluster.folder / "second", fast=True) as second:
        second.provision([RolePassword(name, PASSWORD) for name in SERVICES])
        _run([second.binaries / "pg_restore", "--clean", "--if-exists", "-d", second.admin_url()], dump)
        db = await open_at(second.url("scheduler"))
        try:
            await db.migrate("intertie.store")
            assert db.entered is not None and db.entered.number > 1
            async with db.transaction() as tx:
                told = await tx.all("SELECT body FROM outbox WHERE type = 'io.intertie.fault.reported.v1'")
            assert len(told) == 1 and b"store.epoch_raised" in told[0]["body"]
            before = db.entered.number
            await db.migrate("intertie.store")
            assert db.entered.number == before
        finally:
            await db.close()


def _run(command: list[Path | str], given: bytes = b"") -> bytes:
    return subprocess.run(command, input=given, check=True, capture_output=True).stdout


async def test_a_promoted_standby_is_noticed_before_anything_is_written_there(cluster: Cluster) -> None:
    """An asynchronous failover is a restore: made and promoted as the runbook says, with a service that stays connected to both addresses."""
    first, port = cluster.server, free_port()
    standby = _standby(cluster, port)
    url = f"postgresql://scheduler@127.0.0.1:{first.port},127.0.0.1:{port}/intertie?target_session_attrs=read-write"
    db = await open_at(url)
    try:
        await db.migrate("intertie.store")
        await emit(db, "before")
        await until(lambda: _as_standby(standby, "SELECT count(*) FROM scheduler.outbox") == "1", "the standby has it")
        first.kill()
        assert _as_standby(standby, "SELECT pg_promote()") == "t"
        with pytest.raises(Unavailable) as refused:
            while True:
                async with db.transaction(timeout_s=5) as tx:
                    await tx.one("SELECT 1")
        assert refused.value.code in ("store.moved", "store.unavailable")
        ended = await _ends(db)
        assert "timeline 2" in ended.text
    finally:
        await db.close()
    again = await open_at(url)
    try:
        await again.migrate("intertie.store")
        assert again.entered is not None and again.entered.number > 1
        await emit(again, "after")
    finally:
        await again.close()
        standby.stop()


def _standby(cluster: Cluster, port: int) -> Postgres:
    """`pg_basebackup -R`, as in the runbook."""
    first, folder = cluster.server, cluster.folder / "standby"
    password = str(urlsplit(first.admin_url()).password)
    standby = Postgres(folder / "pg", run_dir=folder / "run", log_dir=folder / "log", admin_password=password, port=port, fast=True)
    for part in ("pg", "run", "log"):
        (folder / part).mkdir(parents=True)
    owner = standby.account
    command: list[Path | str] = [
        first.binaries / "pg_basebackup",
        "-D",
        standby.cluster,
        "-R",
        "-X",
        "stream",
        "-c",
        "fast",
        "-d",
        first.admin_url("postgres"),
    ]
    for path in (folder, folder / "pg"):
        if owner is not None:
            os.chown(path, owner.uid, owner.gid)
    subprocess.run(
        command,
        check=True,
        cwd="/",
        capture_output=True,
        user=owner.uid if owner else None,
        group=owner.gid if owner else None,
        extra_groups=[] if owner else None,
    )
    try:
        standby.start()
    except Exception:
        print((folder / "log" / "postgres.log").read_text())
        raise
    return standby


def _as_standby(standby: Postgres, sql: str) -> str:
    command: list[Path | str] = [standby.binaries / "psql", "-X", "-q", "-A", "-t", "-d", standby.admin_url(), "-c", sql]
    return str(subprocess.run(command, check=False, capture_output=True, text=True).stdout).strip()
