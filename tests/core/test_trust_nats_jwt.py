"""NATS JWTs as data: who exports, who imports, what a service's row grants. What a server makes of them: tests/edges/test_embedded_operator_bus."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from intertie.clock import ManualClock
from intertie.contracts.endpoints import ENDPOINTS
from intertie.contracts.link import Lane, answer_subject, ask_subject, nudge_subject, sync_subject
from intertie.contracts.telemetry import telemetry_subject
from intertie.errors import Refused
from intertie.ids import SiteName
from intertie.trust import nats_jwt
from intertie.trust.keys import Key
from intertie.trust.login import SiteLogin, read_credentials

NOW = datetime(2026, 3, 1, tzinfo=UTC)
OPERATOR, HUB, SITE, SIGNING, USER = Key.new("O"), Key.new("A"), Key.new("A"), Key.new("A"), Key.new("U")
SERVICES = sorted(nats_jwt.BEYOND_COMMON)


def claims(jwt: str) -> dict[str, Any]:
    return dict(nats_jwt.read(jwt).nats)


def covers(pattern: str, subject: str) -> bool:
    """NATS' own matching, for a table of permissions."""
    left, right = pattern.split("."), subject.split(".")
    for at, token in enumerate(left):
        if token == ">":
            return len(right) > at
        if at >= len(right) or (token != "*" and token != right[at]):
            return False
    return len(left) == len(right)


def may_publish(service: str, subject: str) -> bool:
    return any(covers(pattern, subject) for pattern in nats_jwt.permissions_of(service).publish)


def may_hear(service: str, subject: str) -> bool:
    return any(covers(pattern, subject) for pattern in nats_jwt.permissions_of(service).subscribe)


def site_jwt(name: str = "site-a", keys: list[str] | None = None) -> str:
    signing = [SIGNING.public] if keys is None else keys
    return nats_jwt.site_account(OPERATOR, SiteName(name), SITE.public, HUB.public, signing, NOW)


def test_the_hub_only_exports_and_sites_only_import() -> None:
    hub, site = claims(nats_jwt.hub_account(OPERATOR, HUB.public, NOW)), claims(site_jwt())
    assert "imports" not in hub and "signing_keys" not in hub
    assert "exports" not in site and site["limits"]["exports"] == 0
    exported = {each["subject"]: each["type"] for each in hub["exports"]}
    for each in site["imports"]:
        assert each["account"] == HUB.public
        assert any(covers(subject, each["subject"].replace("*", "x")) and kind == each["type"] for subject, kind in exported.items())


def test_a_sites_imports_are_exactly_its_own_subjects_of_the_contracts() -> None:
    imported = {each["subject"]: each["local_subject"] for each in claims(site_jwt())["imports"]}
    assert imported == {
        **{sync_subject("site-a", lane): f"up.{lane}.sync" for lane in Lane},
        answer_subject("site-a"): "up.answer",
        "intertie.v1.up.site-a.call.*": "up.call.*",
        telemetry_subject("site-a", "*"): "tel.gpu.*",
        "intertie.v1.down.site-a.*": "down.*",
    }
    assert covers("intertie.v1.down.site-a.*", ask_subject("site-a")) and covers("intertie.v1.down.site-a.*", nudge_subject("site-a"))


def test_a_site_has_no_jetstream_no_leaf_nodes_and_bounded_everything() -> None:
    limits = claims(site_jwt())["limits"]
    assert limits["leaf"] == 0 and "disk_storage" not in limits and "mem_storage" not in limits
    assert all(limits[name] > 0 for name in ("conn", "subs", "payload"))


def test_the_scoped_key_carries_the_role_and_without_a_key_nobody_gets_in() -> None:
    [scoped] = claims(site_jwt())["signing_keys"]
    assert scoped["kind"] == "user_scope" and scoped["key"] == SIGNING.public
    assert scoped["template"]["pub"]["allow"] == ["up.*.sync", "up.answer", "up.call.*", "tel.gpu.*"]
    assert scoped["template"]["sub"]["allow"] == ["_INBOX.>", "down.*"]
    assert claims(site_jwt(keys=[]))["signing_keys"] == []


