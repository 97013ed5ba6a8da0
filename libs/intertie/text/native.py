"""A scheduler's own words, as its tools print them side by side. They stay in its language: it is by them that its people and its manuals go."""

from __future__ import annotations


def native_words(state: str, reason: str) -> str:
    """`PENDING (Resources)`. A reason of `None` is none, and one that only repeats the state (`COMPLETED`, `Failed/Error`) says nothing."""
    repeated = reason.lower() in (state.lower(), state.lower().rpartition("/")[2])
    return state if reason in ("", "None") or repeated else f"{state} ({reason})"
