"""Seals: a signature over exact bytes that travel with it. What is inside is parsed only after the signature held."""

from __future__ import annotations

import base64
import binascii
from typing import TypeVar

from intertie.contracts.base import decode
from intertie.contracts.link import Sealed
from intertie.errors import Refused
from intertie.trust.keys import Key, verify

T = TypeVar("T")

# A message with its headers fits one NATS payload of 1 MiB; a seal is one part of a batch.
MAX_PAYLOAD = 256 * 1024


def seal(key: Key, payload: bytes, signer: str) -> Sealed:
    """`payload` (UTF-8 JSON, as encoded by `contracts.base.encode`) signed as it is. `signer`: a service's name, or a site's public key."""
    assert len(payload) <= MAX_PAYLOAD, f"a seal holds at most {MAX_PAYLOAD} bytes, not {len(payload)}"
    signature = base64.urlsafe_b64encode(key.sign(payload)).decode("ascii").rstrip("=")
    return Sealed(payload=payload.decode("utf-8"), signer=signer, signature=signature)


def open_seal(sealed: Sealed, public_key: str, kind: type[T]) -> T:
    """The payload, if this key signed exactly these bytes; `Refused('seal.invalid')` otherwise.

    `public_key` is the key that the caller expects of the signer; `sealed.signer` is only a hint which one to expect.
    """
    try:
        payload = sealed.payload.encode("utf-8")
        signature = base64.b64decode(sealed.signature + "=" * (-len(sealed.signature) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error, ValueError) as err:
        raise Refused("seal.invalid", f"the seal of {sealed.signer[:60]!r} cannot be read") from err
    if len(payload) > MAX_PAYLOAD or not verify(public_key, payload, signature):
        raise Refused("seal.invalid", f"the signature of {sealed.signer[:60]!r} does not fit these bytes and the key expected of it")
    return decode(payload, kind, what=f"what {sealed.signer[:60]!r} sealed")
