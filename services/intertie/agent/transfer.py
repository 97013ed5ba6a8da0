"""Bytes between this site and the gateway, over HTTP, always dialled from here and named by digest. Whoever calls decides how long to try."""

from __future__ import annotations

import asyncio
import hashlib
import os
import ssl
from pathlib import Path
from typing import IO, Protocol

import aiohttp

from intertie.agent.way import STRAIGHT, Way, http_options
from intertie.clock import Clock
from intertie.contracts.job import ResultRef, WorkRef
from intertie.errors import Refused, Unavailable
from intertie.ids import Digest, SiteName
from intertie.trust.claims import site_claims
from intertie.trust.keys import Key

# A pack of the largest kind over a slow line takes minutes; a line that carries nothing for this long is dead.
IDLE_S = 60.0
CONNECT_S = 10.0
CHUNK = 256 * 1024
# The gateway's own word on what will never be taken; every other refusal may be a passing one (a key being rotated, a proxy).
NEVER = frozenset({400, 404, 409, 411, 413, 415, 422})


class Transfer(Protocol):
    """`Unavailable`: try again later. `Refused`: this will never do."""

    async def fetch(self, work: WorkRef, target: Path) -> None: ...

    async def store(self, result: ResultRef, source: Path) -> None: ...


class GatewayTransfer:
    """`PUT` and `GET` on `<gateway>/v1/objects/<digest>`, proven by a JWT of the site key."""

    def __init__(self, gateway: str, site: SiteName, key: Key, clock: Clock, hub_ca: str = "", way: Way = STRAIGHT) -> None:
        self._gateway = gateway.rstrip("/")
        self._site, self._key, self._clock = site, key, clock
        self._options = http_options(way, gateway)
        self._tls: ssl.SSLContext | bool = ssl.create_default_context(cadata=hub_ca) if hub_ca else True

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Intertie-Site {site_claims(self._key, self._site, self._clock.now())}"}

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=IDLE_S)
        return aiohttp.ClientSession(timeout=timeout)

    def _url(self, digest: Digest) -> str:
        return f"{self._gateway}/v1/objects/{digest}"

    async def fetch(self, work: WorkRef, target: Path) -> None:
        """Download into `target`; whole, of the right size and digest, or not there at all."""
        part = target.with_name(f".{target.name}.part")
        seen, size = hashlib.sha256(), 0
        try:
            async with (
                self._session() as session,
                session.get(self._url(work.digest), headers=self._headers(), ssl=self._tls, **self._options) as answer,
            ):
                await _judge(answer)
                with await asyncio.to_thread(_create, part) as file:
                    async for chunk in answer.content.iter_chunked(CHUNK):
                        size += len(chunk)
                        if size > work.size:
                            break
                        seen.update(chunk)
                        await asyncio.to_thread(file.write, chunk)
                    await asyncio.to_thread(_sync, file)
            if size != work.size or f"sha256:{seen.hexdigest()}" != work.digest:
                raise Unavailable("agent.pack_damaged", f"the pack {work.digest} did not arrive whole", retry_after_s=2)
            part.rename(target)
        except (aiohttp.ClientError, TimeoutError) as err:
            raise Unavailable("agent.gateway_away", f"{self._gateway}: {err or type(err).__name__}", retry_after_s=2) from err
        except OSError as err:
            raise Unavailable("agent.disk_full", f"the pack {work.digest} cannot be written: {err.strerror}", retry_after_s=10) from err
        finally:
            part.unlink(missing_ok=True)

    async def store(self, result: ResultRef, source: Path) -> None:
        """Upload; the same bytes again are taken again."""
        headers = self._headers() | {"Content-Type": "application/gzip", "Content-Length": str(result.size)}
        try:
            with source.open("rb") as file:
                async with (
                    self._session() as session,
                    session.put(self._url(result.digest), data=file, headers=headers, ssl=self._tls, **self._options) as answer,
                ):
                    await _judge(answer)
        except FileNotFoundError as err:
            raise Refused("agent.result_gone", f"{source} is not there any more") from err
        except (aiohttp.ClientError, TimeoutError, OSError) as err:
            raise Unavailable("agent.gateway_away", f"{self._gateway}: {err or type(err).__name__}", retry_after_s=2) from err


def _create(path: Path) -> IO[bytes]:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


async def _judge(answer: aiohttp.ClientResponse) -> None:
    if answer.status < 300:
        return
    said = (await answer.content.read(500)).decode("utf-8", "replace")
    text = f"the gateway answers {answer.status}: {said}"
    if answer.status in NEVER:
        raise Refused("agent.gateway_refused", text)
    raise Unavailable("agent.gateway_away", text, retry_after_s=2)
