"""The store of a hub service: PostgreSQL with outer timeouts, named queries, numbered migrations, outbox and relay, consumers with dead letters,
audit rows, leadership; and the twin in memory. It knows no noun.
"""

from intertie.store.audit import audit_reply, chain_handlers, verify_chain
from intertie.store.chainer import Chainer, MemoryChain, PgChain, keep_audit
from intertie.store.checks import check_queries
from intertie.store.consumer import EventConsumer, newer
from intertie.store.failures import Violated
from intertie.store.memory import MemoryStore
from intertie.store.outbox import EVENTS, DeadLetter, HasOutbox, Leader, OutboxPort, read_meta
from intertie.store.pg import Database
from intertie.store.queries import Queries, Query, load_queries
from intertie.store.relay import Relay
from intertie.store.tx import StoreTx, Tx
from intertie.store.versions import first_version, numbered_version

__all__ = [
    "EVENTS",
    "Chainer",
    "Database",
    "DeadLetter",
    "EventConsumer",
    "HasOutbox",
    "Leader",
    "MemoryChain",
    "MemoryStore",
    "OutboxPort",
    "PgChain",
    "Queries",
    "Query",
    "Relay",
    "StoreTx",
    "Tx",
    "Violated",
    "audit_reply",
    "chain_handlers",
    "check_queries",
    "first_version",
    "keep_audit",
    "load_queries",
    "newer",
    "numbered_version",
    "read_meta",
    "verify_chain",
]
