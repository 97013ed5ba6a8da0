"""The audit endpoints that every hub service serves from its own schema: its rows (`qry.<service>.audit`) and their chain
(`qry.<service>.audit_chain`). What a chain is, and the check of it, is `intertie.trust.chain`, handed on here.
"""

from __future__ import annotations

from typing import Protocol

from intertie.bus.rpc import Caller, Serve
from intertie.contracts import endpoints
from intertie.contracts.audit import AuditChainQuery, AuditChainReply
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import AuditQuery, AuditReply, AuditRow
from intertie.trust.chain import GENESIS, link_digest, row_bytes, verify_chain
from intertie.trust.rights import require

__all__ = ["GENESIS", "audit_reply", "chain_handlers", "link_digest", "row_bytes", "verify_chain"]

CHAINS: dict[str, Endpoint[AuditChainQuery, AuditChainReply]] = {
    "registry": endpoints.REGISTRY_AUDIT_CHAIN,
    "scheduler": endpoints.SCHEDULER_AUDIT_CHAIN,
    "metering": endpoints.METERING_AUDIT_CHAIN,
    "identity": endpoints.IDENTITY_AUDIT_CHAIN,
    "incident": endpoints.INCIDENT_AUDIT_CHAIN,
}


class AuditReader(Protocol):
    """A Database or a MemoryStore."""

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]: ...


class ChainReader(Protocol):
    """A service's `ChainPort`."""

    async def page(self, query: AuditChainQuery) -> AuditChainReply: ...


async def audit_reply(store: AuditReader, query: AuditQuery) -> AuditReply:
    """The answer to one audit query: newest first, page on with `before` = the last row's id."""
    return AuditReply(rows=await store.read_audit(query))


def chain_handlers(chain: ChainReader, service: str) -> dict[Endpoint[AuditChainQuery, AuditChainReply], Serve]:
    """What `rpc.serve` takes for a service's chain, beside the service's own handlers."""

    async def audit_chain(query: AuditChainQuery, caller: Caller) -> AuditChainReply:
        require(caller.claims, "audit.read")
        return await chain.page(query)

    return {CHAINS[service]: audit_chain}
