"""`intertie doctor`: what works and what does not, line by line, each failure with the command that mends it. Safe to paste to others."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import click
import msgspec

from intertie.cli.client import Client
from intertie.cli.config import load_login
from intertie.cli.out import json_option, line, local, print_json
from intertie.contracts.http import Health, Whoami
from intertie.contracts.site import SitesReply
from intertie.errors import IntertieError
from intertie.text import language, say


def _say(key: str, **values: object) -> str:
    return say(f"doctor.{key}", language(), **values)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    what: str
    level: Literal["ok", "warn", "bad"]
    text: str
    fix: str = ""


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check this machine, the hub and the way between. Leaves with 1 if something fails."""
    findings = [*machine(), *hub_findings()]
    if as_json:
        print_json(findings)
    else:
        for f in findings:
            line(f"{say(f'cli.{f.level}', language()):5} {f.what}: {f.text}")
            if f.fix:
                line(f"      → {f.fix}")
    sys.exit(1 if any(f.level == "bad" for f in findings) else 0)


def machine() -> Iterator[Finding]:
    """This machine."""
    yield Finding(what="python", level="ok", text=platform.python_version())
    home = Path.home()
    free = shutil.disk_usage(home if home.exists() else "/").free // (1024 * 1024)
    level: Literal["ok", "warn"] = "ok" if free > 1024 else "warn"
    yield Finding(
        what="disk",
        level=level,
        text=_say("disk", free=free),
        fix="" if free > 1024 else _say("disk_fix"),
    )


def hub_findings() -> Iterator[Finding]:
    """The hub, the token, the sites."""
    try:
        client = Client(load_login())
    except IntertieError as err:
        yield Finding(what="hub", level="bad", text=err.text, fix=err.next_step)
        return
    try:
        health = client.get("/healthz", Health)
        yield Finding(what="hub", level="ok", text=_say("hub", url=client.url, version=health.version))
        who = client.get("/v1/whoami", Whoami)
        yield Finding(what="token", level="ok", text=f"{who.name}: {', '.join(who.roles)}{f' of {who.tenant}' if who.tenant else ''}")
        sites = client.get("/v1/sites", SitesReply)
    except IntertieError as err:
        if err.code == "http.503":
            yield Finding(what="hub", level="bad", text=_say("no_bus", url=client.url), fix=_say("no_bus_fix"))
        else:
            yield Finding(what="hub", level="bad", text=f"{err.text} [{err.code}]", fix=err.next_step)
        return
    if not sites.sites:
        yield Finding(what="sites", level="warn", text=_say("no_site"), fix="intertie site invite NAME --owner WHO --tenant TENANT")
    for s in sites.sites:
        what = _say("site", site=s.site)
        if s.left_at is not None:
            yield Finding(what=what, level="ok", text=say("site.left", language(), at=local(s.left_at)))
        elif s.freshness == "fresh" and s.hears_us:
            yield Finding(what=what, level="ok", text=_say("heard"))
        else:
            # Heard a moment ago, but the site has not said that our answers arrive.
            text = _say("one_way") if s.freshness == "fresh" else say(f"freshness.{s.freshness}", language())
            yield Finding(what=what, level="warn", text=text, fix=_say("site_fix"))
