"""A watch that breaks inside says so: what it showed before is called current no longer, and it begins again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from intertie.agent.kubernetes import watch
from intertie.agent.kubernetes.api import Api, Expired
from intertie.agent.kubernetes.core.seen import Job
from intertie.agent.kubernetes.watch import Stream
from intertie.errors import Unavailable

LIMIT_S = 45.0


class PlayedApi(Api):
    """Lists nothing; its first watch ends in an error that nobody foresaw, its second in a version that is gone, the third stands."""

    def __init__(self) -> None:
        self.lists = self.watches = 0
        self.broke, self.stands = asyncio.Event(), asyncio.Event()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        self.lists += 1
        return json.dumps({"kind": "JobList", "metadata": {"resourceVersion": str(self.lists)}, "items": []}).encode()

    @asynccontextmanager
    async def lines(self, path: str, query: Mapping[str, str], silent_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        self.watches += 1
        number = self.watches

        async def told() -> AsyncIterator[bytes]:
            if number == 1:
                self.broke.set()
                raise KeyError("nobody foresaw this")
            if number == 2:
                raise Expired
            self.stands.set()
            await asyncio.Event().wait()
            yield b""

        yield told()


async def test_a_watch_that_breaks_inside_is_not_current_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LAST_PAUSE_S", 0.3)
    api = PlayedApi()
    stream = Stream(api, "/apis/batch/v1/namespaces/x/jobs", Job)
    running = asyncio.create_task(stream.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            await api.broke.wait()
            while stream.current:  # noqa: ASYNC110  # a stream has no event for its lapse
                await asyncio.sleep(0)
            assert stream.why == "KeyError while watching"
            await api.stands.wait()
        assert stream.current and api.lists == 3, "listed anew after each"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_a_version_that_is_gone_is_for_whoever_did_not_watch_just_no_answer_now() -> None:
    assert isinstance(Expired(), Unavailable)
