"""The audit endpoint that every hub service serves from its own schema (`qry.<service>.audit`)."""

from __future__ import annotations

from typing import Protocol

from intertie.contracts.identity import AuditQuery, AuditReply, AuditRow


class AuditReader(Protocol):
    """A Database or a MemoryStore."""

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]: ...


async def audit_reply(store: AuditReader, query: AuditQuery) -> AuditReply:
    """The answer to one audit query: newest first, page on with `before` = the last row's id."""
    return AuditReply(rows=await store.read_audit(query))
