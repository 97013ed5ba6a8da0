"""`python -m intertie.identity.restored`: raises every service's epoch after a restore. `intertie hub restored` starts it, being without a database
driver itself.

Reads one JSON document on standard input (passwords stand in no command line and no environment) and writes one: what was done, or a `Problem`.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from intertie.contracts.base import Problem, decode, encode
from intertie.errors import IntertieError
from intertie.store.restore import Login, Restored, restored


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One service's schema and how it is reached."""

    service: str
    url: str
    password: str | None = None
    role: str = ""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be raised, why and by whom."""

    places: list[Place]
    reason: str
    actor: str
    live: bool = False


async def do(ask: Ask) -> Restored:
    logins = {place.service: Login(place.url, place.password, place.role) for place in ask.places}
    return await restored(logins, reason=ask.reason, actor=ask.actor, live=ask.live)


def main() -> int:
    try:
        done = asyncio.run(do(decode(sys.stdin.buffer.read(), Ask, what="what to raise")))
    except IntertieError as err:
        problem = Problem(kind=type(err).__name__, code=err.code, text=err.text, next_step=err.next_step)
        sys.stdout.buffer.write(encode(problem))
        return 1
    sys.stdout.buffer.write(encode(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
