"""Job requests at the site's desk: kept until they are answered, judged by the owner's rule or by hand, begun with cards that the site chooses.

A request that was accepted becomes an ordinary claim; from there `site` and `course` do the rest, and what leaves the site of it is veiled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from intertie.agent.books import get_setting, put_setting, together
from intertie.agent.core.devices import choose
from intertie.agent.core.model import Attempt, Failing, with_state
from intertie.agent.core.offers import NotTaken, Repeated, Taken, judge
from intertie.agent.core.requests import Accept, Ask, Decline, JobOfferingRule, Pending, usable
from intertie.agent.core.requests import judge as judge_request
from intertie.agent.journal import Also, Cursor, handled
from intertie.contracts.base import decode, encode
from intertie.contracts.link import EntryBase, JobOfferingsTold, Lane, LaneState, Offer, OfferBody
from intertie.contracts.offerings import LocalRequest
from intertie.errors import Conflict, NotFound
from intertie.ids import AttemptId
from intertie.link.journal import NextSeq
from intertie.link.site import Exchange
from intertie.observe import log
from intertie.trust.seal import open_seal

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.requests")

PREFIX, TOLD = "request/", "job_offerings_told"
"""Keys of the journal's settings: a row for each request, and what the registry was told last."""
RULE = "rule"
"""Who accepted, where no person did."""
# A keeper of an older version would set the entry aside.
OFFERINGS_VERSION = 3
# More than anybody answers by hand; the next is declined with these words.
MOST_PENDING = 500

# What may pass by itself while a request waits: the owner said yes, and the cards are not free yet.
PASSING = frozenset({"device_busy", "paused", "cordoned", "device_lost"})


