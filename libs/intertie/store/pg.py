"""PostgreSQL for one service: its own schema, its own role, every call bounded from outside.

asyncpg's own timeouts do not bound (not the wait for a free connection, not a silently cut link), so each transaction runs under one
`asyncio.timeout` that also covers acquiring; and a connection in doubt is thrown away, never waited for. The pool starts empty and mends
itself: a killed server costs the calls of its absence and nothing afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Literal, NoReturn

import asyncpg

from intertie.clock import Clock, SystemClock
from intertie.contracts.identity import AuditQuery, AuditRow
from intertie.contracts.incident import ReportIncident
from intertie.errors import Refused, Stale, Unavailable
from intertie.store import epoch as epochs
from intertie.store import leader as office
from intertie.store import migrate as migrations
from intertie.store.failures import is_away, translate, translated, unavailable
from intertie.store.outbox import DeadLetter, Leader
from intertie.store.outbox_pg import PgOutbox
from intertie.store.tx import Q, Tx

if TYPE_CHECKING:
    Pool = asyncpg.Pool[asyncpg.Record]
    Connection = asyncpg.Connection[asyncpg.Record]
    PooledConnection = asyncpg.pool.PoolConnectionProxy[asyncpg.Record]

# Each service alone stays far below PostgreSQL's default of 100 connections, and two cores are busy with eight.
CONNECTIONS = 8
# Lanes and heartbeats have these to themselves, so that a page of slow queries cannot make every site look silent.
RESERVED = 2
# A silently cut link would otherwise hold the caller for the system's minutes of TCP.
CONNECT_S = 2.0
# Shorter than a person waits, longer than any healthy transaction.
ACQUIRE_S = 3.0
# An epoch that was raised is seen within this by those who are connected; a connection that is made anew looks before its first use.
EPOCH_EVERY_S = 2.0
# Services notice one failover, or are started after it, within this of each other.
NOTICED_WITHIN_S = 300
# Ending a transaction politely; a connection that needs longer is thrown away.
TIDY_S = 1.0

_SCHEMA = re.compile(r"[a-z][a-z0-9_]{0,62}\Z")
_SESSION = {
    # What a lost client had begun ends by itself: the backend looks each second whether its client is still there …
    "client_connection_check_interval": "1s",
    # … and nothing of ours runs longer than this, whatever happened to who asked.
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "60s",
    "timezone": "UTC",
    # PL/pgSQL and planning of our short statements gain nothing from it, and it costs milliseconds at first use.
    "jit": "off",
}

# What tidying up a connection in doubt may raise; then it is thrown away.
_BROKEN = (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)

Isolation = Literal["read committed", "repeatable read", "serializable"]


class Database:
    """A service's schema. `open`, `migrate`, then `transaction` for everything."""

    def __init__(
        self, pool: Pool, reserved: Pool, connect: Callable[[], Awaitable[Connection]], schema: str, service: str, clock: Clock
    ) -> None:
        self._pool = pool
        self._reserved = reserved
        self._connect_anywhere = connect
        self.schema = schema
        self.service = service
        self.clock = clock
        self.committed = asyncio.Event()
        """Set after each commit of this process that emitted an event; the relay clears it."""
        self.outbox = PgOutbox(self)
        self.entered: epochs.Epoch | None = None
        """The epoch that this process works in, from `migrate` on."""
        self._moved = asyncio.Event()

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        password: str | None = None,
        schema: str,
        application_name: str = "",
        service: str = "",
        clock: Clock | None = None,
        connections: int = CONNECTIONS,
        reserved: int = RESERVED,
        wait_s: float = 0.0,
        role: str = "",
    ) -> Database:
        """Connect to a service's schema, which need not exist yet.

        service: name in events, the schema's if empty. wait_s: how long to wait for a server that is on its way up. role: whom this login
        becomes, for an administrator who acts as a service. `Unavailable` if it is not there by then, `Refused('store.login')` if it refuses the login.
        """
        if not _SCHEMA.match(schema):
            raise Refused("store.schema", f"{schema!r} cannot name a schema: use a-z, 0-9 and '_', beginning with a letter")
        service = service or schema
        settings = {**_SESSION, "search_path": schema, "application_name": application_name or f"intertie-{service}"}
        if role:
            settings["role"] = role

        async def connect() -> Connection:
            connection = await asyncpg.connect(url, password=password, timeout=CONNECT_S, server_settings=settings)
            await _prepare(connection)
            return connection

        async def prepare(connection: Connection) -> None:
            await _prepare(connection)
            await database._know_place(connection)

        def pool(size: int) -> Pool:
            return asyncpg.create_pool(
                url,
                password=password,
                min_size=0,
                max_size=size,
                timeout=CONNECT_S,
                server_settings=settings,
                init=prepare,
                reset=_leave,
            )

        database = cls(pool(connections), pool(reserved), connect, schema, service, clock or SystemClock())
        try:
            with translated():
                await database._pool
                await database._reserved
            await database._wait(wait_s)
        except BaseException:
            await database.close()
            raise
        return database

    async def _wait(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            try:
                return await self.ping()
            except Unavailable:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(0.1)

    async def ping(self, timeout_s: float = 2.0) -> None:
        """Return if the server answers within the limit; `Unavailable` otherwise. Uses the reserved connections."""
        async with self.transaction(timeout_s=timeout_s, reserved=True) as tx:
            await tx.one(Q.system_ping)

    async def close(self) -> None:
        """Close all connections; those still in use are given a moment and then cut."""
        for pool in (self._pool, self._reserved):
            try:
                async with asyncio.timeout(TIDY_S):
                    await pool.close()
            except _BROKEN:
                pool.terminate()

    async def migrate(self, package: str, *, through: migrations.Phase = "post", timeout_s: float = 120.0, enter: bool = True) -> list[str]:
        """Apply the common tables and then `package`'s own migrations, all or nothing; the names of those applied now. Then enter the epoch:
        it is raised here if this is another database than the one that it was begun on.

        through="pre" leaves `.post` files for later, while code of the version before still runs. enter: False leaves the epoch to the caller.
        """
        try:
            with translated():
                async with asyncio.timeout(timeout_s):
                    connection = await self._connect_anywhere()
                    try:
                        async with connection.transaction():
                            applied = await migrations.apply(connection, self.schema, package, through)
                        if enter:
                            self.entered = await self._settle_on(connection)
                        return applied
                    finally:
                        connection.terminate()
        except TimeoutError as err:
            raise Unavailable("store.timeout", f"the migration of {self.schema} did not end within {timeout_s:g} s") from err

    @asynccontextmanager
    async def transaction(
        self, *, timeout_s: float = 5.0, reserved: bool = False, isolation: Isolation = "read committed", read_only: bool = False
    ) -> AsyncIterator[Tx]:
        """One transaction, at most `timeout_s` from asking for a connection to the end of COMMIT, the caller's own work included.

        `Unavailable`: `store.busy` no connection was free in time · `store.unavailable` the server does not answer · `store.timeout` it took
        too long, nothing was done · `store.maybe` the link broke at COMMIT: read before doing it again. `Stale('store.conflict')`: decide
        again. `Violated`: a constraint. A caller cancelled near COMMIT has often committed; undo nothing on that path.
        """
        pool = self._reserved if reserved else self._pool
        connection: PooledConnection | None = None
        committing = ended = False
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                connection = await _acquire(pool, min(timeout_s, ACQUIRE_S))
                with translated():
                    await connection.execute(f"BEGIN ISOLATION LEVEL {isolation}{' READ ONLY' if read_only else ''}")
                tx = Tx(connection, self.service, self.clock.now)
                try:
                    yield tx
                except Exception:
                    ended = await _rolled_back(connection)
                    raise
                committing = True
                tag = await connection.execute("COMMIT")
                ended = True
                if tag != "COMMIT":
                    raise AssertionError("an error inside this transaction was swallowed: PostgreSQL rolled it back at COMMIT")
                if tx.emitted:
                    self.committed.set()
        except TimeoutError as err:
            if not limit.expired():
                raise
            raise _late(pool, connection, committing, timeout_s) from err
        except Exception as err:
            if not committing or ended:
                raise
            if is_away(err):
                raise _maybe(str(err)) from err
            raise translate(err) or err from err
        finally:
            if committing and not ended:
                # It may have committed: the relay looks, rather than wait for its beat.
                self.committed.set()
            if connection is not None:
                await _release(pool, connection, clean=ended)

    @asynccontextmanager
    async def statement(self, *, timeout_s: float = 5.0, reserved: bool = False) -> AsyncIterator[Tx]:
        """For exactly one statement, which PostgreSQL commits by itself before it answers: one round trip instead of three, the same promises.

        Nothing may be emitted: that would be a second statement. Errors as for `transaction`; after any of them it may have been done.
        """
        pool = self._reserved if reserved else self._pool
        connection: PooledConnection | None = None
        ended = False
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                connection = await _acquire(pool, min(timeout_s, ACQUIRE_S))
                yield Tx(connection, self.service, self.clock.now)
                ended = True
        except TimeoutError as err:
            if not limit.expired():
                raise
            raise _late(pool, connection, connection is not None, timeout_s) from err
        finally:
            if connection is not None:
                await _release(pool, connection, clean=ended)

    def leading(self, role: str) -> AbstractAsyncContextManager[Leader]:
        """Wait until this process leads `role` of this service; see `intertie.store.leader`."""
        return office.leading(self._connect, role)

    async def keep_epoch(self, *, beat_s: float = EPOCH_EVERY_S) -> NoReturn:
        """Look each beat, and at once when a new connection ended elsewhere, whether the epoch is still the one that was entered.

        Raises `Stale('store.epoch_raised')` when it is not: all that this process holds in memory was numbered in another life of the
        database, so it ends, and whoever supervises it starts it anew.
        """
        while True:
            try:
                async with asyncio.timeout(beat_s):
                    await self._moved.wait()
            except TimeoutError:
                pass
            try:
                now = await self._settle()
            except (Unavailable, Stale):
                # Away, or another copy is raising it: asked again with the next beat.
                await asyncio.sleep(min(beat_s, 1.0))
                continue
            self._moved.clear()
            if self.entered is None or now.number != self.entered.number:
                before = self.entered.number if self.entered else 0
                raise Stale("store.epoch_raised", f"epoch {before} of {self.service} became {now.number} ({now.reason}): it begins anew")

    async def _settle(self) -> epochs.Epoch:
        """The epoch as it stands, raised if this is another database. On a connection of its own, which may end anywhere."""
        try:
            with translated():
                async with asyncio.timeout(ACQUIRE_S):
                    connection = await self._connect_anywhere()
        except TimeoutError as err:
            raise unavailable("PostgreSQL does not take a connection") from err
        try:
            with translated():
                async with asyncio.timeout(ACQUIRE_S):
                    return await self._settle_on(connection)
        except TimeoutError as err:
            raise unavailable("PostgreSQL does not answer") from err
        finally:
            connection.terminate()

    async def _settle_on(self, connection: Connection) -> epochs.Epoch:
        async with connection.transaction():
            return await epochs.settle(Tx(connection, self.service, self.clock.now), self.service, self.clock.now())

    async def _connect(self) -> Connection:
        """A connection outside the pools, to the database that the epoch was begun on."""
        connection = await self._connect_anywhere()
        try:
            await self._know_place(connection)
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def _know_place(self, connection: Connection) -> None:
        """A connection that ends at another database than the epoch was begun on serves nobody: `Unavailable` until the epoch is raised."""
        if self.entered is None:
            return
        if epochs.differs(self.entered.place, await epochs.find_place(Tx(connection, self.service, self.clock.now))):
            self._moved.set()
            raise Unavailable("store.moved", "this is another PostgreSQL than before, or another timeline: the epoch is being raised")

    @property
    def stream_epoch(self) -> int:
        """The lowest epoch of an event stream that this service can trust; 0: any, no epoch was ever raised.

        Services that raise theirs for themselves, after one failover, differ by the seconds that each took to notice.
        """
        number = self.entered.number if self.entered is not None else 1
        return max(0, number - NOTICED_WITHIN_S) if number > 1 else 0

    async def epoch(self) -> int:
        """The service's epoch."""
        async with self.transaction(read_only=True) as tx:
            row = await tx.one(Q.epoch_load)
        assert row is not None, "the first migration makes the row"
        return int(row["epoch"])

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]:
        """Audit rows, newest first."""
        async with self.transaction(read_only=True) as tx:
            return await tx.read_audit(query)

    async def open_dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """Events given up and not replayed since, oldest first."""
        async with self.transaction(read_only=True) as tx:
            return await tx.open_dead_letters(limit)

    async def keep_dead_letter(self, letter: DeadLetter, report: ReportIncident | None) -> None:
        """Keep an event that was given up, and say so, in one transaction."""
        async with self.transaction() as tx:
            await tx.dead_letter(letter)
            if report is not None:
                await tx.fault(report)


