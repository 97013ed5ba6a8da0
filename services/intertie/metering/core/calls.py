"""One question per call, as per attempt (ADR 0005): from the site's sealed word, the gateway's word and the agreements, what does it cost, and whom?

Order, repeats and lateness change nothing: every trigger brings its news and asks again. What only one side says waits and is named; what nobody counted
is in suspense, never nought.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal

import msgspec

from intertie.contracts.base import decode
from intertie.contracts.call_offerings import CallOutcome, CallPays
from intertie.contracts.calls import CallBook, CallGrant, CallRecord, CallSeen
from intertie.contracts.link import Sealed
from intertie.contracts.usage import MeterSpec
from intertie.errors import Refused
from intertie.ids import CallId, SiteName, SpecId, TenantName
from intertie.metering.core import ledger
from intertie.metering.core.agreements import DEFAULT_ZONE, in_force
from intertie.metering.core.attribution import Verify
from intertie.metering.core.evidence import Money, SiteKeys
from intertie.metering.core.periods import zone
from intertie.rating.calls import CallUse, RatedCall, clause, price_for, rate_call

# The gateway tells what it saw within a second; if it does not within this, its spool is gone, and its seal on the grant must do.
GRACE = timedelta(minutes=15)
# Ends that the site's own server made before anybody hung up, by the site's word, which gains nothing by them: nobody is charged for an answer that
# never was, whatever became of the error on its way.
AT_UPSTREAM = frozenset({CallOutcome.REJECTED, CallOutcome.UPSTREAM_FAILED, CallOutcome.UPSTREAM_STALLED})
# The gateway's clock runs longer than the site's by the way there and back; more than this is a difference.
SLACK_US, SLACK_PART = 1_000_000, 20


@dataclass(frozen=True, slots=True)
class SiteWord:
    """The site's record as it came, sealed."""

    sealed: Sealed
    record: CallRecord
    received_at: datetime
    proven: bool = False


@dataclass(frozen=True, slots=True)
class Decided:
    """A named person's word on tokens that nobody counted."""

    input_tokens: int
    output_tokens: int
    who: str
    why: str
    at: datetime


@dataclass(frozen=True, slots=True)
class CallEvidence:
    """All that is known of one call."""

    site: SiteName
    call: CallId
    word: SiteWord | None = None
    seen: CallSeen | None = None
    seen_at: datetime | None = None
    balances: Mapping[Money, Decimal] = field(default_factory=dict)
    specs: Sequence[MeterSpec] = ()
    keys: SiteKeys = SiteKeys()
    priced_by: tuple[SpecId, int] | None = None
    last_entry: int = 0
    decided: Decided | None = None

    @property
    def tenant(self) -> TenantName:
        """The gateway's word before the site's."""
        if self.seen is not None:
            return self.seen.tenant
        assert self.word is not None, "a call has a word"
        return self.word.record.tenant


@dataclass(frozen=True, slots=True)
class CallReckoning:
    """What follows."""

    evidence: CallEvidence
    book: CallBook
    at: datetime
    """By the gateway: its own word, else its seal on the grant."""
    legs: Sequence[ledger.Leg] = ()
    spec: MeterSpec | None = None
    response_us: int | None = None
    first_byte_us: int | None = None


def site_word(site: SiteName, sealed: Sealed, received_at: datetime) -> SiteWord:
    """Parse a site's record; `metering.call` if it is of another site. Nothing is believed yet."""
    record = decode(sealed.payload, CallRecord, what="call record")
    if record.site != site:
        raise Refused("metering.call", f"{site} cannot say what a call of {record.site[:63]} cost")
    return SiteWord(sealed, record, received_at)


def with_word(evidence: CallEvidence, word: SiteWord) -> CallEvidence:
    """The first word stays: a second changes nothing."""
    return evidence if evidence.word is not None else replace(evidence, word=word)


def with_seen(evidence: CallEvidence, seen: CallSeen, at: datetime) -> CallEvidence:
    return evidence if evidence.seen is not None else replace(evidence, seen=seen, seen_at=at)


