"""The declared profile against what is seen here."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from intertie.agent.check.report import Check, Line, Place, line
from intertie.agent.sources.reading import CardReading, Reading
from intertie.agent.sources.several import build
from intertie.agent.telemetry import Collector
from intertie.clock import SystemClock
from intertie.contracts.site import PoolProfile, plain_model
from intertie.errors import IntertieError

# What a driver keeps for itself of a card's memory, and what a data sheet rounds.
MEMORY_TOLERANCE = 0.05


async def seen_here(place: Place) -> Reading:
    """By the sources that the owner named, else by NVML; `Refused` for one that cannot be a source."""
    eyes = Collector()
    try:
        sources = build(place.rules.telemetry, place.folder.root, SystemClock(), eyes)
        try:
            return await sources.read()
        finally:
            await sources.close()
    finally:
        await eyes.close()


async def pools(place: Place) -> Sequence[Line]:
    """Nothing to say before a profile is declared: `--detect` makes one."""
    if not place.profiles:
        return []
    try:
        reading = await seen_here(place)
    except IntertieError as err:
        reading = Reading(error=err.text)
    # The cards of a queue's, a cluster's or a head's nodes are not this machine's.
    elsewhere = any(table is not None for table in (place.rules.slurm, place.rules.kubernetes, place.rules.machines))
    return judged(place.profiles, reading, os.cpu_count() or 1, str(place.folder.pools), elsewhere=elsewhere)


def judged(profiles: Sequence[PoolProfile], reading: Reading, cpus: int, file: str, *, elsewhere: bool = False) -> list[Line]:
    """Pools against one look at the cards. A card that is cut into slices counts by its slices."""
    found: list[Line] = []
    cards = [card for card in reading.cards if card.name and not card.sliced]
    free = Counter(plain_model(card.name or "") for card in cards)
    for profile in profiles:
        if profile.accelerator == "none":
            fits = elsewhere or profile.count <= cpus
            told: dict[str, Any] = {"pool": profile.pool, "declared": profile.count, "seen": cpus}
            found.append(line("ok", "pool.slots", **told) if fits else line("warn", "pool.slots", fix="pool", file=file, **told))
        else:
            unread = bool(reading.error)
            found.append(_unread(profile) if unread else _cards(profile, cards, free, file, elsewhere=elsewhere and bool(reading.none)))
    if reading.error:
        found.append(line("warn", "cards.odd", why=reading.error, fix="cards"))
    left = {model: count for model, count in free.items() if count > 0}
    return [*found, *(line("warn", "cards.unnamed", count=count, model=model, fix="profile") for model, count in left.items())]


def _unread(profile: PoolProfile) -> Line:
    """Nobody saw them, and nobody saw that they are not there."""
    return line("warn", "pool.unknown", pool=profile.pool, declared=profile.count, model=plain_model(profile.accelerator), fix="cards")


def _cards(profile: PoolProfile, cards: Sequence[CardReading], free: Counter[str], file: str, *, elsewhere: bool) -> Line:
    model = plain_model(profile.accelerator)
    seen = free[model]
    free[model] = max(0, seen - profile.count)
    told: dict[str, Any] = {"pool": profile.pool, "declared": profile.count, "model": model, "seen": seen}
    if elsewhere:
        return line("ok", "pool.elsewhere", **told)
    if seen < profile.count:
        return line("fail", "pool.fewer", **told, fix="pool", file=file)
    memories = [card.memory_total_mib for card in cards if plain_model(card.name or "") == model and card.memory_total_mib]
    least = min(memories, default=profile.memory_mib)
    if profile.memory_mib > least * (1 + MEMORY_TOLERANCE):
        return line("warn", "pool.memory", pool=profile.pool, declared=profile.memory_mib, seen=least, fix="pool", file=file)
    return line("ok", "pool.ok", **told)


CHECKS: Sequence[Check] = (pools,)
