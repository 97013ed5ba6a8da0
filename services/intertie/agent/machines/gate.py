"""The head's port for its nodes: who dials is asked for a token or a signature, then carried onto the head's own small bus as a site's account is.

What a node calls `up.scheduler.sync` is `intertie.v1.up.<node>.scheduler.sync` there; it can name nothing of another node's.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import secrets
import ssl
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from sqlite3 import Cursor

import msgspec

from intertie.agent.machines.head import Head, Live, NodeKept
from intertie.agent.machines.wire import Frame, Gone, Line, fingerprint_of, head_context, make_token, token_digest
from intertie.bus.memory import AccountMap, MemoryBus
from intertie.bus.port import Message
from intertie.contracts.base import decode, encode
from intertie.contracts.machines import WIRE_VERSION, Hail, HailNode, JoinNode, PackPart, Part, ResultPart, Welcome, Went
from intertie.contracts.site import PoolProfile
from intertie.contracts.telemetry import decode_sample
from intertie.errors import Denied, IntertieError, Refused, Unavailable
from intertie.ids import RESERVED, SiteName, TenantName, name
from intertie.observe import log
from intertie.trust.keys import verify

LOG = log.get("machines.gate")

GREET_S = 10.0
# Requests of one node under way: a lane has one, transfers a few.
AT_ONCE = 16
REQUEST_S = 10.0
# Lines that have not greeted yet: more is somebody who knocks and says nothing.
STRANGERS = 32
# A message to a node waits so long among others before the oldest is dropped.
WAITING = 256


class TokenKept(msgspec.Struct, frozen=True, kw_only=True):
    """Of a token only its digest is kept. `used_by`: the key that it let in; the same key may say it again after a lost answer."""

    expires: datetime
    node: SiteName | None = None
    used_by: str = ""


_token = msgspec.json.Decoder(TokenKept).decode


def node_account(node: str) -> AccountMap:
    """What a node may name of the head's bus."""
    return AccountMap(
        name=node,
        out={
            "up.*.sync": f"intertie.v1.up.{node}.*.sync",
            "up.answer": f"intertie.v1.up.{node}.answer",
            "up.pack": f"intertie.v1.up.{node}.pack",
            "up.result": f"intertie.v1.up.{node}.result",
            "tel.gpu.*": f"intertie.v1.tel.gpu.{node}.*",
        },
        into={"down.*": f"intertie.v1.down.{node}.*"},
    )


def signed_text(challenge: str, fingerprint: str, node: str) -> bytes:
    """What a node signs: this challenge, of the head with this certificate, for itself."""
    return f"intertie-node\n{challenge}\n{fingerprint}\n{node}".encode()


