"""One list and its watch, for ever: list, watch from that version, list again after 410, begin again after a cut.

`current` is true while the stream stands; whoever reads the cache asks that first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Generic, TypeVar

from intertie.agent.kubernetes.api import PAGE, Api, Expired
from intertie.agent.kubernetes.core.cache import HasMeta, Kept
from intertie.agent.kubernetes.core.seen import Listed, parsed
from intertie.errors import IntertieError, Refused
from intertie.observe import log

LOG = log.get("agent.kubernetes")
T = TypeVar("T", bound=HasMeta)

# The server ends each watch after this long; API servers send a bookmark about once a minute.
WATCH_S = 240
# A stream that says nothing at all for longer than two bookmarks take is cut.
SILENT_S = 150.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 10.0
# Rights that are missing today are asked for again, but not every second.
REFUSED_PAUSE_S = 30.0
PAGES = 10_000


class Stream(Generic[T]):
    """`await run()`; `kept` is what it shows."""

    def __init__(self, api: Api, path: str, kind: type[T], query: Mapping[str, str] | None = None) -> None:
        self.api, self.path, self.query = api, path, dict(query or {})
        self.kept: Kept[T] = Kept(kind)
        self.current = False
        self.why = "not listed yet"
        self.listed = asyncio.Event()
        self.moved = asyncio.Event()
        """Set at each change, and cleared by who waits for one."""

    async def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if not self.kept.version:
                    await self._list()
                await self._watch()
                pause_s = FIRST_PAUSE_S
            except Expired:
                self._lapse("that version is gone; listing again")
                self.kept.version = ""
            except Refused as err:
                self._lapse(err.text)
                LOG.warning("a watch is refused", path=self.path, code=err.code, text=err.text)
                await asyncio.sleep(REFUSED_PAUSE_S if err.code == "kubernetes.forbidden" else LAST_PAUSE_S)
            except IntertieError as err:
                self._lapse(err.text)
                await asyncio.sleep(pause_s)
                pause_s = min(LAST_PAUSE_S, pause_s * 2)
            except Exception as err:
                # A fault of ours in reading a line is no reason to call what was seen before it current for ever.
                LOG.exception("a watch broke", path=self.path)
                self._lapse(f"{type(err).__name__} while watching")
                self.kept.version = ""
                await asyncio.sleep(LAST_PAUSE_S)

    def _lapse(self, why: str) -> None:
        self.current, self.why = False, why

    async def _list(self) -> None:
        pages: list[Listed] = []
        more = ""
        while len(pages) < PAGES:
            query = self.query | {"limit": str(PAGE)} | ({"continue": more} if more else {})
            pages.append(parsed(await self.api.get(self.path, query), Listed, self.path))
            more = pages[-1].metadata.continue_ or ""
            if not more:
                break
        if not pages[-1].metadata.resource_version:
            raise Refused("kubernetes.unreadable", f"{self.path}: a list without a resource version")
        self.kept.relisted(pages)
        self._changed()

    async def _watch(self) -> None:
        query = self.query | {
            "watch": "true",
            "resourceVersion": self.kept.version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        async with self.api.lines(self.path, query, SILENT_S) as lines:
            self.current, self.why = True, ""
            self.listed.set()
            async for line in lines:
                if not self.kept.changed(line):
                    raise Expired
                self._changed()

    def _changed(self) -> None:
        self.moved.set()
