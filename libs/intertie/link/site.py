"""The site's side of a lane: events in, effects out. `intertie.lane.site` performs the effects on a bus and a journal.

One try is under way at a time. Every try has a new nonce; only the answer to the latest is taken, and its time is counted from that try's sending.
`now_s` is CLOCK_BOOTTIME in seconds throughout, which counts suspend. Silence changes nothing here but `silent_since`: what runs goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from intertie.contracts.link import Clocks, Go, Instruction, Lane, LaneState, Offer, Stop, Sync, Synced, Withdraw
from intertie.ids import AttemptId, JournalId, SessionId, SiteName
from intertie.link.clocks import ClockEstimate, by_round_trip
from intertie.link.journal import Batch, InstructionMark, mark_of
from intertie.link.keeper import MOST_EPOCH


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a lane speaks. Seconds; what is waited is spread over half to whole of each, so that sites do not come in step."""

    beat_s: float = 5.0
    idle_s: float = 30.0
    """A lane with nothing to say goes from `beat_s` to this by doubling; the same as `beat_s` where the sync itself is the heartbeat."""
    retry_s: float = 0.25
    """First wait after a failed try, doubled to `beat_s`."""
    busy_s: float = 0.05
    """First wait after BUSY: another copy of the keeper holds this site's row for one transaction."""
    silent_after_s: float = 10.0
    """The lane is silent when tries have failed for this long …"""
    silent_tries: int = 3
    """… and this many in a row, so that one lost answer, or a pause of the machine, is not an absence."""
    heard_tries: int = 2
    """Answers in a row that end a silence: a link that lets one of four through is not back."""


def pace_of(lane: Lane, beat_s: float = 5.0) -> Pace:
    """A lane's pace. The registry lane is the heartbeat and never slows down; the others back off to six beats when idle, and are nudged."""
    idle_s = beat_s if lane is Lane.REGISTRY else beat_s * 6
    return Pace(beat_s=beat_s, idle_s=idle_s, retry_s=beat_s / 20, busy_s=beat_s / 100, silent_after_s=beat_s * 2)


class Wake(StrEnum):
    """Why a lane should speak before its beat."""

    ENTRIES = "entries"
    """New entries are in the journal. While tries fail it changes nothing: they wait for the next try."""
    NUDGE = "nudge"
    """The hub asks. It proves that the bus works, so it also ends a back-off."""
    BUS = "bus"
    """The link to the bus came or went: find out at once."""


class Trouble(StrEnum):
    """Why nothing is taken from a keeper that answers. Nothing is acknowledged, forgotten or started until it is gone."""

    FORKED = "forked"
    AGENT_RESTORED = "agent_restored"
    HUB_RESTORED = "hub_restored"
    SUPERSEDED = "superseded"
    """Another agent of this site took over: a person restarts this one (it takes over again) or stops it."""
    CONTESTED = "contested"
    """Two agents of this site take over from each other: a person stops one of them."""
    VERSION = "version"
    """The hub is older than this agent knows how to speak to: upgrade the hub."""
    EPOCH_LOWER = "epoch_lower"
    """The keeper speaks in an epoch below one that this site has seen."""
    ANSWER = "answer"
    """The keeper acknowledges what this try did not carry."""
    JOURNAL = "journal"
    """The journal here could not be read or written."""


