"""The table of rights, tested whole: every role × action × relation, and what a refusal gives away (BR-146, BR-147)."""

from __future__ import annotations

import pytest

from intertie.contracts.endpoints import ENDPOINTS
from intertie.contracts.identity import Claims, Role
from intertie.errors import Denied, NotFound
from intertie.ids import PrincipalId, SiteName, TenantName
from intertie.trust.rights import TABLE, allowed, not_found, require, require_grantable, scope

MINE, THEIRS = TenantName("acme"), TenantName("rival")
HERE, THERE = SiteName("site-a"), SiteName("site-b")

# Written out a second time and by hand: a = any, t = own tenant, s = own site, . = not at all.
ROLES = [Role.OPERATOR, Role.TENANT_ADMIN, Role.TENANT_USER, Role.SITE_OWNER, Role.AUDITOR, Role.SERVICE, Role.SITE]
EXPECTED = """
                   op ta tu so au sv si
site.read          a  a  a  s  a  a  .
site.register      .  .  .  .  .  a  .
site.invite        a  .  .  .  .  .  .
site.revoke        a  .  .  .  .  .  .
site.cordon        a  .  .  s  .  .  .
pool.mode          a  .  .  s  .  .  .
pool.phase         a  .  .  s  .  .  .
pool.downtime      a  .  .  s  .  .  .
pool.history       a  .  .  s  a  a  .
offering.read      a  t  t  s  a  a  .
call.make          .  t  t  .  .  .  .
call.read          a  t  t  s  a  .  .
call.decide        a  .  .  .  .  .  .
call.seen          .  .  .  .  .  a  .
audit.read         a  .  .  .  a  .  .
audit.anchor       .  .  .  .  .  a  .
drill.start        a  .  .  s  .  .  .
drill.consent      .  .  .  s  .  .  .
drill.read         a  .  .  s  a  a  .
job.submit         .  t  t  .  .  .  .
job.cancel         a  t  t  s  .  .  .
job.read           a  t  t  s  a  a  .
job.logs           .  t  t  .  .  a  .
result.download    .  t  t  .  .  .  .
work.upload        .  t  t  .  .  .  .
work.download      .  .  .  .  .  .  s
result.upload      .  .  .  .  .  .  s
job.preempt        a  .  .  s  .  .  .
attempt.close      a  .  .  .  .  .  .
grant.set          a  .  .  .  .  .  .
grant.read         a  t  .  s  a  .  .
quota.set          a  .  .  .  .  .  .
quota.read         a  t  t  .  a  a  .
spec.agree         a  .  .  .  .  .  .
spec.read          a  t  t  s  a  a  .
statement.read     a  t  t  s  a  a  .
allowance.set      a  .  .  .  .  .  .
ledger.check       a  .  .  .  a  .  .
reconciliation.read a . . s  a  .  .
suspense.read      a  .  .  .  a  .  .
suspense.release   a  .  .  .  .  .  .
quarantine.read    a  .  .  .  a  .  .
quarantine.retry   a  .  .  .  .  .  .
tenant.create      a  .  .  .  .  .  .
tenant.read        a  t  t  .  a  a  .
token.create       a  t  .  s  .  .  .
token.read         a  t  .  s  a  .  .
token.revoke       a  t  .  s  .  .  .
mapping.set        a  .  .  s  .  .  .
mapping.read       a  t  .  s  a  a  .
incident.report    a  .  .  .  .  a  .
incident.read      a  t  .  s  a  a  .
incident.handle    a  .  .  s  .  .  .
service.snapshot   .  .  .  .  .  a  .
"""
ROWS = {line.split()[0]: line.split()[1:] for line in EXPECTED.strip().splitlines()[1:]}
CASES = [(action, role, letter) for action, letters in ROWS.items() for role, letter in zip(ROLES, letters, strict=True)]


def claims(*roles: Role, tenant: TenantName | None = MINE, site: SiteName | None = HERE) -> Claims:
    return Claims(iss="identity", sub=PrincipalId("prn-1"), name="li", roles=list(roles), tenant=tenant, site=site, iat=0, exp=300)


def outcome(who: Claims, action: str, tenant: TenantName | None, site: SiteName | None) -> str:
    try:
        require(who, action, tenant=tenant, site=site)
    except NotFound as error:
        return error.code
    except Denied as error:
        return error.code
    return "ok"


def test_the_table_covers_every_action_of_every_endpoint_and_nothing_unknown() -> None:
    said = {endpoint.action for endpoint in ENDPOINTS if endpoint.action is not None}
    assert set(TABLE) == said | {"work.upload", "work.download", "result.upload", "result.download", "call.make"} == set(ROWS)


@pytest.mark.parametrize(("action", "role", "letter"), CASES)
def test_each_cell_says_whose_things_it_covers(action: str, role: Role, letter: str) -> None:
    who = claims(role)
    things = {"own tenant": (MINE, THERE), "own site": (THEIRS, HERE), "foreign": (THEIRS, THERE), "nobody's": (None, None)}
    covered = {"a": set(things), "t": {"own tenant"}, "s": {"own site"}, ".": set()}[letter]
    for name, (tenant, site) in things.items():
        expected = "rights.denied" if letter == "." else "ok" if name in covered else "not_found"
        assert allowed(who, action, tenant=tenant, site=site) is (expected == "ok")
        assert outcome(who, action, tenant, site) == expected, name


@pytest.mark.parametrize("action", sorted(TABLE))
def test_someone_without_a_role_may_do_nothing(action: str) -> None:
    assert outcome(claims(), action, MINE, HERE) == "rights.denied"


