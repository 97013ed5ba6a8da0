"""How a device is used by the attempt that holds it alone: integrals over what was read, whole numbers only, of bounded size.

A look counts for the time since the look before, as far as looks come regularly; what lies in a gap was not seen. Mean and maximum know nothing
of what was not read (BR-105), and an energy counter that begins anew goes on from there (BR-106).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from intertie.agent.sources.reading import CardReading
from intertie.contracts.telemetry import DeviceUse
from intertie.ids import DeviceId

# A look may come late by as much as its own interval and half of it, on a loaded host; beyond that nobody looked.
LATE = 2.5
# Devices of one attempt whose use is told; the entry must stay within a sync.
MOST_TOLD = 256


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """One device so far. Weights are value × microseconds."""

    last_us: int
    """Up to here it was looked at, in microseconds from the start."""
    read: str = ""
    """Which reading that was, where a source is slower than our looks: the same one counts once."""
    model: str = ""
    milli_weight: int = 0
    milli_us: int = 0
    max_milli: int | None = None
    mib_weight: int = 0
    mib_us: int = 0
    max_mib: int | None = None
    total_mib: int | None = None
    energy_mj: int | None = None
    counter_mj: int | None = None
    shared_us: int = 0
    samples: int = 0


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt's devices, as it lies in the journal's file."""

    devices: dict[str, Tally] = {}


def look(
    use: Use, cards: Mapping[DeviceId, CardReading], shared: frozenset[DeviceId], held: Sequence[DeviceId], *, at_us: int, beat_us: int
) -> Use:
    """The tallies after a look at `at_us` from the start. `shared`: devices with a process on them that is not ours."""
    devices = dict(use.devices)
    for device in held[:MOST_TOLD]:
        card = cards.get(device)
        if card is not None:
            before = devices.get(device, Tally(last_us=0))
            devices[device] = _seen(before, card, device in shared, at_us=at_us, beat_us=beat_us)
    return Use(devices=devices)


def _seen(before: Tally, card: CardReading, shared: bool, *, at_us: int, beat_us: int) -> Tally:
    read = card.read_at.isoformat() if card.read_at is not None else ""
    if at_us <= before.last_us or (read and read == before.read):
        return before
    every_us = max(beat_us, int(card.every_s * 1e6))
    since_us = at_us - before.last_us
    seen_us = since_us if since_us <= LATE * every_us else every_us
    energy_mj, counter_mj = energy(before.energy_mj, before.counter_mj, None if shared else card.energy_mj)
    after = msgspec.structs.replace(
        before,
        last_us=at_us,
        read=read,
        model=card.name or before.model,
        total_mib=card.memory_total_mib or before.total_mib,
        energy_mj=energy_mj,
        # What was drawn while somebody else was on it is nobody's: the counter begins anew afterwards.
        counter_mj=None if shared else counter_mj,
    )
    if shared:
        return msgspec.structs.replace(after, shared_us=before.shared_us + seen_us)
    changes: dict[str, int] = {}
    if (milli := card.milli) is not None:
        changes |= {
            "milli_weight": before.milli_weight + milli * seen_us,
            "milli_us": before.milli_us + seen_us,
            "max_milli": max(milli, before.max_milli or 0),
        }
    if (used := card.memory_used_mib) is not None:
        changes |= {
            "mib_weight": before.mib_weight + used * seen_us,
            "mib_us": before.mib_us + seen_us,
            "max_mib": max(used, before.max_mib or 0),
        }
    return msgspec.structs.replace(after, samples=before.samples + bool(changes), **changes)


def energy(sum_mj: int | None, counter_mj: int | None, now_mj: int | None) -> tuple[int | None, int | None]:
    """(what was used so far, the counter) after a look at the counter. One that fell was begun anew with the driver: it counts from zero."""
    if now_mj is None:
        return sum_mj, counter_mj
    if counter_mj is None:
        return sum_mj or 0, now_mj
    return (sum_mj or 0) + (now_mj - counter_mj if now_mj >= counter_mj else now_mj), now_mj


def told(use: Use | None, held: Sequence[DeviceId], ran_us: int) -> list[DeviceUse]:
    """For the end: of every device that was ever read, what is known. A device of which nothing was ever read is not named: nobody looked here."""
    found: list[DeviceUse] = []
    for device in held[:MOST_TOLD]:
        tally = use.devices.get(device) if use is not None else None
        if tally is None:
            continue
        # The last look may lie a little after the end that its supervisor saw.
        shared_us = min(tally.shared_us, ran_us)
        seen_us = min(max(tally.milli_us, tally.mib_us), ran_us - shared_us)
        found.append(
            DeviceUse(
                device=device,
                model=tally.model[:100],
                mean_milli=_mean(tally.milli_weight, tally.milli_us),
                max_milli=tally.max_milli,
                mean_memory_mib=_mean(tally.mib_weight, tally.mib_us),
                max_memory_mib=tally.max_mib,
                memory_total_mib=tally.total_mib,
                energy_mj=tally.energy_mj,
                seen_us=seen_us,
                unseen_us=ran_us - seen_us - shared_us,
                shared_us=shared_us,
                samples=tally.samples,
            )
        )
    return found


def _mean(weight: int, over_us: int) -> int | None:
    """Rounded to the nearest whole; None over no time."""
    return (2 * weight + over_us) // (2 * over_us) if over_us else None
