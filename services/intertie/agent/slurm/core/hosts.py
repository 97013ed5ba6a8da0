"""Slurm's host lists, spelt out: `n[1-3,08-10],x01`, `rack[1-2]node[0-3]`. Ours, by the man page of slurm.conf (NodeName): see ADR 0010."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

from intertie.agent.slurm.core.words import Unreadable

# slurm.h: MAX_SLURM_NODES is 65,533; a longer list is no host list.
MOST_HOSTS = 65_536
_TOKEN = re.compile(r"\[([^\[\]]+)\]|([^\[\],]+)|(,)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def expand_hosts(text: str) -> tuple[str, ...]:
    """In the order of the list, each name once. `Unreadable` for what is no host list, or names more than `MOST_HOSTS`."""
    names = dict[str, None]()
    host: Sequence[str] | None = None
    at = 0
    for token in _TOKEN.finditer(text):
        if token.start() != at:
            break
        at = token.end()
        if token[3] is not None:
            names.update(dict.fromkeys(host or _bad(text)))
            host = None
        else:
            more = _numbers(token[1], text) if token[1] is not None else (token[2],)
            before = host or ("",)
            if len(names) + len(before) * len(more) > MOST_HOSTS:
                _bad(text)
            host = [one + other for one in before for other in more]
    if at != len(text):
        _bad(text)
    names.update(dict.fromkeys(host or _bad(text)))
    return tuple(names)


def _numbers(inside: str, text: str) -> Sequence[str]:
    """What stands between brackets. A first number's zeros are the width of all in its range."""
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            _bad(text)
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or len(found) + high - low >= MOST_HOSTS:
            _bad(text)
        found += [f"{number:0{len(match[1])}d}" for number in range(low, high + 1)]
    return found


def _bad(text: str) -> NoReturn:
    raise Unreadable("host list", text)
