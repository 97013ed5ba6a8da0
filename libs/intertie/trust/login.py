"""Proofs for logging in to the bus: what nats-py asks at every (re)connection, answered with the newest credential there is.

`FileLogin` reads a `.creds` file again each time, so a renewed one needs no restart; `SiteLogin` mints its own, offline, with the site's scoped
signing key. Pass them as `nats.connect(user_jwt_cb=login.jwt, signature_cb=login.signature)`: NATS' own reader of credentials needs
one more package and keeps the first file it saw.
"""

from __future__ import annotations

import base64
import re
import stat
from pathlib import Path
from typing import Protocol

from intertie.clock import Clock
from intertie.errors import Refused
from intertie.trust.keys import Key
from intertie.trust.nats_jwt import SITE_USER_SECONDS, mint_site_user

# A JWT of ours is some 3 KiB; more is not a credentials file.
MAX_BYTES = 64 * 1024

_JWT = re.compile(r"-----BEGIN NATS USER JWT-----\s+(\S+)\s+-{5,6}END NATS USER JWT")
_SEED = re.compile(r"-----BEGIN USER NKEY SEED-----\s+(\S+)\s+-{5,6}END USER NKEY SEED")


class Login(Protocol):
    """Answers of one connection attempt: `signature` proves the key that `jwt` names."""

    def jwt(self) -> bytes:
        """The user JWT."""
        ...

    def signature(self, nonce: str | bytes) -> bytes:
        """The server's nonce signed, base64."""
        ...


class FileLogin:
    """A hub service's credentials file, read anew at each attempt. The first reading is at once, so a bad file is refused at start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jwt, self._key = read_credentials(path)

    def jwt(self) -> bytes:
        return self._jwt

    def signature(self, nonce: str | bytes) -> bytes:
        # nats-py asks for the signature first; both answers come from this one reading.
        self._jwt, self._key = read_credentials(self._path)
        return _signed(self._key, nonce)


class SiteLogin:
    """An agent's login: a new user JWT of minutes at each attempt, signed by the site's own signing key without asking anyone."""

    def __init__(self, signing_key: Key, account: str, clock: Clock, seconds: int = SITE_USER_SECONDS) -> None:
        self._signing_key = signing_key
        self._account = account
        self._clock = clock
        self._seconds = seconds
        # Lives in this process only: what was minted for it dies with it.
        self._user = Key.new("U")

    def jwt(self) -> bytes:
        return mint_site_user(self._signing_key, self._account, self._user.public, self._clock.now(), self._seconds).encode("ascii")

    def signature(self, nonce: str | bytes) -> bytes:
        return _signed(self._user, nonce)


def read_credentials(path: Path) -> tuple[bytes, Key]:
    """JWT and key of a `.creds` file that only its owner may read. `Refused`: `creds.missing`, `creds.exposed`, `creds.invalid`."""
    try:
        with path.open("rb") as file:
            mode = path.stat().st_mode
            text = file.read(MAX_BYTES).decode("ascii", errors="replace")
    except OSError as err:
        raise Refused("creds.missing", f"cannot read the bus credentials {path}: {err.strerror}") from err
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise Refused("creds.exposed", f"{path} may be read by others than its owner", next_step=f"chmod 600 {path}")
    jwt, seed = _JWT.search(text), _SEED.search(text)
    if jwt is None or seed is None:
        raise Refused("creds.invalid", f"{path} holds no NATS user credentials")
    return jwt[1].encode("ascii"), Key.parse(seed[1])


def _signed(key: Key, nonce: str | bytes) -> bytes:
    return base64.b64encode(key.sign(nonce.encode("ascii") if isinstance(nonce, str) else nonce))
