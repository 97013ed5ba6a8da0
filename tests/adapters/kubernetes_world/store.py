"""Objects with uids and resource versions, what happened to them in order, and who watches."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Callable, Iterator

from tests.adapters.kubernetes_world.kinds import BY_PATH, Failure, Kind, Obj, now

Key = tuple[str, str, str, str]
"""version, plural, namespace, name"""


class Store:
    def __init__(self, history: int = 2_000) -> None:
        self.version = 1_000
        self.objects: dict[Key, Obj] = {}
        self.history: list[tuple[int, str, Key, Obj]] = []
        self.longest = history
        self.floor = 1_000
        """Older versions cannot be watched from: 410."""
        self.waiting: set[asyncio.Event] = set()
        self.after: list[Callable[[str, Key, Obj], None]] = []

    def get(self, kind: Kind, namespace: str, name: str) -> Obj:
        found = self.objects.get(key_of(kind, namespace, name))
        if found is None:
            raise Failure(404, "NotFound", f'{kind.plural}{"." + kind.group if kind.group else ""} "{name}" not found')
        return found

    def list(self, kind: Kind, namespace: str = "") -> list[Obj]:
        return [obj for key, obj in sorted(self.objects.items()) if key[:2] == (kind.version, kind.plural) and namespace in ("", key[2])]

    def create(self, kind: Kind, namespace: str, obj: Obj) -> Obj:
        meta = obj["metadata"]
        if kind.namespaced:
            meta["namespace"] = namespace
        key = key_of(kind, namespace, meta["name"])
        if key in self.objects:
            raise Failure(409, "AlreadyExists", f'{kind.plural}{"." + kind.group if kind.group else ""} "{meta["name"]}" already exists')
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
        made = {"apiVersion": kind.version, "kind": kind.kind, **obj}
        self.objects[key] = made
        self._emit("ADDED", key, made)
        return made

    def update(self, kind: Kind, obj: Obj, *, expect: str = "") -> Obj:
        """Replace. `expect`: 409 unless this is its version now."""
        meta = obj["metadata"]
        key = key_of(kind, meta.get("namespace", ""), meta["name"])
        before = self.objects.get(key)
        if before is None:
            raise Failure(404, "NotFound", f'{kind.plural} "{meta["name"]}" not found')
        if expect and expect != before["metadata"]["resourceVersion"]:
            raise Failure(409, "Conflict", "the object has been modified; please apply your changes to the latest version and try again")
        if {**obj, "metadata": {**meta, "resourceVersion": ""}} == {**before, "metadata": {**before["metadata"], "resourceVersion": ""}}:
            return before
        if obj.get("spec") != before.get("spec"):
            meta["generation"] = before["metadata"].get("generation", 1) + 1
        self.objects[key] = obj
        self._emit("MODIFIED", key, obj)
        return obj

    def change(self, kind: Kind, obj: Obj, work: Callable[[Obj], None]) -> Obj:
        """A controller's own change of what is there now; nothing if it is gone."""
        key = key_of(kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
        there = self.objects.get(key)
        if there is None or there["metadata"]["uid"] != obj["metadata"]["uid"]:
            return obj
        copied = copy.deepcopy(there)
        work(copied)
        return self.update(kind, copied)

    def remove(self, kind: Kind, obj: Obj) -> None:
        key = key_of(kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
        there = self.objects.get(key)
        if there is not None and there["metadata"]["uid"] == obj["metadata"]["uid"]:
            del self.objects[key]
            self._emit("DELETED", key, there)

    def since(self, version: int, kind: Kind, namespace: str) -> Iterator[tuple[int, str, Obj]]:
        for at, what, key, obj in self.history:
            if at > version and key[:2] == (kind.version, kind.plural) and namespace in ("", key[2]):
                yield at, what, obj

    def compact(self) -> None:
        """Forget what happened, as etcd does after some minutes."""
        self.history.clear()
        self.version += 1
        self.floor = self.version

    def _emit(self, what: str, key: Key, obj: Obj) -> None:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, what, key, copy.deepcopy(obj)))
        if len(self.history) > self.longest:
            self.floor = self.history[-self.longest][0]
            del self.history[: -self.longest]
        for told in self.after:
            told(what, key, obj)
        for event in self.waiting:
            event.set()


def key_of(kind: Kind, namespace: str, name: str) -> Key:
    return kind.version, kind.plural, namespace if kind.namespaced else "", name


def kind_of(key: Key) -> Kind:
    return BY_PATH[key[0], key[1]]