async def _prepare(connection: Connection) -> None:
    """jsonb as JSON text, in and out; bytes are taken too, so that `contracts.encode` needs no step between."""
    await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=_json_text, decoder=str, format="text")


async def _leave(_connection: Connection) -> None:
    """Nothing to reset: sessions carry no state of ours, and asyncpg's own reset costs a round trip per transaction."""


def _json_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


async def _acquire(pool: Pool, budget_s: float) -> PooledConnection:
    try:
        with translated():
            return await pool.acquire(timeout=budget_s)
    except TimeoutError as err:
        raise _not_acquired(pool) from err


def _not_acquired(pool: Pool) -> Unavailable:
    if pool.get_idle_size() == 0 and pool.get_size() >= pool.get_max_size():
        return Unavailable("store.busy", "every connection to PostgreSQL is in use", retry_after_s=1.0, next_step="retry shortly")
    return unavailable("PostgreSQL does not take a connection")


def _late(pool: Pool, connection: PooledConnection | None, committing: bool, timeout_s: float) -> Unavailable:
    if connection is None:
        return _not_acquired(pool)
    if committing:
        return _maybe(f"no answer within {timeout_s:g} s")
    return Unavailable("store.timeout", f"the transaction did not end within {timeout_s:g} s and was given up")


def _maybe(why: str) -> Unavailable:
    return Unavailable("store.maybe", f"the outcome of a COMMIT is unknown: {why}", next_step="read what is there before doing it again")


async def _rolled_back(connection: PooledConnection) -> bool:
    """Roll back politely; False if that was not possible, and the connection is to be thrown away."""
    try:
        async with asyncio.timeout(TIDY_S):
            await connection.execute("ROLLBACK")
    except _BROKEN:
        return False
    return True


async def _release(pool: Pool, connection: PooledConnection, *, clean: bool) -> None:
    if not clean:
        _throw_away(connection)
    try:
        await pool.release(connection, timeout=TIDY_S)
    except _BROKEN:
        _throw_away(connection)


def _throw_away(connection: PooledConnection) -> None:
    """Cut it, without waiting for anybody. A connection that was lost has already left the pool and says InterfaceError."""
    with contextlib.suppress(asyncpg.InterfaceError):
        connection.terminate()
