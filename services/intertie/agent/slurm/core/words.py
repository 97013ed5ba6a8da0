"""The one refusal of every parser here, and the words by which Slurm says "nothing".

A parser either gives what the text says, or None where Slurm has said that there is nothing, or raises `Unreadable`. It never falls back on a
legal value: a limit that does not parse is not "unlimited", a count that was cut off is not 0.
"""

from __future__ import annotations

NOTHING = frozenset({"", "(null)", "none", "n/a", "unknown", "none assigned", "not_set", "null"})
"""How Slurm writes an absent value, in lower case."""


class Unreadable(ValueError):
    """What cannot be read as what it should be. `what` names the kind, `text` holds the beginning of it."""

    def __init__(self, what: str, text: object, why: str = "") -> None:
        shown = repr(text if isinstance(text, str) else str(text))[:120]
        super().__init__(f"{shown} is no {what}{f': {why}' if why else ''}")
        self.what = what


class Truncated(Unreadable):
    """Cut off by a column's width: to be asked for again, never to be read as what is left of it (BR-007)."""


def is_nothing(text: str) -> bool:
    return text.strip().lower() in NOTHING
