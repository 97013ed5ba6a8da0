"""How a device was used, in one line: what is not known is said to be unknown, and how much of the run was seen stands beside every mean."""

from __future__ import annotations

from collections.abc import Sequence

from intertie.contracts.telemetry import DeviceUse
from intertie.text import Lang, say

SHOWN = 8


def use_lines(used: Sequence[DeviceUse], lang: Lang) -> list[str]:
    """A line for each of the first devices, and how many more there are."""
    lines = [use_line(one, lang) for one in used[:SHOWN]]
    return [*lines, say("use.more", lang, count=len(used) - SHOWN)] if len(used) > SHOWN else lines


def use_line(one: DeviceUse, lang: Lang) -> str:
    ran_us = one.seen_us + one.unseen_us + one.shared_us
    parts = []
    if one.mean_milli is None or one.max_milli is None:
        parts.append(say("use.unknown", lang))
    else:
        parts.append(say("use.mean", lang, mean=percent(one.mean_milli), most=percent(one.max_milli)))
    if one.max_memory_mib is None:
        parts.append(say("use.memory_unknown", lang))
    elif one.memory_total_mib:
        parts.append(say("use.memory_of", lang, peak=gib(one.max_memory_mib), total=gib(one.memory_total_mib)))
    else:
        parts.append(say("use.memory", lang, peak=gib(one.max_memory_mib)))
    if one.energy_mj is not None:
        parts.append(say("use.energy", lang, wh=f"{one.energy_mj / 3_600_000:.1f}"))
    if ran_us:
        parts.append(say("use.seen", lang, seen=percent(one.seen_us * 1000 // ran_us)))
    if one.shared_us:
        parts.append(say("use.shared", lang, seconds=f"{one.shared_us / 1e6:.0f}"))
    return f"{one.model or 'GPU'}: {say('use.comma', lang).join(parts)}"


def percent(milli: int) -> str:
    return f"{(milli + 5) // 10} %"


def gib(mib: int) -> str:
    """Whole ones where there are many, so that 80 GiB reads as 80."""
    return f"{mib / 1024:.0f}" if mib >= 10 * 1024 else f"{mib / 1024:.1f}"
