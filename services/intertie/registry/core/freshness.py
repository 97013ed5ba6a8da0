"""How old the hub's view of a site is, judged by the leader alone and from its own monotonic clock.

What counts is the growth of the site's `heard` counter, which the keeper writes before every answer. No wall clock that anybody stored takes
part, and what a leader saw before it took office is worth nothing: it starts every site's patience anew, so that the hub's own absence ends
nobody's freshness (LINK D5). A site is reachable when both directions are: one that speaks but does not take our answers is `stale`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from intertie.contracts.site import Freshness


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without growth after which a site is stale, then unknown."""

    # Three lane beats of 5 s: one lost sync and one late one are ordinary.
    stale_s: float = 15.0
    # Longer than a NATS restart with reconnection back-off, so that an upgrade of the bus is not an incident per site.
    unknown_s: float = 60.0

    def scaled(self, factor: float) -> Limits:
        """The same limits on a faster or slower beat."""
        return Limits(stale_s=self.stale_s * factor, unknown_s=self.unknown_s * factor)


@dataclass(frozen=True, slots=True)
class Heard:
    """What the lane's table says of a site: counters that only grow while a session lasts."""

    heard: int
    taken_nonce: int


@dataclass(frozen=True, slots=True)
class Hearing:
    """What this leader has seen of one site. Times are its own monotonic seconds."""

    heard: int
    grew_at_s: float
    """Last growth seen, or when this leader took office."""
    grown: bool
    """Growth was seen in this office."""
    taken_nonce: int
    taken_at_s: float
    """Last move of the taken nonce seen, or the first growth after which one is due."""
    hears_us: bool


@dataclass(frozen=True, slots=True)
class Judgement:
    freshness: Freshness
    hears_us: bool


def first_look(heard: Heard, *, now_s: float, hears_us: bool) -> Hearing:
    """A leader meets a site: what it last was stands, its patience starts now."""
    return Hearing(
        heard=heard.heard,
        grew_at_s=now_s,
        grown=False,
        taken_nonce=heard.taken_nonce,
        taken_at_s=now_s,
        hears_us=hears_us,
    )


def look(hearing: Hearing, heard: Heard, *, now_s: float, limits: Limits) -> Hearing:
    """What the leader knows after reading the lane's table again."""
    if heard.heard == hearing.heard:
        return hearing
    silent_before = now_s - hearing.grew_at_s > limits.stale_s
    seen = replace(hearing, heard=heard.heard, grew_at_s=now_s, grown=True)
    # A new session counts its nonces anew: any move to a nonce above zero shows that an answer arrived.
    if heard.taken_nonce != hearing.taken_nonce:
        return replace(seen, taken_nonce=heard.taken_nonce, taken_at_s=now_s, hears_us=heard.taken_nonce > 0)
    if silent_before:
        return replace(seen, taken_at_s=now_s)
    return replace(seen, hears_us=hearing.hears_us and now_s - hearing.taken_at_s <= limits.stale_s)


def judge(current: Freshness, hearing: Hearing, *, now_s: float, limits: Limits, hears_since_s: float | None) -> Judgement:
    """A site's freshness now. Without growth in this office it may only grow older, never younger.

    `hears_since_s` is the end of the leader's own last deafness (its bus or store was away, it was not looking); None: it is deaf now. What it
    could not hear makes a site stale, never unknown.
    """
    age_s = now_s - hearing.grew_at_s
    unheard_s = 0.0 if hears_since_s is None else now_s - max(hearing.grew_at_s, hears_since_s)
    if unheard_s > limits.unknown_s or (current is Freshness.UNKNOWN and (not hearing.grown or age_s > limits.stale_s)):
        return Judgement(Freshness.UNKNOWN, False)
    if not hearing.grown:
        if current is Freshness.FRESH and age_s > limits.stale_s:
            return Judgement(Freshness.STALE, hearing.hears_us)
        return Judgement(current, hearing.hears_us)
    deaf = now_s - hearing.taken_at_s > limits.stale_s
    if age_s > limits.stale_s or deaf:
        return Judgement(Freshness.STALE, hearing.hears_us and not deaf)
    return Judgement(Freshness.FRESH, hearing.hears_us)
