"""The way out of a site that has one door: which HTTP proxy a connection takes, if any, and the tunnel through it (CONNECT, RFC 9110 9.3.6).

What the environment says (`HTTPS_PROXY`, `NO_PROXY`, as curl reads them) holds for `https://` and `wss://`; a proxy that the owner names holds for
everything, plain NATS too. A password stands in the URL or in a file, goes to the proxy and nowhere else: not into a log, an error, an argument.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed lacks the second

from intertie.errors import Refused
from intertie.observe.redact import hide

PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443, "nats": 4222, "tls": 4222}
# A proxy that has not opened its door by then does not.
TUNNEL_LIMIT_S = 3.0
# Status line and headers of an answer to CONNECT.
ANSWER_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Proxy:
    """`host` and `port` may be shown; who logs in may not."""

    host: str
    port: int
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"Proxy({self.url})"

    @property
    def url(self) -> str:
        """Without who logs in."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def authorization(self) -> str:
        """The value of `Proxy-Authorization`; empty where nobody logs in."""
        if not self.user:
            return ""
        return f"Basic {base64.b64encode(f'{self.user}:{self.password}'.encode()).decode()}"


@dataclass(frozen=True, slots=True)
class Way:
    """How to leave. `named`: by the owner, for everything but `direct`; else what the environment says."""

    named: Proxy | None = None
    direct: Sequence[str] = ()
    """Hosts (or endings such as `.example.cn`) that need no proxy."""

    def through(self, url: str) -> Proxy | None:
        """The proxy that leads to `url`; None: straight. `Refused('link.proxy')` if the environment names what is none."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if self.named is not None:
            return None if _listed(host, self.direct) else self.named
        kind = {"wss": "https", "https": "https", "http": "http"}.get(parts.scheme, "")
        found = getproxies_environment()
        given = found.get(kind) or (found.get("all") if kind else None)
        if (
            not given
            or proxy_bypass_environment(f"{host}:{parts.port or PORTS.get(parts.scheme, 443)}", found)
            or proxy_bypass_environment(host, found)
        ):
            return None
        return parse_proxy(given, where=f"{kind}_proxy of the environment")


STRAIGHT = Way()


def _listed(host: str, direct: Sequence[str]) -> bool:
    return any(host == one.lstrip(".") or host.endswith(f".{one.lstrip('.')}") for one in direct if one)


def parse_proxy(text: str, *, where: str, password_file: Path | None = None) -> Proxy:
    """`[http://][user[:password]@]host[:port]`. `Refused('link.proxy' | 'link.proxy_password')`; neither repeats the text, which may hold a password."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        host, port = parts.hostname or "", parts.port or 8080
    except ValueError:
        host, port = "", 0
    if parts.scheme != "http" or not host or parts.path not in ("", "/"):
        raise Refused(
            "link.proxy",
            f"{where} names no HTTP proxy",
            next_step="write it as http://HOST:PORT; the user may stand before it: http://USER@HOST:PORT",
        )
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if password_file is not None:
        try:
            password = password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as err:
            why = err.strerror if isinstance(err, OSError) else "it is no text"
            raise Refused(
                "link.proxy_password",
                f"{password_file}: {why}",
                next_step="put the proxy's password there, readable by the agent alone (chmod 600)",
            ) from err
    hide(password)
    return Proxy(host, port, user, password)


async def tunnel(proxy: Proxy, host: str, port: int, limit: int = 64 * 1024) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A byte stream to host:port through the proxy. `ConnectionError` says what the proxy answered."""
    async with asyncio.timeout(TUNNEL_LIMIT_S):
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port, limit=limit)
        try:
            target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            login = f"Proxy-Authorization: {proxy.authorization}\r\n" if proxy.authorization else ""
            writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{login}\r\n".encode())
            await writer.drain()
            _judge(proxy, await _head(proxy, reader))
        except BaseException:
            writer.transport.abort()
            raise
    return reader, writer


async def _head(proxy: Proxy, reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as err:
        raise ConnectionError(f"the proxy {proxy.url} gave no answer to CONNECT") from err


def _judge(proxy: Proxy, head: bytes) -> None:
    status = head.split(b"\r\n", 1)[0].decode("latin-1")
    words = status.split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
        raise ConnectionError(f"the proxy {proxy.url} speaks no HTTP")
    if not words[1].startswith("2"):
        raise ConnectionError(f"the proxy {proxy.url} refuses: {words[1]}{' ' + words[2][:80] if len(words) > 2 else ''}")
