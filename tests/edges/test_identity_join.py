"""A site's way in and out, over a real bus in operator mode: join, speak, be cut off, come back, fall silent."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.conftest import PgDatabase, new_short_folder
from tests.edges.conftest import new_hub
from tests.edges.identity_world import CLOCK, POOL, TEAM, Site, World, running_world, until

from intertie.bus.nats import NatsBus
from intertie.contracts import endpoints
from intertie.contracts.identity import Role
from intertie.contracts.incident import CloseIncident, IncidentState
from intertie.contracts.link import Lane, sync_subject
from intertie.contracts.site import Freshness, SitesQuery
from intertie.embedded.hub import HubLayout, running_hub_bus
from intertie.embedded.nats import Nats
from intertie.errors import Conflict, Refused, Unauthenticated, Unavailable
from intertie.ids import SiteName
from intertie.trust.claims import site_claims
from intertie.trust.keys import Key
from intertie.trust.login import SiteLogin

A, B = SiteName("site-a"), SiteName("site-b")


@pytest.fixture
def hub() -> Iterator[tuple[HubLayout, Nats]]:
    """A hub's bus of this test's own: it is killed and wiped here."""
    folder = new_short_folder()
    try:
        layout = new_hub(folder)
        with running_hub_bus(layout) as bus:
            yield layout, bus
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def world(hub: tuple[HubLayout, Nats], pg: PgDatabase) -> AsyncIterator[World]:
    async with running_world(hub[0], pg) as running:
        yield running


async def test_a_site_that_joins_is_fresh_with_credentials_it_minted_itself(world: World) -> None:
    site = Site(A)
    joined = await world.join(site)
    assert (joined.site, joined.owner_tenant, sorted(joined.service_keys)) == (A, TEAM, ["gateway", "identity", "metering", "scheduler"])
    await world.speak(site)
    await until(lambda: world.is_(A, Freshness.FRESH), "the site is fresh")
    reply = await world.call(endpoints.SITES, SitesQuery())
    assert [(p.pool, p.freshness) for p in reply.pools] == [(POOL.pool, Freshness.FRESH)]


async def test_what_the_owner_declares_on_the_lane_becomes_the_next_revision(world: World) -> None:
    site = Site(A)
    await world.join(site)
    await world.speak(site)
    await site.declares(msgspec.structs.replace(POOL, count=4))

    async def revised() -> bool:
        reply = await world.call(endpoints.SITES, SitesQuery())
        return bool([p for p in reply.pools if p.profile.revision == 2 and p.profile.count == 4])

    await until(revised, "the second revision stands")


async def test_a_vague_declaration_is_refused_with_an_incident_and_blocks_nothing_behind_it(world: World) -> None:
    site = Site(A)
    await world.join(site)
    await world.speak(site)
    await site.declares(msgspec.structs.replace(POOL, accelerator="gpu"))
    await site.declares(msgspec.structs.replace(POOL, count=3))

    async def both() -> bool:
        reply = await world.call(endpoints.SITES, SitesQuery())
        keys = [incident.key for incident in await world.open_incidents(A)]
        return reply.pools[0].profile.count == 3 and "registry.profile/site-a/slots" in keys

    await until(both, "the refusal is an incident and the next declaration stands")


async def test_a_repeated_join_with_the_same_keys_gives_the_same_answer(world: World) -> None:
    site = Site(A)
    token = await world.invite(A)
    first = await world.call(endpoints.JOIN, site.request(token), signed="")
    assert await world.call(endpoints.JOIN, site.request(token), signed="") == first


async def test_a_used_token_with_other_keys_is_refused(world: World) -> None:
    token = await world.invite(A)
    await world.call(endpoints.JOIN, Site(A).request(token), signed="")
    with pytest.raises(Conflict) as refused:
        await world.call(endpoints.JOIN, Site(A).request(token), signed="")
    assert refused.value.code == "identity.join_token_used"


async def test_a_vague_pool_refuses_the_join_and_leaves_the_token_good(world: World) -> None:
    site, token = Site(A), await world.invite(A)
    vague = msgspec.structs.replace(site.request(token), pools=[msgspec.structs.replace(POOL, accelerator="gpu")])
    with pytest.raises(Refused) as refused:
        await world.call(endpoints.JOIN, vague, signed="")
    assert refused.value.code == "registry.profile.accelerator" and refused.value.next_step
    await world.call(endpoints.JOIN, site.request(token), signed="")


@pytest.mark.parametrize("token", ["", "itj_nonsense", "itj_tok-00000000000000000000000000_" + "a" * 52 + "_00000000"])
async def test_a_token_that_is_none_lets_nobody_in(world: World, token: str) -> None:
    with pytest.raises(Unauthenticated) as refused:
        await world.call(endpoints.JOIN, Site(A).request(token), signed="")
    assert refused.value.code == "identity.join_token"


async def test_a_site_proves_itself_by_its_key_and_gets_claims_of_a_site(world: World) -> None:
    site = Site(A)
    await world.join(site)
    claims = await world.prove(site, site_claims(site.key, A, CLOCK.now()))
    assert (claims.roles, claims.site, claims.iss) == ([Role.SITE], A, "identity")


async def test_one_site_cannot_prove_to_be_another(world: World) -> None:
    first, second = Site(A), Site(B)
    await world.join(first)
    await world.join(second)
    with pytest.raises(Unauthenticated):
        await world.prove(second, site_claims(second.key, A, CLOCK.now()))


async def test_a_second_site_cannot_speak_as_the_first(world: World) -> None:
    """Whatever a site writes, the server puts its own name into the subject; and it can name nothing of the hub's."""
    first, second = Site(A), Site(B)
    await world.join(first)
    await world.join(second)
    bus = await world.connect(second)
    with pytest.raises(Unavailable):
        await bus.request(sync_subject(A, Lane.REGISTRY), b"{}", timeout_s=0.5)
    second_as_first = Site(A, key=second.key, signing=second.signing, joined=second.joined, bus=bus)
    await world.speak(second_as_first)

    async def noticed() -> bool:
        return any(incident.kind == "link.site_mismatch" for incident in await world.open_incidents(B))

    await until(noticed, "the second site is caught speaking as the first")
    record = await world.record(A)
    assert record is not None and record.freshness is Freshness.UNKNOWN and record.last_heard is None


