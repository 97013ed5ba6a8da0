"""The way to the hub: proxy, gateway, clock against the hub's, bus with the site's own credentials."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import aiohttp
import msgspec

from intertie.agent.check.report import Check, Line, Place, line
from intertie.agent.way import STRAIGHT, Way, http_options, named
from intertie.bus.nats import NatsBus
from intertie.bus.proxy import PORTS
from intertie.clock import SystemClock
from intertie.contracts.http import Health
from intertie.contracts.identity import Joined
from intertie.errors import IntertieError
from intertie.trust.keys import Key
from intertie.trust.login import SiteLogin

ASK_S = 10.0
BUS_S = 6.0
# An HTTP date has whole seconds; segments are stamped with the offset and its error, tokens bear a minute.
CLOCK_WARN_S, CLOCK_FAIL_S = 3.0, 45.0


def _way(place: Place) -> Way:
    link = place.rules.link
    return named(link, place.folder.rules_file) if link is not None and link.proxy else STRAIGHT


def _tls(joined: Joined | None) -> ssl.SSLContext | None:
    return ssl.create_default_context(cadata=joined.hub_ca) if joined is not None and joined.hub_ca else None


async def proxy(place: Place) -> Sequence[Line]:
    if not place.gateway:
        return []
    try:
        found = _way(place).through(place.gateway)
    except IntertieError as err:
        return [line("fail", "proxy.bad", error=err.text, fix="proxy")]
    if found is None:
        return [line("ok", "proxy.none")]
    try:
        async with asyncio.timeout(ASK_S):
            _, writer = await asyncio.open_connection(found.host, found.port)
            writer.close()
    except (OSError, TimeoutError) as err:
        return [line("fail", "proxy.down", url=found.url, error=_why(err), fix="proxy")]
    return [line("ok", "proxy.ok", url=found.url)]


async def gateway(place: Place) -> Sequence[Line]:
    """Its health, and its clock by the Date of that answer."""
    url = place.gateway.rstrip("/")
    if not url:
        return [] if place.node() is not None else [line("warn", "gateway.none", fix="hub")]
    parts, clock, loop = urlsplit(url), SystemClock(), asyncio.get_running_loop()
    try:
        port = parts.port or PORTS.get(parts.scheme, 443)
        options = http_options(_way(place), url)
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            began = loop.time()
            async with session.get(f"{url}/healthz", ssl=_tls(place.joined) or True, **options) as answer:
                body, took, now = await answer.read(), loop.time() - began, clock.now()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, IntertieError) as err:
        told = {"host": parts.hostname or "?", "port": parts.port or PORTS.get(parts.scheme, 443) if parts.netloc.count(":") < 2 else "?"}
        return [line("fail", "gateway.down", url=url, error=_why(err), fix="gateway", **told)]
    try:
        health = msgspec.json.decode(body, type=Health)
    except msgspec.MsgspecError:
        return [line("fail", "gateway.odd", url=url, status=answer.status, fix="gateway", host=parts.hostname, port=port)]
    return [line("ok", "gateway.ok", url=url, ms=took * 1_000, version=health.version), _clock(answer.headers.get("Date", ""), now, took)]


def _clock(date: str, now: datetime, took_s: float) -> Line:
    """`now` is when the answer was read; the hub's date lies half the way before it, in whole seconds."""
    try:
        hubs = parsedate_to_datetime(date)
        offset = (now - hubs).total_seconds() - took_s / 2 - 0.5
    except (ValueError, TypeError):
        return line("warn", "clock.unknown")
    error = 0.5 + took_s / 2
    sure = max(0.0, abs(offset) - error)
    if sure > CLOCK_FAIL_S:
        return line("fail", "clock.off", offset=offset, error=error, fix="clock")
    if sure > CLOCK_WARN_S:
        return line("warn", "clock.off", offset=offset, error=error, fix="clock")
    return line("ok", "clock.ok", offset=offset, error=error)


async def bus(place: Place) -> Sequence[Line]:
    """Every address, logged in as this site; the agent's own session is not disturbed."""
    joined = place.joined
    if joined is None:
        return []
    try:
        login, way = SiteLogin(Key.read(place.folder.signing_key), joined.account, SystemClock()), _way(place)
    except IntertieError as err:
        return [line("fail", "bus.down", url="-", error=err.text, fix="bus")]
    tried = await asyncio.gather(*(_logged_in(url, login, way, _tls(joined)) for url in joined.bus_urls))
    works = any(not error for error, _ in tried)
    found = []
    for url, (error, took) in zip(joined.bus_urls, tried, strict=True):
        if not error:
            over = way.through(url)
            found.append(line("ok", "bus.ok", url=url, ms=took * 1_000, how=f" · {over.url}" if over else ""))
        else:
            found.append(line("warn" if works else "fail", "bus.some" if works else "bus.down", url=url, error=error, fix="bus"))
    return found


async def _logged_in(url: str, login: SiteLogin, way: Way, tls: ssl.SSLContext | None) -> tuple[str, float]:
    """(why not, seconds)."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        made = await NatsBus.connect(url, name="check", credentials=login, tls=tls, way=way, timeout_s=BUS_S)
    except IntertieError as err:
        return err.text, 0.0
    took = loop.time() - began
    await made.close()
    return "", took


def _why(err: BaseException) -> str:
    return str(err) or type(err).__name__


CHECKS: Sequence[Check] = (proxy, gateway, bus)
