"""What to do about one site's account, given what identity has signed and what a NATS server holds.

An older account that is pushed over a newer one silently gives a revoked key back (LINK D18), so every push looks first: nothing newer is
replaced, and no revocation is dropped, even by an identity that was restored from a backup.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Held:
    """An account as a server holds it, parsed."""

    jwt: str
    iat: int
    revoked_keys: Sequence[str]
    """Signing keys that its tags name as revoked."""


class Verdict(StrEnum):
    SAME = "same"
    PUSH = "push"
    NEWER_THERE = "newer_there"
    """The server's is newer than ours: nothing is pushed, a person decides (join again, or revoke)."""
    MERGE = "merge"
    """The server knows revocations that we do not: take them over, sign again, push."""


def compare(jwt: str, iat: int, revoked_keys: Collection[str], held: Held | None) -> Verdict:
    """What to do about an account whose own form is `jwt`."""
    if held is None:
        return Verdict.PUSH
    if held.jwt == jwt:
        return Verdict.SAME
    if held.iat > iat:
        return Verdict.NEWER_THERE
    if set(held.revoked_keys) - set(revoked_keys):
        return Verdict.MERGE
    return Verdict.PUSH


def next_iat(now_s: int, *before: int) -> int:
    """The issue time of a new form: later than every one before, although NATS counts whole seconds."""
    return max(now_s, *(iat + 1 for iat in before)) if before else now_s


PRELOAD_HEAD = "# Written by identity: every account of the hub, so that nats-server starts with them even while identity is away.\n"


def read_preload(text: str) -> dict[str, str]:
    """A NATS preload file, `PUBLIC: JWT` lines, by account."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return {public.strip(): jwt.strip() for public, _, jwt in (line.partition(":") for line in lines)}


def write_preload(lines: Mapping[str, str], ours: Sequence[tuple[str, str]]) -> str:
    """The file with `ours` put in. Lines of accounts that are not ours (system, hub) stay as they are."""
    return PRELOAD_HEAD + "".join(f"{public}: {jwt}\n" for public, jwt in sorted({**lines, **dict(ours)}.items()))
