"""The scheduler process itself, on a real nats-server in operator mode and a real PostgreSQL, with a site in its own account; and a kill of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PgDatabase
from tests.edges.conftest import RunningHub
from tests.edges.scheduler_world import ACME, CLOCK, Agent, alive, pool_record, site_record
from tests.edges.store_world import running, until
from tests.edges.test_lane_real import new_site

from intertie.bus import rpc
from intertie.bus.nats import NatsBus
from intertie.contracts import endpoints
from intertie.contracts.base import Contract
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import Claims, IdentitySnapshotReply, MappingRecord, MappingsChanged, Role
from intertie.contracts.job import CancelJob, JobQuery, JobRecord, JobSpec, Resources, SubmitJob
from intertie.contracts.link import Lane, Offer
from intertie.contracts.site import SitesReply
from intertie.contracts.usage import MeteringSnapshotReply
from intertie.errors import Denied, Refused, Unauthenticated, Unavailable
from intertie.ids import CANARY, JobId, PrincipalId, SiteName, TenantName
from intertie.lane.pg import PgLaneTables
from intertie.scheduler.canary import Canary
from intertie.store import EVENTS, Database
from intertie.trust.claims import sign_claims, verify_claims
from intertie.trust.login import FileLogin

# Generous: two cores that run the whole suite beside it.
LIMIT_S = 30.0


@dataclass
class World:
    """A hub of which only the scheduler runs; registry, identity and metering are answered for here."""

    hub: RunningHub
    folder: Path
    pg: PgDatabase
    bus: NatsBus
    site: SiteName
    canary: bool = True
    """The process runs a canary of its own."""
    canary_creds: Path | None = None
    """Other credentials of it than the hub's folder has."""

    def environ(self) -> dict[str, str]:
        url, password = self.pg.role("scheduler")
        secret = self.folder / "password"
        secret.write_text(password, encoding="utf-8")
        secret.chmod(0o600)
        return {
            "PATH": os.environ["PATH"],
            "INTERTIE_BUS_URL": self.hub.layout.bus_url,
            "INTERTIE_BUS_CREDS": str(self.hub.layout.creds_file("scheduler")),
            "INTERTIE_DATABASE_URL": url,
            "INTERTIE_DATABASE_PASSWORD_FILE": str(secret),
            "INTERTIE_KEY_FILE": str(self.hub.layout.key_file("scheduler")),
            "INTERTIE_KEYS_FILE": str(self.hub.layout.public_keys),
            "INTERTIE_DATA_DIR": str(self.folder),
            "INTERTIE_READY_FILE": str(self.folder / "ready"),
            "INTERTIE_BEAT_S": "0.2",
        } | ({"INTERTIE_CANARY_CREDS": str(self.canary_creds or self.hub.layout.creds_file("canary"))} if self.canary else {})

    def log(self) -> str:
        return (self.folder / "scheduler.log").read_text(encoding="utf-8")

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "scheduler.log").open("ab") as out:
            return subprocess.Popen([sys.executable, "-m", "intertie.scheduler"], env=self.environ(), stdout=out, stderr=out)

    @asynccontextmanager
    async def scheduler(self) -> AsyncIterator[subprocess.Popen[bytes]]:
        """The process, ready; killed at the end if it still lives."""
        process = self.start()
        try:
            ready = self.folder / "ready"
            await until(lambda: ready.exists() or process.poll() is not None, "the scheduler is ready", within_s=LIMIT_S)
            assert process.poll() is None, self.log()
            yield process
        finally:
            process.kill()
            process.wait()
            (self.folder / "ready").unlink(missing_ok=True)

    def claims(self, role: Role, tenant: TenantName | None) -> str:
        at = int(CLOCK.now().timestamp())
        who = Claims(iss="identity", sub=PrincipalId("p-1"), name="ann", roles=[role], tenant=tenant, iat=at, exp=at + 300)
        return sign_claims(self.hub.key("identity"), who)

    async def submit(self, key: str, **spec: object) -> JobRecord:
        asked = SubmitJob(tenant=ACME, spec=JobSpec(name="one", script="true", **spec), client_key=key)  # type: ignore[arg-type]  # JobSpec's
        reply = await rpc.call(self.bus, endpoints.SUBMIT, asked, claims=self.claims(Role.TENANT_USER, ACME), timeout_s=10)
        assert reply.job is not None
        return reply.job

    async def job(self, job: JobId) -> JobRecord:
        return await rpc.call(self.bus, endpoints.JOB, JobQuery(job=job), claims=self.claims(Role.TENANT_USER, ACME), timeout_s=10)

    async def reaches(self, job: JobId, state: str) -> JobRecord:
        async def there() -> bool:
            try:
                return (await self.job(job)).state == state
            except Unavailable:
                return False

        await until(there, f"the job is {state}", within_s=LIMIT_S)
        return await self.job(job)


