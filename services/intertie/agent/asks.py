"""Read-only questions of the hub: logs by offset, status. Losing one costs an answer; nothing here changes anything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from intertie.agent.door import read_log
from intertie.agent.site import Site
from intertie.bus.port import Bus, Message, Subscription
from intertie.contracts.base import decode, encode
from intertie.contracts.link import Answer, Ask, AskLog, AskRefused, LogChunk, SiteStatus
from intertie.errors import IntertieError
from intertie.observe import log

LOG = log.get("agent.asks")

ASK = "down.ask"
ANSWER = "up.answer"
# Control characters take six bytes each in JSON: this much text always fits one message of 1 MiB.
LOG_BYTES = 128 * 1024


class Asks:
    """Answers questions as long as its subscription lives."""

    def __init__(self, bus: Bus, site: Site, status: Callable[[], Awaitable[SiteStatus]]) -> None:
        self._bus, self._site, self._status = bus, site, status

    async def listen(self) -> Subscription:
        return await self._bus.subscribe(ASK, self._asked, workers=4, backlog=256)

    async def _asked(self, message: Message) -> None:
        try:
            ask = decode(message.body, Ask, what="question")
        except IntertieError as err:
            LOG.warning("a question cannot be read", text=err.text)
            return
        try:
            said = await self._answer(ask)
        except IntertieError as err:
            said = AskRefused(code=err.code, text=err.text)
        try:
            await self._bus.publish(ANSWER, encode(Answer(id=ask.id, answer=said)))
        except IntertieError as err:
            LOG.info("an answer was lost", code=err.code, text=err.text)

    async def _answer(self, ask: Ask) -> LogChunk | SiteStatus | AskRefused:
        if not isinstance(ask.question, AskLog):
            return await self._status()
        question = ask.question
        attempt = self._site.books.attempts.get(question.attempt)
        if attempt is None or attempt.local is not None:
            return AskRefused(code="agent.unknown_attempt", text=f"this site knows no attempt {question.attempt}")
        found = await read_log(self._site, attempt, question.offset, min(question.limit, LOG_BYTES))
        return LogChunk(
            attempt=attempt.id,
            offset=found.offset,
            next_offset=found.next_offset,
            text=found.text,
            total=found.total,
            ended=found.ended,
        )