def settle(evidence: CallEvidence, verify: Verify, gateway_key: str, now: datetime) -> CallReckoning:
    """The call as it stands now."""
    word, seen = evidence.word, evidence.seen
    if word is not None and not word.proven and any(verify(word.sealed, key) for key in sorted(evidence.keys.valid)):
        word = replace(word, proven=True)
        evidence = replace(evidence, word=word)
    grant = _grant(evidence, verify, gateway_key)
    at = seen.opened if seen is not None else grant.at if grant is not None else (word.received_at if word is not None else now)
    spec = _spec(evidence, at)
    book = _book(evidence, at, spec)
    priced = _priced(evidence, grant, spec, book, now)
    legs: list[ledger.Leg] = []
    if priced.state == "settled" or evidence.balances:
        legs = ledger.difference(evidence.balances, _target(evidence, priced, spec))
    record = word.record if word is not None and word.proven else None
    return CallReckoning(
        evidence=evidence,
        book=priced,
        at=at,
        legs=legs,
        spec=spec if priced.spec is not None else None,
        response_us=record.end_us if record is not None and record.status is not None else None,
        first_byte_us=record.first_byte_us if record is not None else None,
    )


def _grant(evidence: CallEvidence, verify: Verify, gateway_key: str) -> CallGrant | None:
    """What the gateway sealed for exactly this call at this site; None if nothing believable."""
    if evidence.word is None or not verify(evidence.word.record.grant, gateway_key):
        return None
    try:
        grant = decode(evidence.word.record.grant.payload, CallGrant, what="call grant")
    except Refused:
        return None
    record = evidence.word.record
    same = (grant.call, grant.site, grant.offering, grant.tenant) == (record.call, evidence.site, record.offering, record.tenant)
    agrees = evidence.seen is None or (evidence.seen.tenant, evidence.seen.offering) == (grant.tenant, grant.offering)
    return grant if same and agrees else None


def _spec(evidence: CallEvidence, at: datetime) -> MeterSpec | None:
    """What priced it once prices it for ever; else the agreement in force when it was made."""
    if evidence.priced_by is not None:
        return next((spec for spec in evidence.specs if (spec.spec, spec.revision) == evidence.priced_by), None)
    return in_force(evidence.specs, evidence.tenant, at)


def _book(evidence: CallEvidence, at: datetime, spec: MeterSpec | None) -> CallBook:
    """The facts of both words; money comes after."""
    word, seen = (evidence.word.record if evidence.word is not None else None), evidence.seen
    either = word or seen
    assert either is not None, "a call has a word"
    first = word.first_byte_us if word is not None else seen.first_byte_us if seen is not None else None
    missed, kept = promises(word) if word is not None else ([], None)
    outcome = _outcome(word, seen)
    return CallBook(
        call=evidence.call,
        tenant=evidence.tenant,
        site=evidence.site,
        offering=either.offering,
        principal=seen.principal if seen is not None else None,
        accepted=at,
        day=at.astimezone(zone(spec.time_zone if spec is not None else DEFAULT_ZONE)).date().isoformat(),
        outcome=outcome,
        code=next((one.code for one in (seen, word) if one is not None and one.outcome is outcome and one.code), ""),
        status=either.status,
        first_byte_ms=None if first is None else first // 1_000,
        duration_ms=either.end_us // 1_000,
        request_bytes=either.request_bytes,
        response_bytes=seen.response_bytes if seen is not None else either.response_bytes,
        input_tokens=word.input_tokens if word is not None else None,
        output_tokens=word.output_tokens if word is not None else None,
        model=word.model if word is not None else "",
        streamed=word is not None and word.streamed,
        state="waiting",
        reason="site_word",
        differences=differences(word, seen) if word is not None and seen is not None else [],
        kept=kept,
        missed=missed,
        islanded=word is not None and word.islanded,
    )


def _outcome(word: CallRecord | None, seen: CallSeen | None) -> CallOutcome:
    """How it ended for its caller: the gateway alone knows whether the answer arrived, the site alone what its upstream did."""
    if word is None or seen is None:
        either = word or seen
        assert either is not None, "a call has a word"
        return either.outcome
    if word.outcome in AT_UPSTREAM:
        return word.outcome
    if seen.outcome in (CallOutcome.CLIENT_GONE, CallOutcome.INTERRUPTED, CallOutcome.REFUSED):
        return seen.outcome
    return word.outcome


def differences(word: CallRecord, seen: CallSeen) -> list[str]:
    """Where the two do not agree, by name."""
    found = ["outcome"] if word.outcome is not seen.outcome else []
    if word.outcome is seen.outcome is CallOutcome.COMPLETED and word.response_bytes != seen.response_bytes:
        found.append("bytes")
    if abs(seen.end_us - word.end_us) > SLACK_US + max(seen.end_us, word.end_us) // SLACK_PART:
        found.append("duration")
    return found


