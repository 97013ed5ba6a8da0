"""A site behind a border that lets one thing through: an HTTP proxy that asks who is there and opens port 443 of the hub alone.

The hub offers its bus by WebSocket; TLS ends in front of it. Joining, the three lanes, the job's folder and its result all take that way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from tests.edges.connect_proxy import Authority, ConnectProxy, TlsFront
from tests.journeys.stack import Stack, environment, new_folder

from intertie.clock import SystemClock
from intertie.contracts.job import JobSpec, JobState
from intertie.contracts.site import SitesReply
from intertie.embedded.hub import HubPorts, HubSettings, init_hub
from intertie.embedded.process import free_port

PASSWORD = "pr0xy-passw0rd"
SITE_TOML = """\
[link]
proxy = "http://site-a@127.0.0.1:{port}"
proxy_password_file = "{file}"

[tells]
modules = ["cuda/12.4"]
folders = ["/data/imagenet"]
"""


class Border:
    """A hub behind two TLS fronts, and the one proxy that leads to them."""

    def __init__(self, stack: Stack, proxy: ConnectProxy, authority: Authority, fronts: tuple[TlsFront, TlsFront]) -> None:
        self.stack, self.proxy, self.authority, self.fronts = stack, proxy, authority, fronts

    def site_folder(self) -> Path:
        """The agent's folder as its owner prepared it."""
        folder = self.stack.folder / "site-a"
        folder.mkdir(mode=0o711)
        secret = folder / "proxy-password"
        secret.write_text(PASSWORD + "\n", encoding="utf-8")
        secret.chmod(0o600)
        (folder / "site.toml").write_text(SITE_TOML.format(port=self.proxy.port, file=secret), encoding="utf-8")
        return folder


@contextlib.asynccontextmanager
async def border() -> AsyncIterator[Border]:
    folder = await asyncio.to_thread(new_folder)
    authority = await asyncio.to_thread(Authority, folder)
    authority.certificate.chmod(0o644)
    ports = HubPorts(bus=free_port(), database=free_port(), gateway=free_port(), websocket=free_port())
    bus, gateway = TlsFront(authority, ports.websocket), TlsFront(authority, ports.gateway)
    await bus.start()
    await gateway.start()
    settings = HubSettings(
        time_zone="Asia/Shanghai",
        ports=ports,
        public_url=f"https://127.0.0.1:{gateway.port}",
        bus_public_urls=(f"wss://127.0.0.1:{bus.port}",),
    )
    layout = await asyncio.to_thread(init_hub, folder / "hub", SystemClock().now(), settings=settings)
    proxy = ConnectProxy("site-a", PASSWORD, {bus.port, gateway.port})
    await proxy.start()
    with environment({"SSL_CERT_FILE": str(authority.certificate), "NO_PROXY": "127.0.0.1"}):
        stack = Stack(folder, layout)
        try:
            await stack.start()
            yield Border(stack, proxy, authority, (bus, gateway))
        finally:
            await stack.stop()
            await proxy.stop()
            await bus.stop()
            await gateway.stop()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def check(folder: Path, certificate: Path) -> subprocess.CompletedProcess[str]:
    """The owner's pre-flight, from behind the border."""
    command = [sys.executable, "-m", "intertie.agent", "check", "--json", "--data", str(folder)]
    env = {"PATH": os.environ["PATH"], "SSL_CERT_FILE": str(certificate)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)


async def test_a_job_runs_behind_a_border_with_one_door() -> None:
    async with border() as made:
        stack, proxy = made.stack, made.proxy
        await asyncio.to_thread(made.site_folder)
        await stack.add_site("site-a", slots=2, env={"SSL_CERT_FILE": str(made.authority.certificate)})
        spec = JobSpec(name="far", script="#!/bin/sh\necho over the border > result.txt\n", outputs=["result.txt"])
        job = await stack.do(partial(stack.submit, spec))
        record = await stack.until(partial(stack.ended, job), what="the job ends")
        assert record.state is JobState.SUCCEEDED
        reached = {target.rpartition(":")[2] for target, status in proxy.asked if status == 200}
        assert reached == {str(front.port) for front in made.fronts}, "bus and gateway, and nothing else"

        checked = await stack.do(partial(check, stack.sites["site-a"].folder, made.authority.certificate))
        lines = {one["what"]: one for one in json.loads(checked.stdout)["lines"]}
        assert checked.returncode == 0 and PASSWORD not in checked.stdout + checked.stderr, checked.stdout
        assert [lines[what]["level"] for what in ("proxy", "gateway", "bus", "clock")] == ["ok"] * 4
        assert f"127.0.0.1:{proxy.port}" in lines["bus"]["text"]

        await proxy.stop()
        await stack.until(lambda: not stack.site_record("site-a").hears_us or not stack.fresh("site-a"), what="the hub misses the site")
        await proxy.start()
        again = await stack.do(partial(stack.submit, spec))
        record = await stack.until(partial(stack.ended, again), what="a job ends after the proxy is back", limit_s=90)
        assert record.state is JobState.SUCCEEDED

        said = "".join(
            file.read_text(encoding="utf-8", errors="replace") for file in await stack.do(lambda: list(stack.layout.log.glob("*")))
        )
        assert "over the border" not in said and PASSWORD not in said
        facts = (await stack.do(lambda: stack.admin.get("/v1/sites", SitesReply, {"site": "site-a"}))).pools[0].inventory
        assert facts is not None and facts.facts is not None
        assert (facts.facts.modules, facts.facts.partitions) == (["cuda/12.4"], None)
