"""Lending windows: `HH:MM-HH:MM` in the owner's wall clock, half open, over midnight too (`22:00-06:00`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import time

_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-(?:([01]\d|2[0-3]):([0-5]\d)|(24):(00))\Z")


def is_open(windows: Sequence[str], local: time) -> bool:
    """True inside one of the windows, or if there are none. A window that cannot be read is closed: lending is never guessed."""
    return not windows or any(_inside(window, local) for window in windows)


def _inside(window: str, local: time) -> bool:
    found = _WINDOW.match(window.strip())
    if found is None:
        return False
    start = int(found[1]) * 60 + int(found[2])
    end = int(found[3] or found[5]) * 60 + int(found[4] or found[6])
    at = local.hour * 60 + local.minute
    return start <= at < end if start < end else at >= start or at < end
