"""The ledger's arithmetic: accounts, and the balanced entries that bring an attempt's postings from what they are to what they should be.

A positive amount is owed by the account. Every entry sums to zero per currency, is keyed by one attempt, and corrects by difference:
nothing is overwritten, and no balance ever refuses a posting (an overrun is recorded; levers act elsewhere).

    held/<tenant>       what open attempts may still cost the tenant          against  holds
    tenant/<tenant> · site/<site> · platform       what each pays             against  usage/<provider>
    suspense/<tenant>   what nobody pays until its cause is known             against  usage/<provider>
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from intertie.contracts.job import AttemptRecord
from intertie.contracts.usage import Charge, MeterSpec, WhoPays
from intertie.ids import AttemptId, SpecId
from intertie.metering.core.evidence import Money
from intertie.rating.money import EXACT

HOLDS = "holds"
ZERO = Decimal(0)


class EntryKind(StrEnum):
    HOLD = "hold"
    POST = "post"
    RELEASE = "release"
    ADJUST = "adjust"
    """What came after its attempt was closed: a new entry citing the one before it, never a changed one."""


@dataclass(frozen=True, slots=True)
class Leg:
    account: str
    currency: str
    amount: Decimal


@dataclass(frozen=True, slots=True)
class Entry:
    """One balanced transaction about one attempt, with the charges and clause that explain it."""

    attempt: AttemptId
    kind: EntryKind
    reason: str
    legs: Sequence[Leg]
    spec: tuple[SpecId, int] | None = None
    charges: Sequence[Charge] = ()
    cites: int = 0
    """The entry that an adjustment adjusts; 0 for every other kind."""

    def __post_init__(self) -> None:
        if any(add(leg.amount for leg in self.legs if leg.currency == currency) for currency in {leg.currency for leg in self.legs}):
            raise AssertionError(f"entry of {self.attempt} does not balance: {self.legs}")


def add(amounts: Iterable[Decimal]) -> Decimal:
    """An exact sum of decimals."""
    total = Decimal(0)
    for amount in amounts:
        total = EXACT.add(total, amount)
    return total


def payer_account(payer: WhoPays, record: AttemptRecord) -> str:
    """The account that pays; what nobody pays waits in the tenant's suspense account, owed by no one."""
    return {
        WhoPays.TENANT: f"tenant/{record.tenant}",
        WhoPays.SITE: f"site/{record.site}",
        WhoPays.PLATFORM: "platform",
        WhoPays.NOBODY: f"suspense/{record.tenant}",
    }[payer]


def is_hold(account: str) -> bool:
    return account == HOLDS or account.startswith("held/")


def held(balances: Mapping[Money, Decimal]) -> Decimal:
    """What an attempt holds."""
    return add(amount for (account, _), amount in balances.items() if account.startswith("held/"))


def posted(balances: Mapping[Money, Decimal]) -> Decimal:
    """What an attempt has posted, whoever pays."""
    return add(-amount for (account, _), amount in balances.items() if account.startswith("usage/"))


def hold_target(record: AttemptRecord, spec: MeterSpec | None, amount: Decimal) -> Mapping[Money, Decimal]:
    """What an open attempt's hold should be; nothing for an amount of nothing."""
    if spec is None or amount == 0:
        return {}
    return {(f"held/{record.tenant}", spec.currency): amount, (HOLDS, spec.currency): -amount}


def post_target(record: AttemptRecord, spec: MeterSpec, payer: WhoPays, amount: Decimal) -> Mapping[Money, Decimal]:
    """What an attempt's postings should sum to."""
    if amount == 0:
        return {}
    return {(payer_account(payer, record), spec.currency): amount, (f"usage/{spec.provider}", spec.currency): -amount}


def difference(now: Mapping[Money, Decimal], target: Mapping[Money, Decimal]) -> list[Leg]:
    """Legs that bring the balances `now` to `target`; empty if they agree."""
    legs = [
        Leg(account, currency, EXACT.subtract(target.get((account, currency), Decimal(0)), now.get((account, currency), Decimal(0))))
        for account, currency in sorted(now.keys() | target.keys())
    ]
    return [leg for leg in legs if leg.amount != 0]
