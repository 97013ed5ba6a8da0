"""Islanded: the site works alone. Entered when the bus is away or the scheduler's lane is silent, left by the next answer after that.

The lane's own machine makes sure that one lost answer is no silence and one good answer no return; here an absence that ended a moment ago and
begins again is one absence, and what the agent does not hear in its first seconds after a start is none. A restart goes on with the absence
that it finds written down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from intertie.agent.core.model import Attempt, State
from intertie.agent.core.usage import utc_of
from intertie.contracts.local import Absence
from intertie.ids import AttemptId

# A link that comes and goes within this has not come back in between. Two beats of a lane.
REJOIN = timedelta(seconds=10)
# A healthy agent hears the hub within seconds of its start; that is no absence that anybody wants to read of.
START = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Sight:
    """What the agent sees of the link."""

    now: datetime
    connected: bool
    silent_since: datetime | None
    """The scheduler's lane; None while it is heard."""
    last_heard: datetime | None
    """The last answer on it; None before the first of this process."""

    @property
    def away(self) -> bool:
        return not self.connected or self.silent_since is not None


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What lies on disk."""

    absence: Absence | None = None
    before: Absence | None = None
    """The one before it: it stands again if this one turns out to be none."""
    heads: dict[str, int] = {}
    """By lane: the last entry when the hub was heard again."""


class Islanding:
    """The state. `look` with each new sight; `since` and `written` say what it is then."""

    def __init__(self, written: Written | None = None) -> None:
        self._written = written or Written()
        found = self._written.absence
        # What lasted when the last process ended, lasts: nobody heard anything meanwhile.
        self._lasting = found is not None and found.ended is None
        self._mark: datetime | None = None

    @property
    def written(self) -> Written:
        return self._written

    @property
    def since(self) -> datetime | None:
        """None while the hub is heard."""
        return self._written.absence.since if self._lasting and self._written.absence else None

    def look(self, sight: Sight) -> bool:
        """True if something began, ended or changed its reason."""
        if not sight.away:
            return self._leave(sight) if self._lasting else False
        self._mark = sight.last_heard
        why = "start" if sight.last_heard is None else "silent" if sight.connected else "bus"
        if self._lasting:
            return self._goes_on(why)
        self._enter(sight, why)
        return True

    def _goes_on(self, why: str) -> bool:
        found = self._written.absence
        assert found is not None
        # A restart does not make a cut of the link another one; what is known better now is said.
        if found.why == why or why == "start":
            return False
        self._put(msgspec.structs.replace(found, why=why))
        return True

    def _enter(self, sight: Sight, why: str) -> None:
        self._lasting = True
        last = self._written.absence
        if last is not None and last.ended is not None and timedelta(0) <= sight.now - last.ended < REJOIN:
            again = msgspec.structs.replace(last, ended=None, told=None, entries=0, last=sight.now)
            self._written = Written(absence=again, before=self._written.before)
            return
        since = sight.silent_since or sight.last_heard or sight.now
        self._written = Written(absence=Absence(since=since, why=why, last=sight.now), before=last)

    def _leave(self, sight: Sight) -> bool:
        if sight.last_heard is None or sight.last_heard == self._mark:
            return False  # The bus is back; the hub has not answered yet.
        found = self._written.absence
        assert found is not None
        self._lasting = False
        if found.why == "start" and sight.now - found.since < START:
            self._written = Written(absence=self._written.before)
        else:
            self._put(msgspec.structs.replace(found, ended=sight.now, last=sight.now))
        return True

    def _put(self, absence: Absence) -> None:
        self._written = msgspec.structs.replace(self._written, absence=absence)

    # --- for what is written down ---

    def seen(self, now: datetime, refused: int) -> None:
        """It lasts, or has just ended; so many tenants' submissions were refused in it since the last look."""
        if (found := self._written.absence) is not None:
            self._put(msgspec.structs.replace(found, last=now if self._lasting else found.last, refused=found.refused + refused))

    def returned(self, heads: dict[str, int], entries: int) -> None:
        """The hub is heard: so much waits for it now."""
        if (found := self._written.absence) is not None and found.ended is not None:
            self._put(msgspec.structs.replace(found, entries=entries))
            self._written = msgspec.structs.replace(self._written, heads=heads)

    def told(self, now: datetime) -> None:
        """All that waited then is on disk at the hub."""
        if (found := self._written.absence) is not None and found.ended is not None and found.told is None:
            self._put(msgspec.structs.replace(found, told=now))
            self._written = msgspec.structs.replace(self._written, heads={})


def tally(absence: Absence, attempts: Iterable[Attempt], settled: frozenset[AttemptId], by_grant: frozenset[AttemptId]) -> Absence:
    """The absence with what happened here in it, as the attempts' own records say."""
    until = absence.ended
    started = ended = local = granted = to_settle = done = 0
    for attempt in attempts:
        begun = utc_of(attempt.started.utc_ns) if attempt.started else None
        over = attempt.ended.ended if attempt.ended and attempt.state is State.ENDED else None
        if attempt.local is not None:
            local += _within(begun, absence.since, until) or _within(over, absence.since, until)
            continue
        started += _within(begun, absence.since, until)
        granted += attempt.id in by_grant and _within(begun, absence.since, until)
        if _within(over, absence.since, until):
            ended += 1
            to_settle += 1
            done += attempt.id in settled
    return msgspec.structs.replace(
        absence, lent_started=started, lent_ended=ended, local_ran=local, by_allowance=granted, to_settle=to_settle, settled=done
    )


def _within(moment: datetime | None, since: datetime, until: datetime | None) -> bool:
    return moment is not None and since <= moment and (until is None or moment <= until)
