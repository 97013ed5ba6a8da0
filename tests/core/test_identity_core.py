"""Who may come in: tenants, tokens, invitations, keys, accounts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from intertie.clock import ManualClock
from intertie.contracts.identity import CreateTenant, InviteSite, JoinSite, MapAccount, Role, TenantRecord, TokenRecord
from intertie.contracts.site import Lendable, PoolProfile, SiteKind, TaskType
from intertie.errors import Conflict, NotFound, Refused, Unauthenticated
from intertie.identity.core import accounts, people, sites
from intertie.identity.core.accounts import Held, Verdict
from intertie.identity.core.people import TokenFault
from intertie.identity.core.sites import Invitation, SiteAccount
from intertie.ids import PoolName, PrincipalId, SiteName, TenantName, TokenId
from intertie.trust import claims
from intertie.trust.keys import Key

T0 = datetime(2026, 5, 1, 12, tzinfo=UTC)
SITE, TEAM = SiteName("site-a"), TenantName("team-a")
TENANT = TenantRecord(tenant=TEAM, title="Team A", created_at=T0)
POOL = PoolProfile(
    pool=PoolName("p"),
    accelerator="none",
    count=1,
    memory_mib=0,
    interconnect="none",
    task_types=[TaskType.BATCH],
    lendable=Lendable(devices=1),
)
INVITE = InviteSite(site=SITE, kind=SiteKind.MACHINES, owner="ann", owner_tenant=TEAM, valid_hours=72)
JOIN = JoinSite(token="itj_x", site_key="U1", signing_key="A1", single_user=True, agent_version="1.0", pools=[POOL])


def token(**changes: Any) -> TokenRecord:
    record = TokenRecord(
        id=TokenId("tok-1"),
        principal=PrincipalId("prn-1"),
        name="ann",
        roles=[Role.TENANT_USER],
        tenant=TEAM,
        site=None,
        created_at=T0,
        expires_at=T0 + timedelta(days=90),
    )
    return msgspec.structs.replace(record, **changes)


def invitation(**changes: Any) -> Invitation:
    return msgspec.structs.replace(sites.invite(INVITE, TENANT, None, now=T0), **changes)


def joined(**changes: Any) -> SiteAccount:
    return msgspec.structs.replace(sites.join(invitation(), None, JOIN, account="ACC", now=T0), **changes)


# --- people ---


def test_a_tenant_is_made_once_and_a_repeat_gives_the_same() -> None:
    made = people.new_tenant(None, CreateTenant(tenant=TEAM, title="Team A"), now=T0)
    assert people.new_tenant(made, CreateTenant(tenant=TEAM, title="Team A"), now=T0 + timedelta(days=1)) is made
    with pytest.raises(Conflict):
        people.new_tenant(made, CreateTenant(tenant=TEAM, title="Another"), now=T0)


@pytest.mark.parametrize(("name", "code"), [("Team A", "name.invalid"), ("hub", "name.reserved")])
def test_a_tenants_name_is_a_name(name: str, code: str) -> None:
    with pytest.raises(Refused) as refused:
        people.new_tenant(None, CreateTenant(tenant=TenantName(name)), now=T0)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("record", "tenant", "fault"),
    [
        (None, None, TokenFault.UNKNOWN),
        (token(revoked_at=T0, expires_at=T0), TENANT, TokenFault.REVOKED),
        (token(expires_at=T0), TENANT, TokenFault.EXPIRED),
        (token(), None, TokenFault.TENANT_CLOSED),
        (token(), msgspec.structs.replace(TENANT, active=False), TokenFault.TENANT_CLOSED),
        (token(), TENANT, None),
        (token(tenant=None, roles=[Role.OPERATOR]), None, None),
    ],
)
def test_why_a_token_does_not_count(record: TokenRecord | None, tenant: TenantRecord | None, fault: TokenFault | None) -> None:
    assert people.token_fault(record, tenant, now=T0) == fault


def test_claims_never_outlive_their_token() -> None:
    assert people.claims_of(token(), now=T0).exp == int(T0.timestamp()) + 300
    assert people.claims_of(token(expires_at=T0 + timedelta(seconds=40)), now=T0).exp == int(T0.timestamp()) + 40


def test_the_first_revocations_time_stays() -> None:
    first = people.revoke(token(), now=T0)
    assert people.revoke(first, now=T0 + timedelta(days=1)) is first


def test_use_is_noted_once_a_minute() -> None:
    assert people.needs_touch(token(), now=T0)
    assert not people.needs_touch(token(last_used_at=T0), now=T0 + timedelta(seconds=59))
    assert people.needs_touch(token(last_used_at=T0), now=T0 + timedelta(seconds=60))


# --- sites ---


def test_an_owner_without_a_tenant_is_not_invited() -> None:
    with pytest.raises(NotFound) as refused:
        sites.invite(INVITE, None, None, now=T0)
    assert refused.value.next_step


def test_a_site_is_invited_again_only_as_what_it_is() -> None:
    with pytest.raises(Conflict):
        sites.invite(msgspec.structs.replace(INVITE, kind=SiteKind.SLURM), TENANT, joined(), now=T0)


OTHER_KEYS = msgspec.structs.replace(JOIN, site_key="U2", signing_key="A2")
USED = invitation(used_at=T0, site_key="U1", signing_key="A1")
LATE = T0 + timedelta(hours=73)


@pytest.mark.parametrize(
    ("known", "request_", "now", "outcome"),
    [
        (None, JOIN, T0, "identity.join_token"),
        (USED, OTHER_KEYS, T0, "identity.join_token_used"),
        (USED, JOIN, LATE, None),  # the same answer again, whenever it is asked for
        (invitation(withdrawn_at=T0), JOIN, T0, "identity.join_token"),
        (invitation(), JOIN, LATE, "identity.join_token"),
        (invitation(), JOIN, T0, None),
    ],
)
def test_an_invitation_is_used_once_and_repeated_with_the_same_keys_only(
    known: Invitation | None, request_: JoinSite, now: datetime, outcome: str | None
) -> None:
    if outcome is None:
        assert sites.check_invitation(known, request_, now=now) is known
    else:
        with pytest.raises((Unauthenticated, Conflict)) as refused:
            sites.check_invitation(known, request_, now=now)
        assert refused.value.code == outcome


def test_a_repeat_of_a_join_changes_nothing() -> None:
    site = joined()
    assert sites.join(USED, site, JOIN, account="OTHER", now=T0) is site


def test_joining_with_a_new_invitation_replaces_the_keys_and_names_the_old_one_as_revoked() -> None:
    after = sites.join(invitation(), joined(), OTHER_KEYS, account="OTHER", now=T0)
    assert (after.account, after.signing_key, after.revoked_keys, after.version) == ("ACC", "A2", ["A1"], 2)


def test_the_keys_of_an_older_join_do_not_come_back_by_repeating_it() -> None:
    replaced = sites.join(invitation(), joined(), OTHER_KEYS, account="", now=T0)
    with pytest.raises(Conflict) as refused:
        sites.join(USED, replaced, JOIN, account="", now=T0)
    assert refused.value.code == "identity.keys_replaced"


def test_a_revoked_signing_key_never_comes_back() -> None:
    revoked = sites.revoke_site(joined())
    assert revoked.revoked and revoked.revoked_keys == ["A1"]
    assert sites.revoke_site(revoked) is revoked
    with pytest.raises(Conflict) as refused:
        sites.join(invitation(), revoked, JOIN, account="", now=T0)
    assert refused.value.code == "identity.key_revoked"
    assert not sites.join(invitation(), revoked, OTHER_KEYS, account="", now=T0).revoked


def test_a_restored_identity_learns_of_revocations_from_the_server() -> None:
    """LINK D18: the database of before the revocation, the server of after it."""
    learnt = sites.adopt(joined(), ["A1"])
    assert learnt.revoked and learnt.revoked_keys == ["A1"]
    assert sites.adopt(learnt, ["A1"]) is learnt
    assert not sites.adopt(joined(), ["A0"]).revoked


@pytest.mark.parametrize(
    ("account", "code"),
    [
        ("root", "identity.account_privileged"),
        ("slurm", "identity.account_privileged"),
        ("kube-system", "identity.account_privileged"),
        ("", "identity.account"),
        ("Team A", "identity.account"),
        ("a;rm -rf /", "identity.account"),
        ("0", "identity.account"),  # a uid, and root's
        ("x" * 33, "identity.account"),
    ],
)
def test_no_tenant_becomes_a_privileged_or_impossible_account(account: str, code: str) -> None:
    site = joined(single_user=False)
    with pytest.raises(Refused) as refused:
        sites.map_account(MapAccount(tenant=TEAM, site=SITE, account=account), site, TENANT)
    assert refused.value.code == code


def test_a_single_user_site_takes_its_owners_tenant_only() -> None:
    other = msgspec.structs.replace(TENANT, tenant=TenantName("team-b"))
    with pytest.raises(Refused) as refused:
        sites.map_account(MapAccount(tenant=other.tenant, site=SITE, account=""), joined(), other)
    assert refused.value.code == "identity.single_user"
    with pytest.raises(Refused):
        sites.map_account(MapAccount(tenant=TEAM, site=SITE, account="ann"), joined(), TENANT)
    assert sites.map_account(MapAccount(tenant=TEAM, site=SITE, account=""), joined(), TENANT) is not None


def test_a_mapping_is_removed_even_if_its_tenant_is_gone() -> None:
    assert sites.map_account(MapAccount(tenant=TEAM, site=SITE, account=None), joined(), None) is None


@pytest.mark.parametrize("text", ["", "x", "a.b.c", "e30.x.y", "bnVsbA.x.y", "W10.x.y", "eyJraWQiOjF9.x.y", "eyJraWQiOiIuLi8ifQ.x.y"])
def test_what_is_no_proof_names_no_site(text: str) -> None:
    assert sites.claimed_site(text) is None


def test_a_proof_names_its_site() -> None:
    assert sites.claimed_site(claims.site_claims(Key.new("U"), SITE, ManualClock().now())) == SITE


# --- accounts (LINK D18) ---


@pytest.mark.parametrize(
    ("held", "verdict"),
    [
        (None, Verdict.PUSH),
        (Held("ours", 100, []), Verdict.SAME),
        (Held("other", 99, []), Verdict.PUSH),
        (Held("other", 100, []), Verdict.PUSH),
        (Held("other", 101, []), Verdict.NEWER_THERE),
        (Held("other", 101, ["A9"]), Verdict.NEWER_THERE),
        (Held("other", 99, ["A9"]), Verdict.MERGE),
        (Held("other", 99, ["A0"]), Verdict.PUSH),
    ],
)
def test_nothing_newer_is_replaced_and_no_revocation_dropped(held: Held | None, verdict: Verdict) -> None:
    assert accounts.compare("ours", 100, ["A0"], held) is verdict


def test_two_forms_of_an_account_never_have_the_same_second() -> None:
    assert accounts.next_iat(100, 0) == 100
    assert accounts.next_iat(100, 100) == 101
    assert accounts.next_iat(90, 100) == 101  # the wall clock stepped back


def test_the_preload_file_keeps_what_is_not_ours() -> None:
    text = "# by hand\nASYS: sys.jwt\nAHUB: hub.jwt\n"
    after = accounts.write_preload(accounts.read_preload(text), [("ASITE", "site.jwt")])
    assert accounts.read_preload(after) == {"ASYS": "sys.jwt", "AHUB": "hub.jwt", "ASITE": "site.jwt"}
    assert accounts.write_preload(accounts.read_preload(after), [("ASITE", "site.jwt")]) == after
