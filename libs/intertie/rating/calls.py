"""What one call of an offering costs: pure, exact, with the formula as a sentence. A count that nobody has is never nought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from intertie.contracts.call_offerings import CallOutcome, CallPays, CallPrice
from intertie.contracts.usage import AgreeSpec, MeterSpec
from intertie.rating.money import round_to
from intertie.rating.text import money_text

MILLION = 1_000_000

# An agreement with more prices than this is a price list gone wrong.
MOST_PRICES = 1_000
# Of anything: a thousand million.
MOST_PRICE = Decimal(10) ** 9


@dataclass(frozen=True, slots=True)
class CallUse:
    """What a call used. `us`: microseconds from acceptance to end; tokens None: unknown."""

    us: int
    input_tokens: int | None
    output_tokens: int | None
    events: int = 0
    """Of a stream; 0 where the answer was none."""


@dataclass(frozen=True, slots=True)
class RatedCall:
    """An amount and how it came about; `unknown` names the count without which nothing can be said."""

    amount: Decimal | None
    text: str
    estimated: bool = False
    unknown: str = ""


def price_for(prices: Sequence[CallPrice], offering: str) -> CallPrice | None:
    """The price of `site/name`: its own, else everyone's; None: not priced, which is not free."""
    own = [price for price in prices if price.offering == offering]
    rest = [price for price in prices if not price.offering]
    return next(iter([*own, *rest]), None)


def rate_call(use: CallUse, price: CallPrice, currency: str) -> RatedCall:
    """Exact, rounded once. `1 call × ¥0.001 + 120 input tokens × ¥2.00/M = ¥0.00124`."""
    estimated = False
    output = use.output_tokens
    if output is None and price.per_1m_output and price.unknown_tokens == "events" and use.events:
        output, estimated = use.events, True
    if (use.input_tokens is None and price.per_1m_input) or (output is None and price.per_1m_output):
        return RatedCall(None, "", unknown="tokens")
    exact = Fraction(price.per_call) + Fraction(price.per_second) * use.us / MILLION
    exact += Fraction(price.per_1m_input) * (use.input_tokens or 0) / MILLION + Fraction(price.per_1m_output) * (output or 0) / MILLION
    amount = round_to(exact, price.rounding)
    parts = [f"1 call × {money_text(price.per_call, currency)}"] if price.per_call else []
    if price.per_1m_input:
        parts.append(f"{use.input_tokens} input tokens × {money_text(price.per_1m_input, currency)}/M")
    if price.per_1m_output:
        parts.append(f"{output} output {'events, estimated,' if estimated else 'tokens'} × {money_text(price.per_1m_output, currency)}/M")
    if price.per_second:
        parts.append(f"{Decimal(use.us) / MILLION:.6f} s × {money_text(price.per_second, currency)}/s")
    return RatedCall(amount, f"{' + '.join(parts) or '1 call, free'} = {money_text(amount, currency)}", estimated)


def clause(spec: MeterSpec, outcome: CallOutcome) -> tuple[CallPays, str]:
    """Who pays such an end, and which words of which agreement say so."""
    payer = spec.call_pays.get(outcome.value, CallPays.FREE)
    return payer, f"{spec.spec} rev {spec.revision}: a call that is {outcome.value} → {payer.value}"


def call_terms_wrong(ask: AgreeSpec) -> str:
    """The rule that an agreement's call prices break; empty if none."""
    names = [price.offering for price in ask.call_prices]
    if len(set(names)) != len(names) or len(names) > MOST_PRICES:
        return f"it names each call offering once, at most {MOST_PRICES}"
    for price in ask.call_prices:
        if any(not 0 <= part <= MOST_PRICE for part in (price.per_call, price.per_1m_input, price.per_1m_output, price.per_second)):
            return "a price of a call lies between 0 and a thousand million"
        if not Decimal("0.000000001") <= price.rounding <= 1:
            return "rounding of a call lies between 0.000000001 and 1"
        if price.offering and price.offering.count("/") != 1:
            return f"a call offering is named SITE/NAME, not {price.offering[:60]!r}"
    if unknown := sorted(set(ask.call_pays or {}) - set(CallOutcome)):
        return f"who pays a call is said by one of {', '.join(CallOutcome)}, not {', '.join(unknown)}"
    return ""
