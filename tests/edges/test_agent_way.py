"""The agent's HTTP calls by the way that its owner named: through the proxy with its login, and straight where the owner says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from tests.edges.connect_proxy import Authority, ConnectProxy, TlsFront

from intertie.agent.config import Folder
from intertie.agent.way import http_options, way_of
from intertie.bus.proxy import Proxy, Way
from intertie.errors import Refused


async def heads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[str]) -> None:
    seen.append((await reader.readuntil(b"\r\n\r\n")).decode("latin-1"))
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    await writer.drain()
    writer.close()


async def test_plain_http_is_handed_to_the_proxy_with_its_login_alone() -> None:
    seen: list[str] = []
    proxy = await asyncio.start_server(lambda r, w: heads(r, w, seen), "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    way = Way(Proxy("127.0.0.1", port, "me", "word"))
    async with proxy, aiohttp.ClientSession() as session:
        headers = {"Authorization": "Intertie-Site seal"}
        async with session.get("http://hub.example/healthz", headers=headers, **http_options(way, "http://hub.example")) as answer:
            assert await answer.text() == "ok"
    assert seen[0].startswith("GET http://hub.example/healthz ")
    assert "Proxy-Authorization: Basic bWU6d29yZA==\r\n" in seen[0] and "\r\nAuthorization: Intertie-Site seal\r\n" in seen[0]


async def test_https_goes_through_a_tunnel_and_the_hub_never_sees_the_proxy_s_login(tmp_path: Path) -> None:
    seen: list[str] = []
    hub = await asyncio.start_server(lambda r, w: heads(r, w, seen), "127.0.0.1", 0)
    authority = Authority(tmp_path)
    front, proxy = TlsFront(authority, hub.sockets[0].getsockname()[1]), ConnectProxy("me", "word")
    await front.start()
    await proxy.start()
    url = f"https://127.0.0.1:{front.port}"
    way = Way(Proxy("127.0.0.1", proxy.port, "me", "word"))
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(url, ssl=authority.client(), **http_options(way, url)) as answer:
                assert await answer.text() == "ok"
            wrong = http_options(Way(Proxy("127.0.0.1", proxy.port, "me", "other-word")), url)
            with pytest.raises(aiohttp.ClientHttpProxyError) as refused:
                await session.get(url, ssl=authority.client(), **wrong)
        assert refused.value.status == 407 and "other-word" not in str(refused.value)
        assert "proxy-authorization" not in seen[0].lower() and proxy.tunnels == 1
    finally:
        await front.stop()
        await proxy.stop()
        hub.close()


RULES = [
    ("", None),
    ('[link]\nproxy = "http://p:3128"\n', "http://p:3128"),
    ('[link]\nproxy = "p:3128"\ndirect = [".hub.example", "other"]\n', "http://p:3128"),
    ('[link]\nproxy = "p:3128"\ndirect = ["bus.example"]\n', None),
]


@pytest.mark.parametrize(("rules", "proxy"), RULES)
def test_the_owner_names_the_way_in_site_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: str, proxy: str | None) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "site.toml").write_text(rules, encoding="utf-8")
    found = way_of(Folder(tmp_path)).through("wss://bus.example:443")
    assert (found.url if found else None) == proxy


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ('[link]\nproxy = "socks5://p"\n', "link.proxy"),
        ('[link]\nproxy = "u@p"\nproxy_password_file = "/nowhere/at/all"\n', "link.proxy_password"),
        ('[link]\nproxi = "p"\n', "agent.rules"),
    ],
)
def test_a_way_that_cannot_be_read_is_refused_with_its_place(tmp_path: Path, rules: str, code: str) -> None:
    (tmp_path / "site.toml").write_text(rules, encoding="utf-8")
    with pytest.raises(Refused) as refused:
        way_of(Folder(tmp_path))
    assert refused.value.code == code and refused.value.next_step