async def answered_for(world: World, held: AsyncExitStack) -> None:
    """What the other keepers answer when the scheduler asks for all they have; it proves itself by its signed claims."""
    keys = {name: world.hub.key(name).public for name in ("scheduler", "identity")}

    async def sites(_: Contract, caller: rpc.Caller) -> Contract:
        assert caller.claims.iss == "scheduler"
        return SitesReply(sites=[site_record(world.site)], pools=[pool_record(world.site, 2)])

    async def identities(_: Contract, caller: rpc.Caller) -> Contract:
        mapping = MappingRecord(tenant=ACME, site=world.site, account="u-acme")
        return IdentitySnapshotReply(tenants=[], mappings=[MappingsChanged(version=1, site=world.site, mappings=[mapping])], site_keys=[])

    async def meters(_: Contract, caller: rpc.Caller) -> Contract:
        return MeteringSnapshotReply(specs=[], allowances=[])

    def verifier(text: str) -> Claims:
        return verify_claims(text, keys, CLOCK.now())

    handlers: dict[str, Mapping[Endpoint[Any, Any], rpc.Serve]] = {
        "registry": {endpoints.SITES: sites},
        "identity": {endpoints.IDENTITY_SNAPSHOT: identities},
        "metering": {endpoints.METERING_SNAPSHOT: meters},
    }
    for service, served in handlers.items():
        bus = await connected(world.hub, service, held)
        if service == "identity":
            await bus.ensure_stream(EVENTS)  # identity alone makes it
        held.push_async_callback((await rpc.serve(bus, service, "1.0.0", served, verifier=verifier)).close)


async def connected(hub: RunningHub, service: str, held: AsyncExitStack) -> NatsBus:
    """The bus with a service's own rights."""
    bus = await NatsBus.connect(hub.layout.bus_url, name=service, credentials=FileLogin(hub.layout.creds_file(service)))
    held.push_async_callback(bus.close)
    return bus


@pytest.fixture
async def world(operator_hub: RunningHub, pg: PgDatabase, short_folder: Path, unique: str) -> AsyncIterator[World]:
    async with AsyncExitStack() as held:
        bus = await connected(operator_hub, "gateway", held)
        found = World(operator_hub, short_folder, pg, bus, SiteName(f"site-{unique}"))
        await answered_for(found, held)
        yield found


@pytest.fixture
async def agent(world: World) -> AsyncIterator[Agent]:
    layout = world.hub.layout
    bus = await NatsBus.connect(layout.bus_url, name=f"agent-{world.site}", credentials=await new_site(world.hub, world.site))
    found = Agent(bus, world.site, world.hub.key("scheduler").public)
    try:
        async with alive(found):
            yield found
    finally:
        await bus.close()