class Requests:
    """A part of the `Site`: its requests. `recover` before the first instruction; `tick` each second."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.pending: dict[AttemptId, Pending] = {}
        self.understood = False
        """The registry was heard to know job offerings."""
        self._turn = asyncio.Lock()
        """One answer at a time: a request that is being declined does not begin meanwhile."""

    def offerings(self) -> Mapping[str, JobOfferingRule]:
        """By name; only of pools in which the owner decides."""
        profiles = {name: pool.profile for name, pool in self._site.pools.items()}
        return {rule.name: rule for rule in usable(self._site.rules.job_offering, profiles)}

    async def recover(self) -> None:
        rows = await self._site.journal.read(
            lambda cursor: cursor.execute("SELECT value FROM setting WHERE key LIKE ?", (f"{PREFIX}%",)).fetchall()
        )
        kept = [decode(value, Pending, what="a kept request") for (value,) in rows]
        self.pending = {one.offer.attempt: one for one in kept}

    # --- what the hub asks ---

    async def take(self, offer: Offer, body: OfferBody) -> None:
        """Keep it, and answer what can be answered at once."""
        if body.attempt in self._site.books.attempts or body.attempt in self.pending:
            await self._site.journal.write(handled(offer.id))
            return
        now = self._site.clock.now()
        answer_by = now + timedelta(seconds=max(body.answer_within_s, 1))
        if len(self.pending) >= MOST_PENDING:
            await self._refuse(offer, body, Failing(code="declined", text=f"{MOST_PENDING} requests wait for an answer here already"))
            return
        await self._keep(Pending(offer=offer, received=now, answer_by=answer_by, offering=body.offering), handled(offer.id))
        await self.look(offer.attempt)

    async def tick(self) -> None:
        """What waits: for cards, for its time, for an owner who has answered meanwhile."""
        if self.understood:
            await self.tell()
        for name in list(self.pending):
            await self.look(name)

    async def look(self, name: AttemptId) -> None:
        """Answer one request, if it can be answered now."""
        async with self._turn:
            await self._look(name)

    async def _look(self, name: AttemptId) -> None:
        one = self.pending.get(name)
        if one is None:
            return
        site = self._site
        if name in site.books.attempts or name in site.books.tombstones:
            await self._drop(name)
            return
        body = self._body(one.offer)
        if one.accepted_at is None:
            local = site.clock.now().astimezone()
            found = judge_request(
                body, self.offerings().get(body.offering), site.books.attempts.values(), self.pending.values(), local=local
            )
            match found:
                case Decline(text):
                    await self._refuse(one.offer, body, Failing(code="declined", text=text))
                    return
                case Ask():
                    return
                case Accept():
                    one = msgspec.structs.replace(one, accepted_by=RULE, accepted_at=site.clock.now())
                    await self._keep(one)
        await self._begin(one, body)

    async def _begin(self, one: Pending, body: OfferBody) -> None:
        """Claim with cards of the site's choice; wait while there are none."""
        site = self._site
        pool = site.pools.get(body.pool)
        chosen = choose([pool], pool.kind, len(body.devices), site.books.holds, site.books.observed) if pool is not None else None
        devices = chosen[1] if chosen is not None else []
        if pool is not None and not devices:
            await self._wait(one, body, Failing(code="device_busy", text=f"{len(body.devices)} cards are not free now"))
            return
        asked = msgspec.structs.replace(body, devices=devices)
        answer = judge(asked, site.terms(), site.books, sent_boot_s=site.clock.boot_s(), kernel_boot=site.boot)
        match answer:
            case Repeated():
                await self._drop(one.offer.attempt)
            case NotTaken(why) if why.code in PASSING:
                await self._wait(one, body, why)
            case NotTaken(why):
                await self._refuse(one.offer, body, why)
            case Taken(attempt):
                await self._claim(one, body, attempt)

    async def _claim(self, one: Pending, body: OfferBody, attempt: Attempt) -> None:
        site = self._site
        taken = with_state(attempt, attempt.state, offer=site.kept(one.offer, body), asked=list(body.devices), accepted_at=one.accepted_at)
        await site.claim(one.offer, taken)
        await self._drop(one.offer.attempt)
        LOG.info("a request begins", attempt=attempt.id, offering=body.offering, accepted_by=one.accepted_by)

    async def _wait(self, one: Pending, body: OfferBody, why: Failing) -> None:
        """By rule until the promised time; a person's yes stands until a card is free or the request is withdrawn."""
        if one.accepted_by == RULE and self._site.clock.now() >= one.answer_by:
            text = f"accepted by the owner's rule, but not to be begun within the promised time: {why.text}"
            await self._refuse(one.offer, body, Failing(code="declined", text=text))
        elif one.waits != why.text:
            await self._keep(msgspec.structs.replace(one, waits=why.text))

    # --- what the owner says ---

    def listed(self) -> list[LocalRequest]:
        """Those without an answer at the hub, oldest first."""
        return [self._shown(one) for one in sorted(self.pending.values(), key=lambda each: (each.received, each.offer.attempt))]

    async def accept(self, name: AttemptId, *, by: str) -> LocalRequest:
        """The owner's yes. It begins as soon as cards are free."""
        async with self._turn:
            one = self._asked(name)
            if one.accepted_at is None:
                one = msgspec.structs.replace(one, accepted_by=by, accepted_at=self._site.clock.now(), waits="")
                await self._keep(one)
                LOG.info("a request is accepted", attempt=name, by=by)
            told = self._shown(one)
            await self._look(name)
        return told

    async def decline(self, name: AttemptId, *, by: str, reason: str) -> LocalRequest:
        """The owner's no, with his words. What has begun is not declined but reclaimed."""
        async with self._turn:
            one = self._asked(name)
            told = self._shown(one)
            LOG.info("a request is declined", attempt=name, by=by)
            await self._refuse(one.offer, self._body(one.offer), Failing(code="declined", text=reason))
        return told

    def _asked(self, name: AttemptId) -> Pending:
        one = self.pending.get(name)
        if one is not None:
            return one
        if name in self._site.books.attempts:
            raise Conflict(
                "requests.begun", f"request {name} has begun", next_step=f"intertie local reclaim {name} --reason WHY takes its cards back"
            )
        raise NotFound("requests.unknown", f"there is no request {name} here", next_step="intertie local requests list")

    def _shown(self, one: Pending) -> LocalRequest:
        body = self._body(one.offer)
        return LocalRequest(
            attempt=body.attempt,
            job=body.job,
            offering=body.offering,
            tenant=body.tenant,
            name=body.spec.name,
            devices=len(body.devices),
            wall_s=body.spec.wall_s,
            budget=body.budget,
            received=one.received,
            answer_by=one.answer_by,
            word="accepted" if one.accepted_at is not None else "waiting",
            text=one.waits,
        )

    # --- what the hub is told of offerings ---

    def answered(self, exchange: Exchange) -> None:
        """The registry answered: does it know offerings?"""
        self.understood = exchange.synced.state is LaneState.OK and exchange.synced.v >= OFFERINGS_VERSION

    async def tell(self) -> None:
        """Say all offerings as they are now, if that is not what was said last."""
        offerings = [rule.told() for _, rule in sorted(self.offerings().items())]
        text = encode(offerings).decode("utf-8")
        last = await self._site.journal.read(lambda cursor: get_setting(cursor, TOLD))
        if (last or "[]") == text:
            return

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            at, islanded = self._site.clock.now(), self._site.islanded()
            return {Lane.REGISTRY: [JobOfferingsTold(seq=following[Lane.REGISTRY], at=at, islanded=islanded, offerings=offerings)]}

        await self._site.append(entries, put_setting(TOLD, text))

    # --- the journal ---

    def _body(self, offer: Offer) -> OfferBody:
        """It was verified when it came."""
        return open_seal(offer.sealed, self._site.joined.service_keys.get("scheduler", ""), OfferBody)

    async def _keep(self, one: Pending, also: Also | None = None) -> None:
        write = put_setting(f"{PREFIX}{one.offer.attempt}", encode(one).decode("utf-8"))
        await self._site.journal.write(together(write, also) if also is not None else write)
        self.pending[one.offer.attempt] = one

    async def _drop(self, name: AttemptId) -> None:
        await self._site.journal.write(_forget(name))
        self.pending.pop(name, None)

    async def _refuse(self, offer: Offer, body: OfferBody, why: Failing) -> None:
        """Declined, or not to be taken at all: told to the hub, and never begun."""
        await self._site.refuse(offer, body, why, _forget(body.attempt))
        self.pending.pop(body.attempt, None)


def _forget(name: AttemptId) -> Also:
    def also(cursor: Cursor) -> None:
        cursor.execute("DELETE FROM setting WHERE key = ?", (f"{PREFIX}{name}",))

    return also
