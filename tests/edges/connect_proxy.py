"""A small real HTTP proxy that knows CONNECT alone and asks who is there, and certificates of a small authority of its own. In the test's loop."""

from __future__ import annotations

import asyncio
import base64
import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class ConnectProxy:
    """`start`, `stop` (every tunnel breaks), `start` again at the same port. `asked`: what was asked for, and what was answered."""

    def __init__(self, user: str = "", password: str = "", allowed_ports: set[int] | None = None) -> None:
        self._login = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}" if user else ""
        self._allowed = allowed_ports
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.asked: list[tuple[str, int]] = []

    @property
    def tunnels(self) -> int:
        return sum(status == 200 for _, status in self.asked)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self.cut()
            await self._server.wait_closed()
            self._server = None

    def cut(self) -> None:
        """Break what is open; new tunnels may come."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            target = head.split()[1]
            status = self._judged(head, target)
            self.asked.append((target, status))
            if status != 200:
                writer.write(f"HTTP/1.1 {status} {'Proxy Authentication Required' if status == 407 else 'Forbidden'}\r\n\r\n".encode())
                await writer.drain()
                return
            host, _, port = target.rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            self._writers.add(far_writer)
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        except (OSError, asyncio.IncompleteReadError, IndexError, ValueError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    def _judged(self, head: str, target: str) -> int:
        if self._login and f"proxy-authorization: {self._login}".lower() not in head.lower():
            return 407
        allowed = self._allowed is None or int(target.rpartition(":")[2]) in self._allowed
        return 200 if head.startswith("CONNECT ") and allowed else 403


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(64 * 1024):
            writer.write(chunk)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort()


class Authority:
    """A certificate for 127.0.0.1 and localhost, and who vouches for it."""

    def __init__(self, folder: Path) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "intertie test")])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        self.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        self.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.certificate))

    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


class TlsFront:
    """What stands before a hub: TLS ends here, plain bytes go on to the port behind."""

    def __init__(self, authority: Authority, behind: int) -> None:
        self._authority, self._behind = authority, behind
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._authority.server())
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._behind)
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        except OSError:
            pass
        finally:
            writer.transport.abort()
