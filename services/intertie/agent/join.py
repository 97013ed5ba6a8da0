"""Joining: keys are made here and their seeds stay here; a one-time token buys a name, an account on the bus and the services' public keys."""

from __future__ import annotations

import asyncio
import os
import tomllib
from pathlib import Path

import aiohttp
import msgspec

from intertie.agent import accounts
from intertie.agent.check.detect import interconnect_of
from intertie.agent.config import VERSION, Folder, write_whole
from intertie.agent.sources.reading import Reading
from intertie.agent.telemetry import Collector
from intertie.agent.way import Way, http_options, way_of
from intertie.contracts.base import decode, encode
from intertie.contracts.identity import Joined, JoinSite
from intertie.contracts.site import Lendable, PoolProfile, TaskType, plain_model
from intertie.errors import Refused, Unavailable
from intertie.ids import PoolName
from intertie.trust.keys import Key

# A hub that is being started answers within this.
TIMEOUT_S = 30.0


class _Pools(msgspec.Struct):
    pool: list[PoolProfile]


def read_profiles(path: Path) -> list[PoolProfile]:
    """Declared pools: JSON (a list) or TOML (`[[pool]]` tables). `Refused('agent.profile')` names the field that is missing."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return decode(text, list[PoolProfile], what=str(path))
        return msgspec.convert(tomllib.loads(text), _Pools, strict=False).pool
    except OSError as err:
        raise Refused("agent.profile", f"{path}: {err.strerror}") from err
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as err:
        raise Refused(
            "agent.profile",
            f"{path} is not a profile: {err}",
            next_step="accelerator, count, memory_mib, interconnect and task_types are needed",
        ) from err


async def detect(*, interconnect: str = "", collector: Collector | None = None, reading: Reading | None = None) -> list[PoolProfile]:
    """What this machine can see of itself: a pool of CPU slots, and one per GPU model if there are GPUs; `reading` by the sources that the owner
    named, else by NVML. How the cards are connected is seen by their links and the adapters beside them; `Refused('agent.interconnect')` if
    nobody can say."""
    if reading is None:
        eyes = collector or Collector()
        try:
            reading = await eyes.read()
        finally:
            await eyes.close()
    return [*_gpu_pools(reading, interconnect or interconnect_of(reading)), slots_pool(os.cpu_count() or 1)]


def slots_pool(slots: int) -> PoolProfile:
    """CPU slots of this machine."""
    return PoolProfile(
        pool=PoolName("cpu"),
        accelerator="none",
        count=slots,
        memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1_048_576,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=slots),
    )


def _gpu_pools(reading: Reading, interconnect: str) -> list[PoolProfile]:
    if cut := [card for card in reading.cards if card.sliced]:
        raise Refused(
            "agent.slices",
            f"{len(cut)} of the cards here are cut into slices, and what share of a card one slice counts as cannot be seen from here",
            next_step="declare the slices as a pool with share_milli (ops/docs/telemetry.md), and join with --profile FILE",
        )
    by_model: dict[str, list[int]] = {}
    for card in reading.cards:
        if card.name and card.uuid:
            by_model.setdefault(plain_model(card.name), []).append(card.memory_total_mib or 0)
    if by_model and not interconnect:
        raise Refused(
            "agent.interconnect",
            f"GPUs were found ({', '.join(by_model)}), but how they are connected cannot be seen from here",
            next_step="say it: --interconnect nvlink | pcie | infiniband | none",
        )
    pools = []
    for number, (model, memories) in enumerate(sorted(by_model.items())):
        pools.append(
            PoolProfile(
                pool=PoolName("gpu" if number == 0 else f"gpu-{number + 1}"),
                accelerator=model,
                count=len(memories),
                memory_mib=min(memories),
                interconnect=interconnect,
                task_types=[TaskType.TRAIN, TaskType.FINE_TUNE, TaskType.INFERENCE, TaskType.BATCH],
                lendable=Lendable(devices=len(memories)),
            )
        )
    return pools


async def join(folder: Folder, *, hub: str, token: str, profiles: list[PoolProfile]) -> Joined:
    """Ask the hub; repeating it after a lost answer gives the same answer, since the keys are the same.

    Writes site.json and pools.json. `Refused` with the hub's own code; `Unavailable('agent.hub_away')`.
    """
    if folder.site.exists():
        known = folder.joined()
        raise Refused(
            "agent.joined_already", f"{folder.root} has joined as {known.site}", next_step="choose another --data folder for another site"
        )
    await asyncio.to_thread(folder.make)
    site_key, signing_key = await asyncio.to_thread(_keys, folder)
    request = JoinSite(
        token=token,
        site_key=site_key.public,
        signing_key=signing_key.public,
        single_user=folder.rules().single_user(root=accounts.is_root()),
        agent_version=VERSION,
        pools=profiles,
    )
    joined = await _ask(hub, request, way_of(folder))
    await asyncio.to_thread(write_whole, folder.pools, profiles)
    await asyncio.to_thread(write_whole, folder.site, joined)
    return joined


def _keys(folder: Folder) -> tuple[Key, Key]:
    """Those of an earlier try, or new ones."""
    found = []
    for path, kind in ((folder.site_key, "U"), (folder.signing_key, "A")):
        if not path.exists():
            Key.new("U" if kind == "U" else "A").write(path)
        found.append(Key.read(path))
    return found[0], found[1]


async def _ask(hub: str, request: JoinSite, way: Way) -> Joined:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                f"{hub.rstrip('/')}/v1/join", data=encode(request), headers={"Content-Type": "application/json"}, **http_options(way, hub)
            ) as answer,
        ):
            body = await answer.read()
            status = answer.status
    except (aiohttp.ClientError, TimeoutError) as err:
        raise Unavailable(
            "agent.hub_away", f"no answer from {hub}: {err or type(err).__name__}", next_step="check the address and try again"
        ) from err
    if status < 300:
        return decode(body, Joined, what="the hub's answer")
    code, text, step = _problem(body)
    if status >= 500:
        raise Unavailable(code or "agent.hub_away", text or f"the hub answers {status}", next_step=step or "try again in a moment")
    raise Refused(code or "agent.join_refused", text or f"the hub answers {status}", next_step=step)


class _Problem(msgspec.Struct):
    code: str = ""
    detail: str = ""
    title: str = ""
    text: str = ""
    next_step: str = ""


def _problem(body: bytes) -> tuple[str, str, str]:
    """(code, text, next step) of an RFC 9457 answer; empty where it is something else."""
    try:
        found = msgspec.json.decode(body, type=_Problem)
    except msgspec.MsgspecError:
        return "", "", ""
    return found.code, found.detail or found.text or found.title, found.next_step
