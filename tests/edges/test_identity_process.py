"""Identity, registry and incident as the processes that a hub starts: ready, answering, stopped in order, started again on what is on disk."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.conftest import PgDatabase, new_short_folder
from tests.edges.conftest import new_hub
from tests.edges.identity_world import Site, until

from intertie.bus import rpc
from intertie.bus.nats import NatsBus
from intertie.contracts import endpoints
from intertie.contracts.identity import (
    AuditQuery,
    Authenticate,
    Authenticated,
    CreateTenant,
    CreateToken,
    InviteSite,
    RevokeSite,
    RevokeToken,
    Role,
)
from intertie.contracts.incident import IncidentsQuery
from intertie.contracts.site import Freshness, SiteKind, SitesQuery
from intertie.embedded.hub import HubLayout, environment, running_hub_bus
from intertie.errors import Denied, NotFound, Unauthenticated
from intertie.ids import SiteName, TenantName

SERVICES = ("identity", "registry", "incident")
READY_S = 60.0


def start(layout: HubLayout, pg: PgDatabase, service: str) -> subprocess.Popen[bytes]:
    url, password = pg.role(service)
    secret = layout.secrets / f"test-{service}"
    secret.write_text(password, encoding="ascii")
    secret.chmod(0o600)
    extra = {"INTERTIE_DATABASE_URL": url, "INTERTIE_DATABASE_PASSWORD_FILE": str(secret), "INTERTIE_BEAT_S": "0.1"}
    with (layout.log / f"{service}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", f"intertie.{service}"], env=environment(layout, service, extra), stdout=log, stderr=log
        )


@contextmanager
def running(layout: HubLayout, pg: PgDatabase) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The three processes; killed and waited for at the end."""
    with ExitStack() as stack:
        found = {}
        for service in SERVICES:
            process = start(layout, pg, service)
            stack.callback(process.wait)
            stack.callback(process.kill)
            found[service] = process
        yield found


@pytest.fixture
def layout() -> Iterator[HubLayout]:
    folder = new_short_folder()
    try:
        made = new_hub(folder)
        with running_hub_bus(made):
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def all_ready(layout: HubLayout, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    async def are() -> bool:
        for service, process in processes.items():
            assert process.poll() is None, (layout.log / f"{service}.log").read_text(encoding="utf-8")
        return all(said_ready(layout.ready_file(service), process.pid) for service, process in processes.items())

    await until(are, "all three are ready")


def said_ready(file: Path, pid: int) -> bool:
    return file.exists() and json.loads(file.read_text(encoding="utf-8"))["pid"] == pid


async def logged_in(bus: NatsBus, token: str) -> str:
    answer: Authenticated = await rpc.call(bus, endpoints.AUTHENTICATE, Authenticate(token=token))
    return answer.signed


async def test_three_processes_let_an_operator_and_a_site_in_and_stop_when_asked(layout: HubLayout, pg: PgDatabase) -> None:
    with running(layout, pg) as processes:
        await all_ready(layout, processes)
        bus = await NatsBus.connect(layout.bus_url, name="gateway", credentials=layout.creds_file("gateway"))
        try:
            admin = (layout.data / "admin.token").read_text(encoding="ascii").strip()
            operator = await logged_in(bus, admin)
            team = TenantName("team-a")
            await rpc.call(bus, endpoints.CREATE_TENANT, CreateTenant(tenant=team), claims=operator)
            invite = InviteSite(site=SiteName("site-a"), kind=SiteKind.MACHINES, owner="ann", owner_tenant=team)
            invited = await rpc.call(bus, endpoints.INVITE_SITE, invite, claims=operator)
            joined = await rpc.call(bus, endpoints.JOIN, Site(SiteName("site-a")).request(invited.token))
            assert (joined.bus_urls, joined.gateway_url) == ([layout.bus_url], layout.public_url)
            sites = await rpc.call(bus, endpoints.SITES, SitesQuery(), claims=operator)
            assert [(s.site, s.freshness) for s in sites.sites] == [("site-a", Freshness.UNKNOWN)]
            assert (await rpc.call(bus, endpoints.INCIDENTS, IncidentsQuery(), claims=operator)).incidents == []
            with pytest.raises(NotFound):
                await rpc.call(bus, endpoints.REVOKE_SITE, RevokeSite(site=SiteName("site-z"), reason="stolen"), claims=operator)
            stolen = RevokeSite(site=SiteName("site-a"), reason="its key was stolen")
            assert (await rpc.call(bus, endpoints.REVOKE_SITE, stolen, claims=operator)).revoked
            audited = (await rpc.call(bus, endpoints.IDENTITY_AUDIT, AuditQuery(), claims=operator)).rows
            assert [(row.target, row.reason) for row in audited if row.action == "site.revoke"] == [("site-a", "its key was stolen")]
        finally:
            await bus.close()
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        codes = await asyncio.to_thread(lambda: [process.wait(READY_S) for process in processes.values()])
        assert codes == [0, 0, 0]
        assert not any(layout.ready_file(service).exists() for service in SERVICES)


async def test_people_get_what_their_roles_give_and_a_dead_token_nothing(layout: HubLayout, pg: PgDatabase) -> None:
    with running(layout, pg) as processes:
        await all_ready(layout, processes)
        bus = await NatsBus.connect(layout.bus_url, name="gateway", credentials=layout.creds_file("gateway"))
        try:
            admin_token = (layout.data / "admin.token").read_text(encoding="ascii").strip()
            operator = await logged_in(bus, admin_token)
            for name in ("team-a", "team-b"):
                await rpc.call(bus, endpoints.CREATE_TENANT, CreateTenant(tenant=TenantName(name)), claims=operator)
            request = CreateToken(name="ann", roles=[Role.TENANT_ADMIN], tenant=TenantName("team-a"))
            made = await rpc.call(bus, endpoints.CREATE_TOKEN, request, claims=operator)
            ann = await logged_in(bus, made.token)
            with pytest.raises(Denied):
                await rpc.call(bus, endpoints.CREATE_TENANT, CreateTenant(tenant=TenantName("team-c")), claims=ann)
            with pytest.raises((Denied, NotFound)):
                await rpc.call(
                    bus, endpoints.CREATE_TOKEN, CreateToken(name="x", roles=[Role.OPERATOR], tenant=TenantName("team-a")), claims=ann
                )
            with pytest.raises(NotFound):
                admin_id = (await rpc.call(bus, endpoints.TOKENS, endpoints.TOKENS.request(), claims=operator)).tokens[0].id
                await rpc.call(bus, endpoints.REVOKE_TOKEN, RevokeToken(id=admin_id), claims=ann)
            tenants = await rpc.call(bus, endpoints.TENANTS, endpoints.TENANTS.request(), claims=ann)
            assert [t.tenant for t in tenants.tenants] == ["team-a"]

            await rpc.call(bus, endpoints.REVOKE_TOKEN, RevokeToken(id=made.record.id, reason="left"), claims=operator)
            codes = set()
            for dead in (
                made.token,
                made.token[:-1] + "z",
                made.token.replace("itk", "itj"),
                admin_token.replace("a", "b"),
                "",
                "x" * 5_000,
            ):
                with pytest.raises(Unauthenticated) as refused:
                    await logged_in(bus, dead)
                codes.add(refused.value.code)
            assert codes == {"identity.token_invalid"}
            audit = await rpc.call(bus, endpoints.IDENTITY_AUDIT, AuditQuery(), claims=operator)
            assert ("authenticate", made.record.id, "revoked") in [(row.action, row.target, row.result) for row in audit.rows]
        finally:
            await bus.close()
