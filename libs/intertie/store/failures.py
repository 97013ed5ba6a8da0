"""PostgreSQL's and asyncpg's errors in our words. Nothing of asyncpg's own passes the store's edge, except what is our bug (bad SQL, a wrong
type), which stays as it is and becomes `internal` outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
from asyncpg import exceptions as pg

from intertie.errors import IntertieError, Refused, Stale, Unavailable


class Violated(Exception):
    """A constraint of the schema refused a row. The service's store says in its own words what that means (`Conflict('scheduler.key_reused')`).

    After it the transaction is over, unless it happened inside `tx.savepoint()`.
    """

    def __init__(self, constraint: str, table: str, text: str) -> None:
        super().__init__(f"{table}.{constraint}: {text}")
        self.constraint = constraint
        self.table = table


# The connection is gone, is being refused, or the server is on its way down or up.
_AWAY = (
    pg.PostgresConnectionError,
    pg.AdminShutdownError,
    pg.CrashShutdownError,
    pg.CannotConnectNowError,
    pg.DatabaseDroppedError,
    pg.IdleSessionTimeoutError,
    pg.IdleInTransactionSessionTimeoutError,
    pg.TooManyConnectionsError,
    pg.InternalClientError,
    OSError,
)
# Somebody else was quicker; the same decision on fresh state may well pass. A cached plan that a migration outdated is renewed by the retry.
_CONFLICT = (pg.SerializationError, pg.DeadlockDetectedError, pg.InvalidCachedStatementError, pg.OutdatedSchemaCacheError)
_FULL = (pg.DiskFullError, pg.OutOfMemoryError)
_TEXT = (pg.CharacterNotInRepertoireError, pg.UntranslatableCharacterError)

_GONE = ("closed", "closing", "released back to the pool")

_RETRY = "retry; `intertie doctor` shows whether PostgreSQL answers"


def unavailable(text: str) -> Unavailable:
    return Unavailable("store.unavailable", text, next_step=_RETRY)


def is_away(err: BaseException) -> bool:
    """True if the connection, not the statement, failed: at COMMIT the outcome is then unknown."""
    if isinstance(err, asyncpg.InterfaceError):
        # asyncpg says "connection is closed" and "another operation is in progress", which is our bug, with one type.
        return any(word in str(err) for word in _GONE)
    return isinstance(err, _AWAY) and not isinstance(err, pg.OutdatedSchemaCacheError)


def translate(err: BaseException) -> IntertieError | Violated | None:
    """Our error for a foreign one; None if it is nobody's but ours (a bug), or not the store's at all."""
    if isinstance(err, _CONFLICT):
        return Stale("store.conflict", f"another transaction was quicker: {err}")
    if isinstance(err, pg.IntegrityConstraintViolationError):
        return Violated(err.constraint_name or err.column_name or "", err.table_name or "", str(err))
    if isinstance(err, pg.LockNotAvailableError):
        return Unavailable("store.locked", "the row is held by another transaction", retry_after_s=0.2)
    if isinstance(err, pg.QueryCanceledError):
        return Unavailable("store.timeout", f"PostgreSQL ended a statement: {err}")
    if isinstance(err, _FULL):
        return Unavailable("store.full", f"PostgreSQL has no room: {err}", retry_after_s=10, next_step="free disk or memory of PostgreSQL")
    if isinstance(err, pg.ReadOnlySQLTransactionError):
        return Unavailable("store.read_only", "this PostgreSQL takes no writes (a standby?)", retry_after_s=5)
    if isinstance(err, _TEXT):
        return Refused("store.text", f"a text holds a character that cannot be stored: {err}", next_step="remove NUL characters")
    if isinstance(err, pg.InvalidAuthorizationSpecificationError | pg.InvalidCatalogNameError):
        return Refused("store.login", f"PostgreSQL refuses this login: {err}", next_step="check the URL, role and password file")
    if is_away(err):
        return unavailable(f"PostgreSQL does not answer: {type(err).__name__}: {err}")
    return None


@contextmanager
def translated() -> Iterator[None]:
    """Raise foreign errors of the block in our words."""
    try:
        yield
    except Exception as err:
        ours = translate(err)
        if ours is None:
            raise
        raise ours from err