# BR-125: user text never becomes a subject token.
@pytest.mark.parametrize("bad", ["a.b", "*", ">", "", "x y", "任务", "a" * 300, "$SYS", "_INBOX", "hub", "Site"])
def test_br_125_a_name_that_could_bend_a_subject_gets_no_account(bad: str) -> None:
    with pytest.raises(Refused):
        site_jwt(bad)


def test_keys_of_the_wrong_kind_get_no_account() -> None:
    with pytest.raises(Refused):
        site_jwt(keys=[USER.public])
    with pytest.raises(Refused):
        nats_jwt.site_account(OPERATOR, SiteName("site-a"), USER.public, HUB.public, [], NOW)
    with pytest.raises(Refused):
        nats_jwt.mint_site_user(SIGNING, USER.public, USER.public, NOW)


def test_a_minted_user_carries_no_permissions_of_its_own_and_dies_in_minutes() -> None:
    jwt = nats_jwt.mint_site_user(SIGNING, SITE.public, USER.public, NOW)
    found = nats_jwt.read(jwt)
    assert dict(found.nats) == {"type": "user", "issuer_account": SITE.public, "version": 2}
    assert (found.subject, found.issuer, found.at) == (USER.public, SIGNING.public, int(NOW.timestamp()))
    assert nats_jwt.SITE_USER_SECONDS <= 900


def test_the_agent_mints_a_new_credential_at_each_login_by_the_time_it_is() -> None:
    clock = ManualClock(NOW)
    login = SiteLogin(SIGNING, SITE.public, clock)
    first = login.jwt()
    clock.advance(600)
    second = login.jwt()
    assert nats_jwt.read(second.decode()).at - nats_jwt.read(first.decode()).at == 600


@pytest.mark.parametrize("change", ["", "a.b", "a.b.c", "tampered", "moved"])
def test_a_jwt_that_was_changed_is_not_read(change: str) -> None:
    jwt, other = site_jwt(), nats_jwt.hub_account(Key.new("O"), HUB.public, NOW)
    head, body, signature = jwt.split(".")
    text = {"tampered": f"{head}.{body[:-2]}AA.{signature}", "moved": f"{head}.{other.split('.')[1]}.{signature}"}.get(change, change)
    with pytest.raises(Refused) as error:
        nats_jwt.read(text)
    assert error.value.code == "jwt.invalid"


def test_credentials_come_back_from_their_file_and_only_their_owner_may_read_it(tmp_path: Path) -> None:
    file, jwt = tmp_path / "x.creds", nats_jwt.service_user(HUB, "scheduler", USER.public, NOW)
    file.touch(mode=0o600)
    file.write_text(nats_jwt.credentials(jwt, USER), encoding="ascii")
    read, key = read_credentials(file)
    assert read.decode() == jwt and key.public == USER.public
    file.chmod(0o640)
    with pytest.raises(Refused) as error:
        read_credentials(file)
    assert error.value.code == "creds.exposed"


# --- the table of services -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_says_its_own_events_and_heads_and_nobody_elses(service: str) -> None:
    for other in SERVICES:
        assert may_publish(service, f"intertie.v1.evt.{other}.job.changed.t.s") == (other == service)
        assert may_publish(service, f"intertie.v1.heads.{other}") == (other == service)
        assert may_hear(service, f"intertie.v1.heads.{other}")


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: each.subject)
def test_every_endpoint_is_heard_by_its_keeper_alone(endpoint: Any) -> None:
    assert [service for service in SERVICES if may_hear(service, endpoint.subject)] == [endpoint.service]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: each.subject)
def test_the_gateway_reaches_every_endpoint_and_queries_are_open_to_all(endpoint: Any) -> None:
    assert may_publish("gateway", endpoint.subject)
    if endpoint.kind == "qry":
        assert all(may_publish(service, endpoint.subject) for service in SERVICES)


