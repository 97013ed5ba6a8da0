"""The line between a head and its nodes: framed messages on TLS. The head listens on the one port that its owner named, nodes dial.

A frame is four bytes of length and a MessagePack array. Both sides say something at least once a second, so a line that is cut is noticed in
seconds, whatever TCP believes. The head's certificate is its own; a node knows it by the fingerprint that came with its token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import ssl
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from intertie.errors import Refused, Unavailable

# As the bus' own limit, with room for a frame's other fields.
FRAME_BYTES = 1024 * 1024 + 64 * 1024
# Said when there is nothing else to say.
PING_S = 1.0
# A line that brought nothing for so long is dead: a machine under full load is late by a second or two, never by this.
DEAD_S = 6.0
# A peer that takes no byte for so long is as good as gone.
SEND_S = 10.0
# TCP, TLS and both greetings.
CONNECT_S = 10.0
# The key is the head's alone; nobody but its own nodes looks at the date.
CERTIFICATE_DAYS = 3650


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """`kind`: hail, join, node, welcome, refused · request, answer, failed · message · ping."""

    kind: str
    id: int = 0
    subject: str = ""
    body: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode
PING = Frame("ping")


class Gone(Unavailable):
    """The line is not there any more."""

    def __init__(self, text: str) -> None:
        super().__init__("machines.line", text)


class Line:
    """One connection. `frames()` ends with `Gone`; `send` may be called from many tasks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()
        self._pinging = asyncio.create_task(self._ping(), name="line-ping")

    @property
    def peer(self) -> str:
        found = self._writer.get_extra_info("peername")
        return str(found[0]) if found else "somebody"

    async def send(self, frame: Frame) -> None:
        """`Gone` if the other side takes nothing; `Refused('bus.too_large')` for what no frame carries."""
        data = _encode(frame)
        if len(data) > FRAME_BYTES:
            raise Refused("bus.too_large", f"a frame of {len(data)} bytes on {frame.subject}, at most {FRAME_BYTES} travel")
        try:
            async with asyncio.timeout(SEND_S), self._turn:
                self._writer.write(len(data).to_bytes(4, "big") + data)
                await self._writer.drain()
        except (OSError, TimeoutError, RuntimeError) as err:
            self.close()
            raise Gone(f"the line is gone: {err or type(err).__name__}") from err

    async def receive(self) -> Frame:
        """The next frame that is no ping."""
        while True:
            try:
                async with asyncio.timeout(DEAD_S):
                    size = int.from_bytes(await self._reader.readexactly(4), "big")
                    if size > FRAME_BYTES:
                        raise Gone(f"a frame of {size} bytes was announced")
                    data = await self._reader.readexactly(size)
                frame = _decode(data)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.MsgspecError) as err:
                raise Gone(f"the line is gone: {str(err) or type(err).__name__}") from err
            if frame.kind != PING.kind:
                return frame

    async def frames(self) -> AsyncIterator[Frame]:
        while True:
            yield await self.receive()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            with contextlib.suppress(Gone):
                await self.send(PING)

    def close(self) -> None:
        """At once; whoever waits on it hears so."""
        self._pinging.cancel()
        if self._writer.transport is not None:
            self._writer.transport.abort()

    async def closed(self) -> None:
        self.close()
        # TimeoutError and what TLS raises are OSErrors; a cancellation of who waits here is none of ours to swallow.
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pinging, return_exceptions=True)
            async with asyncio.timeout(1):
                await self._writer.wait_closed()


# --- certificates ------------------------------------------------------------------------------------------------------------------------


def make_certificate(folder: Path, name: str, now: datetime) -> None:
    """`tls.key` (0600) and `tls.pem` in `folder`, unless they are there."""
    key_file, pem_file = folder / "tls.key", folder / "tls.pem"
    if key_file.exists() and pem_file.exists():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"intertie head {name}"[:64])])
    made = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=CERTIFICATE_DAYS))
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # The key last: both are there once it is.
    for path, data in ((pem_file, made.public_bytes(serialization.Encoding.PEM)), (key_file, secret)):
        part = path.with_name(f".{path.name}.part")
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        part.rename(path)


def fingerprint_of(folder: Path) -> str:
    """SHA-256 of the certificate, hexadecimal."""
    found = x509.load_pem_x509_certificate((folder / "tls.pem").read_bytes())
    return found.fingerprint(hashes.SHA256()).hex()


def head_context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / "tls.pem", folder / "tls.key")
    return context


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT`, IPv6 in brackets; `Refused('machines.address')` otherwise."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise Refused("machines.address", f"{address[:80]!r} is not HOST:PORT", next_step="for example 10.0.0.5:7443")
    return host.strip("[]"), int(port)


async def dial(address: str, fingerprint: str) -> Line:
    """A line to the head whose certificate has this fingerprint, and to nobody else: nothing is said before that is known.

    `Refused('machines.stranger')` if another answers there, `Unavailable('machines.head_away')` if nobody does.
    """
    host, port = split_address(address)
    # No authority vouches for a head: the fingerprint does, and it is compared before a byte is sent.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, TimeoutError) as err:
        raise Unavailable("machines.head_away", f"no head answers at {address}: {err or type(err).__name__}", retry_after_s=2) from err
    tls = writer.get_extra_info("ssl_object")
    shown = hashlib.sha256(tls.getpeercert(binary_form=True) or b"").hexdigest()
    if shown != fingerprint:
        writer.transport.abort()
        raise Refused(
            "machines.stranger",
            f"who answers at {address} is not the head that made the token (certificate {shown[:16]}…, expected {fingerprint[:16]}…)",
            next_step="check the address; if the head was made anew, ask it for a new token: intertie node token",
        )
    return Line(reader, writer)


# --- tokens ------------------------------------------------------------------------------------------------------------------------------

TOKEN = "itn"


def make_token(secret: bytes, fingerprint: str) -> str:
    """`itn_<secret>_<fingerprint>_<check>`: shown once, kept as a digest."""
    body = f"{TOKEN}_{secret.hex()}_{fingerprint}"
    return f"{body}_{hashlib.sha256(body.encode()).hexdigest()[:8]}"


def read_token(text: str) -> str:
    """The fingerprint in a token; `Refused('machines.token')` for what is none. The text is never repeated."""
    parts = text.strip().split("_")
    body = "_".join(parts[:-1])
    if len(parts) != 4 or parts[0] != TOKEN or len(parts[2]) != 64 or hashlib.sha256(body.encode()).hexdigest()[:8] != parts[3]:
        raise Refused(
            "machines.token", "this is no whole node token: one looks like itn_…_…_…", next_step="at the head: intertie node token"
        )
    return parts[2]


def token_digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode("utf-8", "replace")).hexdigest()
