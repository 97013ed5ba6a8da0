"""A drill's evidence without I/O: its one canonical form, what each party signs, the verdict that follows from what both sides saw, and the check
of a file that needs no hub.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from intertie.contracts.base import decode, encode
from intertie.contracts.drill import (
    DrillAttempt,
    DrillBook,
    DrillCheck,
    DrillConsent,
    DrillDocument,
    DrillEvidence,
    DrillSignature,
    HubDrill,
    SiteDrill,
)
from intertie.errors import Refused
from intertie.trust.keys import Key, verify

SITE, HUB, PERSON = "site", "hub", "person"
PASSED, FAILED = "passed", "failed"
# A cut that is this much longer than agreed was not kept to.
LONGER = timedelta(seconds=10)
# A link that needs longer than this to say what happened in minutes would need hours after a day.
REPLAY_MS = 120_000
# Ends that an attempt does not give itself. What its owner or tenant asked for during a drill is theirs.
LINK_CAUSES = frozenset({"platform", "site"})


def canonical(message: object) -> bytes:
    """The one form: JSON with sorted keys, no spaces, UTF-8, whole numbers only (RFC 8785 for the values that stand in evidence)."""
    return json.dumps(json.loads(encode(message)), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def signed_bytes(part: object, role: str, name: str, at: datetime, key: str) -> bytes:
    """What a party signs: the part, and as whom, when and by which key."""
    told = {"part": json.loads(encode(part)), "role": role, "name": name, "at": json.loads(encode(at)), "key": key}
    return b"intertie drill 1\n" + canonical(told)


def sign_part(key: Key, part: object, *, role: str, name: str, at: datetime) -> DrillSignature:
    signature = key.sign(signed_bytes(part, role, name, at, key.public))
    return DrillSignature(role=role, name=name, key=key.public, at=at, signature=base64.b64encode(signature).decode("ascii"))


def signature_holds(part: object, signature: DrillSignature) -> bool:
    try:
        raw = base64.b64decode(signature.signature, validate=True)
    except (binascii.Error, ValueError):
        return False
    return verify(signature.key, signed_bytes(part, signature.role, signature.name, signature.at, signature.key), raw)


# --- the verdict -------------------------------------------------------------------------------------------------------------------------


def checks_of(seconds: int, start: datetime, consent: DrillConsent, at_site: SiteDrill, at_hub: HubDrill) -> list[DrillCheck]:
    """Everything that must be true of a passed drill, each with what was found."""
    return [
        _consented(seconds, start, consent),
        _cut(seconds, at_site),
        _noticed_at_site(at_site),
        _noticed_at_hub(at_site, at_hub),
        _ran_on(at_site),
        _began_with_a_go(at_site),
        _replayed(at_site),
        _books(at_hub),
    ]


def verdict_of(checks: Sequence[DrillCheck]) -> str:
    return PASSED if all(check.ok for check in checks) else FAILED


def _consented(seconds: int, start: datetime, consent: DrillConsent) -> DrillCheck:
    in_time = consent.until is None or start + timedelta(seconds=seconds) <= consent.until
    ok = consent.allowed and seconds <= consent.longest_s and in_time
    until = consent.until.isoformat() if consent.until else "taken back"
    return DrillCheck(
        name="consent", ok=ok, text=f"the owner allowed cuts of up to {consent.longest_s} s until {until}, by {consent.given}"
    )


def _cut(seconds: int, at_site: SiteDrill) -> DrillCheck:
    lasted = at_site.back_at - at_site.cut_at
    ok = at_site.ended_by == "time" and lasted <= timedelta(seconds=seconds) + LONGER and lasted >= timedelta(seconds=seconds * 0.8)
    return DrillCheck(
        name="cut", ok=ok, text=f"the link was cut for {lasted.total_seconds():.1f} s of {seconds} s agreed, ended by {at_site.ended_by}"
    )


def _noticed_at_site(at_site: SiteDrill) -> DrillCheck:
    ok = at_site.islanded_at is not None and at_site.islanded_at <= at_site.back_at and at_site.heard_at is not None
    if at_site.islanded_at is None:
        return DrillCheck(name="noticed_at_site", ok=False, text="the site did not notice that nobody heard it")
    after = (at_site.islanded_at - at_site.cut_at).total_seconds()
    back = (
        f"heard again {(at_site.heard_at - at_site.back_at).total_seconds():.1f} s after the link was back"
        if at_site.heard_at
        else "never heard again"
    )
    return DrillCheck(name="noticed_at_site", ok=ok, text=f"islanded {after:.1f} s after the cut, {back}")


def _noticed_at_hub(at_site: SiteDrill, at_hub: HubDrill) -> DrillCheck:
    """By each side's own clock: only lengths are compared."""
    limit = at_hub.silent_limit_ms / 1000
    lasted = (at_site.back_at - at_site.cut_at).total_seconds()
    if at_hub.silent_at is None:
        ok = lasted < 2 * limit
        return DrillCheck(
            name="noticed_at_hub",
            ok=ok,
            text=f"the hub never called the site silent: it does so after {limit:g} s, the cut took {lasted:.1f} s",
        )
    if at_hub.heard_at is None:
        return DrillCheck(name="noticed_at_hub", ok=False, text="the hub called the site silent and has not called it heard again")
    silent = (at_hub.heard_at - at_hub.silent_at).total_seconds()
    return DrillCheck(name="noticed_at_hub", ok=True, text=f"the hub called the site silent for {silent:.1f} s")


