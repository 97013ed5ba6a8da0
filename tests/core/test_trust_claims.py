"""Signed claims and tokens: who may say what about whom, for how long, and what a typo looks like."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from joserfc import jws
from joserfc.jwk import OctKey

from intertie.clock import ManualClock
from intertie.contracts.base import encode
from intertie.contracts.identity import Claims, Role
from intertie.errors import Refused, Unauthenticated
from intertie.ids import PrincipalId, SiteName, TenantName
from intertie.trust import claims as trust
from intertie.trust.claims import ServiceClaims, read_keyset, sign_claims, site_claims, verify_claims, verify_site_claims
from intertie.trust.keys import Key
from intertie.trust.tokens import API, JOIN, Prefix, new_token, token_digest, token_id, token_matches

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
AT = int(NOW.timestamp())
IDENTITY, SCHEDULER, SITE = Key.new("U"), Key.new("U"), Key.new("U")
KEYSET = {"identity": IDENTITY.public, "scheduler": SCHEDULER.public}


def person(**changes: object) -> Claims:
    found = Claims(
        iss="identity",
        sub=PrincipalId("prn-1"),
        name="li",
        roles=[Role.TENANT_USER],
        tenant=TenantName("acme"),
        iat=AT,
        exp=AT + 300,
    )
    return msgspec.structs.replace(found, **changes)


def service(**changes: object) -> Claims:
    me = "scheduler"
    return msgspec.structs.replace(person(iss=me, sub=me, name=me, roles=[Role.SERVICE], tenant=None), **changes)


def test_what_identity_says_of_a_person_is_believed() -> None:
    assert verify_claims(sign_claims(IDENTITY, person()), KEYSET, NOW) == person()


def test_what_a_service_says_of_itself_is_believed() -> None:
    assert verify_claims(sign_claims(SCHEDULER, service()), KEYSET, NOW) == service()


REFUSED = [
    # (what is wrong, who signs, the claims, code)
    ("another key signs as identity", SCHEDULER, person(), "claims.invalid"),
    ("an issuer that nobody knows", SITE, person(iss="site-a"), "claims.unknown_issuer"),
    ("a service claims a person's role", SCHEDULER, service(roles=[Role.OPERATOR]), "claims.overreach"),
    ("a service claims one role more", SCHEDULER, service(roles=[Role.SERVICE, Role.OPERATOR]), "claims.overreach"),
    ("a service claims no role", SCHEDULER, service(roles=[]), "claims.overreach"),
    ("a service claims to be another", SCHEDULER, service(sub="metering"), "claims.overreach"),
    ("a service claims a tenant", SCHEDULER, service(tenant="acme"), "claims.overreach"),
    ("a service claims a site", SCHEDULER, service(site="site-a"), "claims.overreach"),
    ("for another audience", IDENTITY, person(aud="elsewhere"), "claims.invalid"),
    ("expired beyond the leeway", IDENTITY, person(iat=AT - 330, exp=AT - 30), "claims.expired"),
    ("signed in the future", IDENTITY, person(iat=AT + 31, exp=AT + 300), "claims.invalid"),
    ("living for ever", IDENTITY, person(exp=AT + 100_000), "claims.invalid"),
    ("ending before it began", IDENTITY, person(exp=AT - 1), "claims.invalid"),
]


@pytest.mark.parametrize(("key", "claims", "code"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_claims_are_refused(key: Key, claims: Claims, code: str) -> None:
    with pytest.raises(Unauthenticated) as error:
        verify_claims(sign_claims(key, claims), KEYSET, NOW)
    assert error.value.code == code


@pytest.mark.parametrize("skew_s", [-29, 0, 29])
def test_half_a_minute_between_two_clocks_is_forgiven(skew_s: int) -> None:
    signed = sign_claims(IDENTITY, person())
    assert verify_claims(signed, KEYSET, NOW + timedelta(seconds=skew_s))
    assert verify_claims(signed, KEYSET, NOW + timedelta(seconds=300 + skew_s) - timedelta(seconds=1))


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def unsigned(algorithm: str) -> str:
    return f"{b64(json.dumps({'alg': algorithm, 'kid': 'identity'}).encode())}.{b64(encode(person()))}."


MALFORMED = [
    "",
    "x",
    "a.b.c",
    "é.é.é",
    sign_claims(IDENTITY, person())[:-4],
    sign_claims(IDENTITY, person()) + "x",
    sign_claims(IDENTITY, person()) * 20,
    unsigned("none"),
    unsigned("EdDSA"),
    unsigned("Ed25519"),
    # The classic confusion: the public key used as a shared secret.
    jws.serialize_compact(
        {"alg": "HS256", "kid": "identity"}, encode(person()), OctKey.import_key(IDENTITY.public.encode()), algorithms=["HS256"]
    ),
    jws.serialize_compact({"alg": "Ed25519", "kid": "identity"}, b"[]", trust._private(IDENTITY), algorithms=["Ed25519"]),
    jws.serialize_compact({"alg": "Ed25519", "kid": "scheduler"}, encode(person()), trust._private(SCHEDULER), algorithms=["Ed25519"]),
    jws.serialize_compact({"alg": "Ed25519"}, encode(person()), trust._private(IDENTITY), algorithms=["Ed25519"]),
]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_token_of_ours_is_refused_as_unauthenticated(text: str) -> None:
    with pytest.raises(Unauthenticated):
        verify_claims(text, KEYSET, NOW)


def test_a_site_proves_to_be_itself_and_nothing_else() -> None:
    name = SiteName("site-a")
    keys = {name: SITE.public}
    found = verify_site_claims(site_claims(SITE, name, NOW), keys, NOW)
    assert found.site == name and found.roles == [Role.SITE]
    for changes in ({"site": "site-b"}, {"roles": [Role.OPERATOR]}, {"tenant": "acme"}):
        with pytest.raises(Unauthenticated):
            verify_site_claims(sign_claims(SITE, msgspec.structs.replace(found, **changes)), keys, NOW)
    with pytest.raises(Unauthenticated):
        verify_site_claims(site_claims(Key.new("U"), name, NOW), keys, NOW)
    with pytest.raises(Unauthenticated):
        verify_claims(site_claims(SITE, name, NOW), {"site-a": SITE.public}, NOW)


def test_a_service_signs_anew_before_its_claims_end_and_not_at_every_call() -> None:
    clock = ManualClock(NOW)
    mine = ServiceClaims(SCHEDULER, "scheduler", clock)
    first = mine.signed()
    clock.advance(199)
    assert mine.signed() is first
    clock.advance(2)
    second = mine.signed()
    assert second != first
    assert verify_claims(second, KEYSET, clock.now()).exp == AT + 201 + 300


def test_the_keyset_is_read_whole_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "public.json"
    file.write_text(json.dumps(KEYSET), encoding="utf-8")
    assert read_keyset(file) == KEYSET
    for text in ("", "[]", '{"identity": "x"}', '{"identity": 1}'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(Refused) as error:
            read_keyset(file)
        assert error.value.code == "claims.keyset"


# --- tokens ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [API, JOIN])
def test_a_token_names_its_record_and_matches_its_digest_only(prefix: Prefix) -> None:
    token, other = new_token(prefix), new_token(prefix)
    assert token.text.startswith(f"{prefix}_{token.id}_")
    assert token_id(f" {token.text}\n", prefix) == token.id
    assert token_matches(token.text, token.digest) and token.digest == token_digest(token.text)
    assert not token_matches(token.text, other.digest)
    assert not token_matches(token.text, None)
    assert not token_matches("nobody", None)


def test_a_token_holds_256_random_bits_and_its_repr_none() -> None:
    tokens = [new_token(API) for _ in range(50)]
    secrets = {token.text.split("_")[2] for token in tokens}
    assert len(secrets) == 50 and all(len(secret) * 5 >= 256 for secret in secrets)
    assert tokens[0].text.split("_")[2] not in repr(tokens[0])


def test_every_single_typo_is_told_apart_from_a_refusal() -> None:
    text = new_token(API).text
    for at in range(len(text)):
        letter = "7" if text[at] != "7" else "6"
        with pytest.raises(Unauthenticated) as error:
            token_id(text[:at] + letter + text[at + 1 :], API)
        assert error.value.code in {"token.mistyped", "token.malformed"}
        assert text[30:60] not in str(error.value)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda text: "", "token.malformed"),
        (lambda text: text[:-1], "token.malformed"),
        (lambda text: text + "0", "token.malformed"),
        (lambda text: text.upper(), "token.malformed"),
        (lambda text: text[:-1] + ("0" if text[-1] != "0" else "1"), "token.mistyped"),
        (lambda text: new_token(JOIN).text, "token.wrong_kind"),
    ],
)
def test_a_token_that_cannot_be_is_refused_before_any_lookup(change: object, code: str) -> None:
    assert callable(change)
    with pytest.raises(Unauthenticated) as error:
        token_id(change(new_token(API).text), API)
    assert error.value.code == code
