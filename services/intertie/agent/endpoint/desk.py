"""The site's desk for calls: what is offered and how it is, who may call now, and the record of each call.

A call is on disk here before its upstream is asked for long, and its record goes out on the metering lane under the site's key. What was under way when
the agent died is recorded as interrupted at the next start. Without a hub there are no calls: the owner's own use of the server is not ours.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp

from intertie.agent.books import get_setting, put_setting
from intertie.agent.endpoint.course import Course, Ending
from intertie.agent.endpoint.rules import EndpointRule, offerings_of
from intertie.bus.port import Bus, Message, Subscription
from intertie.contracts.base import decode, encode
from intertie.contracts.call_offerings import PATHS, CallOffering, CallOutcome, OfferingTold
from intertie.contracts.calls import (
    BEAT_S,
    LOCAL_CALL_SUBJECT,
    SILENT_S,
    TAKE_LEEWAY_S,
    TAKE_S,
    CallAbort,
    CallCredit,
    CallDone,
    CallGrant,
    CallOpen,
    CallPart,
    CallRecord,
    LocalEndpoint,
    LocalEndpoints,
    UpFrame,
    local_answer_subject,
    pack,
    unpack_down,
)
from intertie.contracts.link import CallClosed, EntryBase, Lane, LaneState, OfferingsTold
from intertie.errors import IntertieError, NotFound, Refused
from intertie.ids import CallId, is_id
from intertie.link.journal import NextSeq
from intertie.link.site import Exchange
from intertie.observe import log
from intertie.trust.seal import open_seal, seal

if TYPE_CHECKING:
    from intertie.agent.journal import Cursor
    from intertie.agent.site import Site

LOG = log.get("agent.endpoint")

CALLS_VERSION = 3
"""Registries from this link version on know offerings."""
OPEN_KEY = "call/"
PAUSED_KEY = "endpoint_paused"
TOLD_KEY = "endpoint_told"
# Calls whose opening is not taken twice: more than any site ends within the seconds in which a copy can come.
REMEMBERED = 20_000
# Between two looks at an upstream, and how long one may take.
HEALTH_S = 5.0
HEALTH_LIMIT_S = 3.0


@dataclass(slots=True)
class Offered:
    """One offering and how it is here."""

    rule: EndpointRule
    offering: CallOffering
    api_key: str = ""
    paused: bool = False
    trouble: str = "not looked at yet"
    """Why the upstream cannot be called; empty: it answered the last look."""
    under_way: int = 0
    calls: int = 0
    refused: int = 0


class Desk:
    """Made with the site; `recover` from disk, `listen` on a bus, `run` its beats."""

    def __init__(self, site: Site, *, beat: float = 1.0) -> None:
        self._site, self._beat = site, beat
        self.problem = ""
        self.offered: dict[str, Offered] = {}
        try:
            for rule, offering in offerings_of(site.rules.endpoint):
                self.offered[rule.name] = Offered(rule, offering, _api_key(rule))
        except Refused as err:
            # The owner's own work and all other lending go on; what is wrong is said where the owner looks.
            self.problem, self.offered = err.text, {}
            LOG.error("no call is offered", code=err.code, text=err.text)
        self._client: aiohttp.ClientSession | None = None
        self._bus: Bus | None = None
        self._listening: Subscription | None = None
        self._courses: dict[CallId, Course] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._known: OrderedDict[CallId, None] = OrderedDict()
        self._keeper_knows = False
        self._told = ""
        self._look = asyncio.Event()

    # --- life ---

    async def recover(self) -> None:
        """What was paused stays so; what was under way when the agent ended is recorded as interrupted."""
        journal = self._site.journal
        paused = await journal.read(lambda cursor: get_setting(cursor, PAUSED_KEY))
        for name in decode(paused, list[str], what="paused endpoints") if paused else []:
            if name in self.offered:
                self.offered[name].paused = True
        told = await journal.read(lambda cursor: get_setting(cursor, TOLD_KEY))
        self._told = told or ""
        for text in await journal.read(_open_calls):
            draft = decode(text, CallRecord, what="an open call")
            LOG.warning("a call was cut off by the end of the agent", call=draft.call)
            await self._record(draft)

    async def listen(self, bus: Bus) -> None:
        """Take calls that come on this bus. Quick and in order: each frame is only handed to its call."""
        if not self.offered:
            return
        self._bus = bus
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        bus.on_state(self._link)
        self._listening = await bus.listen(LOCAL_CALL_SUBJECT, self._heard)

    async def run(self) -> None:
        """For ever: look at the upstreams, say that calls live, end those whose gateway is gone."""
        if not self.offered and self._told in ("", "[]"):
            await asyncio.Event().wait()  # Nothing is offered, and nobody believes that anything is.
        looked_s = float("-inf")
        while True:
            now_s = self._site.clock.monotonic_s()
            if now_s - looked_s >= HEALTH_S * self._beat or self._look.is_set():
                self._look.clear()
                looked_s = now_s
                try:
                    await self._look_at_upstreams()
                    await self._tell()
                except IntertieError as err:
                    LOG.warning("a look at the upstreams was put off", code=err.code, text=err.text)
            for course in list(self._courses.values()):
                if now_s - course.heard_s > SILENT_S:
                    course.abort(Ending(CallOutcome.INTERRUPTED, "call.gateway_silent", "the gateway of this call is not heard any more"))
                else:
                    await course.alive()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(BEAT_S, HEALTH_S * self._beat)):
                    await self._look.wait()

    async def close(self) -> None:
        """Calls under way end as interrupted; their records are on disk before this returns."""
        if self._listening is not None:
            await self._listening.close()
        for course in list(self._courses.values()):
            course.abort(Ending(CallOutcome.INTERRUPTED, "call.agent_stopped", "the site's agent was stopped"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        if self._client is not None:
            await self._client.close()

    def answered(self, exchange: Exchange) -> None:
        """The registry answered: does it know offerings?"""
        knows = exchange.synced.state is LaneState.OK and exchange.synced.v >= CALLS_VERSION
        if knows and not self._keeper_knows:
            self._look.set()
        self._keeper_knows = knows

    def _link(self, up: bool) -> None:
        if not up:
            for course in list(self._courses.values()):
                course.abort(Ending(CallOutcome.INTERRUPTED, "call.bus_lost", "the site lost the bus"))

    # --- frames ---

    def _heard(self, message: Message) -> None:
        try:
            frame = unpack_down(message.body)
        except Refused as err:
            LOG.warning("what came is no frame of a call", text=err.text[:200])
            return
        if isinstance(frame, CallOpen):
            self._open(frame)
            return
        course = self._courses.get(frame.call)
        if course is None:
            return
        match frame:
            case CallPart():
                course.part(frame)
            case CallCredit():
                course.credit(frame.through)
            case CallAbort():
                course.abort(Ending(frame.outcome, frame.code))

    def _open(self, frame: CallOpen) -> None:
        if frame.call in self._known or not is_id(frame.call) or not is_id(frame.gateway):
            return
        self._known[frame.call] = None
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        task = asyncio.get_running_loop().create_task(self._take(frame), name=f"take-{frame.call}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, frame: CallOpen) -> None:
        """One call, from its opening to its record."""
        try:
            grant, offered = self._admit(frame)
        except Refused as err:
            retry_after_s = 1 if err.code == "call.busy" else 0
            LOG.info("a call is refused", call=frame.call, code=err.code)
            refusal = CallDone(
                call=frame.call, seq=1, outcome=CallOutcome.REFUSED, code=err.code, text=err.text, retry_after_s=retry_after_s
            )
            with suppress(IntertieError):
                await self._say(frame, refusal)
            return
        assert self._client is not None, "frames come only while listening"
        course = Course(
            frame, offered.rule, offered.offering, self._client, offered.api_key, lambda up: self._say(frame, up), self._site.clock
        )
        self._courses[frame.call] = course
        offered.under_way += 1
        offered.calls += 1
        opened = asyncio.create_task(self._note(self._draft(grant, course, Ending(CallOutcome.INTERRUPTED, "call.agent_restarted"))))
        try:
            ending = await course.run()
        except Exception:
            LOG.exception("a call failed inside", call=frame.call)
            ending = Ending(CallOutcome.INTERRUPTED, "call.agent_failed", "the site's agent failed; its log says where")
        finally:
            offered.under_way -= 1
            del self._courses[frame.call]
        record = self._draft(grant, course, ending)
        await course.done(ending)
        await opened
        if ending.code == "call.upstream_unreachable":
            self._look.set()
        await self._record(record)

    def _admit(self, frame: CallOpen) -> tuple[CallGrant, Offered]:
        """Refusals in this order; what is refused here reached nobody's server."""
        site = self._site
        key = site.joined.service_keys.get("gateway", "")
        if not key:
            raise Refused("call.no_gateway_key", "this site joined before calls were known: it must join again to take them")
        grant = open_seal(frame.grant, key, CallGrant)
        if (grant.call, grant.site) != (frame.call, site.joined.site):
            raise Refused("call.grant", "the grant is of another call, or for another site")
        offset_s, error_s = site.offset()
        age_s = (site.clock.now() + timedelta(seconds=offset_s) - grant.at).total_seconds()
        if abs(age_s) > TAKE_S + TAKE_LEEWAY_S + error_s:
            raise Refused("call.too_late", f"the grant is {age_s:.0f} s old by this site's clock: nobody waits for it any more")
        offered = self.offered.get(grant.offering)
        if offered is None:
            raise Refused("call.unknown_offering", f"this site offers no {grant.offering[:63]}")
        if not offered.offering.admits(grant.tenant):
            raise Refused("call.tenant", f"{grant.offering} is not offered to {grant.tenant}")
        if frame.path not in PATHS[offered.offering.protocol]:
            raise Refused("call.path", f"{offered.offering.protocol.value} has no {frame.path[:80]}")
        if not site.may_start():
            raise Refused("call.superseded", "another agent of this site is in charge")
        if why := self._why_not(offered):
            raise Refused("call.paused" if offered.paused or site.pause.on else "call.unavailable", why)
        if offered.under_way >= offered.offering.limits.concurrency:
            offered.refused += 1
            raise Refused("call.busy", f"{grant.offering} has {offered.under_way} calls under way, all that it takes at once")
        return grant, offered

    async def _say(self, frame: CallOpen, up: UpFrame) -> None:
        assert self._bus is not None, "frames come only while listening"
        await self._bus.publish(local_answer_subject(frame.gateway), pack(up))

    # --- records ---

    def _draft(self, grant: CallGrant, course: Course, ending: Ending) -> CallRecord:
        used, promise = course.used(), course.offering.promise
        return CallRecord(
            call=grant.call,
            site=grant.site,
            offering=grant.offering,
            tenant=grant.tenant,
            grant=course.opened.grant,
            revision=grant.revision,
            accepted=course.accepted,
            first_byte_us=course.first_byte_us,
            end_us=course.elapsed_us(),
            outcome=ending.outcome,
            code=ending.code,
            status=course.status,
            request_bytes=course.request_bytes,
            response_bytes=course.sent_bytes,
            input_tokens=used.input_tokens,
            output_tokens=used.output_tokens,
            events=used.events,
            streamed=course.streamed,
            model=used.model,
            response_p95_ms=promise.response_p95_ms,
            first_byte_p95_ms=promise.first_byte_p95_ms,
            islanded=self._site.islanded(),
        )

    async def _note(self, draft: CallRecord) -> None:
        """That it is under way, in a row of its own. A disk that refuses costs the record only if the agent dies too."""
        try:
            await self._site.journal.write(put_setting(OPEN_KEY + draft.call, encode(draft).decode("utf-8")))
        except IntertieError as err:
            LOG.error("an open call is not on disk", call=draft.call, code=err.code)

    async def _record(self, record: CallRecord) -> None:
        """The fact: sealed, on the metering lane, in one transaction with the end of the open row. A full disk delays it, nothing drops it."""
        site = self._site
        sealed = seal(site.key, encode(record), site.key.public)

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            closed = CallClosed(seq=following[Lane.METERING], at=site.clock.now(), islanded=site.islanded(), sealed=sealed)
            return {Lane.METERING: [closed]}

        def also(cursor: Cursor) -> None:
            cursor.execute("DELETE FROM setting WHERE key = ?", (OPEN_KEY + record.call,))

        await site.record(entries, also)

    # --- what is offered ---

    def _why_not(self, offered: Offered) -> str:
        """Why nothing can be called now; empty: it can."""
        if self._site.pause.on:
            return "the site's owner has paused all lending"
        if offered.paused:
            return "the site's owner has paused it"
        full = self._site.room.why
        return full.text if full is not None else offered.trouble

    async def _look_at_upstreams(self) -> None:
        await asyncio.gather(*(self._probe(one) for one in self.offered.values()))

    async def _probe(self, offered: Offered) -> None:
        """Does the upstream answer? Any answer below 500 will do; without a path to ask, that it can be connected to."""
        if self._client is None:
            return
        rule = offered.rule
        address = urlsplit(rule.upstream)
        path = rule.health or ("/v1/models" if rule.protocol == "openai" else "")
        before = offered.trouble
        try:
            async with asyncio.timeout(HEALTH_LIMIT_S):
                if path:
                    key = {"Authorization": f"Bearer {offered.api_key}"} if offered.api_key else {}
                    async with self._client.get(
                        f"{address.scheme}://{address.netloc}{path}", headers=key, allow_redirects=False
                    ) as response:
                        offered.trouble = f"its server answered {response.status}" if response.status >= 500 else ""
                else:
                    _, writer = await asyncio.open_connection(address.hostname, address.port or (443 if address.scheme == "https" else 80))
                    writer.close()
                    await writer.wait_closed()
                    offered.trouble = ""
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as err:
            # ValueError: an address that turns out to be none. The other offerings go on.
            offered.trouble = f"its server does not answer ({type(err).__name__})"
        if offered.trouble != before:
            LOG.info("an upstream changed", endpoint=rule.name, trouble=offered.trouble)

    async def _tell(self) -> None:
        """All offerings to the registry, if it knows such and anything is news."""
        if not self._keeper_knows or (not self.offered and not self._told):
            return
        told = [
            OfferingTold(
                offering=one.offering,
                available=not (why := self._why_not(one)),
                paused=one.paused or self._site.pause.on,
                reason=why,
            )
            for one in self.offered.values()
        ]
        text = encode(told).decode("utf-8")
        if text == self._told:
            return

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            site = self._site
            entry = OfferingsTold(seq=following[Lane.REGISTRY], at=site.clock.now(), islanded=site.islanded(), offerings=told)
            return {Lane.REGISTRY: [entry]}

        await self._site.append(entries, put_setting(TOLD_KEY, text))
        self._told = text

    # --- the owner's door ---

    async def pause(self, name: str, paused: bool) -> None:
        """In force at once, also for calls that are being refused; what is under way goes on."""
        if name not in self.offered:
            raise NotFound("endpoint.not_found", f"{name[:63]!r} is no endpoint of this site", next_step="intertie local endpoint list")
        self.offered[name].paused = paused
        self._look.set()
        names = sorted(one for one, offered in self.offered.items() if offered.paused)
        await self._site.journal.write(put_setting(PAUSED_KEY, encode(names).decode("utf-8")))

    def status(self) -> LocalEndpoints:
        return LocalEndpoints(
            endpoints=[
                LocalEndpoint(
                    name=one.offering.name,
                    upstream=one.rule.upstream,
                    available=not self._why_not(one),
                    paused=one.paused,
                    reason=self._why_not(one),
                    under_way=one.under_way,
                    concurrency=one.offering.limits.concurrency,
                    calls=one.calls,
                    refused=one.refused,
                    told=bool(self._told),
                )
                for one in self.offered.values()
            ],
            problem=self.problem,
        )


def _open_calls(cursor: Cursor) -> list[str]:
    return [str(row[0]) for row in cursor.execute("SELECT value FROM setting WHERE key >= ? AND key < ?", (OPEN_KEY, "call0"))]


def _api_key(rule: EndpointRule) -> str:
    if not rule.api_key_file:
        return ""
    try:
        return Path(rule.api_key_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        text = f"[[endpoint]] {rule.name}: api_key_file cannot be read: {type(err).__name__}"
        raise Refused("endpoint.rule", text, next_step="let the agent's user read it") from err
