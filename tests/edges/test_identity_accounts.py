"""What identity does about accounts that a server holds, lacks, or refuses. The server is a stand-in: only its three requests are played."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from tests.edges.test_identity_store import invited, join_request, team

from intertie.bus.memory import MemoryBroker
from intertie.bus.port import Message
from intertie.clock import ManualClock
from intertie.identity.accounts import LIST, UPDATE, AccountPusher, Signer, lookup_subject
from intertie.identity.core.accounts import read_preload
from intertie.identity.core.sites import SiteAccount
from intertie.identity.memory import MemoryIdentityStore
from intertie.ids import SiteName
from intertie.trust import nats_jwt
from intertie.trust.keys import Key

SITE = SiteName("site-a")


@dataclass
class Server:
    """nats-server's resolver: account → JWT. `refuses` names accounts that it does not take."""

    held: dict[str, str] = field(default_factory=dict)
    refuses: set[str] = field(default_factory=set)
    updates: int = 0

    async def list(self, message: Message) -> bytes:
        return msgspec.json.encode({"server": {}, "data": sorted(self.held)})

    async def look_up(self, message: Message) -> bytes:
        return self.held.get(message.subject.split(".")[3], "").encode()

    async def update(self, message: Message) -> bytes:
        jwt = message.body.decode()
        account = nats_jwt.read(jwt).subject
        if account in self.refuses:
            return msgspec.json.encode({"server": {}, "error": {"code": 500, "description": "no"}})
        self.held[account] = jwt
        self.updates += 1
        return msgspec.json.encode({"server": {}, "data": {"account": account, "code": 200, "message": "jwt updated"}})


@dataclass
class Rig:
    clock: ManualClock
    server: Server
    store: MemoryIdentityStore
    signer: Signer
    pusher: AccountPusher
    file: Path

    async def joined(self, site: SiteName = SITE) -> SiteAccount:
        token = await invited(self.store, site)
        request = join_request(token, site_key=Key.new("U").public, signing_key=Key.new("A").public)
        found = await self.store.join(token.id, request, account=Key.new("A").public, sign=self.signer, now=self.clock.now())
        await self.pusher.push(found)
        return found

    async def set_back(self, to: SiteAccount) -> None:
        """The database is restored from a backup."""
        async with self.store.rows() as rows:
            await rows.save_site(to)

    def faults(self) -> list[str]:
        return [event.entity for event in self.store.memory.events if event.entity.startswith("fault/")]

    def in_file(self, account: str) -> str | None:
        return read_preload(self.file.read_text(encoding="ascii")).get(account)


@pytest.fixture
async def rig(short_folder: Path) -> AsyncIterator[Rig]:
    clock, server = ManualClock(), Server()
    broker = MemoryBroker()
    nats = broker.client()
    for subject, answer in ((LIST, server.list), (UPDATE, server.update), (lookup_subject("*"), server.look_up)):
        await nats.subscribe(subject, answer)
    store = MemoryIdentityStore(clock=clock)
    await team(store)
    signer = Signer(Key.new("O"), Key.new("A").public, clock)
    file = short_folder / "preload.conf"
    file.write_text("ASYS: sys.jwt\n", encoding="ascii")
    yield Rig(clock, server, store, signer, AccountPusher(broker.client(), store, signer, clock, accounts_file=file), file)


async def test_a_joined_site_is_at_the_server_and_in_the_file(rig: Rig) -> None:
    site = await rig.joined()
    assert rig.server.held == {site.account: site.jwt}
    assert rig.in_file(site.account) == site.jwt and rig.in_file("ASYS") == "sys.jwt"


async def test_a_round_that_finds_everything_in_place_pushes_nothing(rig: Rig) -> None:
    await rig.joined()
    await rig.pusher.compare()
    await rig.pusher.compare()
    assert rig.server.updates == 1


async def test_what_the_server_lost_is_pushed_again(rig: Rig) -> None:
    site = await rig.joined()
    rig.server.held.clear()
    await rig.pusher.compare()
    assert rig.server.held == {site.account: site.jwt}


async def test_an_older_account_at_the_server_is_replaced(rig: Rig) -> None:
    site = await rig.joined()
    revoked = await rig.store.revoke_site(SITE, sign=rig.signer, actor="ops", reason="leaves")
    assert revoked is not None and revoked.jwt != site.jwt
    await rig.pusher.compare()
    assert rig.server.held == {site.account: revoked.jwt}
    assert rig.in_file(site.account) == revoked.jwt


async def test_a_restored_identity_leaves_the_newer_account_and_takes_its_revocations_over(rig: Rig) -> None:
    """LINK D18."""
    before = await rig.joined()
    revoked = await rig.store.revoke_site(SITE, sign=rig.signer, actor="ops", reason="stolen")
    assert revoked is not None
    await rig.pusher.push(revoked)
    await rig.set_back(before)
    for _ in range(2):
        await rig.pusher.compare()
    learnt = await rig.store.site(SITE)
    assert learnt is not None and learnt.revoked and learnt.revoked_keys == revoked.revoked_keys
    held = nats_jwt.read(rig.server.held[before.account])
    assert "signing_keys" not in held.nats or held.nats["signing_keys"] == []


async def test_with_an_empty_server_and_a_restored_database_the_file_is_the_memory(rig: Rig) -> None:
    """LINK D18, both memories lost but one: the revocation still holds."""
    before = await rig.joined()
    revoked = await rig.store.revoke_site(SITE, sign=rig.signer, actor="ops", reason="stolen")
    assert revoked is not None
    await rig.pusher.push(revoked)
    await rig.set_back(before)
    rig.server.held.clear()
    await rig.pusher.compare()
    held = nats_jwt.read(rig.server.held[before.account])
    assert held.nats.get("signing_keys", []) == [] and nats_jwt.revoked_keys(held) == [before.signing_key]
    learnt = await rig.store.site(SITE)
    assert learnt is not None and learnt.revoked
    assert rig.faults() == ["fault/identity/identity.account_newer/site-a"]


async def test_an_account_that_the_server_refuses_keeps_no_other_from_it(rig: Rig) -> None:
    first = await rig.joined()
    second = await rig.joined(SiteName("site-b"))
    rig.server.held.clear()
    rig.server.refuses.add(first.account)
    for _ in range(3):
        await rig.pusher.compare()
    assert set(rig.server.held) == {second.account}
    assert rig.faults() == ["fault/identity/identity.account_refused/site-a"]


async def test_a_file_that_cannot_be_written_stops_nothing_and_is_reported(rig: Rig) -> None:
    rig.file.unlink()
    rig.file.mkdir()
    site = await rig.joined()
    assert rig.server.held == {site.account: site.jwt}
    assert rig.faults() == ["fault/identity/identity.accounts_file/site-a"]


async def test_a_clock_that_stepped_back_does_not_make_a_newer_account_older(rig: Rig) -> None:
    site = await rig.joined()
    rig.clock.step_wall(-timedelta(days=30).total_seconds())
    revoked = await rig.store.revoke_site(SITE, sign=rig.signer, actor="ops", reason="leaves")
    assert revoked is not None and revoked.iat == site.iat + 1
    await rig.pusher.push(revoked)
    assert rig.server.held == {site.account: revoked.jwt}