async def test_a_silent_site_becomes_unknown_and_one_incident_that_its_return_marks_recovered(world: World) -> None:
    site = Site(A)
    await world.join(site)
    speaking = await world.speak(site)
    await until(lambda: world.is_(A, Freshness.FRESH), "the site is fresh")
    speaking.cancel()
    await until(lambda: world.is_(A, Freshness.UNKNOWN), "the silent site is unknown")

    async def silent() -> bool:
        return [i.key for i in await world.open_incidents(A)] == ["site.silent/site-a"]

    await until(silent, "one incident is open")
    await world.speak(site)

    async def recovered() -> bool:
        return [i.recovered_at is not None for i in await world.open_incidents(A)] == [True]

    await until(recovered, "the incident is marked recovered")
    [incident] = await world.open_incidents(A)
    assert (incident.state, incident.times) == (IncidentState.OPEN, 1)
    closed = await world.call(endpoints.CLOSE_INCIDENT, CloseIncident(incident=incident.incident, reason="the switch was restarted"))
    assert closed.state is IncidentState.CLOSED and closed.closed_by == "ops"


async def test_a_bus_that_comes_back_with_empty_folders_has_every_site_again_by_itself(world: World, hub: tuple[HubLayout, Nats]) -> None:
    """LINK D17: folders wiped, the preload file too; nobody asks for anything, identity sees what lacks."""
    layout, server = hub
    site = Site(A)
    await world.join(site)
    await world.speak(site)
    await until(lambda: world.is_(A, Freshness.FRESH), "the site is fresh")
    server.kill()
    empty(server.accounts_folder)
    empty(server.jetstream_folder)
    forget_sites(layout)
    before = await heard(world)
    await asyncio.to_thread(server.start)

    async def returned() -> bool:
        return await heard(world) > before and await world.is_(A, Freshness.FRESH)

    await until(returned, "the site speaks again")


async def test_a_wiped_bus_starts_with_every_site_while_identity_is_away(hub: tuple[HubLayout, Nats], pg: PgDatabase) -> None:
    """LINK D17: the preload file is enough."""
    layout, server = hub
    site = Site(A)
    async with running_world(layout, pg) as world:
        joined = await world.join(site)
    server.kill()
    empty(server.accounts_folder)
    await asyncio.to_thread(server.start)
    bus = await NatsBus.connect(layout.bus_url, name=A, credentials=SiteLogin(site.signing, joined.account, CLOCK))
    try:
        assert await bus.alive()
    finally:
        await bus.close()


async def test_a_revoked_site_is_dropped_at_once_and_no_other(world: World) -> None:
    first, second = Site(A), Site(B)
    for site in (first, second):
        await world.join(site)
        await world.connect(site)
    assert first.bus is not None and second.bus is not None
    drops: list[bool] = []
    second.bus.on_state(lambda up: drops.append(up))
    await world.identity.revoke_site(A, actor="ops", reason="leaves")

    async def dropped() -> bool:
        return first.bus is not None and not await first.bus.alive(0.3)

    await until(dropped, "the revoked site's connection is gone")
    assert await second.bus.alive() and drops == [True]
    with pytest.raises(Unauthenticated):
        await world.prove(first, site_claims(first.key, A, CLOCK.now()))


async def test_a_restored_identity_gives_no_revoked_key_back(world: World) -> None:
    """LINK D18: the database is set back to before the revocation; the server's newer account stays, and the revocation is learnt from it."""
    site = Site(A)
    await world.join(site)
    before = await world.identity.store.site(A)
    assert before is not None
    await world.identity.revoke_site(A, actor="ops", reason="stolen")
    async with world.identity.store.rows() as rows:
        await rows.save_site(before)
    rounds = world.pusher.rounds
    world.pusher.beat.hint()

    async def compared() -> bool:
        return world.pusher.rounds >= rounds + 2

    await until(compared, "identity compared its accounts with the server's")
    learnt = await world.identity.store.site(A)
    assert learnt is not None and learnt.revoked and learnt.revoked_keys == [site.signing.public]
    bus = await world.connect(site, wait=False)
    assert not await bus.alive(1.0)


# --- the test's own hands ----------------------------------------------------------------------------------------------------------------


def forget_sites(layout: HubLayout) -> None:
    """The preload file as `hub init` writes it: system and hub only."""
    file = layout.nats / "preload.conf"
    keep = {Key.read(layout.key_file(name)).public for name in ("hub", "system")}
    lines = [line for line in file.read_text(encoding="ascii").splitlines() if line.partition(":")[0] in keep]
    assert len(lines) == 2
    file.write_text("\n".join(lines) + "\n", encoding="ascii")


def empty(folder: Path) -> None:
    """Remove all that is in a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


async def heard(world: World) -> int:
    return sum(row.heard for row in await world.registry.lanes.sites(Lane.REGISTRY))