def test_who_is_denied_is_sent_to_people_and_not_to_a_process() -> None:
    for action, step in (
        ("drill.read", "ask someone with the role auditor or operator or site_owner"),
        ("site.register", "only the federation's own processes may"),
    ):
        with pytest.raises(Denied) as denied:
            scope(claims(Role.TENANT_USER), action)
        assert denied.value.next_step == step


@pytest.mark.parametrize("action", sorted(TABLE))
def test_a_role_without_its_tenant_or_site_is_no_right_to_what_belongs_to_nobody(action: str) -> None:
    for role in (Role.TENANT_ADMIN, Role.TENANT_USER, Role.SITE_OWNER, Role.SITE):
        if ROWS[action][ROLES.index(role)] != "a":
            assert outcome(claims(role, tenant=None, site=None), action, None, None) == "rights.denied"


def test_two_roles_reach_as_far_as_both() -> None:
    who = claims(Role.TENANT_USER, Role.SITE_OWNER)
    assert outcome(who, "job.cancel", MINE, THERE) == "ok"
    assert outcome(who, "job.cancel", THEIRS, HERE) == "ok"
    assert outcome(who, "job.cancel", THEIRS, THERE) == "not_found"
    # The right to read as an owner does not lend the right to submit in another tenant's name.
    assert outcome(who, "job.submit", THEIRS, HERE) == "not_found"


def test_br_146_anothers_thing_and_an_unknown_id_read_the_same() -> None:
    with pytest.raises(NotFound) as foreign:
        require(claims(Role.TENANT_USER, site=None), "job.cancel", tenant=THEIRS, site=THERE)
    unknown = not_found()
    told = (foreign.value.code, foreign.value.text, foreign.value.next_step, foreign.value.details)
    assert told == (unknown.code, unknown.text, unknown.next_step, unknown.details)
    assert THEIRS not in str(foreign.value)


def test_br_146_a_denial_does_not_depend_on_the_thing() -> None:
    texts = set()
    for tenant in (MINE, THEIRS, None):
        with pytest.raises(Denied) as error:
            require(claims(Role.TENANT_USER), "quota.set", tenant=tenant)
        texts.add(str(error.value))
    assert len(texts) == 1


@pytest.mark.parametrize("action", ["job.read", "statement.read", "quota.read", "tenant.read"])
def test_br_147_a_list_is_cut_by_the_same_table_as_a_single_fetch(action: str) -> None:
    mine = scope(claims(Role.TENANT_USER, site=None), action)
    assert (mine.everything, mine.tenant, mine.site) == (False, MINE, None)
    assert mine.covers(MINE, THERE) and not mine.covers(THEIRS, HERE) and not mine.covers(None, None)
    assert scope(claims(Role.AUDITOR, tenant=None, site=None), action).everything


GRANTS = [
    # (giver, role, tenant, site, allowed)
    (Role.OPERATOR, Role.OPERATOR, None, None, True),
    (Role.OPERATOR, Role.AUDITOR, None, None, True),
    (Role.OPERATOR, Role.TENANT_ADMIN, THEIRS, None, True),
    (Role.OPERATOR, Role.TENANT_USER, None, None, False),
    (Role.OPERATOR, Role.SITE_OWNER, None, HERE, True),
    (Role.OPERATOR, Role.SITE_OWNER, THEIRS, None, False),
    (Role.OPERATOR, Role.SERVICE, None, None, False),
    (Role.OPERATOR, Role.SITE, None, HERE, False),
    (Role.TENANT_ADMIN, Role.TENANT_ADMIN, MINE, None, True),
    (Role.TENANT_ADMIN, Role.TENANT_USER, MINE, None, True),
    (Role.TENANT_ADMIN, Role.OPERATOR, MINE, None, False),
    (Role.TENANT_ADMIN, Role.AUDITOR, MINE, None, False),
    (Role.TENANT_ADMIN, Role.SITE_OWNER, MINE, HERE, False),
    (Role.SITE_OWNER, Role.SITE_OWNER, None, HERE, True),
    (Role.SITE_OWNER, Role.TENANT_USER, MINE, HERE, False),
    (Role.SITE_OWNER, Role.OPERATOR, None, HERE, False),
]


@pytest.mark.parametrize(("giver", "role", "tenant", "site", "allowed"), GRANTS)
def test_nobody_hands_out_more_than_he_has(
    giver: Role, role: Role, tenant: TenantName | None, site: SiteName | None, allowed: bool
) -> None:
    who = claims(giver)
    if allowed:
        require_grantable(who, [role], tenant, site)
    else:
        with pytest.raises(Denied) as error:
            require_grantable(who, [role], tenant, site)
        assert error.value.code == "rights.grant"


def test_a_role_in_another_tenant_is_not_found_and_a_user_may_give_none() -> None:
    with pytest.raises(NotFound):
        require_grantable(claims(Role.TENANT_ADMIN, site=None), [Role.TENANT_USER], THEIRS, None)
    with pytest.raises(Denied):
        require_grantable(claims(Role.TENANT_USER), [Role.TENANT_USER], MINE, None)


def test_two_roles_of_the_giver_do_not_lend_each_other_their_reach() -> None:
    # Owner of a site and admin of one tenant: the site's reach must not carry over to tenants.
    who = claims(Role.TENANT_ADMIN, Role.SITE_OWNER)
    with pytest.raises(Denied):
        require_grantable(who, [Role.TENANT_ADMIN], THEIRS, HERE)
    with pytest.raises(Denied):
        require_grantable(who, [Role.SITE_OWNER], MINE, THERE)