async def test_the_canary_is_answered_across_its_account_after_a_commit_and_is_no_site(world: World) -> None:
    """LINK D5: the whole way from a site to the disk, and silence when that way is cut."""
    world.canary = False
    login = FileLogin(world.hub.layout.creds_file("canary"))
    bus = await NatsBus.connect(world.hub.layout.bus_url, name="canary", credentials=login)
    answered = list[float]()
    try:
        async with running(Canary(bus, CLOCK, beat_s=0.1).run(answered.append)):
            async with world.scheduler():
                await until(lambda: len(answered) >= 3, "the canary is answered", within_s=LIMIT_S)
            heard = len(answered)
            async with world.scheduler():
                await until(lambda: len(answered) > heard + 1, "and by the next process, too", within_s=LIMIT_S)
    finally:
        await bus.close()


async def test_a_canary_that_cannot_connect_at_the_start_is_heard_as_soon_as_it_can(world: World, short_folder: Path) -> None:
    """The hub serves meanwhile, and is deaf; nobody starts it again."""
    world.canary_creds = short_folder / "canary.creds"

    async def syncs() -> int:
        row = await tables.site(Lane.SCHEDULER, CANARY)
        return row.heard if row is not None else 0

    async with world.scheduler() as process, AsyncExitStack() as held:
        url, password = world.pg.role("scheduler")
        db = await Database.open(url, password=password, schema="scheduler")
        held.push_async_callback(db.close)
        tables = PgLaneTables(db)
        await until(lambda: "the bus is not reached" in world.log(), "it tries", within_s=LIMIT_S)
        assert await syncs() == 0

        def appear() -> None:
            assert world.canary_creds is not None
            part = world.canary_creds.with_suffix(".part")
            part.touch(mode=0o600)
            part.write_bytes(world.hub.layout.creds_file("canary").read_bytes())
            part.replace(world.canary_creds)

        await asyncio.to_thread(appear)

        async def heard() -> bool:
            return await syncs() >= 2

        await until(heard, "the canary is committed", within_s=LIMIT_S)
        assert process.poll() is None


async def test_jobs_run_across_account_borders_through_a_kill_and_none_runs_twice(world: World, agent: Agent) -> None:
    async with world.scheduler() as process:
        first = await world.submit("k1", env_names=[])
        body = await agent.next_running()
        assert (body.account, agent.attribution(body).job) == ("u-acme", first.job)
        await world.reaches(first.job, "running")
        waiting = [await world.submit(f"k{n}") for n in range(2, 5)]
        process.send_signal(signal.SIGKILL)
        process.wait()
        await agent.end(body)
    async with world.scheduler() as process:
        assert (await world.submit("k1")).job == first.job, "the key is remembered"
        await world.reaches(first.job, "succeeded")
        for _ in waiting:
            await agent.end(await agent.next_running())
        for job in waiting:
            done = await world.reaches(job.job, "succeeded")
            assert [a.state for a in done.attempts if a.started_at] == ["ended"]
        offered = [one.attempt for one in agent.heard if isinstance(one, Offer)]
        assert len(offered) == len(set(offered))
        process.terminate()
        assert await asyncio.to_thread(process.wait, LIMIT_S) == 0, world.log()
    assert "Traceback" not in world.log(), world.log()


async def test_claims_are_verified_by_the_scheduler_itself(world: World, agent: Agent) -> None:
    async with world.scheduler():
        job = await world.submit("k1")
        await agent.next_running()
        with pytest.raises(Unauthenticated):
            await rpc.call(world.bus, endpoints.CANCEL, CancelJob(job=job.job), claims="")
        with pytest.raises(Unauthenticated):
            await rpc.call(world.bus, endpoints.CANCEL, CancelJob(job=job.job), claims=world.claims(Role.TENANT_USER, ACME)[:-4] + "AAAA")
        with pytest.raises(Denied):
            await rpc.call(world.bus, endpoints.CANCEL, CancelJob(job=job.job), claims=world.claims(Role.AUDITOR, None))
        with pytest.raises(Refused) as refused:
            await world.submit("k2", resources=Resources(gpus=8, gpu_model="A100"))
        assert refused.value.code == "scheduler.no_site_fits"
        await rpc.call(world.bus, endpoints.CANCEL, CancelJob(job=job.job), claims=world.claims(Role.TENANT_USER, ACME))
        await world.reaches(job.job, "cancelled")
