"""A site leaves: proven by its own key, refused while anything of the hub's is open there, and answered with a receipt that identity seals.

What is open is the scheduler's and metering's to say, and they are asked. Both are paged through whole: a site leaves once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from intertie.bus import rpc
from intertie.bus.port import Bus
from intertie.contracts import endpoints
from intertie.contracts.job import AttemptRecord, AttemptsQuery
from intertie.contracts.usage import AttemptBook, BookQuery
from intertie.errors import Conflict
from intertie.ids import AttemptId, SiteName

# One page of either keeper's answer.
ASK_S = 10.0
SHOWN = 5
# The scheduler's words for an attempt that may still hold a device, or get one.
OPEN = frozenset({"offered", "claimed", "staging", "running"})


@dataclass(frozen=True, slots=True)
class Held:
    """What the hub holds of a site's attempts."""

    attempts: int = 0
    segments: int = 0
    quantity_milli_us: int = 0


async def held_of(bus: Bus, claims: Callable[[], str], site: SiteName) -> Held:
    """What was run there; `Conflict('identity.leave_open')` while an attempt of it is open at the scheduler or not complete at metering.

    `Unavailable` if either does not answer: nobody leaves on a guess.
    """
    total, after = Held(), None
    while True:
        reply = await rpc.call(bus, endpoints.ATTEMPTS, AttemptsQuery(after=after), claims=claims(), timeout_s=ASK_S)
        mine = [item.record for item in reply.attempts if item.record.site == site]
        require_over([record.attempt for record in mine if is_open(record)], "the scheduler", site)
        if mine:
            asked = BookQuery(attempts=[record.attempt for record in mine])
            books = (await rpc.call(bus, endpoints.BOOKS, asked, claims=claims(), timeout_s=ASK_S)).books
            require_over([book.attempt for book in books if not is_settled(book)], "metering", site)
            total = add(total, books)
        if not reply.more or not reply.attempts:
            return total
        after = reply.attempts[-1].record.attempt


def is_open(record: AttemptRecord) -> bool:
    """Whether the scheduler still expects something of it."""
    return record.state in OPEN


def is_settled(book: AttemptBook) -> bool:
    """Whether metering has all of it: nothing held back, nothing waiting. What was closed as lost waits for nobody."""
    return book.in_suspense == 0 and (book.complete or book.because == "lost" or book.segments == 0)


def add(total: Held, books: list[AttemptBook]) -> Held:
    ran = [book for book in books if book.segments]
    return Held(
        total.attempts + len(ran),
        total.segments + sum(book.segments for book in ran),
        total.quantity_milli_us + sum(book.quantity_milli_us for book in ran),
    )


def require_over(open_ones: list[AttemptId], who: str, site: SiteName) -> None:
    if open_ones:
        raise Conflict(
            "identity.leave_open",
            f"{who} still waits for {len(open_ones)} attempt(s) of site {site}: {', '.join(open_ones[:SHOWN])}",
            next_step="wait until they have ended and settled, or let an operator close them",
        )
