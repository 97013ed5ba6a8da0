"""What one list and the watch after it show, kept object by object: lists and lines in, objects out; no I/O.

Three absences are told apart: `gone` (the API server said DELETED), `missing` (a later list lacks it, which alone proves nothing), and never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from intertie.agent.kubernetes.core.seen import Changed, Listed, Meta, Status, parsed
from intertie.errors import Refused

# Ended objects that we keep after the API server has forgotten them; each is a few KiB.
GONE = 5_000
WARNINGS = 50


class HasMeta(Protocol):
    @property
    def metadata(self) -> Meta: ...


class _Bare(msgspec.Struct, frozen=True, kw_only=True):
    metadata: Meta


T = TypeVar("T", bound=HasMeta)


class Kept(Generic[T]):
    """Objects of one kind in one namespace, by uid."""

    def __init__(self, kind: type[T]) -> None:
        self.kind = kind
        self.objects: dict[str, T] = {}
        self.gone: dict[str, T] = {}
        self.missing: dict[str, T] = {}
        self.version = ""
        self.warnings: list[str] = []

    def relisted(self, pages: Sequence[Listed]) -> None:
        """A whole list, of one or more pages. What is not in it is missing, not gone."""
        before = self.objects
        self.objects = {}
        for page in pages:
            for item in page.items or ():
                if (one := self._parsed(item)) is not None:
                    self.objects[one.metadata.uid] = one
        self.missing |= {uid: one for uid, one in before.items() if uid not in self.objects}
        for uid in self.objects:
            self.missing.pop(uid, None)
            self.gone.pop(uid, None)
        self.version = pages[-1].metadata.resource_version if pages else ""

    def changed(self, line: bytes) -> bool:
        """One line of a watch. False: this watch is over (410, or an error), list again."""
        try:
            told = parsed(line, Changed, "a watched line")
        except Refused as err:
            self._warn(err.text)
            return False
        if told.type == "ERROR":
            return False
        if told.type == "BOOKMARK":
            try:
                self.version = parsed(told.object, _Bare, "a bookmark").metadata.resource_version or self.version
            except Refused:
                # Bookmarks carry little else than a version; some servers leave the name out.
                self.version = _version(told.object) or self.version
            return True
        one = self._parsed(told.object)
        if one is None:
            self.version = _version(told.object) or self.version
            return True
        self.version = one.metadata.resource_version or self.version
        uid = one.metadata.uid
        if told.type == "DELETED":
            self.objects.pop(uid, None)
            self.missing.pop(uid, None)
            self._bury(one)
        elif told.type in ("ADDED", "MODIFIED"):
            self.objects[uid] = one
            self.missing.pop(uid, None)
            self.gone.pop(uid, None)
        else:
            self._warn(f"a watch said the unknown word {told.type[:40]!r}")
        return True

    def adopt(self, one: T) -> None:
        """What a create or a get has just answered, if the watch has not told of it yet."""
        uid = one.metadata.uid
        if uid not in self.objects and uid not in self.gone:
            self.objects[uid] = one
        self.missing.pop(uid, None)

    def lost(self, uid: str) -> None:
        """It was asked for by name, and is not there."""
        one = self.missing.pop(uid, None) or self.objects.pop(uid, None)
        if one is not None:
            self._bury(one)

    def forget(self, uid: str) -> None:
        self.gone.pop(uid, None)

    def _bury(self, one: T) -> None:
        self.gone[one.metadata.uid] = one
        while len(self.gone) > GONE:
            self.gone.pop(next(iter(self.gone)))

    def _parsed(self, data: bytes | msgspec.Raw) -> T | None:
        try:
            return parsed(data, self.kind)
        except Refused as err:
            self._warn(err.text)
            return None

    def _warn(self, text: str) -> None:
        if text not in self.warnings and len(self.warnings) < WARNINGS:
            self.warnings.append(text)


class _Versioned(msgspec.Struct, frozen=True):
    metadata: dict[str, msgspec.Raw] = {}


def _version(data: bytes | msgspec.Raw) -> str:
    """Of an object of which nothing else need be readable."""
    try:
        told = parsed(data, _Versioned).metadata.get("resourceVersion")
        return parsed(told, str) if told is not None else ""
    except Refused:
        return ""


def error_of(line: bytes) -> Status | None:
    """What an ERROR line says; None if it is another line."""
    try:
        told = parsed(line, Changed)
        return parsed(told.object, Status) if told.type == "ERROR" else None
    except Refused:
        return None
