"""Signed claims: who is calling, as a compact JWT (Ed25519, RFC 9864) that the *called* service verifies for itself.

identity signs for people and sites; a service signs for itself alone. The header's `kid` names the issuer, the keyset says which public key
that issuer has, and nothing in a token is believed before its signature held.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import OKPKey

from intertie.clock import Clock
from intertie.contracts.base import decode, encode
from intertie.contracts.identity import Claims, Role
from intertie.errors import Refused, Unauthenticated
from intertie.ids import PrincipalId, SiteName
from intertie.trust.keys import Key, raw_public

ISSUER = "identity"
AUDIENCE = "intertie"
ALGORITHM = "Ed25519"
# A caller works with one token for a few requests; what was revoked dies with it.
LIFE_S = 300
# Nobody's clock may make a token that lives for ever: longer than any we sign, with room for the leeway.
MAX_LIFE_S = 900
# Hosts of one hub keep time by NTP; half a minute forgives one that has just started.
LEEWAY_S = 30
# It travels in a header of every message.
MAX_BYTES = 4_096

Keyset = Mapping[str, str]
"""Issuer → public nkey."""


def sign_claims(key: Key, claims: Claims) -> str:
    """The compact token of these claims."""
    header = {"alg": ALGORITHM, "kid": claims.iss, "typ": "JWT"}
    return jws.serialize_compact(header, encode(claims), _private(key), algorithms=[ALGORITHM])


def verify_claims(text: str, keyset: Keyset, now: datetime) -> Claims:
    """The claims, if their issuer signed them and may say so. `Unauthenticated`: `claims.invalid`, `.expired`, `.unknown_issuer`, `.overreach`."""
    claims = _verified(text, keyset, now)
    if claims.iss != ISSUER and not _speaks_for_itself(claims):
        raise Unauthenticated("claims.overreach", f"{claims.iss[:60]!r} may claim the role of a service for itself, and nothing else")
    return claims


def verify_site_claims(text: str, keys: Mapping[SiteName, str], now: datetime) -> Claims:
    """A site's own proof (`site_claims`), checked against that site's key: it may claim to be itself and nothing else."""
    claims = _verified(text, {str(site): key for site, key in keys.items()}, now)
    if claims.roles != [Role.SITE] or claims.site != claims.iss or claims.tenant is not None:
        raise Unauthenticated("claims.overreach", f"{claims.iss[:60]!r} may claim to be that site, and nothing else")
    return claims


def site_claims(key: Key, site: SiteName, now: datetime) -> str:
    """What an agent sends with an HTTP call: it is that site, for a minute or so, by its site key."""
    at = int(now.timestamp())
    who = PrincipalId(f"site/{site}")
    return sign_claims(key, Claims(iss=site, sub=who, name=site, roles=[Role.SITE], site=site, iat=at, exp=at + LIFE_S))


def read_keyset(path: Path) -> dict[str, str]:
    """`public.json`: issuer → public nkey. `Refused('claims.keyset')` if it cannot be used."""
    try:
        keyset = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        for public in keyset.values():
            raw_public(public)
    except (OSError, msgspec.MsgspecError, Refused) as err:
        raise Refused("claims.keyset", f"{path} does not hold the services' public keys: {err}") from err
    return keyset


class ServiceClaims:
    """One service's own signed claims, signed anew when two thirds of their life are over."""

    def __init__(self, key: Key, service: str, clock: Clock) -> None:
        self._key = key
        self._service = service
        self._clock = clock
        self._text = ""
        self._renew_at = 0.0

    def signed(self) -> str:
        """A token that is valid now and for at least a third of its life."""
        if not self._text or self._clock.monotonic_s() >= self._renew_at:
            at = int(self._clock.now().timestamp())
            me = self._service
            claims = Claims(iss=me, sub=PrincipalId(me), name=me, roles=[Role.SERVICE], iat=at, exp=at + LIFE_S)
            self._text = sign_claims(self._key, claims)
            self._renew_at = self._clock.monotonic_s() + LIFE_S * 2 / 3
        return self._text


def _speaks_for_itself(claims: Claims) -> bool:
    return claims.roles == [Role.SERVICE] and claims.sub == claims.iss and claims.tenant is None and claims.site is None


def _verified(text: str, keyset: Keyset, now: datetime) -> Claims:
    """Signature, shape, audience and times, in this order."""
    if len(text) > MAX_BYTES:
        raise Unauthenticated("claims.invalid", f"the signed claims are longer than {MAX_BYTES} bytes")
    try:
        token = jws.extract_compact(text.encode("ascii"))
        issuer = token.protected.get("kid")
        public = keyset.get(issuer) if isinstance(issuer, str) else None
        if public is None:
            raise Unauthenticated("claims.unknown_issuer", f"nobody here knows the issuer {str(issuer)[:60]!r} of these claims")
        if not jws.validate_compact(token, _public(public), algorithms=[ALGORITHM]):
            raise Unauthenticated("claims.invalid", "the signature of the claims does not hold")
        claims = decode(token.payload, Claims, what="signed claims")
    except (JoseError, ValueError) as err:
        raise Unauthenticated("claims.invalid", f"the signed claims cannot be read: {type(err).__name__}") from err
    except Unauthenticated:
        raise
    except Refused as err:
        raise Unauthenticated("claims.invalid", err.text) from err
    at = now.timestamp()
    if claims.iss != issuer or claims.aud != AUDIENCE:
        raise Unauthenticated("claims.invalid", "the claims are of another issuer than their key, or for another audience")
    if claims.iat > at + LEEWAY_S or not 0 < claims.exp - claims.iat <= MAX_LIFE_S:
        raise Unauthenticated("claims.invalid", "the claims' times cannot be: signed in the future, or living too long")
    if claims.exp + LEEWAY_S <= at:
        raise Unauthenticated(
            "claims.expired", "the signed claims have expired", next_step="log in again, or compare the two hosts' clocks"
        )
    return claims


def _private(key: Key) -> OKPKey:
    return OKPKey.import_key(key.private())


def _public(public: str) -> OKPKey:
    return OKPKey.import_key(Ed25519PublicKey.from_public_bytes(raw_public(public)))
