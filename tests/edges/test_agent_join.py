"""Joining over HTTP, and bytes to and from a gateway: real sockets, a hub that answers, refuses, or is not there."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner
from tests.fakes.agents import pool

from intertie.agent import join as room
from intertie.agent.__main__ import cli as agent_cli
from intertie.agent.config import Folder
from intertie.agent.transfer import GatewayTransfer
from intertie.clock import SystemClock
from intertie.contracts.base import decode, encode
from intertie.contracts.identity import Joined, JoinSite
from intertie.contracts.job import ResultRef, WorkRef
from intertie.embedded.process import free_port
from intertie.errors import Refused, Unavailable
from intertie.ids import SiteName, TenantName, digest
from intertie.trust.claims import verify_site_claims
from intertie.trust.keys import Key

SITE = SiteName("lab")


@dataclass
class Hub:
    """Remembers who asked what; `status` other than 200 plays trouble."""

    url: str = ""
    asked: list[JoinSite] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    proofs: list[str] = field(default_factory=list)
    status: int = 200

    async def join(self, request: web.Request) -> web.Response:
        self.asked.append(decode(await request.read(), JoinSite))
        if self.status != 200:
            problem = {"title": "refused", "status": self.status, "code": "identity.token_used", "detail": "the token was used"}
            return web.json_response(problem, status=self.status, content_type="application/problem+json")
        joined = Joined(site=SITE, account="A", bus_urls=[], gateway_url=self.url, service_keys={}, owner_tenant=TenantName("acme"))
        return web.Response(body=encode(joined), content_type="application/json")

    async def put(self, request: web.Request) -> web.Response:
        self.proofs.append(request.headers["Authorization"])
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        self.objects[request.match_info["digest"]] = await request.read()
        return web.Response(status=201)

    async def get(self, request: web.Request) -> web.Response:
        self.proofs.append(request.headers["Authorization"])
        found = self.objects.get(request.match_info["digest"])
        return web.Response(status=404) if found is None else web.Response(body=found)


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    made = Hub()
    app = web.Application()
    app.router.add_post("/v1/join", made.join)
    app.router.add_put("/v1/objects/{digest}", made.put)
    app.router.add_get("/v1/objects/{digest}", made.get)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    made.url = f"http://127.0.0.1:{port}"
    yield made
    await runner.cleanup()


async def test_a_join_writes_down_the_answer_and_no_seed_leaves(hub: Hub, short_folder: Path) -> None:
    folder = Folder(short_folder / "site")
    joined = await room.join(folder, hub=hub.url, token="once", profiles=[pool().profile])
    assert joined.site == SITE and folder.joined() == joined and folder.profiles() == [pool().profile]
    [asked] = hub.asked
    assert asked.token == "once" and asked.site_key.startswith("U") and asked.signing_key.startswith("A")
    for path in (folder.site_key, folder.signing_key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_text(encoding="ascii").strip().encode() not in encode(asked)


async def test_a_join_that_is_tried_again_shows_the_same_keys(hub: Hub, short_folder: Path) -> None:
    folder = Folder(short_folder / "site")
    hub.status = 503
    with pytest.raises(Unavailable):
        await room.join(folder, hub=hub.url, token="once", profiles=[pool().profile])
    hub.status = 200
    await room.join(folder, hub=hub.url, token="once", profiles=[pool().profile])
    assert hub.asked[0].site_key == hub.asked[1].site_key


async def test_a_refused_join_says_the_hub_s_code_and_leaves_nothing_joined(hub: Hub, short_folder: Path) -> None:
    hub.status = 400
    with pytest.raises(Refused, match=r"identity\.token_used: the token was used"):
        await room.join(Folder(short_folder / "site"), hub=hub.url, token="used", profiles=[pool().profile])
    with pytest.raises(Refused, match=r"agent\.not_joined"):
        Folder(short_folder / "site").joined()


async def test_a_folder_that_has_joined_does_not_join_again(hub: Hub, short_folder: Path) -> None:
    folder = Folder(short_folder / "site")
    await room.join(folder, hub=hub.url, token="once", profiles=[pool().profile])
    with pytest.raises(Refused, match=r"agent\.joined_already"):
        await room.join(folder, hub=hub.url, token="twice", profiles=[pool().profile])


PROFILES = [
    ("a field is missing", '[[pool]]\npool = "gpu"\naccelerator = "A100"\n', "count"),
    ("no task types", '[[pool]]\npool="g"\naccelerator="A100"\ncount=1\nmemory_mib=1\ninterconnect="pcie"\ntask_types=[]\n', "task_types"),
    ("not TOML", "[[pool", "not a profile"),
]


@pytest.mark.parametrize(("what", "text", "said"), PROFILES, ids=[row[0] for row in PROFILES])
def test_a_profile_that_lacks_something_is_refused_by_name(short_folder: Path, what: str, text: str, said: str) -> None:
    path = short_folder / "profile.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(Refused, match=said):
        room.read_profiles(path)


async def test_bytes_go_out_and_come_back_by_digest_with_the_site_s_proof(hub: Hub, short_folder: Path) -> None:
    key, clock = Key.new("U"), SystemClock()
    transfer = GatewayTransfer(hub.url, SITE, key, clock)
    data = b"x" * 700_000
    source, target = short_folder / "out", short_folder / "in"
    source.write_bytes(data)
    await transfer.store(ResultRef(digest=digest(data), size=len(data), files=1), source)
    await transfer.fetch(WorkRef(digest=digest(data), size=len(data)), target)
    assert hashlib.sha256(target.read_bytes()).digest() == hashlib.sha256(data).digest()
    for proof in hub.proofs:
        kind, token = proof.split(" ")
        assert kind == "Intertie-Site" and verify_site_claims(token, {SITE: key.public}, clock.now()).site == SITE


async def test_bytes_that_are_not_what_was_named_are_not_kept(hub: Hub, short_folder: Path) -> None:
    named = digest(b"what was packed")
    hub.objects[named] = b"what was served"
    transfer = GatewayTransfer(hub.url, SITE, Key.new("U"), SystemClock())
    with pytest.raises(Unavailable, match=r"agent\.pack_damaged"):
        await transfer.fetch(WorkRef(digest=named, size=15), short_folder / "in")
    assert os.listdir(short_folder) == []


ANSWERS = [(413, Refused), (422, Refused), (401, Unavailable), (403, Unavailable), (500, Unavailable), (503, Unavailable)]


@pytest.mark.parametrize(("status", "kind"), ANSWERS, ids=[str(row[0]) for row in ANSWERS])
async def test_a_gateway_s_refusal_is_final_only_if_it_can_never_change(
    hub: Hub, short_folder: Path, status: int, kind: type[Exception]
) -> None:
    """401 is no proof of revocation: a result waits, it is never thrown away for it."""
    hub.status = status
    source = short_folder / "out"
    source.write_bytes(b"1")
    with pytest.raises(kind):
        await GatewayTransfer(hub.url, SITE, Key.new("U"), SystemClock()).store(ResultRef(digest=digest(b"1"), size=1, files=1), source)


async def test_a_gateway_that_is_not_there_is_tried_again_later(short_folder: Path) -> None:
    transfer = GatewayTransfer(f"http://127.0.0.1:{free_port()}", SITE, Key.new("U"), SystemClock())
    with pytest.raises(Unavailable, match=r"agent\.gateway_away"):
        await transfer.fetch(WorkRef(digest=digest(b""), size=0), short_folder / "in")


@pytest.mark.parametrize("by", ["stdin", "environment"])
def test_the_join_token_is_no_argument_that_every_process_list_shows(short_folder: Path, by: str) -> None:
    """Port 9 is where nothing listens: the token was read, and the hub is away."""
    asked = ["join", "--detect", "--interconnect", "none", "--hub", "http://127.0.0.1:9", "--data", str(short_folder / "site")]
    given = (
        {"args": [*asked, "--token-file", "-"], "input": "once"}
        if by == "stdin"
        else {"args": asked, "env": {"INTERTIE_JOIN_TOKEN": "once"}}
    )
    done = CliRunner().invoke(agent_cli, **given)
    assert (done.exit_code, "agent.hub_away" in done.output) == (5, True)
    assert CliRunner().invoke(agent_cli, [*asked, "--token", "once"]).exit_code == 2
    assert CliRunner().invoke(agent_cli, asked, env={"INTERTIE_JOIN_TOKEN": ""}).exit_code == 2
