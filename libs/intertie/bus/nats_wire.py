"""What carries a session's bytes: TCP through a proxy, or WebSocket, straight or through one. Plain TCP is nats-py's own.

nats-py's WebSocket knows no proxy, leaves its HTTP session open when a connect fails, and takes each frame for a line; hence this.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any
from urllib.parse import ParseResult, urlsplit

import aiohttp
from nats.aio.transport import TcpTransport, Transport

from intertie.bus.proxy import PORTS, Proxy, tunnel

# As much as the server holds back for a slow client.
FRAME_BYTES = 64 * 1024 * 1024
END_LIMIT_S = 1.0


def wire_for(url: str, tls: ssl.SSLContext | None, proxy: Proxy | None) -> Transport | None:
    """The transport for `url`; None: nats-py's own. `ValueError` for what cannot work."""
    scheme = urlsplit(url).scheme
    if scheme in ("ws", "wss"):
        if scheme == "ws" and proxy is not None:
            raise ValueError("ws:// does not pass a proxy: it is not encrypted, and proxies cut what they can read; use wss://")
        return WebSocket(url, tls, proxy)
    return TunnelledTcp(proxy) if proxy is not None else None


class TunnelledTcp(TcpTransport):
    """TCP through a proxy; TLS, if the server asks for it, is begun inside as on any other."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._proxy = proxy

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        reader, writer = await tunnel(self._proxy, uri.hostname or "", uri.port or PORTS["nats"], buffer_size)
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = writer

    def __bool__(self) -> bool:
        """Chosen before it is connected: nats-py replaces only what is false."""
        return True


class WebSocket(Transport):
    """One connection; frames are a byte stream, whatever their borders."""

    def __init__(self, url: str, tls: ssl.SSLContext | None, proxy: Proxy | None) -> None:
        self._url, self._tls, self._proxy = url, tls, proxy
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._pending: list[bytes] = []
        self._read = bytearray()
        self._closing: asyncio.Task[None] | None = None

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        await self._open()

    async def connect_tls(self, uri: object, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int) -> None:
        """For `wss://` nats-py calls this to connect, and again when the server's INFO asks for TLS, which there is by then."""
        if self._socket is None:
            await self._open()

    async def _open(self) -> None:
        await self.abort()
        self._session = aiohttp.ClientSession()
        options: dict[str, Any] = {}
        if self._proxy is not None:
            options["proxy"] = self._proxy.url
            if self._proxy.authorization:
                options["proxy_headers"] = {"Proxy-Authorization": self._proxy.authorization}
        try:
            self._socket = await self._session.ws_connect(
                self._url, ssl=self._tls or True, max_msg_size=FRAME_BYTES, autoping=True, compress=0, **options
            )
        except aiohttp.ClientError as error:
            await self.abort()
            raise ConnectionError(self._why(error)) from error
        except BaseException:
            await self.abort()
            raise

    def _why(self, error: aiohttp.ClientError) -> str:
        if isinstance(error, aiohttp.ClientHttpProxyError) and self._proxy is not None:
            return f"the proxy {self._proxy.url} refuses: {error.status} {error.message[:80]}"
        if isinstance(error, aiohttp.ClientProxyConnectionError) and self._proxy is not None:
            return f"the proxy {self._proxy.url} is not reached: {error.os_error}"
        if isinstance(error, aiohttp.WSServerHandshakeError):
            return f"no WebSocket there: the server answers {error.status}"
        return str(error) or type(error).__name__

    def write(self, payload: bytes) -> None:
        self._pending.append(payload)

    def writelines(self, payload: list[bytes]) -> None:
        self._pending += payload

    async def drain(self) -> None:
        while self._pending:
            body = b"".join(self._pending)
            self._pending.clear()
            if self._socket is None:
                raise ConnectionResetError("the link went")
            try:
                await self._socket.send_bytes(body)
            except aiohttp.ClientError as error:
                raise ConnectionResetError("the link went") from error

    async def read(self, buffer_size: int) -> bytes:
        if not self._read:
            await self._receive()
        taken = bytes(self._read)
        self._read.clear()
        return taken

    async def readline(self) -> bytes:
        """A line, or what there is at the end."""
        while b"\n" not in self._read and await self._receive():
            pass
        end = self._read.find(b"\n") + 1 or len(self._read)
        taken = bytes(self._read[:end])
        del self._read[:end]
        return taken

    async def _receive(self) -> bool:
        """One more frame; False at the end."""
        if self._socket is None:
            return False
        got = await self._socket.receive()
        if got.type is aiohttp.WSMsgType.BINARY:
            self._read += got.data
            return True
        if got.type is aiohttp.WSMsgType.ERROR:
            raise ConnectionError(f"the WebSocket broke: {got.data}")
        return False

    def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(END_LIMIT_S):
                if self._socket is not None:
                    await self._socket.close()
        except TimeoutError:
            pass
        await self.abort()

    async def wait_closed(self) -> None:
        if self._closing is not None:
            await asyncio.wait({self._closing})

    async def abort(self) -> None:
        """Let go of the socket, whatever the other end does."""
        session, self._session, self._socket = self._session, None, None
        if session is not None:
            await session.close()

    def at_eof(self) -> bool:
        return self._socket is None or self._socket.closed

    def __bool__(self) -> bool:
        return True
