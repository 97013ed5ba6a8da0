"""Where calls lie: words, books and entries in one transaction; PostgreSQL, and the twin. Rows that are read are locked until the end, so the question
is asked of what is there, and nobody decides beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Protocol

from intertie.contracts.base import decode, encode
from intertie.contracts.calls import CallBook, CallRecord, CallSeen, CallsQuery
from intertie.contracts.link import Sealed
from intertie.contracts.usage import MeterSpec
from intertie.ids import CallId, OfferingName, SiteName, SpecId, TenantName
from intertie.metering.core import ledger
from intertie.metering.core.calls import CallEvidence, CallReckoning, Decided, SiteWord
from intertie.metering.core.evidence import Money, SiteKeys
from intertie.metering.memory import MemoryMetering
from intertie.metering.pg import Q
from intertie.metering.store import Mark
from intertie.store import Database, Tx

if TYPE_CHECKING:
    from asyncpg import Record

Key = tuple[SiteName, CallId]
News = Callable[[CallEvidence], CallEvidence]
Ask = Callable[[CallEvidence], CallReckoning]


@dataclass(frozen=True, slots=True)
class SummedCalls:
    """Calls of one tenant, offering, day and outcome."""

    site: SiteName
    offering: OfferingName
    day: str
    outcome: str
    calls: int
    waiting: int
    amount: Decimal
    others: Decimal
    input_tokens: int
    output_tokens: int
    unknown: int


@dataclass(frozen=True, slots=True)
class Attained:
    """An offering's calls within some time. Microseconds."""

    calls: int = 0
    answered: int = 0
    failed: int = 0
    kept: int = 0
    missed: int = 0
    missing: int = 0
    response_us: int | None = None
    first_byte_us: int | None = None


class CallStore(Protocol):
    async def reckon(self, news: Mapping[Key, News], ask: Ask, mark: Mark | None = None) -> int:
        """Bring news to calls, ask what follows, write it; how many were new here. Nothing if the mark was there before."""
        ...

    async def decide(self, key: Key, decided: Decided, ask: Ask) -> bool:
        """Keep a person's word, with its audit row, and ask anew; False if there is no such call. The first word stands."""
        ...

    async def open_calls(self, after: Key, limit: int) -> list[Key]:
        """Those that are not settled, by site and call."""
        ...

    async def find(self, query: CallsQuery) -> list[CallBook]:
        """Newest first."""
        ...

    async def summed(self, tenant: TenantName, start: datetime, end: datetime) -> list[SummedCalls]: ...

    async def attained(self, site: SiteName, offering: OfferingName, start: datetime, end: datetime) -> Attained: ...

    async def counted(self) -> tuple[int, int]:
        """(not settled, postings that are not the book's amount)."""
        ...


