"""Ed25519 keys in NATS' own writing (nkeys), so that one key signs accounts, seals and claims and one text names it everywhere.

An nkey is base 32 of a prefix byte (which kind), 32 bytes and a CRC-16/XMODEM, little endian; a seed has two prefix bytes. The format is
NATS' (github.com/nats-io/nkeys); `cryptography` does the arithmetic.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from intertie.errors import Conflict, Refused

Kind = Literal["O", "A", "U"]
"""Operator, account, user."""

_PREFIX: dict[str, int] = {"O": 14 << 3, "A": 0, "U": 20 << 3}
_KIND: dict[int, Kind] = {14 << 3: "O", 0: "A", 20 << 3: "U"}
_SEED = 18 << 3
# Base 32 of 1 + 32 + 2 and of 2 + 32 + 2 bytes.
_PUBLIC_LENGTH = 56
_SEED_LENGTH = 58


class Key:
    """One key pair. The seed leaves the object only through `write`, `credentials_seed` and `private`, never through `repr`."""

    __slots__ = ("_private", "_raw", "kind", "public")

    def __init__(self, kind: Kind, raw: bytes) -> None:
        self.kind: Kind = kind
        self._raw = raw
        self._private = Ed25519PrivateKey.from_private_bytes(raw)
        self.public = _text(bytes([_PREFIX[kind]]) + self._private.public_key().public_bytes_raw())

    @classmethod
    def new(cls, kind: Kind) -> Key:
        """A fresh random key."""
        return cls(kind, os.urandom(32))

    @classmethod
    def parse(cls, seed: str) -> Key:
        """The key of a seed (`SO…`, `SA…`, `SU…`). `Refused('key.seed')`; the text is never repeated in an error."""
        raw = _bytes(seed.strip(), _SEED_LENGTH)
        if raw is None or raw[0] & 0xF8 != _SEED:
            raise Refused("key.seed", "this is not an nkey seed, or it was damaged")
        kind = _KIND.get((raw[0] & 7) << 5 | raw[1] >> 3)
        if kind is None:
            raise Refused("key.seed", "this seed is of a kind that is not used here (operator, account and user are)")
        return cls(kind, raw[2:])

    @classmethod
    def read(cls, path: Path) -> Key:
        """The key in a file that only its owner may read. `Refused`: `key.missing`, `key.exposed`, `key.seed`."""
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(256)
        except OSError as err:
            raise Refused("key.missing", f"cannot read the key {path}: {err.strerror}") from err
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise Refused(
                "key.exposed",
                f"{path} may be read by others than its owner (mode {stat.S_IMODE(mode):04o})",
                next_step=f"chmod 600 {path}, and replace the key if others had access",
            )
        return cls.parse(text.decode("ascii", errors="replace"))

    def write(self, path: Path) -> None:
        """Write the seed, 0600, into a file that must not exist yet: a key is never overwritten. `Conflict('key.exists')`."""
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileExistsError as err:
            raise Conflict("key.exists", f"{path} exists already; a key is never overwritten") from err
        except OSError as err:
            raise Refused("key.unwritable", f"cannot write the key {path}: {err.strerror}") from err
        with os.fdopen(handle, "wb") as file:
            # The umask may have taken rights away, never added any; this makes the mode exact.
            os.fchmod(file.fileno(), 0o600)
            file.write(self.credentials_seed().encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def credentials_seed(self) -> str:
        """The secret text, for a credentials file only."""
        prefix = _PREFIX[self.kind]
        return _text(bytes([_SEED | prefix >> 5, (prefix & 31) << 3]) + self._raw)

    def private(self) -> Ed25519PrivateKey:
        """The key itself, for libraries that sign on their own."""
        return self._private

    def sign(self, data: bytes) -> bytes:
        """64 bytes of Ed25519 over exactly these bytes."""
        return self._private.sign(data)

    def __repr__(self) -> str:
        return f"Key({self.public})"

    def __reduce__(self) -> str:
        raise TypeError("a key is not pickled: it would leave this process")


def verify(public: str, data: bytes, signature: bytes) -> bool:
    """True if `signature` is this key's over exactly these bytes. A text that is no key verifies nothing."""
    key = _public_key(public)
    if key is None:
        return False
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def kind_of_public(public: str) -> Kind | None:
    """Which kind a public nkey is; None if the text is no public nkey of ours, or was mistyped."""
    raw = _bytes(public, _PUBLIC_LENGTH)
    return None if raw is None else _KIND.get(raw[0])


def require_public(public: str, kind: Kind, what: str) -> str:
    """`public` if it is a public nkey of this kind; `Refused('key.public')` names `what` otherwise."""
    if kind_of_public(public) != kind:
        raise Refused("key.public", f"{what} must be a public nkey that starts with {kind}, not {public[:60]!r}")
    return public


def raw_public(public: str) -> bytes:
    """The 32 bytes of a public nkey. `Refused('key.public')`."""
    raw = _bytes(public, _PUBLIC_LENGTH)
    if raw is None or raw[0] not in _KIND:
        raise Refused("key.public", f"{public[:60]!r} is not a public nkey")
    return raw[1:]


# A hub knows a key per site and a handful of services; parsing a point costs more than the lookup.
@lru_cache(maxsize=4_096)
def _public_key(public: str) -> Ed25519PublicKey | None:
    raw = _bytes(public, _PUBLIC_LENGTH)
    if raw is None or raw[0] not in _KIND:
        return None
    return Ed25519PublicKey.from_public_bytes(raw[1:])


def _text(raw: bytes) -> str:
    return base64.b32encode(raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")).decode("ascii").rstrip("=")


def _bytes(text: str, length: int) -> bytes | None:
    """What the base 32 says without its checksum; None if it is not of this length, alphabet and checksum."""
    if len(text) != length:
        return None
    try:
        raw = base64.b32decode(text + "=" * (-length % 8))
    except (binascii.Error, ValueError):
        return None
    body, checksum = raw[:-2], raw[-2:]
    # Unused low bits of the last character must be zero too: one key, one text.
    return body if binascii.crc_hqx(body, 0).to_bytes(2, "little") == checksum and _text(body) == text else None
