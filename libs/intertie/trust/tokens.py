"""API tokens (`itk_…`) and join tokens (`itj_…`): secrets that people copy by hand, so they say what they are and whether they were mistyped.

`<prefix>_<id>_<secret>_<checksum>`: the id finds the record, the secret proves it, the checksum (CRC-32 of all before it) tells a typo from
a refusal before any database is asked. Stored is SHA-256 of the whole text. That is enough, and a slow hash like argon2 would be waste: slow
hashes make guessing of *human* secrets dear, while 256 random bits cannot be guessed at any speed, and each request must check one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import zlib
from dataclasses import dataclass
from typing import Literal

from intertie.errors import Unauthenticated
from intertie.ids import TokenId, mint

Prefix = Literal["itk", "itj"]
API: Prefix = "itk"
JOIN: Prefix = "itj"

_WHAT: dict[str, str] = {API: "an API token", JOIN: "a join token"}
# 256 bits in base 32 without padding.
_SHAPE = re.compile(r"(itk|itj)_(tok-[0-9a-v]{26})_([a-z2-7]{52})_([0-9a-f]{8})\Z")
# A digest is compared even when no record was found, so that both refusals cost the same.
_NOBODY = hashlib.sha256(b"nobody").hexdigest()


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token just made. `text` is shown once and never stored; `digest` is what is stored."""

    id: TokenId
    text: str
    digest: str

    def __repr__(self) -> str:
        return f"NewToken({self.id})"


def new_token(prefix: Prefix) -> NewToken:
    """A fresh token of this kind with 256 random bits."""
    token = TokenId(mint("tok"))
    secret = base64.b32encode(secrets.token_bytes(32)).decode("ascii").rstrip("=").lower()
    body = f"{prefix}_{token}_{secret}"
    text = f"{body}_{_checksum(body)}"
    return NewToken(token, text, token_digest(text))


def token_id(text: str, prefix: Prefix) -> TokenId:
    """The id that a token names. `Unauthenticated`: `token.malformed`, `token.mistyped`, `token.wrong_kind`; the text is never repeated."""
    found = _SHAPE.match(text.strip())
    if found is None:
        raise Unauthenticated(
            "token.malformed", f"this is not {_WHAT[prefix]}: one looks like {prefix}_tok-…_…_…", next_step="copy it whole"
        )
    if found[4] != _checksum(text.strip().rpartition("_")[0]):
        raise Unauthenticated(
            "token.mistyped", "the token's checksum does not fit: a character was lost or changed", next_step="copy it again"
        )
    if found[1] != prefix:
        raise Unauthenticated("token.wrong_kind", f"this is {_WHAT[found[1]]}, and {_WHAT[prefix]} is wanted here")
    return TokenId(found[2])


def token_digest(text: str) -> str:
    """What is stored of a token: SHA-256, hex."""
    return hashlib.sha256(text.strip().encode("utf-8")).hexdigest()


def token_matches(text: str, stored_digest: str | None) -> bool:
    """True if `text` is the token whose digest was stored; the time taken tells nothing, not even whether there was a record."""
    same = hmac.compare_digest(token_digest(text), stored_digest or _NOBODY)
    return same and stored_digest is not None


def _checksum(body: str) -> str:
    return f"{zlib.crc32(body.encode('utf-8')):08x}"