class PgCalls:
    """`CallStore` in metering's schema."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def reckon(self, news: Mapping[Key, News], ask: Ask, mark: Mark | None = None) -> int:
        keys = sorted(news)
        sites, calls = [site for site, _ in keys], [call for _, call in keys]
        async with self._db.transaction() as tx:
            if mark is not None and not await mark(tx):
                return 0
            await tx.all(Q.calls_turn, sites, calls)
            rows = {(row["site"], row["call"]): row for row in await tx.all(Q.calls_lock, sites, calls)}
            balances, last = _balances(await tx.all(Q.call_balances, sites, calls))
            decided = {(row["site"], row["call"]): _decided(row) for row in await tx.all(Q.call_decisions, sites, calls)}
            found = {}
            for key in keys:
                before = _evidence(key, rows.get(key), balances.get(key, {}), last.get(key, 0))
                found[key] = news[key](replace(before, decided=decided.get(key)))
            tenants = sorted({one.tenant for one in found.values()})
            specs = [decode(row["record"], MeterSpec) for row in await tx.all(Q.specs_for, tenants)]
            known = await _keys(tx, sorted(set(sites)))
            for key, evidence in found.items():
                mine = [spec for spec in specs if spec.consumer in (evidence.tenant, "*")]
                await _write(tx, ask(replace(evidence, specs=mine, keys=known.get(key[0], SiteKeys()))))
        return len(keys) - len(rows)

    async def decide(self, key: Key, decided: Decided, ask: Ask) -> bool:
        async with self._db.transaction() as tx:
            tokens = (decided.input_tokens, decided.output_tokens)
            if not await tx.run(Q.call_decide, *key, *tokens, decided.who, decided.why, decided.at):
                return bool(await tx.all(Q.calls_lock, [key[0]], [key[1]]))
            await tx.audit(actor=decided.who, action="call.decide", target=f"{key[0]}/{key[1]}", reason=decided.why)
        await self.reckon({key: lambda before: before}, ask)
        return True

    async def open_calls(self, after: Key, limit: int) -> list[Key]:
        async with self._db.transaction(read_only=True) as tx:
            return [(SiteName(row["site"]), CallId(row["call"])) for row in await tx.all(Q.calls_open, *after, limit)]

    async def find(self, query: CallsQuery) -> list[CallBook]:
        async with self._db.transaction(read_only=True) as tx:
            rows = await tx.all(
                Q.calls_find, query.tenant, query.site, query.offering, query.day, query.call, query.state, query.after, query.limit
            )
        return [decode(row["book"], CallBook) for row in rows]

    async def summed(self, tenant: TenantName, start: datetime, end: datetime) -> list[SummedCalls]:
        async with self._db.transaction(read_only=True) as tx:
            return [SummedCalls(**dict(row)) for row in await tx.all(Q.calls_summed, tenant, start, end)]

    async def attained(self, site: SiteName, offering: OfferingName, start: datetime, end: datetime) -> Attained:
        async with self._db.transaction(read_only=True) as tx:
            row = await tx.one(Q.calls_attained, site, offering, start, end)
        assert row is not None, "aggregates answer with one row"
        return Attained(**dict(row))

    async def counted(self) -> tuple[int, int]:
        async with self._db.transaction(read_only=True) as tx:
            row = await tx.one(Q.calls_counted)
        assert row is not None, "aggregates answer with one row"
        return row["waiting"], row["differing"]


def _balances(rows: Sequence[Record]) -> tuple[dict[Key, dict[Money, Decimal]], dict[Key, int]]:
    found: dict[Key, dict[Money, Decimal]] = {}
    last: dict[Key, int] = {}
    for row in rows:
        key = (row["call_site"], row["call"])
        last[key] = max(last.get(key, 0), row["last"])
        if row["amount"]:
            found.setdefault(key, {})[(row["account"], row["currency"])] = row["amount"]
    return found, last


def _evidence(key: Key, row: Record | None, balances: Mapping[Money, Decimal], last: int) -> CallEvidence:
    if row is None:
        return CallEvidence(site=key[0], call=key[1])
    word = None
    if row["payload"] is not None:
        sealed = Sealed(payload=row["payload"], signer=row["signer"], signature=row["signature"])
        word = SiteWord(sealed, decode(row["payload"], CallRecord, what="a stored call"), row["received_at"], row["proven"])
    return CallEvidence(
        site=key[0],
        call=key[1],
        word=word,
        seen=decode(row["seen"], CallSeen, what="a stored call") if row["seen"] is not None else None,
        seen_at=row["seen_at"],
        balances=balances,
        priced_by=(SpecId(row["priced_spec"]), row["priced_revision"]) if row["priced_spec"] is not None else None,
        last_entry=last,
    )


def _decided(row: Record) -> Decided:
    return Decided(row["input_tokens"], row["output_tokens"], row["who"], row["why"], row["at"])


async def _keys(tx: Tx, sites: Sequence[SiteName]) -> dict[SiteName, SiteKeys]:
    found: dict[SiteName, SiteKeys] = {}
    for row in await tx.all(Q.keys_for, list(sites)):
        before, key = found.get(row["site"], SiteKeys()), frozenset({row["key"]})
        found[row["site"]] = replace(before, revoked=before.revoked | key) if row["revoked"] else replace(before, valid=before.valid | key)
    return found


async def _write(tx: Tx, reckoning: CallReckoning) -> None:
    evidence, book, word, spec = reckoning.evidence, reckoning.book, reckoning.evidence.word, reckoning.spec
    sealed = (word.sealed.payload, word.sealed.signer, word.sealed.signature) if word is not None else (None, None, None)
    priced = (spec.spec, spec.revision) if spec is not None else (None, None)
    await tx.run(
        Q.call_save,
        evidence.site,
        evidence.call,
        book.offering,
        book.tenant,
        reckoning.at,
        book.day,
        *sealed,
        word.received_at if word is not None else None,
        word is not None and word.proven,
        encode(evidence.seen).decode() if evidence.seen is not None else None,
        evidence.seen_at,
        book.state,
        book.reason,
        book.outcome.value,
        book.payer.value if book.payer is not None else None,
        book.amount,
        book.currency or None,
        *priced,
        book.input_tokens,
        book.output_tokens,
        reckoning.response_us,
        reckoning.first_byte_us,
        book.kept,
        encode(book).decode(),
    )
    if not reckoning.legs:
        return
    kind = ledger.EntryKind.ADJUST if evidence.last_entry else ledger.EntryKind.POST
    row = await tx.one(Q.call_entry_insert, evidence.site, evidence.call, kind, book.formula[:1_000], *priced, evidence.last_entry or None)
    assert row is not None, "an insert returns its row"
    accounts, currencies = [leg.account for leg in reckoning.legs], [leg.currency for leg in reckoning.legs]
    await tx.run(Q.postings_insert, row["id"], accounts, currencies, [leg.amount for leg in reckoning.legs])


class MemoryCalls:
    """`CallStore` beside a twin of metering."""

    def __init__(self, metering: MemoryMetering) -> None:
        self._metering = metering
        self.kept: dict[Key, CallReckoning] = {}
        self.entries: list[tuple[Key, Sequence[ledger.Leg]]] = []

    async def reckon(self, news: Mapping[Key, News], ask: Ask, mark: Mark | None = None) -> int:
        async with self._metering.transaction() as tx:
            if mark is not None and not await mark(tx):
                return 0
            fresh = [key for key in news if key not in self.kept]
            asked: list[tuple[Key, CallReckoning]] = []
            for key in sorted(news):
                before = self.kept[key].evidence if key in self.kept else CallEvidence(site=key[0], call=key[1])
                evidence = news[key](before)
                _, keys = self._metering.site_keys.get(key[0], (0, SiteKeys()))
                specs = [one for one in self._metering.agreed if one.provider == "platform" and one.consumer in (evidence.tenant, "*")]
                asked.append((key, ask(replace(evidence, specs=specs, keys=keys, balances=self._sums(key)))))
            for key, reckoning in asked:
                spec = reckoning.spec
                priced = (spec.spec, spec.revision) if spec is not None else None
                self.kept[key] = replace(reckoning, evidence=replace(reckoning.evidence, priced_by=priced))
                if reckoning.legs:
                    assert not ledger.add(leg.amount for leg in reckoning.legs), "an entry that does not balance"
                    self.entries.append((key, reckoning.legs))
        return len(fresh)

    def _sums(self, key: Key) -> dict[Money, Decimal]:
        sums: dict[Money, Decimal] = {}
        for of, legs in self.entries:
            for leg in legs if of == key else ():
                sums[(leg.account, leg.currency)] = ledger.add([sums.get((leg.account, leg.currency), Decimal(0)), leg.amount])
        return {money: amount for money, amount in sums.items() if amount}

    async def decide(self, key: Key, decided: Decided, ask: Ask) -> bool:
        if key not in self.kept:
            return False
        if self.kept[key].evidence.decided is not None:
            return True
        async with self._metering.transaction() as tx:
            await tx.audit(actor=decided.who, action="call.decide", target=f"{key[0]}/{key[1]}", reason=decided.why)
        await self.reckon({key: lambda before: replace(before, decided=decided)}, ask)
        return True

    async def open_calls(self, after: Key, limit: int) -> list[Key]:
        return sorted(key for key, one in self.kept.items() if one.book.state != "settled" and key > after)[:limit]

    async def find(self, query: CallsQuery) -> list[CallBook]:
        def fits(book: CallBook) -> bool:
            wanted = ((query.tenant, book.tenant), (query.site, book.site), (query.offering, book.offering), (query.call, book.call))
            texts = ((query.day, book.day), (query.state, book.state))
            same = all(asked is None or asked == held for asked, held in wanted) and all(
                not asked or asked == held for asked, held in texts
            )
            return same and (not query.after or book.call < query.after)

        found = [one.book for one in self.kept.values() if fits(one.book)]
        return sorted(found, key=lambda book: book.call, reverse=True)[: query.limit]

    async def summed(self, tenant: TenantName, start: datetime, end: datetime) -> list[SummedCalls]:
        sums: dict[tuple[str, SiteName, OfferingName, str], SummedCalls] = {}
        for one in self.kept.values():
            book = one.book
            if book.tenant != tenant or not start <= one.at < end:
                continue
            key = (book.day, book.site, book.offering, book.outcome.value)
            zero = SummedCalls(book.site, book.offering, book.day, book.outcome.value, 0, 0, Decimal(0), Decimal(0), 0, 0, 0)
            before, amount = sums.get(key, zero), book.amount or Decimal(0)
            unknown = (book.input_tokens is None or book.output_tokens is None) and book.outcome != "refused"
            sums[key] = replace(
                before,
                calls=before.calls + 1,
                waiting=before.waiting + (book.state != "settled"),
                amount=before.amount + (amount if book.payer == "tenant" else 0),
                others=before.others + (amount if book.payer in ("site", "platform") else 0),
                input_tokens=before.input_tokens + (book.input_tokens or 0),
                output_tokens=before.output_tokens + (book.output_tokens or 0),
                unknown=before.unknown + unknown,
            )
        return [sums[key] for key in sorted(sums)]

    async def attained(self, site: SiteName, offering: OfferingName, start: datetime, end: datetime) -> Attained:
        mine = [one for (at, _), one in self.kept.items() if at == site and one.book.offering == offering and start <= one.at < end]
        outcomes = [one.book.outcome.value for one in mine]
        return Attained(
            calls=len(mine),
            answered=sum(one in ("completed", "incomplete", "rejected", "client_gone") for one in outcomes),
            failed=sum(one in ("upstream_failed", "upstream_stalled", "timed_out") for one in outcomes),
            kept=sum(one.book.kept is True for one in mine),
            missed=sum(one.book.kept is False for one in mine),
            missing=sum(one.book.reason == "site_word" for one in mine),
            response_us=_p95([one.response_us for one in mine]),
            first_byte_us=_p95([one.first_byte_us for one in mine]),
        )

    async def counted(self) -> tuple[int, int]:
        waiting = sum(one.book.state != "settled" for one in self.kept.values())
        differing = 0
        for key, one in self.kept.items():
            posted = ledger.add(-amount for (account, _), amount in self._sums(key).items() if account.startswith("usage/"))
            differing += posted != (one.book.amount or Decimal(0))
        return waiting, differing


def _p95(values: Sequence[int | None]) -> int | None:
    """As PostgreSQL's `percentile_disc(0.95)`."""
    known = sorted(value for value in values if value is not None)
    return known[max(0, -(-len(known) * 95 // 100) - 1)] if known else None
