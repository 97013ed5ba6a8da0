"""What people read, in English and Chinese: one catalogue for the command line and the console, using the terms of the design.

`say(key, lang, **values)` fills a text. A key without both languages, or with other fields in one than in the other, fails a test.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from intertie.text.catalogue import TEXTS

Lang = Literal["en", "zh"]


def language(environ: Mapping[str, str] | None = None) -> Lang:
    """The reader's language: `INTERTIE_LANG`, else the locale's (`LC_ALL`, `LC_MESSAGES`, `LANG`); English unless it is Chinese."""
    given = os.environ if environ is None else environ
    for name in ("INTERTIE_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        if value := given.get(name):
            return "zh" if value.lower().startswith("zh") else "en"
    return "en"


def accepted(header: str) -> Lang:
    """The first of English and Chinese in an `Accept-Language` header."""
    for part in header.split(","):
        tag = part.strip().lower()
        if tag.startswith("zh"):
            return "zh"
        if tag.startswith("en"):
            return "en"
    return "en"


def say(key: str, lang: Lang, /, **values: object) -> str:
    """The text of `key` in `lang`, filled. An unknown key is our bug."""
    english, chinese = TEXTS[key]
    return (chinese if lang == "zh" else english).format(**values)


def known(key: str) -> bool:
    """True if the catalogue has the key: for texts chosen by a code that may be newer than this catalogue."""
    return key in TEXTS
