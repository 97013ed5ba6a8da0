"""The bus where only one door leads out: WebSocket with TLS, an HTTP proxy that asks who is there, and both when they are cut."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.edges.bus_rig import NatsServer, free_port, until
from tests.edges.connect_proxy import Authority, ConnectProxy

from intertie.bus.nats import NatsBus
from intertie.bus.port import Message
from intertie.bus.proxy import Proxy, Way, parse_proxy
from intertie.errors import Refused, Unavailable

LIMIT_S = 30


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class Server(NatsServer):
    """Plain NATS, and `ws://` or `wss://` beside it, at two ports of one server."""

    def __init__(self, authority: Authority | None) -> None:
        self.ws_port = free_port()
        tls = "no_tls: true" if authority is None else f'tls {{ cert_file: "{authority.certificate}", key_file: "{authority.key}" }}'
        super().__init__(f'websocket {{ listen: "127.0.0.1:{self.ws_port}", {tls}, compression: false }}')
        self.ws_url = f"{'ws' if authority is None else 'wss'}://127.0.0.1:{self.ws_port}"


@pytest.fixture
def server(authority: Authority) -> Iterator[Server]:
    made = Server(authority)
    made.start()
    yield made
    made.remove()


@pytest.fixture
async def proxy() -> AsyncIterator[ConnectProxy]:
    made = ConnectProxy("site", "s3cret-word")
    await made.start()
    yield made
    await made.stop()


def way(proxy: ConnectProxy, password: str = "s3cret-word") -> Way:
    return Way(Proxy("127.0.0.1", proxy.port, "site", password))


async def echo(message: Message) -> bytes:
    return message.body


async def asked(bus: NatsBus, body: bytes = b"x") -> bool:
    try:
        return (await bus.request("echo", body, timeout_s=2)).body == body
    except Unavailable:
        return False


async def until_asked(bus: NatsBus) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await asked(bus):  # noqa: ASYNC110  it is the asking that is waited for
            await asyncio.sleep(0.02)


async def test_plain_websocket_carries_what_plain_nats_carries() -> None:
    server = Server(None)
    server.start()
    bus = await NatsBus.connect(server.ws_url, name="tested", timeout_s=LIMIT_S)
    try:
        await bus.subscribe("echo", echo)
        # Far larger than one frame of the server's, and smaller than one.
        for size in (1, 4_096, 900_000):
            assert await asked(bus, b"y" * size)
    finally:
        await bus.close()
        server.remove()


async def test_a_cut_websocket_is_made_again(server: Server, authority: Authority) -> None:
    bus = await NatsBus.connect(server.ws_url, name="tested", tls=authority.client(), timeout_s=LIMIT_S)
    try:
        await bus.subscribe("echo", echo)
        assert await asked(bus)
        server.kill()
        await until(lambda: not bus.connected, "the loss is noticed", LIMIT_S)
        server.start()
        await until_asked(bus)
    finally:
        await bus.close()


async def test_through_a_proxy_that_asks_who_is_there(server: Server, authority: Authority, proxy: ConnectProxy) -> None:
    bus = await NatsBus.connect(server.ws_url, name="tested", tls=authority.client(), way=way(proxy), timeout_s=LIMIT_S)
    try:
        await bus.subscribe("echo", echo)
        assert await asked(bus, b"z" * 300_000)
        assert (f"127.0.0.1:{server.ws_port}", 200) in proxy.asked
    finally:
        await bus.close()


async def test_plain_nats_goes_through_a_named_proxy_too(server: Server, proxy: ConnectProxy) -> None:
    bus = await NatsBus.connect(server.url, name="tested", way=way(proxy), timeout_s=LIMIT_S)
    try:
        await bus.subscribe("echo", echo)
        assert await asked(bus)
        assert (f"127.0.0.1:{server.port}", 200) in proxy.asked
    finally:
        await bus.close()


@pytest.mark.parametrize("plain", [False, True], ids=["wss", "nats"])
async def test_a_proxy_that_dies_and_returns_costs_a_pause(server: Server, authority: Authority, proxy: ConnectProxy, plain: bool) -> None:
    url = server.url if plain else server.ws_url
    bus = await NatsBus.connect(url, name="tested", tls=None if plain else authority.client(), way=way(proxy), timeout_s=LIMIT_S)
    try:
        await bus.subscribe("echo", echo)
        assert await asked(bus)
        before = proxy.tunnels
        proxy.cut()
        await until(lambda: proxy.tunnels > before, "a new tunnel", LIMIT_S)
        await until_asked(bus)
        await proxy.stop()
        await until(lambda: not bus.connected, "the loss is noticed", LIMIT_S)
        await proxy.start()
        await until_asked(bus)
    finally:
        await bus.close()


@pytest.mark.parametrize("plain", [False, True], ids=["wss", "nats"])
async def test_a_proxy_that_refuses_is_named_and_the_password_is_not(
    server: Server,
    authority: Authority,
    proxy: ConnectProxy,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    plain: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    url = server.url if plain else server.ws_url
    with pytest.raises(Unavailable) as refused:
        await NatsBus.connect(url, name="tested", tls=authority.client(), way=way(proxy, "wr0ng-word"), timeout_s=3)
    assert "407" in refused.value.text and f"127.0.0.1:{proxy.port}" in refused.value.text
    said = caplog.text + "".join(capfd.readouterr()) + refused.value.text
    assert "wr0ng-word" not in said and proxy.tunnels == 0


async def test_a_proxy_that_is_not_there_is_named(server: Server, authority: Authority) -> None:
    gone = Way(Proxy("127.0.0.1", free_port()))
    with pytest.raises(Unavailable, match="proxy"):
        await NatsBus.connect(server.ws_url, name="tested", tls=authority.client(), way=gone, timeout_s=3)


async def test_an_unencrypted_websocket_is_not_led_through_a_proxy(proxy: ConnectProxy) -> None:
    with pytest.raises(Unavailable, match="wss://"):
        await NatsBus.connect("ws://127.0.0.1:1", name="tested", way=way(proxy), timeout_s=1)
    assert not proxy.asked


async def test_a_certificate_that_nobody_vouches_for_is_refused(server: Server) -> None:
    with pytest.raises(Unavailable, match="(?i)certificate"):
        await NatsBus.connect(server.ws_url, name="tested", timeout_s=2)


# --- which way leads there ---

ENVIRONMENTS = [
    ("wss://hub.example/x", {"HTTPS_PROXY": "http://p:3128"}, "http://p:3128"),
    ("https://hub.example", {"https_proxy": "p:3128"}, "http://p:3128"),
    ("wss://hub.example", {"ALL_PROXY": "http://p:3128"}, "http://p:3128"),
    ("wss://hub.example", {"HTTPS_PROXY": "http://p:3128", "NO_PROXY": "hub.example"}, None),
    ("wss://hub.inner.example", {"HTTPS_PROXY": "http://p:3128", "NO_PROXY": ".inner.example,localhost"}, None),
    ("wss://hub.example", {"HTTPS_PROXY": "http://p:3128", "NO_PROXY": "*"}, None),
    ("http://hub.example", {"HTTPS_PROXY": "http://p:3128"}, None),
    # Plain NATS is led through a proxy only by the owner's own word.
    ("nats://hub.example", {"HTTPS_PROXY": "http://p:3128", "ALL_PROXY": "http://p:3128"}, None),
    ("wss://hub.example", {}, None),
]


@pytest.mark.parametrize(("url", "environ", "expected"), ENVIRONMENTS)
def test_the_environment_names_the_proxy(url: str, environ: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = Way().through(url)
    assert (found.url if found else None) == expected


def test_the_owner_s_word_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://other:1")
    named = Way(Proxy("p", 3128), direct=[".inner.example"])
    assert [
        way.url if way else None for way in map(named.through, ("wss://hub.example", "nats://a.inner.example", "nats://hub.example"))
    ] == [
        "http://p:3128",
        None,
        "http://p:3128",
    ]


NO_PROXY_AT_ALL = ["", "socks5://p:1080", "https://p:443", "http://", "http://p:99999", "http://p/path", "ftp://p"]


@pytest.mark.parametrize("text", NO_PROXY_AT_ALL)
def test_what_is_no_http_proxy_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(Refused) as refused:
        parse_proxy(text.replace("://", "://me:hunter22@"), where="[link] proxy")
    assert refused.value.code == "link.proxy" and "hunter22" not in refused.value.text + refused.value.next_step


def test_a_proxy_s_password_comes_from_the_url_or_a_file_and_is_never_shown(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("fr0m-file\n", encoding="utf-8")
    by_url = parse_proxy("http://me:p%40ss-word@p:3128", where="here")
    by_file = parse_proxy("me@p", where="here", password_file=secret)
    assert (by_url.password, by_file.password, by_file.port) == ("p@ss-word", "fr0m-file", 8080)
    assert "ss-word" not in repr(by_url) + by_url.url and "fr0m" not in repr(by_file)
    with pytest.raises(Refused, match=r"none: No such file"):
        parse_proxy("me@p", where="here", password_file=tmp_path / "none")