def test_commands_are_called_only_by_those_whose_work_needs_them() -> None:
    allowed = {
        (service, target)
        for service in SERVICES
        for target in SERVICES
        if service != "gateway" and may_publish(service, f"intertie.v1.cmd.{target}.anything")
    }
    assert allowed == {
        ("identity", "registry"),
        *((service, "incident") for service in ("registry", "scheduler", "metering", "identity")),
    }


@pytest.mark.parametrize("lane", list(Lane))
def test_a_lane_is_heard_by_its_keeper_alone_and_spoken_by_no_service(lane: Lane) -> None:
    subject = sync_subject("site-a", lane)
    assert [service for service in SERVICES if may_hear(service, subject)] == [lane]
    assert not any(may_publish(service, subject) for service in SERVICES)
    assert may_publish(lane, nudge_subject("site-a"))


def test_only_the_scheduler_asks_sites_and_hears_answers_and_telemetry() -> None:
    assert [service for service in SERVICES if may_publish(service, ask_subject("site-a"))] == ["scheduler"]
    assert [service for service in SERVICES if may_hear(service, answer_subject("site-a"))] == ["scheduler"]
    assert [service for service in SERVICES if may_hear(service, telemetry_subject("site-a", "n"))] == ["scheduler"]
    assert not any(may_publish(service, telemetry_subject("site-a", "n")) for service in SERVICES)


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_may_make_another_stream_or_touch_the_system(service: str) -> None:
    for subject in (
        "$JS.API.STREAM.DELETE.OTHER",
        "$JS.API.STREAM.PURGE.INTERTIE_EVENTS",
        "$JS.API.STREAM.CREATE.OTHER",
        "$JS.API.CONSUMER.DELETE.INTERTIE_EVENTS.x",
        "$JS.API.STREAM.RESTORE.INTERTIE_EVENTS",
        "$SYS.REQ.CLAIMS.UPDATE",
    ):
        assert not may_publish(service, subject), subject


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_may_answer_what_it_was_asked(service: str) -> None:
    found = claims(nats_jwt.service_user(HUB, service, USER.public, NOW))
    assert found["resp"]["max"] == 1 and found["resp"]["ttl"] >= 30_000_000_000


def test_a_service_without_a_row_gets_no_credential() -> None:
    with pytest.raises(Refused) as error:
        nats_jwt.service_user(HUB, "newcomer", USER.public, NOW)
    assert error.value.code == "bus.no_such_service"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_cannot_take_what_waits_for_another(service: str) -> None:
    for other in SERVICES:
        for subject in (
            f"$JS.API.CONSUMER.MSG.NEXT.INTERTIE_EVENTS.{other}",
            f"$JS.API.CONSUMER.CREATE.INTERTIE_EVENTS.{other}",
            f"$JS.ACK.INTERTIE_EVENTS.{other}.1.2.3.4.5",
            f"$JS.ACK.hub.hash.INTERTIE_EVENTS.{other}.1.2.3.4.5",
        ):
            assert may_publish(service, subject) == (other == service), subject


@pytest.mark.parametrize("service", SERVICES)
def test_br_128_a_service_is_answered_below_its_own_name_and_hears_no_other_inbox(service: str) -> None:
    assert nats_jwt.inbox_of(nats_jwt.service_user(HUB, service, USER.public, NOW)) == f"_INBOX.{service}"
    for other in (*SERVICES, "system"):
        assert may_hear(service, f"_INBOX.{other}.token.1") == (other == service)
    assert not may_hear(service, "_INBOX.token")


@pytest.mark.parametrize(
    ("jwt", "inbox"),
    [
        (nats_jwt.system_user(HUB, USER.public, NOW), "_INBOX.system"),
        # Alone in its account; its permissions stand in the account, not in its own JWT.
        (nats_jwt.mint_site_user(SIGNING, SITE.public, USER.public, NOW), "_INBOX"),
        ("not a jwt", "_INBOX"),
        (b"\xff.\xff.\xff", "_INBOX"),
    ],
)
def test_others_are_answered_where_their_permissions_say(jwt: str | bytes, inbox: str) -> None:
    assert nats_jwt.inbox_of(jwt) == inbox
