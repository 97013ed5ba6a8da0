"""The processes of `ops/bench link`: the scheduler's own lane on its real store, an echo with nothing behind it, and the agents that ask both.

Each runs in a process of its own, on uvloop; what an agent sends and how many wait at once is the same for both answerers.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from datetime import UTC
from pathlib import Path

import msgspec
import nats
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from ops.lib.bench_hub import CLOCK

from intertie.bus.nats import NatsBus
from intertie.contracts.base import encode
from intertie.contracts.identity import MappingRecord, MappingsChanged
from intertie.contracts.link import Clocks, Lane, LaneState, SettingsApplied, Sync, Synced, sync_subject
from intertie.contracts.site import Freshness, SiteKind, SiteRecord
from intertie.ids import JournalId, SessionId, SiteName, TenantName
from intertie.lane.pg import PgLaneTables
from intertie.link.journal import first_digest, next_digest
from intertie.observe import log
from intertie.scheduler.core.given import Fact
from intertie.scheduler.core.world import mappings_fact, site_fact
from intertie.scheduler.pg import PACKAGE, PgSchedulerStore
from intertie.scheduler.wiring import wire
from intertie.store import Database
from intertie.trust.keys import Key

ECHO = "bench.link.echo"


def name_of(number: int) -> SiteName:
    return SiteName(f"site-{number:04}")


# --- who answers ------------------------------------------------------------------------------------------------------------------------------


async def keep(url: str, database: str, password: str, sites: int) -> None:
    """The scheduler's lane as `python -m intertie.scheduler` wires it, with its instructions, settings and hearing; until standard input ends."""
    log.setup("bench", "ERROR")
    db = await Database.open(database, password=password, schema="scheduler")
    await db.migrate(PACKAGE)
    store = PgSchedulerStore(db)
    await store.learn([fact for number in range(sites) for fact in _known(name_of(number))], None)
    bus = await NatsBus.connect(url, name="scheduler")
    parts = await wire(store, PgLaneTables(db), bus, CLOCK, Key.new("U"), lambda: "", zone=UTC)
    keeping = asyncio.create_task(parts.keeper.run())
    await parts.keeper.listening.wait()
    await _until_the_end()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await bus.close()
    await db.close()


def _known(site: SiteName) -> list[Fact]:
    """What the scheduler knows of a site from others, as far as its settings hold it."""
    at = CLOCK.now()
    record = SiteRecord(
        site=site,
        kind=SiteKind.MACHINES,
        title=site,
        owner="owner",
        single_user=False,
        owner_tenant="",
        freshness=Freshness.FRESH,
        joined_at=at,
        last_heard=at,
        hears_us=True,
        clock_offset_s=0.0,
        agent_version="0",
        version=1,
    )
    mapping = MappingRecord(site=site, tenant=TenantName("tenant"), account="account")
    return [site_fact(record, at), mappings_fact(MappingsChanged(version=1, site=site, mappings=[mapping]), at)]


async def echo(url: str) -> None:
    """Answers of the same size by one subscription of nats-py, until standard input ends."""
    answer = encode(Synced(v=2, nonce=1_000, ack_through=0, safe_through=0, lease_s=1_800, epoch=1, clock=CLOCK.now()))

    async def answered(msg: Msg) -> None:
        await msg.respond(answer)

    raw = await nats.connect(url)
    await raw.subscribe(ECHO, cb=answered)
    await raw.flush()
    await _until_the_end()
    await raw.close()


async def _until_the_end() -> None:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


# --- the agents -------------------------------------------------------------------------------------------------------------------------------


