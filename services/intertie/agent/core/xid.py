"""NVIDIA's error codes (XID): whose fault each is, and what the kernel's lines say. The owner's mapping may drain on other codes.

A code that is in no table is told and drains nothing. Whether the job or the card is to blame for what is the program's own fault is seen from where
it comes again: on several cards of one job, or in several jobs on one card.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class XidMeans(StrEnum):
    """job: the program's own fault, the card is well. restart: the program must begin anew, the card is well. drain: the card takes no work until it was
    reset. alert: not known here; a person looks."""

    JOB = "job"
    RESTART = "restart"
    DRAIN = "drain"
    ALERT = "alert"


TABLE: Mapping[int, XidMeans] = {
    **dict.fromkeys((13, 31, 43, 45, 68), XidMeans.JOB),
    94: XidMeans.RESTART,
    **dict.fromkeys((48, 79, 95, 109, 119, 120), XidMeans.DRAIN),
}
DRAINS = frozenset(code for code, means in TABLE.items() if means is XidMeans.DRAIN)


def meaning(code: int, drains: Collection[int] = DRAINS) -> XidMeans:
    """`drains`: the owner's own list."""
    if code in drains:
        return XidMeans.DRAIN
    found = TABLE.get(code, XidMeans.ALERT)
    return XidMeans.ALERT if found is XidMeans.DRAIN else found


@dataclass(frozen=True, slots=True)
class XidLine:
    """What one line of the kernel says. `pci` is bus and device, `a1:00`; code None: the card left the bus without one."""

    pci: str
    code: int | None
    pid: int | None = None
    process: str = ""


_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d{1,6})\b(.*)")
_LOST = re.compile(r"NVRM: GPU ([0-9a-fA-F:.]+): GPU has fallen off the bus")
_PID = re.compile(r"pid='?(\d{1,10})\b")
_NAME = re.compile(r"name=([^,\s]+)")


def parse(line: str) -> XidLine | None:
    """None for a line that tells of no error."""
    if found := _XID.search(line):
        pid, name = _PID.search(found[3]), _NAME.search(found[3])
        process = name[1] if name and name[1] != "<unknown>" else ""
        return XidLine(pci_of(found[1]), int(found[2]), int(pid[1]) if pid else None, process[:64])
    if found := _LOST.search(line):
        return XidLine(pci_of(found[1]), None)
    return None


def pci_of(text: str) -> str:
    """Bus and device, lower case, however the domain was written: `00000000:A1:00.0` and `0000:a1:00` are `a1:00`."""
    parts = text.lower().partition(".")[0].split(":")
    return ":".join(parts[-2:])


def suspects(seen: Iterable[tuple[int, str, str]]) -> dict[str, str]:
    """(code, card, job) of faults that are a program's own → card or job that is suspected, and why. Three are no chance."""
    cards: dict[str, set[str]] = {}
    jobs: dict[str, set[str]] = {}
    for code, card, job in seen:
        if meaning(code) is XidMeans.JOB:
            cards.setdefault(card, set()).add(job)
            jobs.setdefault(job, set()).add(card)
    return {
        **{card: f"hardware: the same fault in {len(of)} jobs" for card, of in cards.items() if len(of) >= SUSPICIOUS},
        **{job: f"program: the same fault on {len(of)} cards" for job, of in jobs.items() if len(of) >= SUSPICIOUS},
    }


SUSPICIOUS = 3