def _ran_on(at_site: SiteDrill) -> DrillCheck:
    ran = [a for a in at_site.attempts if a.before == "running"]
    lost = [a.attempt for a in ran if not _ran_to_its_own_end(a)]
    if not ran:
        return DrillCheck(name="work_ran_on", ok=False, text="nothing of the federation ran when the cut began: there was nothing to lose")
    if lost:
        return DrillCheck(name="work_ran_on", ok=False, text=f"{len(lost)} of {len(ran)} did not survive the cut: {', '.join(lost[:20])}")
    through = sum(a.after == "running" for a in ran)
    return DrillCheck(
        name="work_ran_on",
        ok=True,
        text=f"{len(ran)} attempts ran when the cut began: {through} ran through it, {len(ran) - through} came to their own end",
    )


def _ran_to_its_own_end(attempt: DrillAttempt) -> bool:
    if attempt.after == "running":
        return attempt.same_process
    return attempt.after == "ended" and attempt.cause not in LINK_CAUSES and attempt.outcome not in ("unknown", "")


def _began_with_a_go(at_site: SiteDrill) -> DrillCheck:
    began = [a for a in at_site.attempts if a.began_in_cut]
    wrong = [a.attempt for a in began if not a.go_before]
    text = (
        f"{len(began)} attempts began during the cut, each with a go from before it"
        if not wrong
        else f"began without a go: {', '.join(wrong[:20])}"
    )
    return DrillCheck(name="began_with_a_go", ok=not wrong, text=text)


def _replayed(at_site: SiteDrill) -> DrillCheck:
    late = [lane.lane for lane in at_site.lanes if lane.to_head_ms is None or lane.to_head_ms > REPLAY_MS]
    said = "; ".join(
        f"{lane.lane}: {lane.waiting} entries in {'?' if lane.to_head_ms is None else lane.to_head_ms} ms" for lane in at_site.lanes
    )
    return DrillCheck(name="replayed", ok=bool(at_site.lanes) and not late, text=said or "no lane said anything")


def _books(at_hub: HubDrill) -> DrillCheck:
    wrong = [text for book in at_hub.books if (text := book_fault(book))]
    ended = sum(book.site_us is not None for book in at_hub.books)
    text = (
        f"{ended} ended attempts have the same microseconds in the site's, the scheduler's and the metering's books"
        if not wrong
        else "; ".join(wrong[:10])
    )
    return DrillCheck(name="books_agree", ok=not wrong, text=text)


