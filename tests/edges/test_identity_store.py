"""One suite for the store of identity: PostgreSQL and the twin in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conftest import PgDatabase

from intertie.contracts.identity import AuditQuery, CreateTenant, CreateToken, InviteSite, JoinSite, MapAccount, Role
from intertie.contracts.site import Lendable, PoolProfile, SiteKind, TaskType
from intertie.errors import Conflict, NotFound, Refused, Unauthenticated
from intertie.identity.bootstrap import ensure_operator
from intertie.identity.core import people
from intertie.identity.core.sites import SiteAccount
from intertie.identity.memory import MemoryIdentityStore
from intertie.identity.pg import PACKAGE, PgIdentityStore, Q
from intertie.identity.store import IdentityStore
from intertie.ids import PoolName, PrincipalId, SiteName, TenantName, TokenId
from intertie.store import Database
from intertie.store.checks import check_queries
from intertie.trust.rights import Scope
from intertie.trust.tokens import API, JOIN, NewToken, new_token, token_digest, token_id

T0 = datetime(2026, 5, 1, 12, tzinfo=UTC)
SITE, TEAM = SiteName("site-a"), TenantName("team-a")
ALL = Scope(everything=True, tenant=None, site=None)
POOL = PoolProfile(
    pool=PoolName("p"),
    accelerator="none",
    count=1,
    memory_mib=0,
    interconnect="none",
    task_types=[TaskType.BATCH],
    lendable=Lendable(devices=1),
)


@asynccontextmanager
async def on_postgres(pg: PgDatabase) -> AsyncIterator[PgIdentityStore]:
    db = await Database.open(pg.url, password=pg.password, schema="identity")
    try:
        await db.migrate(PACKAGE)
        yield PgIdentityStore(db)
    finally:
        await db.close()


@pytest.fixture(params=["pg", "memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[IdentityStore]:
    if request.param == "memory":
        yield MemoryIdentityStore()
        return
    async with on_postgres(request.getfixturevalue("pg")) as found:
        yield found


def sign(site: SiteAccount) -> SiteAccount:
    """Stands for the operator's signature: what is signed is `accounts`' matter."""
    return msgspec.structs.replace(site, iat=site.iat + 1, jwt=f"jwt-{site.iat + 1}")


def join_request(token: NewToken, **changes: Any) -> JoinSite:
    request = JoinSite(token=token.text, site_key="U1", signing_key="A1", single_user=True, agent_version="1.0", pools=[POOL])
    return msgspec.structs.replace(request, **changes)


async def team(store: IdentityStore, name: TenantName = TEAM) -> None:
    await store.create_tenant(CreateTenant(tenant=name, title="Team"), actor="ops", now=T0)


async def invited(store: IdentityStore, site: SiteName = SITE) -> NewToken:
    token = new_token(JOIN)
    request = InviteSite(site=site, kind=SiteKind.MACHINES, owner="ann", owner_tenant=TEAM)
    await store.invite(request, token.id, token.digest, actor="ops", now=T0)
    return token


async def joined(store: IdentityStore, **changes: Any) -> SiteAccount:
    token = await invited(store)
    return await store.join(token.id, join_request(token, **changes), account="ACC", sign=sign, now=T0)


async def told(store: IdentityStore) -> list[tuple[str, int]]:
    if isinstance(store, MemoryIdentityStore):
        return [(event.entity, event.version) for event in store.memory.events]
    assert isinstance(store, PgIdentityStore)
    async with store.db.transaction() as tx:
        return [(row["entity"], row["version"]) for row in await tx.all("SELECT entity, version FROM outbox ORDER BY id")]


async def actions(store: IdentityStore) -> list[str]:
    return [row.action for row in reversed(await store.read_audit(AuditQuery()))]


async def person(
    store: IdentityStore,
    *,
    tenant: TenantName | None = TEAM,
    site: SiteName | None = None,
    roles: tuple[Role, ...] = (Role.TENANT_USER,),
) -> NewToken:
    token = new_token(API)
    request = CreateToken(name="ann", roles=list(roles), tenant=tenant, site=site)
    await store.add_token(people.grant(request, id=token.id, principal=PrincipalId("prn-1"), now=T0), token.digest, actor="ops")
    return token


async def test_a_tenant_is_told_once_and_repeats_change_nothing(store: IdentityStore) -> None:
    await team(store)
    await team(store)
    assert await told(store) == [("team-a", 1)] and await actions(store) == ["tenant.create"]
    with pytest.raises(Conflict):
        await store.create_tenant(CreateTenant(tenant=TEAM, title="Other"), actor="ops", now=T0)


async def test_a_token_is_kept_as_a_digest_and_never_as_itself(pg: PgDatabase) -> None:
    async with on_postgres(pg) as store:
        await team(store)
        token = await person(store)
        secret = token.text.split("_")[2]
        async with store.db.transaction() as tx:
            rows = await tx.all("SELECT record::text || digest AS told FROM token UNION ALL SELECT a::text FROM audit AS a")
    assert len(rows) == 3 and not any(secret in row["told"] for row in rows)


async def test_a_token_for_an_unknown_tenant_is_refused(store: IdentityStore) -> None:
    with pytest.raises(NotFound):
        await person(store)
    assert await store.tokens(ALL) == []


async def test_a_token_for_a_site_that_nobody_invited_is_refused(store: IdentityStore) -> None:
    """A name misspelt would be a token that reaches nothing, or a site of that name that joins later."""
    await team(store)
    with pytest.raises(NotFound) as refused:
        await person(store, tenant=None, site=SITE, roles=(Role.SITE_OWNER,))
    assert refused.value.code == "identity.site_unknown" and await store.tokens(ALL) == []
    await invited(store)
    before = await person(store, tenant=None, site=SITE, roles=(Role.SITE_OWNER,))
    await joined(store)
    after = await person(store, tenant=None, site=SITE, roles=(Role.SITE_OWNER,))
    assert [t.id for t in await store.tokens(ALL)] == [before.id, after.id]


async def test_tokens_are_listed_by_whose_they_are(store: IdentityStore) -> None:
    await team(store)
    await team(store, TenantName("team-b"))
    mine, theirs = await person(store), await person(store, tenant=TenantName("team-b"))
    assert [t.id for t in await store.tokens(ALL)] == [mine.id, theirs.id]
    assert [t.id for t in await store.tokens(Scope(everything=False, tenant=TEAM, site=None))] == [mine.id]
    assert [t.tenant for t in await store.tenants(Scope(everything=False, tenant=TEAM, site=None))] == [TEAM]


async def test_a_revoked_token_stays_revoked_at_its_first_time(store: IdentityStore) -> None:
    await team(store)
    token = await person(store)
    first = await store.revoke_token(token.id, actor="ops", reason="left", now=T0)
    again = await store.revoke_token(token.id, actor="ops", reason="left", now=T0 + timedelta(days=1))
    assert first == again and first is not None and first.revoked_at == T0
    assert (await actions(store)).count("token.revoke") == 1
    assert await store.revoke_token(TokenId("tok-x"), actor="ops", reason="", now=T0) is None


async def test_use_is_noted_and_leaves_no_audit_row(store: IdentityStore) -> None:
    await team(store)
    token = await person(store)
    await store.touch_token(token.id, now=T0)
    await store.touch_token(token.id, now=T0 + timedelta(seconds=5))
    row, tenant = await store.token(token.id)
    assert row is not None and row.record.last_used_at == T0 and tenant is not None
    assert await actions(store) == ["tenant.create", "token.create"]


async def test_a_join_tells_keys_and_the_owners_own_mapping(store: IdentityStore) -> None:
    await team(store)
    site = await joined(store)
    assert (site.jwt, site.account, site.owner_tenant) == ("jwt-1", "ACC", TEAM)
    assert await told(store) == [("team-a", 1), ("sitekey/site-a", 1), ("mappings/site-a", 1)]
    assert [(m.tenant, m.account) for m in await store.mappings(ALL)] == [(TEAM, "")]


async def test_a_join_repeated_with_the_same_keys_gives_the_same_and_tells_nothing(store: IdentityStore) -> None:
    await team(store)
    token = await invited(store)
    first = await store.join(token.id, join_request(token), account="ACC", sign=sign, now=T0)
    before = await told(store)
    again = await store.join(token.id, join_request(token), account="OTHER", sign=sign, now=T0 + timedelta(days=9))
    assert again == first and await told(store) == before


async def test_two_agents_that_race_with_one_token_do_not_both_join(store: IdentityStore) -> None:
    await team(store)
    token = await invited(store)
    requests = [join_request(token, site_key=f"U{n}", signing_key=f"A{n}") for n in range(4)]
    results = await asyncio.gather(
        *(store.join(token.id, request, account="ACC", sign=sign, now=T0) for request in requests), return_exceptions=True
    )
    assert sum(isinstance(result, SiteAccount) for result in results) == 1
    assert all(isinstance(result, SiteAccount | Conflict) for result in results)


async def test_a_newer_invitation_takes_the_place_of_the_older(store: IdentityStore) -> None:
    await team(store)
    older, newer = await invited(store), await invited(store)
    with pytest.raises(Unauthenticated):
        await store.join(older.id, join_request(older), account="ACC", sign=sign, now=T0)
    await store.join(newer.id, join_request(newer), account="ACC", sign=sign, now=T0)


async def test_a_key_speaks_for_one_site(store: IdentityStore) -> None:
    await team(store)
    await joined(store)
    token = await invited(store, SiteName("site-b"))
    for stolen in ({"site_key": "U9"}, {"signing_key": "A9"}):
        with pytest.raises(Conflict) as refused:
            await store.join(token.id, join_request(token, **stolen), account="ACC2", sign=sign, now=T0)
        assert refused.value.code == "identity.key_taken"
    assert [site.site for site in await store.sites()] == [SITE]


async def test_new_keys_of_a_site_are_a_new_version_and_a_new_form_of_its_account(store: IdentityStore) -> None:
    await team(store)
    await joined(store)
    after = await joined(store, site_key="U2", signing_key="A2")
    assert (after.version, after.jwt, after.revoked_keys) == (2, "jwt-2", ["A1"])
    assert (await told(store))[-1] == ("sitekey/site-a", 2)


async def test_revoking_a_site_is_signed_and_told_once(store: IdentityStore) -> None:
    await team(store)
    await joined(store)
    first = await store.revoke_site(SITE, sign=sign, actor="ops", reason="leaves")
    assert first is not None and first.revoked and first.jwt == "jwt-2"
    assert await store.revoke_site(SITE, sign=sign, actor="ops", reason="leaves") == first
    assert (await actions(store)).count("site.revoke") == 1
    assert await store.revoke_site(SiteName("site-z"), sign=sign, actor="ops", reason="") is None


async def test_mappings_are_told_whole_with_a_version_of_their_own(store: IdentityStore) -> None:
    await team(store)
    await team(store, TenantName("team-b"))
    await joined(store, single_user=False)
    for account in ("alice", "alice", "bob"):
        await store.map_account(MapAccount(tenant=TEAM, site=SITE, account=account), actor="ann")
    both = await store.map_account(MapAccount(tenant=TenantName("team-b"), site=SITE, account="carol"), actor="ann")
    assert [(m.tenant, m.account) for m in both] == [("team-a", "bob"), ("team-b", "carol")]
    left = await store.map_account(MapAccount(tenant=TEAM, site=SITE, account=None), actor="ann")
    assert [m.tenant for m in left] == ["team-b"]
    assert [version for entity, version in await told(store) if entity == "mappings/site-a"] == [1, 2, 3, 4]


async def test_a_snapshot_holds_the_newest_event_of_every_entity(store: IdentityStore) -> None:
    await team(store)
    await joined(store)
    await store.map_account(MapAccount(tenant=TEAM, site=SITE, account=None), actor="ann")
    snapshot = await store.snapshot()
    newest: dict[str, int] = {}
    for entity, version in await told(store):
        newest[entity] = max(version, newest.get(entity, 0))
    held = [*snapshot.tenants, *snapshot.mappings, *snapshot.site_keys]
    assert {event.entity: event.version for event in held} == newest
    assert snapshot.mappings[0].mappings == []


async def test_the_first_operator_is_made_once_and_its_token_is_the_owners_alone(store: IdentityStore, short_folder: Path) -> None:
    assert await ensure_operator(store, short_folder, T0)
    file = short_folder / "admin.token"
    text = file.read_text(encoding="ascii").strip()
    assert file.stat().st_mode & 0o777 == 0o600
    row, _ = await store.token(token_id(text, API))
    assert row is not None and row.digest == token_digest(text) and row.record.roles == [Role.OPERATOR]
    assert not await ensure_operator(store, short_folder, T0)
    assert file.read_text(encoding="ascii").strip() == text


async def test_a_token_file_left_by_a_crash_becomes_valid(store: IdentityStore, short_folder: Path) -> None:
    token = new_token(API)
    file = short_folder / "admin.token"
    file.write_text(token.text, encoding="ascii")
    file.chmod(0o600)
    assert await ensure_operator(store, short_folder, T0)
    assert (await store.token(token.id))[0] is not None


async def test_a_revoked_first_operator_is_followed_by_a_new_token_never_by_the_old_one(store: IdentityStore, short_folder: Path) -> None:
    await ensure_operator(store, short_folder, T0)
    old = token_id((short_folder / "admin.token").read_text(encoding="ascii").strip(), API)
    await store.revoke_token(old, actor="admin", reason="leaked", now=T0)
    assert await ensure_operator(store, short_folder, T0)
    assert token_id((short_folder / "admin.token").read_text(encoding="ascii").strip(), API) != old
    row, _ = await store.token(old)
    assert row is not None and row.record.revoked_at == T0


async def test_what_is_no_token_is_never_overwritten(store: IdentityStore, short_folder: Path) -> None:
    file = short_folder / "admin.token"
    file.write_text("my notes", encoding="ascii")
    file.chmod(0o600)
    with pytest.raises(Refused):
        await ensure_operator(store, short_folder, T0)
    assert file.read_text(encoding="ascii") == "my notes"


async def test_postgresql_can_run_every_query_and_none_is_idle(pg: PgDatabase) -> None:
    async with on_postgres(pg) as store:
        assert await check_queries(store.db, Q) == []
