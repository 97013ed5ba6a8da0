"""`[[telemetry]]` in `site.toml`: which sources are read, where, how often. Pure to import; the mapping itself is read at the start."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from intertie.errors import Refused

Seconds = Annotated[float, msgspec.Meta(gt=0, le=300)]


class TelemetrySource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source. Without any, NVML is read; with some, only those that are named (name `nvml` too to have both)."""

    source: Literal["nvml", "dcgm", "ascend", "prometheus"]
    url: str = ""
    """Of an exporter: `http://127.0.0.1:9400/metrics`, or of another host by its name or address."""
    host: str = ""
    """Said on purpose for any host but this machine: it must be the one in `url`."""
    mapping: str = ""
    """A TOML file of the owner's, relative to the data folder; `dcgm` and `ascend` bring their own."""
    interval_s: Seconds = 10.0
    timeout_s: Seconds = 3.0


def check(one: TelemetrySource, place: int) -> None:
    """`Refused('agent.telemetry')` with the place, for what cannot be a source."""

    def refuse(what: str, next_step: str) -> Refused:
        return Refused("agent.telemetry", f"site.toml, telemetry[{place}] ({one.source}): {what}", next_step=next_step)

    if one.source == "nvml":
        if one.url or one.mapping or one.host:
            raise refuse("nvml has no url, host or mapping", "leave them out")
        return
    if one.source == "prometheus" and not one.mapping:
        raise refuse("no mapping", 'name a file: mapping = "my-exporter.toml" (the shipped dcgm.toml and ascend.toml are examples)')
    try:
        parts = urlsplit(one.url)
        host, port = parts.hostname or "", parts.port
    except ValueError as err:
        raise refuse(f"url {one.url[:200]!r} cannot be read: {err}", 'write url = "http://127.0.0.1:9400/metrics"') from err
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise refuse(f"url {one.url[:200]!r} is no address of an exporter", 'write url = "http://127.0.0.1:9400/metrics"')
    if parts.username is not None or parts.password is not None:
        raise refuse("url holds a user or a password", "let the exporter listen on the loopback address, without one")
    if not loopback(host) and one.host.lower() != host:
        raise refuse(f"{host} is not this machine", f'say that it is meant: host = "{host}"')


def loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