def promises(word: CallRecord) -> tuple[list[str], bool | None]:
    """(missed, kept): what was promised against what this call measured; None if it measured no promise."""
    measured: list[tuple[str, int, int]] = []
    if word.response_p95_ms is not None and word.outcome is CallOutcome.COMPLETED:
        measured.append(("response_p95_ms", word.end_us // 1_000, word.response_p95_ms))
    if word.first_byte_p95_ms is not None and word.first_byte_us is not None:
        measured.append(("first_byte_p95_ms", word.first_byte_us // 1_000, word.first_byte_p95_ms))
    if not measured:
        return [], None
    missed = [f"{name} {value} > {promised}" for name, value, promised in measured if value > promised]
    return missed, not missed


def _priced(evidence: CallEvidence, grant: CallGrant | None, spec: MeterSpec | None, book: CallBook, now: datetime) -> CallBook:
    """The first reason that holds it back, else its price."""
    word, seen = evidence.word, evidence.seen
    if word is None:
        assert seen is not None, "a call has a word"
        # What the site never took, or refused before its upstream was asked, has no record there.
        nothing = not seen.taken or seen.outcome is CallOutcome.REFUSED
        return _free(book, spec, "it reached no upstream") if nothing else _held(book, "waiting", "site_word")
    if not word.proven:
        return _held(book, "suspense", "unproven")
    if grant is None:
        return _held(book, "suspense", "no_grant")
    if seen is None:
        if now - word.received_at < GRACE:
            return _held(book, "waiting", "gateway_word")
        book = _with(book, differences=[*book.differences, "gateway_word_missing"])
    if spec is None:
        return _held(book, "suspense", "no_spec")
    payer, text = clause(spec, book.outcome)
    if payer is CallPays.FREE:
        return _free(book, spec, text)
    price = price_for(spec.call_prices, f"{evidence.site}/{book.offering}")
    if price is None:
        return _held(book, "suspense", "no_price")
    use = CallUse(word.record.end_us, word.record.input_tokens, word.record.output_tokens, word.record.events)
    rated = rate_call(use, price, spec.currency)
    if rated.amount is None and (decided := evidence.decided) is not None:
        given = use.input_tokens if use.input_tokens is not None else decided.input_tokens
        made = use.output_tokens if use.output_tokens is not None else decided.output_tokens
        rated = replace(rate_call(CallUse(use.us, given, made), price, spec.currency), estimated=True)
        book = _with(book, decided=f"{decided.who}: {decided.why}")
    if rated.amount is None:
        return _held(book, "suspense", f"{rated.unknown}_unknown")
    return _settled(book, spec, payer, rated, text)


def _settled(book: CallBook, spec: MeterSpec, payer: CallPays, rated: RatedCall, text: str) -> CallBook:
    return _with(
        book,
        state="settled",
        reason="",
        payer=payer,
        amount=rated.amount,
        currency=spec.currency,
        spec=spec.spec,
        spec_revision=spec.revision,
        formula=f"{rated.text}; {text}",
        estimated=rated.estimated,
    )


def _free(book: CallBook, spec: MeterSpec | None, text: str) -> CallBook:
    return _with(
        book,
        state="settled",
        reason="",
        payer=CallPays.FREE,
        amount=Decimal(0),
        currency=spec.currency if spec is not None else "",
        formula=f"not charged; {text}",
    )


def _held(book: CallBook, state: str, reason: str) -> CallBook:
    return _with(book, state=state, reason=reason)


def _with(book: CallBook, **changes: object) -> CallBook:
    return msgspec.structs.replace(book, **changes)


def _target(evidence: CallEvidence, book: CallBook, spec: MeterSpec | None) -> Mapping[Money, Decimal]:
    """What its postings should sum to."""
    if spec is None or not book.amount or book.payer is None or book.state != "settled":
        return {}
    account = {CallPays.TENANT: f"tenant/{book.tenant}", CallPays.SITE: f"site/{evidence.site}", CallPays.PLATFORM: "platform"}[book.payer]
    return {(account, spec.currency): book.amount, (f"usage/{spec.provider}", spec.currency): -book.amount}
