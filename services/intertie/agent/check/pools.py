"""The declared profile against what is seen here."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from intertie.agent.check.report import Check, Line, Place, line
from intertie.agent.config import plain_model
from intertie.agent.sources.reading import CardReading, Reading
from intertie.agent.telemetry import Collector
from intertie.contracts.site import PoolProfile

# What a driver keeps for itself of a card's memory, and what a data sheet rounds.
MEMORY_TOLERANCE = 0.05


async def seen_here() -> Reading:
    eyes = Collector()
    try:
        return await eyes.read()
    finally:
        await eyes.close()


async def pools(place: Place) -> Sequence[Line]:
    """Nothing to say before a profile is declared: `--detect` makes one."""
    if not place.profiles:
        return []
    reading = await seen_here()
    return judged(place.profiles, reading, os.cpu_count() or 1, str(place.folder.pools))


def judged(profiles: Sequence[PoolProfile], reading: Reading, cpus: int, file: str) -> list[Line]:
    """Pools against one look at the cards. A card that is cut into slices counts by its slices."""
    found: list[Line] = []
    cards = [card for card in reading.cards if card.name and not card.sliced]
    free = Counter(plain_model(card.name or "") for card in cards)
    for profile in profiles:
        if profile.accelerator == "none":
            level, key = ("ok", "pool.slots") if profile.count <= cpus else ("warn", "pool.slots")
            found.append(
                line(
                    "ok" if level == "ok" else "warn",
                    key,
                    pool=profile.pool,
                    declared=profile.count,
                    seen=cpus,
                    fix="" if level == "ok" else "pool",
                    file=file,
                )
            )
        else:
            found.append(_cards(profile, reading, cards, free, file))
    if reading.error:
        found.append(line("warn", "cards.odd", why=reading.error, fix="cards"))
    left = {model: count for model, count in free.items() if count > 0}
    return [*found, *(line("warn", "cards.unnamed", count=count, model=model, fix="profile") for model, count in left.items())]


def _cards(profile: PoolProfile, reading: Reading, cards: Sequence[CardReading], free: Counter[str], file: str) -> Line:
    model = plain_model(profile.accelerator)
    seen = free[model]
    free[model] = max(0, seen - profile.count)
    told: dict[str, Any] = {"pool": profile.pool, "declared": profile.count, "model": model, "seen": seen}
    if reading.none:
        # The cards of a queue's nodes are not the login node's.
        return line("ok", "pool.elsewhere", **told) if _has_queue() else line("fail", "pool.fewer", **told, fix="pool", file=file)
    if seen < profile.count:
        return line("fail", "pool.fewer", **told, fix="pool", file=file)
    memories = [card.memory_total_mib for card in cards if plain_model(card.name or "") == model and card.memory_total_mib]
    least = min(memories, default=profile.memory_mib)
    if profile.memory_mib > least * (1 + MEMORY_TOLERANCE):
        return line("warn", "pool.memory", pool=profile.pool, declared=profile.memory_mib, seen=least, fix="pool", file=file)
    return line("ok", "pool.ok", **told)


def _has_queue() -> bool:
    from shutil import which  # noqa: PLC0415  # asked only where no card is seen

    return which("sinfo") is not None


CHECKS: Sequence[Check] = (pools,)
