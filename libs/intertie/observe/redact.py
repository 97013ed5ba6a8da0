"""Takes secrets out of anything that is about to be written down: by name, by shape, and by value. Pure but for the set of known values.

Field case BR-144: a canary put into a job's environment may be found nowhere but in the 0600 file at the site.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

REDACTED = "[redacted]"

SECRET_WORDS = frozenset(
    "token tokens seed seeds password passwd passphrase secret secrets authorization cookie credential credentials jwt signed bearer "
    "apikey".split()
)
SECRET_PAIRS = ("api_key", "private_key", "signing_seed", "intertie_claims")
ENVIRONMENT = frozenset({"env", "environ", "environment"})

_SHAPES = (
    re.compile(r"\bS[UAONCX][A-Z2-7]{54,}\b"),  # an nkey seed
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"),  # a JWT
    re.compile(r"(?<=://)[^\s/:@]*:[^\s/@]+(?=@)"),  # user:password in a URL
    re.compile(r"(?i)(?<=\bbearer )[\w.~+/=-]{8,}"),
    re.compile(r"(?is)-----BEGIN [A-Z ]*(?:PRIVATE KEY|SEED)-----.*?------?END[^-]*-----+"),
)

# Values shorter than this would blank out ordinary words.
_SHORTEST_VALUE = 6
# Enough for every secret file of a process and the environments of the jobs it holds; beyond it the oldest is forgotten.
_MOST_VALUES = 4_096
# Deeper than any message of ours; what lies deeper is not worth a log line.
_MOST_DEPTH = 8

_values: dict[str, None] = {}


def hide(value: str) -> None:
    """From now on `value` is blanked wherever it would be written down by this process."""
    if len(value) < _SHORTEST_VALUE:
        return
    while len(_values) >= _MOST_VALUES:
        del _values[next(iter(_values))]
    _values[value] = None


def secret_name(name: str) -> bool:
    """Does this name say that its value is a secret?"""
    low = name.lower().replace("-", "_").replace(".", "_")
    return not SECRET_WORDS.isdisjoint(low.split("_")) or any(pair in low for pair in SECRET_PAIRS)


def scrub(text: str) -> str:
    """`text` without hidden values and without anything shaped like a secret."""
    for value in _values:
        if value in text:
            text = text.replace(value, REDACTED)
    for shape in _SHAPES:
        text = shape.sub(REDACTED, text)
    return text


def clean(value: object, name: str = "", depth: int = 0) -> object:
    """`value` fit to be written down under `name`. Of an environment the names stay and every value goes."""
    if name and name.lower() in ENVIRONMENT:
        return _names_only(value)
    if name and secret_name(name) and isinstance(value, str | bytes | Mapping | list | tuple | set):
        return REDACTED
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if depth >= _MOST_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {scrub(str(key)): clean(item, str(key), depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [clean(item, "", depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return scrub(str(value))


def _names_only(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): REDACTED for key in value}
    if isinstance(value, list | tuple):
        return [f"{str(item).partition('=')[0]}={REDACTED}" if "=" in str(item) else REDACTED for item in value]
    return REDACTED
