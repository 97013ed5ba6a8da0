"""Errors that cross a boundary. Four kinds, so that every caller knows what to do with one it has never seen.

`Refused` never retry, it says what to change · `Unavailable` retry after a while · `Stale` reload and decide again · an
`AssertionError`, or anything else, is our bug: outside it becomes `internal` and a trace id. The code (`scheduler.no_site_fits`) is API
and never changes its meaning; the text is for people and may.
"""

from __future__ import annotations

from collections.abc import Mapping


class IntertieError(Exception):
    """Base of the errors that may be told to a caller.

    code: dotted, lower case, `keeper.what`. text: one sentence, what was wrong and where. next_step: what to do about it. details: small
    JSON-like facts (numbers, names) for machines; never a secret.
    """

    def __init__(self, code: str, text: str, *, next_step: str = "", details: Mapping[str, object] | None = None) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
        self.next_step = next_step
        self.details = dict(details or {})


class Refused(IntertieError):
    """The request cannot be granted as it is; the same request will be refused again."""


class NotFound(Refused):
    """Not there, or not yours to see: both read the same."""


class Denied(Refused):
    """Known who you are; you may not do this."""


class Unauthenticated(Refused):
    """Not known who you are."""


class Conflict(Refused):
    """Contradicts something already recorded (a key reused with other content, a name taken)."""


class Unavailable(IntertieError):
    """Not now: a dependency is away or a queue is full. Nothing is known to have been done."""

    def __init__(self, code: str, text: str, *, retry_after_s: float = 1.0, next_step: str = "") -> None:
        super().__init__(code, text, next_step=next_step, details={"retry_after_s": retry_after_s})
        self.retry_after_s = retry_after_s


class Stale(IntertieError):
    """Decided on something that has changed since: reload and decide again."""


KINDS: Mapping[str, type[IntertieError]] = {
    "refused": Refused,
    "not_found": NotFound,
    "denied": Denied,
    "unauthenticated": Unauthenticated,
    "conflict": Conflict,
    "unavailable": Unavailable,
    "stale": Stale,
}


def kind_of(error: BaseException) -> str:
    """The wire word of an error's kind; `internal` for what is not ours to tell."""
    return next((word for word, kind in KINDS.items() if type(error) is kind), "internal")