class Agent:
    """A site's lane. Its idle sync is encoded once, and only what changes with each try is written anew: the rate is to be the keeper's."""

    def __init__(self, site: SiteName) -> None:
        self.subject = sync_subject(site, Lane.SCHEDULER)
        self._site, self._nonce, self._taken, self._revision = site, 1_000, 0, 0
        self._journal = JournalId(f"jnl-{site:0>32}")
        self._ack, self._digest = 0, first_digest(self._journal)
        self._pending: bytes | None = None
        self._template()

    def _sync(self, nonce: int, taken: int, entries: Sequence[bytes]) -> bytes:
        sync = Sync(
            site=self._site,
            session=SessionId(f"ses-{self._site:0>26}"),
            place="0" * 32,
            lane=Lane.SCHEDULER,
            nonce=nonce,
            taken_nonce=taken,
            journal=self._journal,
            first_seq=self._ack + 1,
            digest_before=self._digest,
            entries=[msgspec.Raw(entry) for entry in entries],
            at_head=True,
            running=[],
            instruction_epoch=1,
            settings_revision=self._revision,
            clocks=Clocks(utc=CLOCK.now(), boot_s=CLOCK.monotonic_s(), kernel_boot="0" * 36, offset_s=0.0, error_s=0.001),
        )
        return encode(sync)

    def _template(self) -> None:
        whole = self._sync(999_999_999, 888_888_888, ())
        self._head, rest = whole.split(b"999999999")
        self._middle, rest = rest.split(b"888888888")
        before, rest = rest.split(b'"boot_s":')
        self._clocks, self._rest = before[: before.rindex(b'"utc":') + 6], rest[rest.index(b",") :]

    def body(self, *, with_entry: bool) -> bytes:
        """The next try."""
        self._nonce += 1
        if with_entry:
            entry = encode(SettingsApplied(seq=self._ack + 1, at=CLOCK.now(), revision=self._revision))
            self._pending = entry
            return self._sync(self._nonce, self._taken, [entry])
        clocks = b'%b%b,"boot_s":%.6f%b' % (self._clocks, encode(CLOCK.now()), CLOCK.monotonic_s(), self._rest)
        return b"%b%d%b%d%b" % (self._head, self._nonce, self._middle, self._taken, clocks)

    def answered(self, data: bytes) -> None:
        """Take a keeper's answer: it must be a good one. All but those after settings or an entry of ours are not even parsed."""
        self._taken = self._nonce
        if self._pending is None and b'"settings":null' in data and b'"state":"ok"' in data:
            return
        said = msgspec.json.decode(data, type=Synced)
        if said.state is LaneState.BUSY:
            return
        if said.state is not LaneState.OK or said.ack_through < self._ack:
            raise RuntimeError(f"the keeper answers {data!r}")
        if self._pending is not None and said.ack_through == self._ack + 1:
            self._ack, self._digest = said.ack_through, next_digest(self._digest, self._pending)
        self._pending = None
        if said.settings is not None:
            self._revision = said.settings_revision
        self._template()


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of agents got in one go."""

    answers: int
    elapsed_s: float


async def ask(clients: Sequence[Client], agents: Sequence[Agent], waiting: int, seconds: float, *, raw: bool, entry_every: int) -> Answers:
    """Ask for so long, `waiting` tries under way at once, one of each agent at most. entry_every: of so many syncs one brings an entry; 0: none."""
    done, sent, began = 0, 0, CLOCK.monotonic_s()
    ends = began + seconds

    async def some(mine: Sequence[Agent], client: Client) -> None:
        nonlocal done, sent
        while True:
            for agent in mine:
                sent += 1
                body = agent.body(with_entry=entry_every > 0 and sent % entry_every == 0)
                reply = await client.request(ECHO if raw else agent.subject, body, timeout=10)
                if not raw:
                    agent.answered(reply.data)
                if CLOCK.monotonic_s() >= ends:
                    return
                done += 1

    await asyncio.gather(*(some(agents[n::waiting], clients[n % len(clients)]) for n in range(waiting)))
    return Answers(answers=done, elapsed_s=CLOCK.monotonic_s() - began)


async def agents(url: str, first: int, count: int, connections: int, waiting: int) -> None:
    """So many agents on a few connections. Each line of standard input is one go: `raw`, seconds, `entry_every`; one line of answers for each."""
    clients = [await nats.connect(url) for _ in range(connections)]
    of = {raw: [Agent(name_of(number)) for number in range(first, first + count)] for raw in (True, False)}
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        raw, seconds, entry_every = json.loads(line)
        found = await ask(clients, of[raw], waiting, seconds, raw=raw, entry_every=entry_every)
        print(encode(found).decode(), flush=True)
    for client in clients:
        await client.close()


PARTS: dict[str, Callable[..., Coroutine[None, None, None]]] = {"keep": keep, "echo": echo, "agents": agents}


# --- starting them ----------------------------------------------------------------------------------------------------------------------------


class Child:
    """A process that runs one of `PARTS`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def say(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        await self._process.stdin.drain()

    async def heard(self, timeout_s: float) -> bytes:
        """Its next line; `RuntimeError` if it ended."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        if not line:
            raise RuntimeError("a process of this benchmark ended")
        return line


@asynccontextmanager
async def child(part: str, *arguments: object) -> AsyncIterator[Child]:
    """A process of its own for one part; it ends when its standard input does. Arguments are said there: a password is among them."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ops.lib.bench_link_parts", stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        made = Child(process)
        await made.say(part, *arguments)
        if b"ready" not in await made.heard(60):
            raise RuntimeError(f"{part} did not come up")
        yield made
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 10)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main() -> None:
    part, *arguments = json.loads(sys.stdin.readline())
    uvloop.run(PARTS[part](*arguments))


if __name__ == "__main__":
    main()