class Gate:
    """Listens while `run` runs."""

    def __init__(
        self,
        head: Head,
        keys: Path,
        *,
        site: SiteName,
        listen: tuple[str, int],
        owner_tenant: TenantName,
        pools: Callable[[], list[PoolProfile]],
    ) -> None:
        """`keys` holds `tls.key` and `tls.pem`; port 0 takes a free one (`port` says which)."""
        self._head, self._site, self._listen, self._owner, self._pools = head, site, listen, owner_tenant, pools
        self.fingerprint = fingerprint_of(keys)
        self._context: ssl.SSLContext = head_context(keys)
        self._strangers: dict[int, Line] = {}
        self._lines: dict[SiteName, Line] = {}
        self.port = listen[1]
        self.listening = asyncio.Event()
        self.beat_s = 1.0

    @property
    def address(self) -> str:
        return f"{self._listen[0]}:{self.port}"

    async def run(self) -> None:
        """`Refused('machines.listen')` if the port cannot be had."""
        try:
            server = await asyncio.start_server(self._accept, *self._listen, ssl=self._context, ssl_handshake_timeout=GREET_S)
        except OSError as err:
            raise Refused(
                "machines.listen",
                f"{self.address} cannot be listened on: {err.strerror or err}",
                next_step="[machines] listen in site.toml",
            ) from err
        self.port = server.sockets[0].getsockname()[1]
        subscriptions = [
            await self._head.bus.subscribe("intertie.v1.up.*.pack", self._pack, workers=8),
            await self._head.bus.subscribe("intertie.v1.up.*.result", self._result, workers=8),
            await self._head.bus.subscribe("intertie.v1.tel.gpu.*.*", self._sample, workers=4),
        ]
        self.listening.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.listening.clear()
            server.close()
            for line in list(self._lines.values()):
                line.close()
            for one in subscriptions:
                await one.close()

    # --- tokens ---

    async def make_token(self, node: SiteName | None, hours: int) -> tuple[str, datetime]:
        """Shown once."""
        if node is not None:
            checked(node)
        text = make_token(secrets.token_bytes(24), self.fingerprint)
        kept = TokenKept(expires=self._head.clock.now() + timedelta(hours=hours), node=node)

        def write(cursor: Cursor) -> None:
            old = [
                digest
                for digest, body in cursor.execute("SELECT digest, body FROM token").fetchall()
                if _token(body).expires < self._head.clock.now()
            ]
            cursor.executemany("DELETE FROM token WHERE digest = ?", [(digest,) for digest in old])
            cursor.execute("INSERT INTO token VALUES (?, ?)", (token_digest(text), encode(kept)))

        await self._head.store.write(write)
        return text, kept.expires

    async def _join(self, asked: JoinNode) -> NodeKept:
        checked(asked.node)
        digest, now = token_digest(asked.token), self._head.clock.now()

        def use(cursor: Cursor) -> None:
            row = cursor.execute("SELECT body FROM token WHERE digest = ?", (digest,)).fetchone()
            kept = _token(row[0]) if row else None
            if kept is None or now >= kept.expires or not hmac.compare_digest(kept.used_by or asked.key, asked.key):
                raise Denied("machines.token", "this token is unknown here, used or too old", next_step="at the head: intertie node token")
            if kept.node is not None and kept.node != asked.node:
                raise Denied(
                    "machines.token_name",
                    f"this token is for node {kept.node}, not for {asked.node}",
                    next_step=f"say which node this machine is: intertie node join --node {kept.node} …",
                )
            cursor.execute("UPDATE token SET body = ? WHERE digest = ?", (encode(msgspec.structs.replace(kept, used_by=asked.key)), digest))

        def free(known: NodeKept | None) -> NodeKept | None:
            if known is not None and known.key != asked.key and known.revoked_at is None:
                raise Denied(
                    "machines.name_taken",
                    f"another machine is node {asked.node} here",
                    next_step="choose another --node, or revoke that one first: intertie node revoke",
                )
            return known

        def joined(known: NodeKept | None) -> NodeKept:
            if free(known) is not None and known is not None and known.key == asked.key:
                return msgspec.structs.replace(known, slots=asked.slots, version=asked.version, revoked_at=None)
            return NodeKept(name=asked.node, key=asked.key, joined_at=now, slots=asked.slots, version=asked.version)

        free(self._head.nodes.get(asked.node))  # A token is not used up by a name that is another's.
        await self._head.store.write(use)
        node = await self._head.change_node(asked.node, joined)
        assert node is not None, "it is a node now"
        LOG.info("a node joined", node=node.name, slots=node.slots)
        return node

    # --- one line ---

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        try:
            # Who says nothing makes room for who comes later: a greeting takes milliseconds.
            while len(self._strangers) >= STRANGERS:
                self._strangers.pop(next(iter(self._strangers))).close()
            self._strangers[id(line)] = line
            try:
                async with asyncio.timeout(GREET_S):
                    node = await self._greet(line)
            finally:
                self._strangers.pop(id(line), None)
            if node is not None:
                await self._serve(node, line)
        except (Gone, TimeoutError):
            pass
        except IntertieError as err:
            LOG.warning("who dialled was refused", peer=line.peer, code=err.code, text=err.text)
            with contextlib.suppress(IntertieError):
                await line.send(Frame("refused", 0, err.code, encode([err.text, err.next_step])))
        except Exception:
            LOG.exception("a line broke", peer=line.peer)
        finally:
            await line.closed()

    async def _greet(self, line: Line) -> NodeKept | None:
        challenge = base64.urlsafe_b64encode(os.urandom(24)).decode()
        await line.send(Frame("hail", 0, "", encode(Hail(v=WIRE_VERSION, site=self._site, challenge=challenge))))
        frame = await line.receive()
        if frame.kind == "join":
            node = await self._join(decode(frame.body, JoinNode, what="join"))
            await line.send(Frame("welcome", 0, "", encode(self._welcome(node.name))))
            return None
        if frame.kind != "node":
            raise Refused("machines.greeting", f"a greeting of kind {frame.kind[:20]!r} is none")
        said = decode(frame.body, HailNode, what="greeting")
        known = self._head.nodes.get(said.node)
        if known is None or not _signed(known.key, said.signature, signed_text(challenge, self.fingerprint, said.node)):
            raise Denied(
                "machines.not_a_node", "this machine is no node of this site", next_step="intertie node join --head … --token-file …"
            )
        if known.revoked_at is not None:
            raise Denied("machines.revoked", f"node {known.name} was revoked here", next_step="ask the site's owner")
        told = await self._head.note_node(known.name, slots=said.slots, version=said.version, single_user=said.single_user)
        if told is None or told.revoked_at is not None:
            raise Gone("revoked meanwhile")
        await line.send(Frame("welcome", 0, "", encode(self._welcome(known.name))))
        return told

    def _welcome(self, node: SiteName) -> Welcome:
        return Welcome(
            site=self._site, node=node, head_key=self._head.key.public, owner_tenant=self._owner, pools=self._pools(), beat_s=self.beat_s
        )

    async def _serve(self, node: NodeKept, line: Line) -> None:
        """Until the line is gone. A newer line of the same node takes its place."""
        if (before := self._lines.pop(node.name, None)) is not None:
            before.close()
        self._lines[node.name] = line
        self._head.live[node.name] = Live(since=self._head.clock.now())
        client = self._head.broker.client(node.name, node_account(node.name))
        out = asyncio.Queue[Message](WAITING)

        def take(message: Message) -> None:
            if out.full():
                out.get_nowait()
            out.put_nowait(message)

        listening = await client.listen("down.*", take)
        LOG.info("a node is connected", node=node.name, peer=line.peer)
        room = asyncio.Semaphore(AT_ONCE)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_forward(out, line))
                async for frame in line.frames():
                    if frame.kind == "message":
                        await client.publish(frame.subject, frame.body)
                    elif frame.kind == "request":
                        await room.acquire()
                        group.create_task(_ask(client, line, frame, room))
        except* (Gone, Refused) as gone:
            LOG.info("a node's line is gone", node=node.name, why=str(gone.exceptions[0]))
        finally:
            await listening.close()
            await client.close()
            if self._lines.get(node.name) is line:
                del self._lines[node.name]
                await self._lost(node.name)

    async def _lost(self, node: SiteName) -> None:
        """Its devices are unknown from now on; what runs there runs on."""
        self._head.live.pop(node, None)
        with contextlib.suppress(Unavailable):
            await self._head.note_node(node, last_word=self._head.clock.now())
        self._head.tell()

    def drop(self, node: SiteName) -> None:
        """Its line, at once (it was revoked)."""
        if (line := self._lines.get(node)) is not None:
            line.close()

    # --- what nodes ask beside their lane ---

    async def _sample(self, message: Message) -> None:
        node = SiteName(message.subject.split(".")[4])
        sample = decode_sample(message.body)
        if sample.node == node:
            await self._head.take_sample(node, sample)

    async def _pack(self, message: Message) -> bytes:
        """Bytes of a pack, to the node whose work it is."""
        node, asked = SiteName(message.subject.split(".")[3]), decode(message.body, PackPart, what="question")
        mine = any(
            work.node == node
            and not work.over
            and work.attempt.spec.work is not None
            and work.attempt.spec.work.digest == asked.work.digest
            for work in self._head.works.values()
        )
        if not mine:
            raise Denied("machines.not_yours", f"no work of node {node} has this pack")
        return encode(await asyncio.to_thread(read_part, self._head.packs / asked.work.digest, asked.offset, asked.limit))

    async def _result(self, message: Message) -> bytes:
        """Bytes of a result, from the node that made it; the answer says what is on disk."""
        node, part = SiteName(message.subject.split(".")[3]), decode(message.body, ResultPart, what="result")
        mine = [work for work in self._head.works.values() if work.node == node]
        if not any(work.result == part.result and not work.trimmed for work in mine):
            # It may have been quicker than the word of its end; otherwise it is delivered or forgotten, and need not go on.
            later = any(work.go_number and not work.over for work in mine)
            return encode(Went(offset=0 if later else part.result.size, whole=not later, later=later))
        went = await asyncio.to_thread(write_part, self._head.results, part)
        if went.whole:
            self._head.tell()
        return encode(went)