def book_fault(book: DrillBook) -> str:
    """What differs between the three books of an attempt; empty if nothing. One that still runs at the site must run in the hub's book, too."""
    if book.site_us is None:
        return f"{book.attempt} runs at its site, and the hub has an end of it by {book.cause}" if book.cause in LINK_CAUSES else ""
    if book.site_us == book.scheduler_us == book.metering_us:
        return ""
    return f"{book.attempt}: site {book.site_us}, scheduler {book.scheduler_us}, metering {book.metering_us} µs"


# --- the file ----------------------------------------------------------------------------------------------------------------------------


def verify_file(data: bytes, *, what: str = "evidence") -> tuple[DrillEvidence, list[str]]:
    """The evidence in a file, and what is wrong with it. Signatures are checked over the file's own words, so that a version that knows more
    fields still verifies what an older one wrote. `Refused('drill.not_canonical')` if its bytes are not the one canonical form."""
    evidence = decode(data, DrillEvidence, what=what)
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise Refused("contract.invalid", f"{what} is not JSON: {err}") from err
    known = [set(DrillEvidence.__struct_fields__), *(set(DrillSignature.__struct_fields__) for _ in raw["signatures"])]
    foreign = [set(said) - names for said, names in zip([raw, *raw["signatures"]], known, strict=True)]
    if data.removesuffix(b"\n") != canonical(raw) or any(foreign):
        raise Refused("drill.not_canonical", f"{what} is not in the canonical form: it was changed after it was written")
    return evidence, list(_faults(evidence, need_person=True, document=raw["document"], at_site=raw["document"]["at_site"]))


def faults_of(evidence: DrillEvidence, *, need_person: bool = True) -> list[str]:
    """What is wrong with evidence of this version; empty if every signature holds and the verdict is what the document's facts give."""
    document = evidence.document
    return list(_faults(evidence, need_person=need_person, document=document, at_site=document.at_site))


def _faults(evidence: DrillEvidence, *, need_person: bool, document: object, at_site: object) -> Iterator[str]:
    """`document`, `at_site`: what the signatures are over."""
    roles = [signature.role for signature in evidence.signatures]
    for role in (SITE, HUB, *((PERSON,) if need_person else ())):
        if role not in roles:
            yield f"nobody signed as {role}"
    for signature in evidence.signatures:
        if signature.role not in (SITE, HUB, PERSON):
            yield f"{signature.role[:20]!r} is no role that signs a drill"
        elif not signature_holds(at_site if signature.role == SITE else document, signature):
            yield f"the signature of {signature.role} {signature.name} does not hold"
    yield from _contradictions(evidence.document)


def _contradictions(document: DrillDocument) -> Iterator[str]:
    """What in a document does not follow from the rest of it."""
    site = document.at_site
    if (site.drill, site.site, site.seconds) != (document.drill, document.site, document.seconds):
        yield "the site's account is of another drill"
    if {a.attempt for a in site.attempts} != {b.attempt for b in document.at_hub.books}:
        yield "the books are not those of the site's attempts"
    for book in document.at_hub.books:
        told = next((a for a in site.attempts if a.attempt == book.attempt), None)
        if told is not None and book.site_us != (told.ran_us if told.after == "ended" else None):
            yield f"the site's book of {book.attempt} is not what the site signed"
    checks = checks_of(document.seconds, document.start, document.consent, site, document.at_hub)
    # Not by their words: these may be put better one day.
    if [(c.name, c.ok) for c in checks] != [(c.name, c.ok) for c in document.checks]:
        yield "the checks do not follow from what both sides saw"
    if document.verdict != verdict_of(checks):
        yield f"the verdict {document.verdict!r} does not follow from the checks"