# --- effects: what the shell is to do, in order -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Read the batch after entry `after`, then say `loaded` (or `not_loaded`)."""

    after: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send this, then say `answered` or `failed`."""

    sync: Sync


@dataclass(frozen=True, slots=True)
class Exchange:
    """One answered try."""

    nonce: int
    sent_boot_s: float
    """When this very try was sent: `start_within` and any lease count from here."""
    answered_boot_s: float
    synced: Synced
    clock: ClockEstimate
    acknowledged: int
    """Through this entry the keeper has all on disk: a go stands only if its claim is not above it."""
    epochs: tuple[int, int] = (0, 0)
    """(highest epoch known, highest of which an answer came at head): to be on disk before anything of this exchange is acted on."""


@dataclass(frozen=True, slots=True)
class Take:
    """Remember the two marks, store the instructions, hand the exchange over, then say `stored` (or `not_stored`)."""

    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Silent:
    """The lane is silent since then (CLOCK_BOOTTIME of the last answer taken, or of the start)."""

    since_boot_s: float


@dataclass(frozen=True, slots=True)
class Heard:
    """The silence is over."""


@dataclass(frozen=True, slots=True)
class Report:
    """A trouble began, or (None) is gone."""

    trouble: Trouble | None
    text: str


@dataclass(frozen=True, slots=True)
class Lost:
    """What the keeper has of what this site was told to forget: `journal` through `ack_through`; nothing at all if `journal` is None."""

    journal: JournalId | None
    ack_through: int


@dataclass(frozen=True, slots=True)
class Reopen:
    """Open a new journal in place of `journal` and say `reopened`; if another lane did so already, only say it."""

    journal: JournalId
    why: str
    lost: Lost | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """The keeper answers in an epoch above the one known here: journal what is held (`HeldTold`), then say `raised`, or `not_raised` if the journal
    refused. Until then nothing of that epoch is taken, and the keeper says it again."""

    epoch: int


Effect = Load | Send | Take | Silent | Heard | Report | Reopen | Raised

BROKEN = (LaneState.FORKED, LaneState.AGENT_RESTORED, LaneState.HUB_RESTORED)
"""States whose way out is a new journal."""

# Of an instruction or a revision; above it SQLite and PostgreSQL hold nothing.
MOST_NUMBER = 2**62

FIRST_EPOCH = 1
"""In which a service begins; above it, it was restored at least once."""

# New journals in a row of which none was taken: then it is not the journal, and a person must look. A hub that lacks something of several
# journals names one of them after the other.
MOST_REOPENS = 10


def stops_first(instructions: Sequence[Instruction]) -> list[Instruction]:
    """What ends work before what begins any: a site that returns must not start on devices, or for jobs, that are being taken back."""
    return sorted(instructions, key=lambda one: 0 if isinstance(one, Stop | Withdraw) else 2 if isinstance(one, Offer | Go) else 1)


def _unfit(synced: Synced) -> str:
    """What of an answer no keeper of ours says, and no journal can hold; empty if nothing. An epoch that was believed once would be told for ever."""
    if max(synced.epoch, *(one.epoch for one in synced.instructions), 0) > MOST_EPOCH:
        return f"an epoch above {MOST_EPOCH}"
    if max(synced.settings_revision, *(one.number for one in synced.instructions), 0) > MOST_NUMBER:
        return f"a number above {MOST_NUMBER}"
    if not 1970 <= synced.clock.year < 2200:
        return f"the time {synced.clock.isoformat()}"
    return ""


@dataclass(slots=True)
class _Try:
    sync: Sync
    sent_s: float
    last: int
    """Number of the last entry it carries."""


class SiteMachine:
    """One lane of one site. Methods are the events; each gives the effects to perform, in order. `due_at` is when to say `tick`."""

    def __init__(
        self,
        *,
        site: SiteName,
        session: SessionId,
        lane: Lane,
        journal: JournalId,
        marks: tuple[int, int],
        now_s: float,
        pace: Pace,
        spread: Callable[[], float],
        epochs: tuple[int, int] = (0, 0),
        place: str = "",
        tells_held: bool = False,
    ) -> None:
        """`marks` are the journal's (acknowledged, safe), `epochs` and `place` its own too. `spread` gives numbers in [0, 1): a seeded one replays.
        `tells_held`: a raised epoch is an effect, and is known only when that was performed."""
        self._tells_held = tells_held
        self.site, self.session, self.lane, self.journal, self.place = site, session, lane, journal, place
        self.pace = pace
        self._spread = spread
        self._cursor = marks[0]
        self._forgotten = 0
        self._nonce = 0
        self._taken = 0
        self._loading = False
        self._try: _Try | None = None
        self._epoch, self._ready = epochs
        self._reopens = 0
        self._failures = 0
        self._failing_since_s: float | None = None
        self._good = 0
        self._ever_heard = False
        self._idle_beats = 0
        self._wanted = False
        self._rewound_to: int | None = None
        self.trouble: Trouble | None = None
        self.due_at = now_s
        self.last_heard_s: float | None = None
        self.silent_since_s: float | None = now_s
        """A site starts unheard: islanded until the first answer says otherwise."""
        self.clock: ClockEstimate | None = None
        self.clean = False
        """The last answered try left nothing to send, and nothing was said since."""

    @property
    def nonce(self) -> int:
        """Of the latest try."""
        return self._nonce

    @property
    def taken_nonce(self) -> int:
        """Of the last answer taken."""
        return self._taken

    # --- events ---

    def tick(self, now_s: float) -> list[Effect]:
        """Time passed."""
        if self._loading or self._try is not None or now_s < self.due_at:
            return []
        self._loading, self._wanted = True, False
        return [Load(self._cursor)]

    def wake(self, why: Wake, now_s: float) -> None:
        """Somebody wants the lane to speak early."""
        if why is Wake.ENTRIES:
            self.clean = False
        if self._loading or self._try is not None:
            self._wanted = True
        elif why is Wake.BUS:
            # A bus that is back is back for every site: they must not all speak in the same moment.
            self.due_at = min(self.due_at, now_s + self.pace.retry_s * self._spread())
        elif why is Wake.NUDGE:
            # A job waits for this. The keeper commits those who come together in groups, so many nudged at once do no harm.
            self.due_at = min(self.due_at, now_s)
        elif self._failures == 0 and self.trouble is None:
            self.due_at = min(self.due_at, now_s)

    def loaded(
        self,
        now_s: float,
        batch: Batch,
        *,
        running: Sequence[AttemptId],
        mark: InstructionMark,
        settings_revision: int,
        clocks: Clocks,
    ) -> list[Effect]:
        """The batch is here; `running` lists every attempt that may hold devices as of its last entry; `clocks` were read just now."""
        self._loading = False
        if batch.journal is not None and batch.journal != self.journal:
            self.due_at = now_s  # Another lane had the journal opened anew meanwhile; `reopened` is on its way.
            return []
        self._nonce += 1
        self._forgotten = batch.forgotten
        self._epoch = max(self._epoch, mark.epoch)
        sync = Sync(
            site=self.site,
            session=self.session,
            place=self.place,
            lane=self.lane,
            nonce=self._nonce,
            taken_nonce=self._taken,
            journal=self.journal,
            first_seq=batch.first_seq,
            digest_before=batch.digest_before,
            forgotten_through=self._forgotten,
            entries=[msgspec.Raw(entry) for entry in batch.entries],
            at_head=batch.at_head,
            running=list(running) if batch.at_head else None,
            instruction_mark=mark.number,
            instruction_epoch=self._epoch,
            mark_epoch=None if mark.epoch == self._epoch else mark.epoch,
            settings_revision=settings_revision,
            clocks=clocks,
        )
        self._try = _Try(sync, now_s, batch.first_seq - 1 + len(batch.entries))
        return [Send(sync)]

    def not_loaded(self, now_s: float, why: str) -> list[Effect]:
        """The journal could not be read. Says nothing about the link."""
        self._loading = False
        self.due_at = now_s + self.pace.beat_s
        return self._in_trouble(Trouble.JOURNAL, why)

    def failed(self, now_s: float, nonce: int) -> list[Effect]:
        """No answer: lost, late, or nobody was there. Whether the keeper has the entries is not known; they are sent again."""
        if self._try is None or self._try.sync.nonce != nonce:
            return []
        return self._fail(now_s)

    def answered(self, now_s: float, synced: Synced) -> list[Effect]:
        """An answer arrived. One to an earlier try says nothing: its time would be counted from the wrong sending."""
        current = self._try
        if current is None or synced.nonce != current.sync.nonce:
            return []
        if synced.state is LaneState.BUSY:
            effects = self._fail(now_s)
            wait_s = min(self.pace.beat_s, self.pace.busy_s * 2 ** min(self._failures - 1, 10))
            self.due_at = now_s + wait_s * (0.5 + self._spread() / 2)
            return effects
        if broken := _unfit(synced):
            return self._refuse(now_s, Trouble.ANSWER, f"the {self.lane} keeper says what cannot be: {broken}")
        if synced.epoch < self._epoch:
            text = (
                f"the {self.lane} keeper is in epoch {synced.epoch}, this site knows {self._epoch}: run `intertie hub restored` at the hub"
            )
            return self._refuse(now_s, Trouble.EPOCH_LOWER, text)
        if self._is_raised(synced):
            return self._raise(now_s, synced.epoch)
        if synced.state in BROKEN:
            lost = Lost(synced.journal, synced.ack_through) if synced.state is LaneState.HUB_RESTORED else None
            return self._break(now_s, Trouble(synced.state.value), f"the {self.lane} keeper answers {synced.state.value}", lost)
        if synced.state is LaneState.BEHIND:
            return self._rewind(now_s, synced)
        if synced.state is not LaneState.OK:
            return self._refuse(now_s, Trouble(synced.state.value), f"the {self.lane} keeper answers {synced.state.value}")
        return self._take(now_s, current, synced)

    def reopened(self, now_s: float, journal: JournalId) -> list[Effect]:
        """The journal has another id now, and begins again at its first entry; an answer to the old one's entries means nothing any more."""
        self.journal = journal
        self._try, self._loading, self._wanted = None, False, False
        self._cursor, self._forgotten, self._rewound_to = 0, 0, None
        self.clean = False
        self.due_at = now_s
        return []

    def raised(self, now_s: float, epoch: int) -> list[Effect]:
        """What is held is in the journal, behind everything before it: from the next sync on the keeper may know that this epoch is known here."""
        if self._epoch == 0:
            self._ready = epoch
        self._epoch = max(self._epoch, epoch)
        self.due_at = now_s
        return []

    def not_raised(self, now_s: float, why: str) -> list[Effect]:
        """The journal refused: the next answer of that epoch asks again."""
        self.due_at = now_s + self.pace.beat_s
        return self._in_trouble(Trouble.JOURNAL, why)

    def stored(self) -> list[Effect]:
        """The journal has the marks and instructions of the last exchange."""
        return self._untroubled() if self.trouble is Trouble.JOURNAL else []

    def not_stored(self, now_s: float, why: str) -> list[Effect]:
        """The journal refused the marks or instructions of the last exchange: nothing of it counts, the keeper repeats what is open."""
        self.due_at = now_s + self.pace.beat_s
        self.clean = False
        return self._in_trouble(Trouble.JOURNAL, why)

    # --- what they lead to ---

    def _take(self, now_s: float, current: _Try, synced: Synced) -> list[Effect]:
        sync = current.sync
        if not sync.first_seq - 1 <= synced.ack_through <= current.last or synced.safe_through > synced.ack_through:
            text = f"entries {sync.first_seq}–{current.last} were sent, the answer acknowledges {synced.ack_through}, safe {synced.safe_through}"
            return self._refuse(now_s, Trouble.ANSWER, text)
        if synced.ack_through < sync.first_seq and sync.entries:
            return self._refuse(now_s, Trouble.ANSWER, f"entry {sync.first_seq} was sent and neither taken nor refused")
        self._try = None
        self._taken = sync.nonce
        self._cursor = synced.ack_through
        self._rewound_to, self._reopens = None, 0
        self.clock = by_round_trip(self.clock, sync.clocks, now_s, synced.clock)
        effects: list[Effect] = [] if self.trouble is Trouble.JOURNAL else self._untroubled()
        effects += self._hear(now_s)
        sent_all = sync.at_head and synced.ack_through == current.last
        said = stops_first(synced.instructions)
        if self._learn(synced.epoch):
            allowed = said
        else:
            allowed = [one for one in said if not isinstance(one, Offer | Go)]
            self._ready = synced.epoch if sent_all else self._ready
        synced = msgspec.structs.replace(synced, instructions=allowed)
        exchange = Exchange(sync.nonce, current.sent_s, now_s, synced, self.clock, synced.ack_through, (self._epoch, self._ready))
        effects.append(Take(exchange))
        self._plan_next(now_s, current, synced, sent_all)
        if len(allowed) < len(said) and self._ready == self._epoch:
            self.due_at = now_s  # What was held back is said again in the next answer, and may be taken then.
        return effects

    def _learn(self, epoch: int) -> bool:
        """Know the keeper's epoch; True if work may start on its word: it is the first ever heard, or an answer of it came at head before."""
        if self._epoch == 0:
            self._ready = epoch
        self._epoch = epoch
        return self._ready >= epoch

    def _is_raised(self, synced: Synced) -> bool:
        """A first epoch needs no telling: nothing of it can have been lost."""
        return self._tells_held and synced.state in (LaneState.OK, LaneState.BEHIND) and synced.epoch > max(self._epoch, FIRST_EPOCH)

    def _raise(self, now_s: float, epoch: int) -> list[Effect]:
        """Take nothing of the answer, which the keeper repeats, but that it arrived."""
        assert self._try is not None, "an answer belongs to a try"
        self._taken = self._try.sync.nonce
        self._try = None
        self.clean = False
        self.due_at = now_s + self.pace.beat_s
        return [Raised(epoch)]

    def _plan_next(self, now_s: float, current: _Try, synced: Synced, sent_all: bool) -> None:
        """At once while there is more either way, else by the beat."""
        sync = current.sync
        mark = mark_of(sync)
        # `more` with nothing new in it is a keeper repeating what waits for our answers: that is not worth a loop without a beat.
        brought_new = any(InstructionMark(one.epoch, one.number) > mark for one in synced.instructions)
        self.clean = sent_all and not self._wanted
        if not sent_all or self._wanted or (synced.more and brought_new):
            self._idle_beats = 0
            self.due_at = now_s
            return
        self._idle_beats = 0 if sync.entries or brought_new else self._idle_beats + 1
        wait_s = min(self.pace.idle_s, self.pace.beat_s * 2 ** min(max(0, self._idle_beats - 1), 10))
        if self.silent_since_s is not None:
            wait_s = self.pace.retry_s  # One answer came: the next try says whether the silence is over.
        self.due_at = now_s + wait_s * (0.5 + self._spread() / 2)

    def _rewind(self, now_s: float, synced: Synced) -> list[Effect]:
        """The keeper lacks what it once acknowledged, or an answer of ours was not its: send again from there, if it is still here."""
        if synced.ack_through < self._forgotten:
            text = f"the {self.lane} keeper asks for entries after {synced.ack_through}, those up to {self._forgotten} were called safe"
            return self._break(now_s, Trouble.HUB_RESTORED, text, Lost(self.journal, synced.ack_through))
        if synced.ack_through >= self._cursor or synced.ack_through == self._rewound_to:
            return self._refuse(now_s, Trouble.ANSWER, f"the {self.lane} keeper asks again for entries after {synced.ack_through}")
        assert self._try is not None, "an answer belongs to a try"
        self._learn(synced.epoch)
        self._taken = self._try.sync.nonce
        self._try = None
        self._cursor = self._rewound_to = synced.ack_through
        self.clean = False
        self.due_at = now_s
        return []

    def _hear(self, now_s: float) -> list[Effect]:
        """An answer was taken."""
        self._failures, self._failing_since_s = 0, None
        self.last_heard_s = now_s
        self._good += 1
        if self.silent_since_s is not None and (not self._ever_heard or self._good >= self.pace.heard_tries):
            self.silent_since_s = None
            self._ever_heard = True
            return [Heard()]
        return []

    def _fail(self, now_s: float) -> list[Effect]:
        """The try under way came to nothing."""
        current = self._try
        assert current is not None, "only a try can fail"
        self._try = None
        self._good = 0
        self._failures += 1
        self.clean = False
        if self._failing_since_s is None:
            self._failing_since_s = current.sent_s
        wait_s = min(self.pace.beat_s, self.pace.retry_s * 2 ** min(self._failures - 1, 10))
        self.due_at = now_s + wait_s * (0.5 + self._spread() / 2)
        long_enough = now_s - self._failing_since_s >= self.pace.silent_after_s
        if self.silent_since_s is None and self._failures >= self.pace.silent_tries and long_enough:
            self.silent_since_s = self.last_heard_s if self.last_heard_s is not None else self._failing_since_s
            return [Silent(self.silent_since_s)]
        return []

    def _refuse(self, now_s: float, trouble: Trouble, text: str) -> list[Effect]:
        """Take nothing of this answer. The keeper is there, but the site works as if it were not."""
        effects = self._fail(now_s)
        self.due_at = now_s + self.pace.idle_s * (0.5 + self._spread() / 2)
        return [*self._in_trouble(trouble, text), *effects]

    def _break(self, now_s: float, trouble: Trouble, text: str, lost: Lost | None) -> list[Effect]:
        """Both sides cannot be joined as they are: open a new journal, in which everything that is left is said again."""
        effects = self._refuse(now_s, trouble, text)
        if self._reopens >= MOST_REOPENS:
            return effects
        self._reopens += 1
        return [*effects, Reopen(self.journal, trouble.value, lost)]

    def _in_trouble(self, trouble: Trouble, text: str) -> list[Effect]:
        if self.trouble is trouble:
            return []
        self.trouble = trouble
        return [Report(trouble, text)]

    def _untroubled(self) -> list[Effect]:
        if self.trouble is None:
            return []
        gone, self.trouble = self.trouble, None
        return [Report(None, f"{gone.value} is over")]