def checked(node: str) -> SiteName:
    """A node's name is a subject token, a folder and a prefix of device names. `Refused('name.invalid')`."""
    if node in RESERVED:
        raise Refused("name.reserved", f"node {node!r} is a reserved word; choose another name")
    return SiteName(name(node, "node"))


def _signed(key: str, signature: str, text: bytes) -> bool:
    try:
        return verify(key, text, base64.urlsafe_b64decode(signature))
    except (binascii.Error, ValueError):
        return False


async def _forward(out: asyncio.Queue[Message], line: Line) -> None:
    while True:
        message = await out.get()
        await line.send(Frame("message", 0, message.subject, message.body))


async def _ask(client: MemoryBus, line: Line, frame: Frame, room: asyncio.Semaphore) -> None:
    try:
        try:
            reply = await client.request(frame.subject, frame.body, timeout_s=REQUEST_S)
            await line.send(Frame("answer", frame.id, frame.subject, reply.body))
        except Gone:
            raise
        except IntertieError as err:
            await line.send(Frame("failed", frame.id, err.code, err.text.encode()))
    finally:
        room.release()


def read_part(path: Path, offset: int, limit: int) -> Part:
    try:
        with path.open("rb") as f:
            total = os.fstat(f.fileno()).st_size
            f.seek(min(offset, total))
            return Part(offset=min(offset, total), total=total, data=f.read(limit))
    except OSError as err:
        raise Unavailable("machines.pack", f"the pack cannot be read at the head: {err.strerror}", retry_after_s=5) from err


def write_part(folder: Path, part: ResultPart) -> Went:
    """Append what comes next; anything else is answered with where to go on. Whole only when its digest is right."""
    whole, growing = folder / part.result.digest, folder / f".{part.result.digest}.part"
    if whole.exists():
        return Went(offset=part.result.size, whole=True)
    try:
        with growing.open("ab") as f:
            at = f.tell()
            if part.offset != at or at + len(part.data) > part.result.size:
                if at > part.result.size:
                    f.truncate(0)
                    at = 0
                return Went(offset=at)
            f.write(part.data)
            f.flush()
            at = f.tell()
            if at < part.result.size:
                return Went(offset=at)
            os.fsync(f.fileno())
        with growing.open("rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        if f"sha256:{found}" != part.result.digest:
            growing.unlink()
            return Went(offset=0)
        growing.rename(whole)
    except OSError as err:
        raise Unavailable("machines.disk", f"a result cannot be written at the head: {err.strerror}", retry_after_s=5) from err
    return Went(offset=part.result.size, whole=True)
