"""One nats-py client from its connect to its end. It never reconnects: `nats` makes the next one, with fresh credentials.

nats-py treats any `-ERR` it does not know (expired credentials, too large a payload, too many connections) as the end for ever, though
its own reconnection is on (field case BR-109), and while it reconnects by itself it buffers what is published and says it later, after
the caller was told that it failed (BR-111). So it may not; there is one way back from every kind of loss.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import secrets
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from intertie.bus.nats_wire import WebSocket, wire_for
from intertie.bus.port import Message
from intertie.bus.proxy import STRAIGHT, Way
from intertie.bus.subjects import lowered, refuse_large, wire_name
from intertie.clock import SystemClock
from intertie.errors import IntertieError, Refused, Unavailable
from intertie.observe import log
from intertie.trust.login import FileLogin, Login
from intertie.trust.nats_jwt import INBOX, inbox_of

LOG = log.get("bus.nats")

# A cut is noticed after three of these at the latest; the server asks every 2 s too.
PING_INTERVAL_S = 0.7
PINGS_OUTSTANDING = 2
# One server that does not answer must not keep us from the next.
CONNECT_LIMIT_S = 3.0
# A server that takes our bytes no longer must not hold a publisher.
FLUSH_LIMIT_S = 2.0
# Outgoing bytes not yet given to the socket; beyond it a publisher waits.
PENDING_BYTES = 8 * 1024 * 1024
# What the server counts beside headers and body differs between versions by a few bytes; kilobytes are never worth a closed connection.
PAYLOAD_MARGIN = 1024

STATUS = "status"
NO_RESPONDERS = "503"

_DENIED = re.compile(r'(?i)publish to "([^"]+)"')

NO_HEADERS: Mapping[str, str] = {}


Credentials = Login | Path | None
"""What answers the server (`intertie.trust.login`), a `.creds` file read anew at each connect, or none."""


def expiry_s(credentials: Credentials) -> float | None:
    """Seconds that the credentials of this moment still hold; None if they do not say."""
    login = login_of(credentials)
    if login is None:
        return None
    try:
        payload = login.jwt().split(b".")[1]
        exp = json.loads(base64.urlsafe_b64decode(payload + b"=" * (-len(payload) % 4))).get("exp")
    except (IndexError, ValueError, AttributeError):
        return None
    return float(exp) - SystemClock().now().timestamp() if isinstance(exp, int | float) and exp > 0 else None


def login_of(credentials: Credentials) -> Login | None:
    """Who logs in; None where no account does."""
    return FileLogin(credentials) if isinstance(credentials, Path) else credentials


class NotConnected(Unavailable):
    """Why a connect did not succeed. `authorization` is retried more slowly, and for ever: it is no proof of revocation (DESIGN 10)."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__("bus.unavailable", f"no connection to {url}: {reason}")
        self.reason = reason
        self.authorization = "authori" in reason.lower() or "authenti" in reason.lower()


