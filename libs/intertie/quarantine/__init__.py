"""The way out of quarantine: what a keeper of a lane could not interpret is listed, and tried again when a person says so.

Trying again is to stand open again: the lane's own interpreter finds such an entry within seconds and hands it to the service like any other, in
order, under the same marks. What still fails is set aside again. PostgreSQL in `pg`, a twin in `memory`; one suite holds both to the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from intertie.bus.rpc import Caller, Serve
from intertie.contracts import endpoints
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.link import Lane
from intertie.contracts.quarantine import QuarantinedEntry, QuarantineQuery, QuarantineReply, Reinterpret, Reinterpreted
from intertie.errors import NotFound, Refused
from intertie.ids import SiteName
from intertie.trust import rights

SERVED: Mapping[Lane, tuple[Endpoint[Any, Any], Endpoint[Any, Any]]] = {
    Lane.REGISTRY: (endpoints.REGISTRY_QUARANTINE, endpoints.REGISTRY_REINTERPRET),
    Lane.SCHEDULER: (endpoints.SCHEDULER_QUARANTINE, endpoints.SCHEDULER_REINTERPRET),
    Lane.METERING: (endpoints.METERING_QUARANTINE, endpoints.METERING_REINTERPRET),
}


class QuarantineStore(Protocol):
    """What is asked of a keeper's disk."""

    async def entries(self, lane: Lane, site: SiteName | None, limit: int) -> tuple[list[QuarantinedEntry], int]:
        """(the oldest of them, how many there are), of a site or of all."""
        ...

    async def reopen(self, lane: Lane, ask: Reinterpret, who: str) -> int:
        """Let entries stand open again, and audit who wanted it why, in one transaction; how many. Nothing is audited if there were none."""
        ...


class Quarantine:
    """The two calls of one keeper."""

    def __init__(self, lane: Lane, store: QuarantineStore) -> None:
        self._lane, self._store = lane, store

    def handlers(self) -> Mapping[Endpoint[Any, Any], Serve]:
        listed, tried = SERVED[self._lane]
        return {listed: self.entries, tried: self.reinterpret}

    async def entries(self, ask: QuarantineQuery, caller: Caller) -> QuarantineReply:
        """What could not be interpreted, oldest first."""
        rights.require(caller.claims, "quarantine.read")
        entries, total = await self._store.entries(self._lane, ask.site, ask.limit)
        return QuarantineReply(entries=entries, total=total)

    async def reinterpret(self, ask: Reinterpret, caller: Caller) -> Reinterpreted:
        """Try one entry again, or all of a site."""
        rights.require(caller.claims, "quarantine.retry")
        if (ask.journal is None) != (ask.seq is None):
            raise Refused(
                "quarantine.entry", "an entry is named by its journal and its number", next_step="give both, or none for all of the site"
            )
        if not ask.reason.strip():
            raise Refused("quarantine.no_reason", "whoever tries again says why", next_step="give --reason, such as the upgrade that helps")
        reopened = await self._store.reopen(self._lane, ask, f"{caller.claims.name} ({caller.claims.sub})")
        if not reopened:
            raise NotFound("quarantine.none", "no such entry is in quarantine", next_step="see `intertie quarantine list`")
        return Reinterpreted(reopened=reopened)


class _Tagged(msgspec.Struct):
    kind: str = ""


def kind_of(raw: bytes) -> str:
    """The tag that an entry gives itself; empty if it cannot be read."""
    try:
        return msgspec.json.decode(raw, type=_Tagged).kind[:64]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
