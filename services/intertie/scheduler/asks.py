"""Read-only questions to a site, answered by an id on another subject. Losing one costs an answer, never a fact."""

from __future__ import annotations

import asyncio

from intertie.bus.port import Bus, Message, Subscription
from intertie.contracts.base import decode, encode
from intertie.contracts.link import Answer, Ask, AskLog, AskRefused, LogChunk, SiteStatus, answer_subject, ask_subject
from intertie.errors import NotFound, Unavailable
from intertie.ids import SiteName, mint

# A person waits for this; a site that speaks at all answers in milliseconds.
ANSWER_S = 3.0
# Questions in flight; more would only wait for a site that is away.
OPEN_ASKS = 256


class Asker:
    """`await listen()` once, then `log(…)`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._open: dict[str, tuple[SiteName, asyncio.Future[LogChunk | SiteStatus | AskRefused]]] = {}

    async def listen(self) -> Subscription:
        return await self._bus.subscribe(answer_subject("*"), self._on_answer, workers=1)

    async def _on_answer(self, message: Message) -> None:
        answer = decode(message.body, Answer, what="answer")
        site, waiting = self._open.get(answer.id, (None, None))
        # The site's name stands in the subject, put there by the server: nobody answers for another.
        if waiting is not None and site == message.subject.split(".")[3] and not waiting.done():
            waiting.set_result(answer.answer)

    async def log(self, site: SiteName, question: AskLog, *, timeout_s: float = ANSWER_S) -> LogChunk:
        """`Unavailable('scheduler.site_silent')` if the site does not answer; `NotFound` with its code if it has no such log."""
        if len(self._open) >= OPEN_ASKS:
            raise Unavailable("scheduler.asks_full", f"{OPEN_ASKS} questions to sites are open", retry_after_s=1.0)
        ask = Ask(id=mint("ask"), question=question)
        future: asyncio.Future[LogChunk | SiteStatus | AskRefused] = asyncio.get_running_loop().create_future()
        self._open[ask.id] = (site, future)
        try:
            await self._bus.publish(ask_subject(site), encode(ask))
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError as err:
            raise site_silent(site) from err
        finally:
            del self._open[ask.id]
        if isinstance(answer, AskRefused):
            raise NotFound(answer.code, answer.text)
        if not isinstance(answer, LogChunk):
            raise site_silent(site)
        return answer


def site_silent(site: SiteName) -> Unavailable:
    return Unavailable(
        "scheduler.site_silent",
        f"site {site} does not answer; its logs stay there and can be read when it is back",
        retry_after_s=5.0,
        next_step="the job itself is not affected; try again later",
    )