class Session:
    """An open connection. `lost` is set once, when it is of no more use, however that came."""

    def __init__(self, url: str, inbox: str = INBOX) -> None:
        """`inbox`: the subject below which this connection may hear answers."""
        self.url = url
        self.client = Client()
        self.lost = asyncio.Event()
        self.renew_at: float | None = None
        self._errors: list[str] = []
        self._below = inbox
        self._inbox = f"{self.new_inbox()}."
        self._asked: dict[str, asyncio.Future[Message]] = {}
        self._subjects: dict[str, str] = {}
        self._count = 0

    @classmethod
    async def open(cls, url: str, name: str, credentials: Credentials, tls: ssl.SSLContext | None, way: Way = STRAIGHT) -> Session:
        """Connect to one server, or `NotConnected` with the reason."""
        options: dict[str, object] = {}
        try:
            login, left = login_of(credentials), expiry_s(credentials)
            inbox = INBOX if login is None else inbox_of(login.jwt())
        except IntertieError as error:
            raise NotConnected(url, f"credentials: {error.text}") from error
        session = cls(url, inbox)
        try:
            session.client._transport = wire_for(url, tls, way.through(url))
        except (ValueError, Refused) as error:
            raise NotConnected(url, _text(error)) from error
        if login is not None:
            options["user_jwt_cb"], options["signature_cb"] = login.jwt, login.signature
        if tls is not None:
            options["tls"] = tls
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                await session.client.connect(
                    url,
                    name=name,
                    allow_reconnect=False,
                    # One more try after 50 ms; 0 would mean for ever.
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0.05,  # type: ignore[arg-type]  # declared int, used as seconds to sleep
                    connect_timeout=2,
                    ping_interval=PING_INTERVAL_S,  # type: ignore[arg-type]  # declared int, used as seconds to sleep
                    max_outstanding_pings=PINGS_OUTSTANDING,
                    pending_size=PENDING_BYTES,
                    flush_timeout=FLUSH_LIMIT_S,
                    error_cb=session._error,
                    closed_cb=session._closed,
                    **options,  # type: ignore[arg-type]  # a subset of connect's own keywords
                )
                # connect() can return without a connection, when the server closed before its PONG.
                if not session.client.is_connected:
                    raise nats.errors.Error("closed by the server")
                await session.client.subscribe(f"{session._inbox}*", cb=session._answered)
        except (nats.errors.Error, OSError, ValueError, AssertionError, RuntimeError) as error:
            reason = session._errors[-1] if isinstance(error, nats.errors.NoServersError) and session._errors else _text(error)
            await session.end()
            raise NotConnected(url, reason) from error
        except BaseException:
            await session.end()
            raise
        if left is not None:
            # At two thirds of its life, with time for several tries.
            session.renew_at = asyncio.get_running_loop().time() + max(left * 2 / 3, 0.2)
        return session

    async def _error(self, error: Exception) -> None:
        text = _text(error)
        self._errors = [*self._errors[-3:], text]
        if "permissions violation" in text.lower():
            LOG.warning("the server refuses a subject", server=self.url, reason=text)
            self._denied(text)
        elif isinstance(error, nats.errors.SlowConsumerError):
            LOG.warning("messages were dropped before they could be taken in", subject=error.subject)

    def _denied(self, text: str) -> None:
        """Whoever waits for an answer on that subject need not wait out its time. nats-py tells the text in lower case."""
        found = _DENIED.search(text)
        for token, subject in self._subjects.items() if found else ():
            asked = self._asked[token]
            if found and subject.lower() == found[1].lower() and not asked.done():
                asked.set_exception(Unavailable("bus.denied", f"this connection may not say {subject}", retry_after_s=5.0))

    async def _closed(self) -> None:
        self.lose()

    @property
    def reason(self) -> str:
        """The last thing that was heard of it."""
        last = self.client.last_error
        return _text(last) if last else self._errors[-1] if self._errors else "closed"

    @property
    def usable(self) -> bool:
        # A reading that ended by an error of its own leaves nats-py deaf, and `is_connected`.
        reading = self.client._reading_task
        return not self.lost.is_set() and self.client.is_connected and reading is not None and not reading.done()

    @property
    def max_message(self) -> int:
        return self.client.max_payload - PAYLOAD_MARGIN

    def new_inbox(self) -> str:
        """A subject that nobody can guess, below the one that this connection may hear."""
        return f"{self._below}.{secrets.token_hex(11)}"

    def lose(self) -> None:
        """From now on of no use: whoever waits for an answer hears so at once."""
        self.lost.set()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(Unavailable("bus.timeout", "the link went while an answer was awaited: it may have been done"))

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str], reply: str = "") -> None:
        """Hand one message to the client; `Unavailable` if the link is gone."""
        if headers or len(body) > self.max_message:
            refuse_large(subject, headers, body, self.max_message)
        if not self.usable:
            raise Unavailable("bus.unavailable", f"no connection to the bus ({self.reason})")
        spelt = {wire_name(name): value for name, value in headers.items()} if headers else None
        try:
            await self.client.publish(subject, body, reply=reply, headers=spelt)
        except nats.errors.BadSubjectError as error:
            raise Refused("bus.subject", f"{subject[:120]!r} is not a subject") from error
        except nats.errors.BadHeaderError as error:
            raise Refused("bus.header", f"a header name of a message to {subject} is not legal") from error
        except (nats.errors.Error, OSError, RuntimeError, AttributeError) as error:
            raise Unavailable("bus.unavailable", f"no connection to the bus ({_text(error)})") from error

    async def publish_many(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Hand many to the client as one piece: its own publish costs several times what it writes. Subjects are legal ones."""
        for subject, body in messages:
            if len(body) > self.max_message:
                refuse_large(subject, NO_HEADERS, body, self.max_message)
        if not self.usable:
            raise Unavailable("bus.unavailable", f"no connection to the bus ({self.reason})")
        client = self.client
        client.stats["out_msgs"] += len(messages)
        client.stats["out_bytes"] += sum(len(body) for _, body in messages)
        try:
            await client._send_command(
                b"".join([b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(body), body) for subject, body in messages])
            )
            if client._flush_queue is not None and client._flush_queue.empty():
                await client._flush_pending()
        except (nats.errors.Error, OSError, RuntimeError, AttributeError, AssertionError) as error:
            raise Unavailable("bus.unavailable", f"no connection to the bus ({_text(error)})") from error

    async def request(self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] = NO_HEADERS) -> Message:
        """One answer by this session's own inbox."""
        self._count += 1
        token = str(self._count)
        asked: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[token], self._subjects[token] = asked, subject
        # A timer that answers, not a timeout that cancels: nats-py may swallow the cancellation, and then nothing would end this wait.
        timer = asyncio.get_running_loop().call_later(timeout_s, _too_late, asked, subject, timeout_s)
        try:
            await self.publish(subject, body, headers, reply=self._inbox + token)
            answer = await asked
        finally:
            timer.cancel()
            del self._asked[token], self._subjects[token]
            if asked.done() and not asked.cancelled():
                asked.exception()
        if not answer.body and answer.headers.get(STATUS) == NO_RESPONDERS:
            raise Unavailable("bus.no_responder", f"nobody answers {subject}")
        return Message(subject, answer.body, answer.headers)

    async def _answered(self, msg: Msg) -> None:
        asked = self._asked.get(msg.subject[len(self._inbox) :])
        if asked is not None and not asked.done():
            asked.set_result(message_of(msg))

    async def barrier(self, timeout_s: float) -> bool:
        """True once the server has seen all that was sent before. Twice: nats-py writes its PING ahead of its own buffer.

        Not by `flush`: that cancels what waits for the PONG when time is up, and the late PONG then ends nats-py's reading for good.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        for _ in range(2):
            if not self.usable:
                return False
            pong: asyncio.Future[bool] = loop.create_future()
            try:
                await self.client._send_ping(pong)
            except (nats.errors.Error, OSError, RuntimeError, AttributeError, AssertionError):
                return False
            done, _ = await asyncio.wait((pong,), timeout=max(0.0, end - loop.time()))
            if not done:
                return False
        return self.usable

    async def retire(self, limit_s: float = 3.0) -> None:
        """Another session has taken over: answers that are under way may come, messages that are here are handled, then the end."""
        waiting = [asked for asked in self._asked.values() if not asked.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=limit_s)
        with suppress(nats.errors.Error, OSError, TimeoutError, RuntimeError):
            async with asyncio.timeout(limit_s):
                await self.client.drain()
        await self.end()

    async def end(self) -> None:
        """Close, and do not wait for a server that takes nothing."""
        self.lose()
        with suppress(nats.errors.Error, OSError, TimeoutError, RuntimeError, AttributeError, AssertionError):
            async with asyncio.timeout(1.0):
                await self.client.close()
        # nats-py waits for its write buffer to drain, for ever on a link that is silently cut.
        wire = self.client._transport
        if isinstance(wire, WebSocket):
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await wire.abort()
        writer = getattr(wire, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


def _too_late(asked: asyncio.Future[Message], subject: str, timeout_s: float) -> None:
    if not asked.done():
        asked.set_exception(Unavailable("bus.timeout", f"no answer from {subject} within {timeout_s:g} s: it may have been done"))


def message_of(msg: Msg) -> Message:
    return Message(msg.subject, msg.data, lowered(msg.headers) if msg.headers else NO_HEADERS, msg.reply)


def _text(error: BaseException) -> str:
    return str(error).removeprefix("nats: ").strip("'") or type(error).__name__


def order(urls: Sequence[str], attempt: int) -> str:
    """The server of this attempt: each in turn."""
    return urls[attempt % len(urls)]
