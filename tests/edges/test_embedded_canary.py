"""The canary's account on a real server: a site's way to the scheduler's lane, that nobody joined and nobody lists."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.edges.conftest import new_hub

from intertie.bus.nats import NatsBus
from intertie.bus.port import Message
from intertie.clock import SystemClock
from intertie.embedded.hub import environment, init_hub, running_hub_bus
from intertie.errors import Refused, Unavailable
from intertie.ids import SiteName
from intertie.trust import nats_jwt
from intertie.trust.keys import Key


async def test_the_canary_syncs_on_the_schedulers_lane_under_its_own_name_and_says_nothing_else(short_folder: Path) -> None:
    layout = await asyncio.to_thread(new_hub, short_folder)
    assert environment(layout, "scheduler")["INTERTIE_CANARY_CREDS"] == str(layout.creds_file("canary"))
    heard: list[str] = []

    async def answer(message: Message) -> bytes:
        heard.append(message.subject)
        return b"synced"

    with running_hub_bus(layout):
        scheduler = await NatsBus.connect(layout.bus_url, name="scheduler", credentials=layout.creds_file("scheduler"))
        canary = await NatsBus.connect(layout.bus_url, name="canary", credentials=layout.creds_file("canary"))
        try:
            await scheduler.subscribe("intertie.v1.up.*.scheduler.sync", answer)
            assert (await canary.request("up.scheduler.sync", b"", timeout_s=5)).body == b"synced"
            for subject in (
                "up.registry.sync",
                "up.metering.sync",
                "up.answer",
                "tel.gpu.node",
                "intertie.v1.evt.scheduler.job.changed.t.s",
            ):
                with pytest.raises(Unavailable):
                    await canary.request(subject, b"", timeout_s=1)
        finally:
            await canary.close()
            await scheduler.close()
    assert heard == ["intertie.v1.up.canary.scheduler.sync"]


def test_a_hub_made_before_gets_its_canary_at_the_next_init_and_keeps_it(short_folder: Path) -> None:
    layout = new_hub(short_folder)
    layout.key_file("canary").unlink()
    layout.creds_file("canary").unlink()
    init_hub(short_folder, SystemClock().now())
    first = Key.read(layout.key_file("canary")).public
    init_hub(short_folder, SystemClock().now())
    assert Key.read(layout.key_file("canary")).public == first
    assert layout.creds_file("canary").stat().st_mode & 0o777 == 0o600
    assert f"{first}: " in (layout.nats / "preload.conf").read_text(encoding="ascii")


def test_no_site_gets_the_canarys_account() -> None:
    with pytest.raises(Refused):
        nats_jwt.site_account(Key.new("O"), SiteName("canary"), Key.new("A").public, Key.new("A").public, [], SystemClock().now())
