"""All that the agent asks of an adapter, over any `Cluster` (a queue of the site's own) and `Files` (job folders that its nodes see).

What is certain lies in files: `claimed` in the job folder decides between the stub and a fence, the stub's records say that it began and how it
ended. The scheduler is asked for all of its jobs at once, at the owner's interval; its word says who ended what, and whether the nodes are free.
The agent's own notes of each attempt lie below `folder`, on its own disk:

    attempt.json   as it was prepared, without values of the environment
    submitting     the scheduler may have it from here on
    queued.json    it has it, under this native id
    started.json   when it began, on this host's clocks: said once, never reckoned again
    deadline.json  stop.json fenced result.tar.gz
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from intertie.agent.adapters.clear import clear
from intertie.agent.adapters.files import Content, Files, Owned
from intertie.agent.adapters.looks import Look, Looks
from intertie.agent.adapters.port import Chunk, Cluster, NativeJob, NativeOutcome, NativePhase, NativeWords, NativeWork, Presence, Queued
from intertie.agent.adapters.stub import Start, env_of, env_sh, script_of, start_sh
from intertie.agent.core import native
from intertie.agent.core.attempts import Exit
from intertie.agent.core.leases import Deadline
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.clock import Clock
from intertie.contracts.job import ResultRef
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId
from intertie.observe import log

LOG = log.get("agent.queue")

FORMAT = 1
# A cancel is asked for within an instruction: a scheduler that is slower hears it from the next look on.
CANCEL_S = 5.0
# Submits at once: a scheduler that is busy with more is slower for its own users.
SUBMITS = 4
# Of an interval: how often the folder of what still waits in the queue is looked at.
WAITING_SHARE = 6.0
# Looks that must agree, and for how long, before anything is concluded from what they lack: right after a submit, and right after an end, a busy
# site's accounting shows nothing of it yet.
AGREE = 3
LAG_S = 60.0
# After the end by the scheduler's word, looks at the folder for the stub's record: shared storage shows a file late.
RECORD_LOOKS = 5
# A stop that has had no effect for so long beyond its grace is told.
STUBBORN_S = 60.0
# A scheduler that is restarted is away for less.
SILENT_S = 60.0
# Clocks of nodes may be ahead of ours by so much, and a stub that looks at its lease by them.
NODE_AHEAD_S = 120.0
# Ends by which the site itself says that it never ran, however long its nodes were held for it.
UNBEGUN = frozenset({NativeOutcome.NEVER_STARTED, NativeOutcome.LAUNCH_FAILED, NativeOutcome.NODE_FAILED})
# In these a native job has its nodes, by its scheduler's word.
HAS_NODES = frozenset({NativePhase.RUNNING, NativePhase.SUSPENDED, NativePhase.FINISHING})

Through = Callable[[Attempt], Sequence[str]]

_encode = msgspec.json.Encoder(decimal_format="string").encode
T = TypeVar("T")


class _Kept(msgspec.Struct, frozen=True):
    format: int
    attempt: Attempt
    by_utc: float = 0.0
    """By when it must have begun; seconds of the Unix epoch, this host's clock."""


class _Queued(msgspec.Struct, frozen=True):
    native_id: str
    cluster: str
    state: str = ""
    reason: str = ""


class _Stop(msgspec.Struct, frozen=True):
    grace_s: int
    utc: float


