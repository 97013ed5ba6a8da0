"""An exporter over HTTP: one bounded GET of the declared address, no redirect, no proxy, and what came by the mapping."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import aiohttp

from intertie.agent.sources import exposition, mapping
from intertie.agent.sources.reading import Reading
from intertie.agent.sources.settings import TelemetrySource
from intertie.clock import Clock
from intertie.errors import Refused

# The largest real answers (sixteen cards with all profiling fields) have some 300 KB.
MOST_BYTES = 4 * 1024 * 1024
# Series that carry a time: three looks old is no look any more, and a second look may come late.
LEAST_AGE_S = 30.0


def mapping_of(one: TelemetrySource, folder: Path) -> mapping.Mapping:
    """The owner's file if one is named, else the shipped one. `Refused('agent.mapping')`."""
    if not one.mapping:
        return mapping.shipped(one.source)
    path = folder / one.mapping
    try:
        with path.open("rb") as file:
            text = file.read(mapping.MOST_BYTES + 1)
    except OSError as err:
        raise Refused("agent.mapping", f"{path} cannot be read: {err.strerror}", next_step="name a file below the data folder") from err
    return mapping.read(text, str(path))


class Exporter:
    """`Source` of one exporter. Its connection is kept; what it said before is not: an exporter that is gone says nothing."""

    def __init__(self, settings: TelemetrySource, made: mapping.Mapping, clock: Clock) -> None:
        self.name, self.every_s = settings.source, settings.interval_s
        self._settings, self._mapping, self._clock = settings, made, clock
        self._names = made.names()
        self._session: aiohttp.ClientSession | None = None
        self.gone_since: datetime | None = None

    async def read(self) -> Reading:
        try:
            text = await self._get()
            found = exposition.reading(
                exposition.parse(text, self._names),
                self._mapping,
                now_s=self._clock.now().timestamp(),
                max_age_s=max(LEAST_AGE_S, 3 * self._settings.interval_s),
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, Refused) as err:
            why = err.text if isinstance(err, Refused) else f"{self._settings.url}: {err or type(err).__name__}"
            found = Reading(error=why)
        if not found.error:
            self.gone_since = None
            return found
        self.gone_since = self.gone_since or self._clock.now()
        return Reading(error=f"unknown since {self.gone_since:%Y-%m-%d %H:%M:%S}Z: {found.error}"[:500])

    async def _get(self) -> str:
        """`ValueError` for an answer that is none. The address is the one that was declared: nothing leads anywhere else."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
            self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar())
        headers = {"Accept": "text/plain;version=0.0.4"}
        async with self._session.get(self._settings.url, allow_redirects=False, headers=headers) as answer:
            if answer.status != 200:
                raise ValueError(f"answers {answer.status}")
            body = bytearray()
            async for chunk in answer.content.iter_chunked(64 * 1024):
                body += chunk
                if len(body) > MOST_BYTES:
                    raise ValueError(f"the answer has more than {MOST_BYTES} bytes")
        return body.decode("utf-8")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