class QueueAdapter:
    """`folder`: this agent's own notes. `single_user`: the cluster runs all work as one account."""

    def __init__(
        self,
        folder: Path,
        cluster: Cluster,
        files: Files,
        clock: Clock,
        *,
        every_s: float = 30.0,
        single_user: bool = False,
        through: Through | None = None,
        lag_s: float = LAG_S,
    ) -> None:
        """`every_s`: seconds between looks at the scheduler. `through`: words that a job's script is run by, such as a container's. `lag_s`: how far
        the site's accounting may lag."""
        self.folder, self.cluster, self.files, self.clock = folder, cluster, files, clock
        self._single_user = single_user
        self._lag_s = lag_s
        self.stubborn_s, self.silent_s, self.stub_us = STUBBORN_S, SILENT_S, native.STUB_US
        self._submits = asyncio.Semaphore(SUBMITS)
        self._tidied = False
        self._through = through or (lambda attempt: ())
        self.looks = Looks(cluster, clock, every_s)
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)

    # --- what it is ---

    @property
    def single_user(self) -> bool:
        return self._single_user

    @property
    def self_stop(self) -> bool:
        """The stub reads the lease by itself."""
        return True

    def may_run_as(self, account: str) -> str:
        return self.cluster.may_run_as(account)

    def roots(self) -> dict[int, AttemptId]:
        return {}

    # --- notes ---

    def note(self, attempt: AttemptId, name: str) -> Path:
        return self.folder / attempt / name

    def _known(self, attempt: AttemptId) -> Attempt | None:
        kept = self._noted(attempt, "attempt.json", _Kept)
        return kept.attempt if kept is not None and kept.format <= FORMAT else None

    def _by(self, attempt: Attempt) -> datetime:
        """Wall clock of this host, by which it must have begun."""
        kept = self._noted(attempt.id, "attempt.json", _Kept)
        if kept is not None and kept.by_utc:
            return datetime.fromtimestamp(kept.by_utc, UTC)
        left_s = float(attempt.start_by_s)
        if attempt.go_boot_s is not None:
            left_s -= self.clock.boot_s() - attempt.go_boot_s
        return self.clock.now() + timedelta(seconds=left_s)

    def _noted(self, attempt: AttemptId, name: str, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode(self.note(attempt, name).read_bytes(), type=kind)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _write(self, attempt: AttemptId, name: str, value: Any) -> None:
        """Whole or not at all, and on disk."""
        path = self.note(attempt, name)
        part = path.with_name(f".{name}.part")
        try:
            path.parent.mkdir(mode=0o711, exist_ok=True)
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as f:
                f.write(_encode(value))
                f.flush()
                os.fsync(f.fileno())
            part.rename(path)
        except OSError as err:
            raise Unavailable("agent.disk_error", f"{path} cannot be written: {err.strerror}", retry_after_s=10) from err

    def _has(self, attempt: AttemptId, name: str) -> bool:
        return self.note(attempt, name).exists()

    def _owned(self, attempt: Attempt) -> Owned:
        return Owned(attempt.id, attempt.account)

    # --- prepare ---

    async def prepare(self, attempt: Attempt, pack: Path | None) -> None:
        if attempt.local is not None:
            raise Refused("agent.local_native", "the site's own users submit to their own scheduler, not through here")
        if self._has(attempt.id, "fenced"):
            return  # It will be refused; a folder made now would only have to be removed.
        if why := self.may_run_as(attempt.account):
            raise Refused("agent.account", why)
        if self._has(attempt.id, "submitting"):
            return  # The scheduler may have it: what lies there is what runs.
        by = self._by(attempt)
        self._write(attempt.id, "attempt.json", _Kept(FORMAT, msgspec.structs.replace(attempt, env={}), by.timestamp()))
        owned = self._owned(attempt)
        start = Start(
            folder=self.files.seen(owned),
            args=attempt.spec.args,
            by=int(by.timestamp()),
            leased=attempt.lease_s > 0,
            wall_s=attempt.spec.wall_s,
            through=self._through(attempt),
        )
        content = {
            "start.sh": (start_sh(start), 0o500),
            "script": (script_of(attempt), 0o500),
            "env.sh": (env_sh(env_of(attempt, str(start.folder))), 0o600),
        }
        await self.files.make(owned, Content(content, pack))

    # --- into the queue ---

    async def enqueue(self, attempt: Attempt) -> Queued | Exit:
        name = attempt.id
        if (queued := self._noted(name, "queued.json", _Queued)) is not None:
            return Queued(queued.native_id, queued.cluster, queued.state, queued.reason)
        if self._has(name, "fenced"):
            return _given_up()
        self._write(name, "submitting", {})
        work = NativeWork(attempt=attempt, folder=self.files.seen(self._owned(attempt)), start_by=self._by(attempt))
        pause_s = 1.0
        while True:
            try:
                async with self._submits:
                    if self._has(name, "fenced"):
                        return _given_up()
                    job = await self.cluster.submit(work)
                break
            except Refused as err:
                # Whether an earlier try of it was taken nobody has to know: what is fenced never begins.
                if not await self.fence(name):
                    return Queued("", self.cluster.name)  # One was, and has begun.
                return Exit(certain=True, refused_errno=errno.ENOEXEC, refused_file="native queue", refused_text=err.text[:500])
            except Unavailable as err:
                LOG.warning("a submit has no answer: its tag is looked for before the next try", attempt=name, code=err.code, text=err.text)
                if self._has(name, "fenced"):
                    return _given_up()
                if (over := await self._past(attempt)) is not None:
                    return over
                await asyncio.sleep(pause_s)
                pause_s = min(self.looks.every_s, pause_s * 2)
        found = _Queued(job.native_id, job.cluster, job.state, job.reason)
        self._write(name, "queued.json", found)
        self.looks.take(job)
        return Queued(found.native_id, found.cluster, found.state, found.reason)

    async def _past(self, attempt: Attempt) -> Exit | None:
        """Its time to begin is over, by this host's clock, and it has not: now it never will."""
        if self.clock.now() <= self._by(attempt) or not await self.fence(attempt.id):
            return None
        text = f"not begun within {attempt.start_by_s} s of the go; it waited in the site's own queue"
        return Exit(certain=True, refused_errno=errno.ETIME, refused_file="native queue", refused_text=text)

    # --- start ---

    async def start(self, attempt: Attempt) -> StartedRecord | Exit:
        """Wait for it to begin, however long the site's queue is."""
        queued = await self.enqueue(attempt)
        if isinstance(queued, Exit):
            return queued
        name, owned = attempt.id, self._owned(attempt)
        async with self.looks.following(name):
            look = self.looks.latest(name)
            while True:
                try:
                    if (found := await self._begun_or_never(attempt, owned, look)) is not None:
                        return found
                except Unavailable as err:
                    # A folder or disk that is away says nothing: what waits in the queue waits on.
                    LOG.warning("whether it has begun is not known", attempt=name, code=err.code, text=err.text)
                    await asyncio.sleep(self.files.look_s)
                look = await self._next(name, look)

    async def _begun_or_never(self, attempt: Attempt, owned: Owned, look: Look | None) -> StartedRecord | Exit | None:
        """None: it still waits. The folder is the job's to write: what lies in it, or is missing there, never makes unbegun what the scheduler saw run."""
        name = attempt.id
        if (started := self._noted(name, "started.json", StartedRecord)) is not None:
            return started
        if self._has(name, "fenced"):
            return _given_up()
        if (begun := await self._seen_to_begin(owned, look)) is not None:
            return begun
        if look is not None and look.job is not None and look.job.phase is NativePhase.ENDED:
            return await self._ended_unbegun(attempt, look, look.job)
        if self._surely_absent(name):
            if (refused := await self._refused(owned)) is not None:
                return refused
            if await self.fence(name):
                text = "neither the site's queue nor its accounting knows of it any more, and it had not begun"
                return native.never(NativeOutcome.NEVER_STARTED, text)
        if look is not None and look.job is not None and look.job.phase in HAS_NODES:
            # Too late or not is now between its stub and its scheduler's end; what keeps its nodes has begun, with or without a record.
            return self._anchor(name, look, None) if self._held_us(look, look.job) > self.stub_us else None
        return await self._past(attempt)

    def _held_us(self, look: Look, job: NativeJob) -> int:
        """How long it has had its nodes, by its scheduler's clock."""
        return native.held_us(job, self._now().utc_us - look.behind_us)

    def _surely_absent(self, name: AttemptId) -> bool:
        since = self.looks.absent_since(name)
        return since is not None and self.looks.absent(name) >= AGREE and (self.clock.now() - since).total_seconds() >= self._lag_s

    async def _next(self, name: AttemptId, look: Look | None) -> Look | None:
        """The next look at the scheduler, or the one before again after as long as a look at the folder is worth waiting."""
        pause_s = self.files.look_s
        if look is not None and look.job is not None and look.job.phase is NativePhase.QUEUED:
            pause_s = max(pause_s, self.looks.every_s / WAITING_SHARE)
        try:
            async with asyncio.timeout(pause_s):
                return await self.looks.after(name, look)
        except TimeoutError:
            return look

    async def _record(self, owned: Owned, name: str) -> bytes | None:
        """`Unavailable`: whether it is there nobody knows."""
        chunk = await self.files.read(owned, name)
        return chunk.data if chunk is not None else None

    async def _seen_to_begin(self, owned: Owned, look: Look | None) -> StartedRecord | None:
        name = owned.attempt
        told = await self._record(owned, "started")
        if told is None or (begun := native.started_of(told)) is None:
            return None
        job = look.job if look is not None else None
        if (job is None or job.started is None) and self.looks.silent_since is None:
            look = await self.looks.soon(name)
        return self._anchor(name, look, begun)

    async def _refused(self, owned: Owned) -> Exit | None:
        """What a stub said that began nothing. To be asked only of what the scheduler did not see run."""
        told = await self._record(owned, "refused")
        if told is None or (why := native.refused_of(told)) is None:
            return None
        number = errno.ETIME if why.why == "too_late" else errno.EIO
        return Exit(certain=True, refused_errno=number, refused_file="native queue", refused_text=why.what[:500])

    def _anchor(self, name: AttemptId, look: Look | None, begun: native.StubStarted | None) -> StartedRecord:
        job = look.job if look is not None else None
        record = native.anchored(job, look.behind_us if look is not None else 0, begun, self._now())
        self._write(name, "started.json", record)
        return record

    async def _ended_unbegun(self, attempt: Attempt, look: Look, job: NativeJob) -> StartedRecord | Exit:
        """The scheduler says that it is over, and no stub has said that it began: whoever makes `claimed` now decides."""
        assert job.end is not None
        owned = self._owned(attempt)
        # A launch that failed by a signal may be one that the job sent itself.
        unbegun = job.end.outcome in UNBEGUN and job.end.signal is None
        ran = self._held_us(look, job) > self.stub_us and not unbegun
        for _ in range(RECORD_LOOKS):
            if (begun := await self._seen_to_begin(owned, self.looks.latest(attempt.id))) is not None:
                return begun
            if ran:
                return self._anchor(attempt.id, look, None)
            if (refused := await self._refused(owned)) is not None:
                return refused
            if not await self.files.claimed(owned):
                break
            await asyncio.sleep(self.files.look_s)
        if not await self.fence(attempt.id):
            # A stub came first and left nothing more that can be seen: that none of the user's code ran is not known, so it is not said.
            return self._anchor(attempt.id, look, None)
        said = " ".join(word for word in (job.state, job.reason, job.end.text) if word)
        return native.never(job.end.outcome, f"it left the site's own queue before it began: {said}"[:500])

    def _now(self) -> native.Now:
        return native.Now(int(self.clock.now().timestamp() * 1_000_000), int(self.clock.boot_s() * 1_000_000))

    # --- leases ---

    async def renew(self, attempt: AttemptId, until: Deadline) -> None:
        kept = self._known(attempt)
        if kept is None:
            raise Unavailable("agent.lease_not_renewed", f"{attempt} is not prepared")
        # Another host has another boot: its wall clock is all that can be spoken of, and a whole second earlier is safe.
        await self.files.write(self._owned(kept), "lease", f"{int(until.utc)}\n".encode("ascii"))
        self._write(attempt, "deadline.json", until)

    async def deadline(self, attempt: AttemptId) -> Deadline | None:
        return self._noted(attempt, "deadline.json", Deadline)

    # --- what is there ---

    async def found(self) -> list[Attempt]:
        kept: list[Attempt] = []
        for home in sorted(self.folder.iterdir()):
            name = AttemptId(home.name)
            if not self._has(name, "fenced") and (attempt := self._known(name)) is not None and attempt.id == name:
                kept.append(attempt)
        return kept

    async def presence(self, attempt: AttemptId) -> Presence:
        """What the scheduler may have is begun: it starts without us."""
        if self._has(attempt, "trimmed.json"):
            return Presence.BEGUN
        if self._has(attempt, "fenced") or not self._has(attempt, "attempt.json"):
            return Presence.PREPARED if (self.folder / attempt).exists() else Presence.ABSENT
        return Presence.BEGUN if self._has(attempt, "submitting") else Presence.PREPARED

    async def fence(self, attempt: AttemptId) -> bool:
        if self._has(attempt, "fenced"):
            return True
        kept = self._known(attempt)
        if kept is None:
            self._write(attempt, "fenced", {})
            return True
        owned = self._owned(kept)
        if self._has(attempt, "started.json") or not await self.files.claim(owned):
            return False
        self._write(attempt, "fenced", {})
        if self._has(attempt, "submitting"):
            await self._cancel(attempt, 0)
        return True

    async def tidy(self) -> None:
        """What was given up by this agent or one before, and may still wait in the site's queue, is asked to go until it is gone."""
        if not self._tidied:
            for home in await asyncio.to_thread(lambda: list(self.folder.iterdir())):
                name = AttemptId(home.name)
                if self._has(name, "fenced") and self._has(name, "submitting"):
                    self.looks.stopping(name, 0)
            self._tidied = True
        await self.looks.tidy()

    async def _cancel(self, attempt: AttemptId, grace_s: int) -> None:
        self.looks.stopping(attempt, grace_s)
        with contextlib.suppress(Unavailable, Refused, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await self.cluster.cancel(attempt, grace_s)

    # --- the end ---

    async def ended(self, attempt: Attempt) -> Exit:
        """By the scheduler's end and the stub's record: both if both are to be had. What is absent everywhere is waited for."""
        name, owned = attempt.id, self._owned(attempt)
        missing_s, prompted = 0.0, False
        async with self.looks.following(name):
            if (stop := self._noted(name, "stop.json", _Stop)) is not None:
                self.looks.stopping(name, stop.grace_s)
            look = self.looks.latest(name)
            while True:
                job = look.job if look is not None else None
                try:
                    record = await self._record(owned, "exit")
                    recorded = record is not None and native.ended_of(record) is not None
                    if job is not None and job.phase is NativePhase.ENDED:
                        if recorded or missing_s > self._patience_s(job):
                            return await self._settled(owned, job, record)
                        missing_s += self.files.look_s
                        await asyncio.sleep(self.files.look_s)
                        continue
                    if recorded and self._surely_absent(name):
                        return await self._settled(owned, None, record)  # Its books have forgotten it; its own record has not.
                except Unavailable as err:
                    # Its exit code may lie there: nothing is concluded without it while it cannot be looked for.
                    LOG.warning("its record of the end is out of reach", attempt=name, code=err.code, text=err.text)
                    await asyncio.sleep(self.files.look_s)
                    recorded = False
                if recorded and not prompted:
                    prompted = True  # Its own end is here: one prompt look, and then the owner's interval again.
                    look = await self.looks.soon(name)
                else:
                    look = await self._next(name, look)

    def _patience_s(self, job: NativeJob) -> float:
        """How long a record is looked for once the scheduler says that it is over: shared storage shows it late, and one that was killed left none."""
        few_s = RECORD_LOOKS * self.files.look_s
        end = job.end
        leaves_one = end is not None and end.outcome is NativeOutcome.EXITED and end.code not in native.STUB_CODES
        return max(few_s, self._lag_s) if leaves_one else few_s

    async def _settled(self, owned: Owned, job: NativeJob | None, record: bytes | None) -> Exit:
        told = await self._record(owned, "started")
        begun, lease = self._noted(owned.attempt, "started.json", StartedRecord), self._noted(owned.attempt, "deadline.json", Deadline)
        now = self._now()
        known = native.Known(
            asked=self._has(owned.attempt, "stop.json"),
            lease_over=lease is not None and now.utc_us / 1e6 >= lease.utc - NODE_AHEAD_S,
            most_us=now.utc_us - begun.utc_ns // 1_000 if begun is not None else native.MOST_NS,
        )
        started = native.started_of(told) if told is not None else None
        ended = native.ended_of(record) if record is not None else None
        return native.exit_of(job, started, ended, known, self.stub_us)

    async def alive(self, attempt: AttemptId) -> bool:
        if not self._has(attempt, "started.json") or (kept := self._known(attempt)) is None:
            return False
        look = self.looks.latest(attempt)
        if look is None or look.job is None or look.failed:
            return False
        if look.job.phase not in (NativePhase.STARTING, NativePhase.RUNNING, NativePhase.SUSPENDED):
            return False
        try:
            return await self._record(self._owned(kept), "exit") is None
        except Unavailable:
            return False

    async def stop(self, attempt: AttemptId, grace_s: int) -> None:
        if not self._has(attempt, "submitting") or (kept := self._known(attempt)) is None:
            return
        if not self._has(attempt, "stop.json"):
            with contextlib.suppress(Unavailable):
                self._write(attempt, "stop.json", _Stop(grace_s, self.clock.now().timestamp()))
        with contextlib.suppress(Unavailable, Refused):
            await self.files.write(self._owned(kept), "stop", f"{grace_s}\n".encode("ascii"))
        await self._cancel(attempt, grace_s)

    # --- the scheduler's words ---

    async def words(self, attempt: AttemptId, before: NativeWords | None) -> NativeWords:
        look = self.looks.latest(attempt)
        async with self.looks.following(attempt):
            while True:
                if look is not None and (now := self._words(attempt, look, before)) is not None and now != before:
                    return now
                look = await self.looks.after(attempt, look)

    def _words(self, attempt: AttemptId, look: Look, before: NativeWords | None) -> NativeWords | None:
        """None: this look says nothing."""
        job = look.job
        if look.failed or job is None:
            return replace(before, text=unsaid) if before is not None and (unsaid := self._unsaid(attempt, look)) else None
        text = job.warning
        stop = self._noted(attempt, "stop.json", _Stop)
        if stop is not None and self.clock.now().timestamp() > stop.utc + stop.grace_s + self.stubborn_s:
            text = f"being stopped since {_stamp(datetime.fromtimestamp(stop.utc, UTC))}, without effect"
        return NativeWords(
            native_id=job.native_id,
            state=job.state,
            reason=job.reason,
            suspended=job.phase is NativePhase.SUSPENDED,
            nodes=job.nodes,
            restarts=job.restarts,
            text=text,
        )

    def _unsaid(self, attempt: AttemptId, look: Look) -> str:
        if look.failed and self.looks.silent_since is not None:
            silent_s = (self.clock.now() - self.looks.silent_since).total_seconds()
            return f"the site's scheduler has not answered since {_stamp(self.looks.silent_since)}" if silent_s >= self.silent_s else ""
        since = self.looks.absent_since(attempt)
        if since is None or not self._surely_absent(attempt):
            return ""
        return f"neither the site's queue nor its accounting shows it since {_stamp(since)}"

    # --- what it leaves ---

    async def pack(self, attempt: Attempt) -> ResultRef | None:
        if not attempt.spec.outputs or attempt.local is not None:
            return None
        return await self.files.pack(self._owned(attempt), attempt.spec.outputs, self.result(attempt.id))

    def result(self, attempt: AttemptId) -> Path:
        return self.note(attempt, "result.tar.gz")

    async def log(self, attempt: AttemptId, offset: int, limit: int) -> Chunk:
        """From its folder; from the scheduler where the log lies with that alone."""
        kept = self._known(attempt) or self._trimmed(attempt)
        if kept is not None and (chunk := await self.files.read(self._owned(kept), "log", offset, limit)) is not None:
            return chunk
        if kept is None or not self._has(attempt, "queued.json"):
            return Chunk(b"", 0, 0)
        return await self.cluster.logs(attempt, offset, limit)

    def _trimmed(self, attempt: AttemptId) -> Attempt | None:
        kept = self._noted(attempt, "trimmed.json", _Kept)
        return kept.attempt if kept is not None else None

    async def trim(self, attempt: AttemptId) -> None:
        if (kept := self._known(attempt)) is None:
            return
        await self.files.remove(self._owned(kept), ("work", "tmp", "script", "env.sh", "start.sh"))
        # Whose folder it is must still be known while its log is kept; nothing finds it as work any more.
        self.note(attempt, "attempt.json").rename(self.note(attempt, "trimmed.json"))
        self.result(attempt).unlink(missing_ok=True)
        self.looks.forget(attempt)

    async def forget(self, attempt: AttemptId) -> None:
        if (kept := self._known(attempt) or self._trimmed(attempt)) is not None:
            with contextlib.suppress(Unavailable):
                await self.files.remove(self._owned(kept))
        self.looks.forget(attempt)
        await asyncio.to_thread(clear, self.folder / attempt)


def _given_up() -> Exit:
    return Exit(certain=True, refused_errno=errno.EEXIST, refused_file="native queue", refused_text="given up before it started")


def _stamp(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}Z"
