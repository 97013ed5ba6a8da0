"""The `Cluster` of a Slurm: five verbs and its accounting, over commands or slurmrestd.

One look at the queue serves all jobs of ours and counts the rest as native load. What the queue has forgotten, or has ended, is asked of the
accounting in one question; while that lags or is away, of the queue's own memory of single jobs. Silence of all three says nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import PurePath

from intertie.agent import accounts
from intertie.agent.adapters.files import Files, Owned
from intertie.agent.adapters.port import (
    Accounted,
    Chunk,
    Described,
    Listing,
    NativeJob,
    NativeNode,
    NativePhase,
    NativeWork,
)
from intertie.agent.core.rights import SLOTS
from intertie.agent.slurm.commands import Slurm
from intertie.agent.slurm.core import judge
from intertie.agent.slurm.core.names import ExitCode
from intertie.agent.slurm.core.records import Bad, Booked, Node, Queued, Read
from intertie.agent.slurm.core.request import Request, request_of
from intertie.agent.slurm.core.rules import Become, SlurmRules, partitions
from intertie.agent.slurm.core.tags import Tag
from intertie.agent.slurm.transport import Unsure
from intertie.clock import Clock
from intertie.contracts.site import NativeLoad
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId
from intertie.observe import log

LOG = log.get("agent.slurm")

# After a submit whose answer was lost, looks for its tag before that is all that can be said; slurmctld shows a job that it took at once.
UNSURE_LOOKS, UNSURE_S = 3, 1.0
# Native ids remembered, to ask the accounting by them.
MOST_KNOWN = 20_000


@dataclass(slots=True)
class Known:
    """What this process has seen of a tag. The id is a hint for the accounting, never a name."""

    account: str
    number: int | None = None
    submitted: datetime | None = None
    asked: Request | None = None
    """As it was submitted by this process."""
    over: NativeJob | None = None
    """Its end, once the books had it whole."""


@dataclass(slots=True)
class Looked:
    """One look at the queue."""

    rows: Sequence[Queued]
    bad: Sequence[Bad]
    at: datetime


class SlurmCluster:
    """`files`: where job folders lie; logs are read from there."""

    def __init__(self, slurm: Slurm, rules: SlurmRules, files: Files, clock: Clock, *, name: str = "") -> None:
        self.slurm, self.rules, self.files, self.clock = slurm, rules, files, clock
        self._name = name or rules.cluster
        self._known: dict[AttemptId, Known] = {}
        self._last: Looked | None = None
        self._ending: dict[AttemptId, asyncio.Task[None]] = {}
        self._said: set[str] = set()

    @property
    def name(self) -> str:
        return self._name

    @property
    def questions(self) -> int:
        """Put to slurmctld and slurmdbd so far: what looking costs."""
        return self.slurm.asked

    async def open(self) -> None:
        """Learn the cluster's name, before the first word with it. Without it nothing of it can be told apart from another's."""
        if not self._name:
            self._name = await self.slurm.cluster()

    async def close(self) -> None:
        for task in self._ending.values():
            task.cancel()
        await asyncio.gather(*self._ending.values(), return_exceptions=True)
        await self.slurm.close()

    def may_run_as(self, account: str) -> str:
        rules = self.rules
        if rules.become is Become.SELF:
            return ""
        if not account:
            return "no local account is mapped, and nothing runs here as the agent's own user"
        if rules.accounts and account not in rules.accounts:
            return f"local account {account!r} is not among the accounts of [slurm] in site.toml"
        # On a login node the account is that machine's: only the lists of the owner, in site.toml and sudoers, can say.
        return "" if rules.ssh is not None or rules.become is Become.REST else accounts.why_not(account)

    # --- whose is it ---

    def _ours(self, known: Iterable[Known] = ()) -> judge.Ours:
        users = {*self.rules.accounts, *[one.account for one in known if one.account]} if self.rules.accounts else set[str]()
        root = PurePath(self.rules.nodes_see or self.rules.folder)
        return judge.Ours(root, frozenset(users), by_account=self.rules.become is Become.SUDO)

    def _remember(self, tag: AttemptId, account: str = "") -> Known:
        known = self._known.setdefault(tag, Known(account))
        known.account = known.account or account
        while len(self._known) > MOST_KNOWN:
            self._known.pop(next(iter(self._known)))
        return known

    def _tell_once(self, text: str) -> None:
        if text and text not in self._said and len(self._said) < 1_000:
            self._said.add(text)
            LOG.warning("the site's Slurm says something that needs a look", text=text)

    # --- looking ---

    async def _look(self) -> Looked:
        await self.open()
        read = await self.slurm.queue()
        self._last = Looked(read.rows, read.bad, self.clock.now())
        for bad in read.bad:
            self._tell_once(f"job {bad.about} cannot be read in the queue: {bad.why}")
        return self._last

    async def status(self, tags: Collection[AttemptId]) -> Listing:
        look = await self._look()
        known = {tag: self._remember(tag) for tag in tags}
        rows = judge.by_tag(look.rows, self._ours(known.values()))
        whole = not look.bad
        why = f"{len(look.bad)} lines of the queue cannot be read" if look.bad else ""
        jobs = dict[AttemptId, NativeJob]()
        owed: dict[AttemptId, Sequence[Queued]] = {}
        for tag in tags:
            held = [row for row in rows.get(tag, ()) if isinstance(row, Queued) and self._may_be(row, known[tag])]
            self._hint(known[tag], held)
            live = [row for row in held if row.state.phase is not NativePhase.ENDED]
            if live:
                job = judge.chosen([judge.of_queue(row, self._tag_of(row), self._name) for row in live])
                jobs[tag] = replace(job, warning=job.warning or self._drift(live[0], known[tag]))
            elif (over := known[tag].over) is not None:
                jobs[tag] = over
            else:
                owed[tag] = held
        if owed:
            ended, trouble = await self._ended(owed, known)
            jobs |= ended
            if trouble:
                whole, why = False, trouble
        for job in jobs.values():
            self._tell_once(job.warning)
        return Listing(jobs, look.at, whole, why)

    def _tag_of(self, row: judge.Row) -> Tag:
        tag = replace(self._ours(), users=frozenset()).tag(row)
        assert tag is not None
        return tag

    def _drift(self, row: Queued, known: Known) -> str:
        asked = known.asked
        return judge.drift(row, asked.place.partition, asked.minutes) if asked is not None and known.number == row.number else ""

    def _may_be(self, row: judge.Row, known: Known) -> bool:
        """A tag on somebody else's job is a comment that somebody wrote."""
        return self.rules.become is Become.SELF or not known.account or row.user == known.account

    def _hint(self, known: Known, rows: Sequence[judge.Row]) -> None:
        if rows:
            known.number, known.submitted = rows[-1].number, rows[-1].submitted
            known.account = known.account or rows[-1].user

    async def _ended(
        self, owed: Mapping[AttemptId, Sequence[Queued]], known: Mapping[AttemptId, Known]
    ) -> tuple[dict[AttemptId, NativeJob], str]:
        """Those that the queue has forgotten or shows as ended: by the accounting, and what that lacks by the queue's own memory."""
        found = dict[AttemptId, NativeJob]()
        trouble = ""
        try:
            books = await self._books(owed, known)
        except Unavailable as err:
            books, trouble = Read(()), f"accounting is away: {err.text}"
        booked = judge.by_tag(books.rows, self._ours(known.values()))
        codes = await self._codes(owed)
        for tag, held in owed.items():
            runs = [row for row in booked.get(tag, ()) if isinstance(row, Booked) and self._may_be(row, known[tag])]
            job = self._of_runs(runs, codes.get(held[-1].number) if held else None)
            if job is not None and job.phase is NativePhase.ENDED:
                known[tag].over = found[tag] = job
                self._hint(known[tag], runs)
            elif held:
                found[tag] = self._by_memory(held[-1], codes)
            elif job is not None and job.phase is not NativePhase.QUEUED:
                # The books say that it lives, and the queue does not show it: they lag, or slurmctld lost it. What only ever waited is absent.
                trouble = trouble or f"the queue does not show job {job.native_id}, and the accounting has no end of it"
        return found, trouble

    async def _codes(self, owed: Mapping[AttemptId, Sequence[Queued]]) -> Mapping[int, ExitCode]:
        """What the queue remembers of those that it shows as ended."""
        rows = [held[-1] for held in owed.values() if held]
        told = {row.number: row.exit for row in rows if row.exit is not None}
        if lacking := [row.number for row in rows if row.exit is None]:
            told |= await self.slurm.codes(lacking)
        return told

    def _of_runs(self, runs: Sequence[Booked], code: ExitCode | None = None) -> NativeJob | None:
        """Runs of one tag: those of one native job are its restarts."""
        if not runs:
            return None
        jobs = dict[tuple[int, str], list[Booked]]()
        for run in runs:
            jobs.setdefault((run.number, run.cluster), []).append(run)
        code = code if len(jobs) == 1 else None
        return judge.chosen([self._of_run(same, code) for same in jobs.values()])

    def _of_run(self, same: Sequence[Booked], code: ExitCode | None) -> NativeJob:
        job, last = judge.of_books(same, self._tag_of(same[-1]), self._name, code), same[-1]
        if job.end is None or last.state.by_uid is None or self.rules.become is Become.SELF:
            return job  # Where all is one account, the owner's own hand is that account's, too.
        who = accounts.by_name(last.user)
        return replace(job, end=replace(job.end, own=who is not None and who.uid == last.state.by_uid))

    async def _books(self, owed: Mapping[AttemptId, Sequence[Queued]], known: Mapping[AttemptId, Known]) -> Read[Booked]:
        """One question: by ids where all are known, else by the accounts that work runs as."""
        now = self.clock.now()
        oldest = now - timedelta(days=self.rules.look_back_days)
        ids = [known[tag].number for tag in owed]
        if all(number is not None for number in ids):
            since = min((known[tag].submitted or oldest for tag in owed), default=oldest)
            return await self.slurm.books(max(oldest, since - timedelta(minutes=5)), None, ids=[n for n in ids if n is not None])
        users = {known[tag].account for tag in owed if known[tag].account} | set(self.rules.accounts)
        return await self.slurm.books(oldest, None, users=users)

    def _by_memory(self, row: Queued, codes: Mapping[int, ExitCode]) -> NativeJob:
        """An end that the queue shows and the books lack. Without its exit code the end is not told yet."""
        code = row.exit or codes.get(row.number)
        if code is None:
            return _unfinished(judge.of_queue(row, self._tag_of(row), self._name))
        return judge.of_queue(replace(row, exit=code), self._tag_of(row), self._name)

    # --- submitting ---

    async def submit(self, work: NativeWork) -> NativeJob:
        request = request_of(work, self.rules, self.clock.now())
        if why := self.may_run_as(request.account):
            raise Refused("slurm.account", why)
        known = self._remember(work.attempt.id, request.account)
        if (found := await self._find(request, known)) is not None:
            return found
        try:
            number, cluster = await self.slurm.submit(request)
        except Unsure as err:
            if (found := await self._after_unsure(request, known)) is not None:
                LOG.warning("the answer of a submit was lost; its tag was found", attempt=work.attempt.id, native=found.native_id)
                return found
            raise err
        known.number, known.submitted, known.asked = number, None, request
        return NativeJob(
            tag=work.attempt.id,
            cluster=cluster or self._name,
            native_id=str(number),
            phase=NativePhase.QUEUED,
            state="PENDING",
            generation=request.tag.generation,
        )

    async def _after_unsure(self, request: Request, known: Known) -> NativeJob | None:
        for _ in range(UNSURE_LOOKS):
            await asyncio.sleep(UNSURE_S)
            try:
                found = await self._find(request, known)
            except Unavailable:
                continue
            if found is not None:
                return found
        return None

    async def _find(self, request: Request, known: Known) -> NativeJob | None:
        """A native job that carries this tag already, alive or over. `Unavailable` if the queue cannot be asked: then nothing is submitted.

        Accounting that is away hides only what has left the queue, and that the job's own folder refuses to start again."""
        tag = request.tag.attempt
        ours = self._ours([known])
        rows = judge.by_tag((await self._look()).rows, ours).get(tag, ())
        self._hint(known, rows)
        if rows:
            return judge.chosen([judge.of_queue(row, self._tag_of(row), self._name) for row in rows if isinstance(row, Queued)])
        try:
            users = {request.account} if request.account else set(self.rules.accounts)
            books = await self.slurm.books(self.clock.now() - timedelta(days=self.rules.look_back_days), None, users=users)
        except Unavailable as err:
            LOG.warning("a submit goes on without the accounting", attempt=tag, text=err.text)
            return None
        runs = [row for row in judge.by_tag(books.rows, ours).get(tag, ()) if isinstance(row, Booked)]
        # A row that never ends of a job that the queue has lost (slurmctld died within seconds of a submit) is no job.
        return self._of_runs([run for run in runs if run.state.phase is NativePhase.ENDED and run.started is not None])

    # --- ending ---

    async def cancel(self, tag: AttemptId, grace_s: int) -> None:
        known = self._remember(tag)
        rows = judge.by_tag((await self._look()).rows, self._ours([known])).get(tag, ())
        self._hint(known, rows)
        for row in rows:
            if not isinstance(row, Queued) or row.state.phase in (NativePhase.ENDED, NativePhase.FINISHING):
                continue
            account = known.account or row.user
            if row.state.phase is NativePhase.RUNNING and grace_s > 0:
                await self.slurm.cancel(row.number, account, term=True)
                if tag not in self._ending:
                    self._ending[tag] = asyncio.create_task(self._finish_off(tag, account, row.number, row.submitted, grace_s))
            else:
                await self.slurm.cancel(row.number, account, term=False)

    async def _finish_off(self, tag: AttemptId, account: str, number: int, submitted: datetime | None, grace_s: int) -> None:
        """What did not end within its grace is ended by Slurm; asked until Slurm has heard it."""
        try:
            await asyncio.sleep(grace_s + 2)
            while True:
                try:
                    row = await self.slurm.job(number)
                    alive = row is not None and row.submitted == submitted and row.state.phase is not NativePhase.ENDED
                    if alive:
                        await self.slurm.cancel(number, account, term=False)
                    return
                except (Unavailable, Refused) as err:
                    LOG.warning("a cancel waits for Slurm", attempt=tag, text=err.text)
                    await asyncio.sleep(self.rules.every_s)
        finally:
            self._ending.pop(tag, None)

    async def logs(self, tag: AttemptId, offset: int, limit: int) -> Chunk:
        known = self._known.get(tag)
        chunk = await self.files.read(Owned(tag, known.account if known is not None else ""), "log", offset, limit)
        return chunk if chunk is not None else Chunk(b"", 0, 0)

    # --- the third book ---

    async def accounting(self, start: datetime, end: datetime) -> Sequence[Accounted]:
        users = set(self.rules.accounts) | {known.account for known in self._known.values() if known.account}
        read = await self.slurm.books(start, end, users=users)
        for bad in read.bad:
            self._tell_once(f"run {bad.about} cannot be read in the accounting: {bad.why}")
        return judge.accounted(read.rows, self._ours(self._known.values()), start, end)

    # --- what is there ---

    async def describe(self) -> Described:
        last = self._last
        if last is None or (self.clock.now() - last.at).total_seconds() > self.rules.every_s:
            last = await self._look()
        read = await self.slurm.nodes()
        used = partitions(self.rules)
        nodes = [node for node in read.rows if not used or used & set(node.partitions)]
        warnings = [f"node {bad.about} cannot be read: {bad.why}" for bad in read.bad]
        warnings += [f"node {node.name}: {node.state.warning}" for node in nodes if node.state.warning]
        warnings += self._foreign(last.rows)
        seen = [one for node in nodes for one in native_nodes(node, self.rules.models)]
        return Described(
            cluster=self._name,
            version=next((node.version for node in nodes if node.version), ""),
            at=self.clock.now(),
            nodes=tuple(seen),
            load=self._load(last.rows, nodes),
            queues=tuple(sorted({part for node in read.rows for part in node.partitions})),
            warnings=tuple(warnings[:50]),
        )

    def _load(self, rows: Sequence[Queued], nodes: Sequence[Node]) -> NativeLoad:
        ours = self._ours(self._known.values())
        busy = sum(node.busy or 0 for node in nodes)
        held = 0
        for row in rows:
            if row.state.phase in (NativePhase.RUNNING, NativePhase.SUSPENDED, NativePhase.FINISHING) and ours.tag(row) is not None:
                per_node = sum(one.count for one in row.gres if one.name == "gpu")
                held += row.tres.gpus if row.tres.gpus is not None else per_node * max(1, row.node_count)
        return judge.native_load(rows, ours, busy, held, self.clock.now())

    def _foreign(self, rows: Sequence[Queued]) -> list[str]:
        """Accounts that were lent to the federation alone, used by hand (BR-148): told in numbers."""
        counted = dict[str, int]()
        ours = self._ours()
        for row in rows:
            if row.user in self.rules.accounts and ours.tag(row) is None and row.state.phase is not NativePhase.ENDED:
                counted[row.user] = counted.get(row.user, 0) + 1
        return [f"{count} jobs of account {user} did not come through us" for user, count in sorted(counted.items())]


def native_nodes(node: Node, models: Mapping[str, str]) -> Sequence[NativeNode]:
    """One line for each kind of card, and one for its processors; a planned node is usable and has nothing free (BR-042)."""
    state, usable = node.state.word, node.state.usable
    reason = node.reason or node.state.warning
    found: list[NativeNode] = []
    total = sum(node.cards.values())
    busy = total if node.busy is None or node.state.planned else node.busy
    for word, count in node.cards.items():
        mine = min(count, busy)
        busy -= mine
        found.append(NativeNode(node.name, usable, state, reason, count, mine, models.get(word, word)))
    cpus_busy = node.cpus if node.state.planned else min(node.cpus, node.cpus_busy)
    found.append(NativeNode(node.name, usable, state, reason, node.cpus, cpus_busy, SLOTS, node.memory_mib))
    return found


def _unfinished(job: NativeJob) -> NativeJob:
    """Over by the queue's word, and not yet how."""
    return NativeJob(
        tag=job.tag,
        cluster=job.cluster,
        native_id=job.native_id,
        phase=NativePhase.FINISHING,
        state=job.state,
        reason=job.reason,
        generation=job.generation,
        submitted=job.submitted,
        started=job.started,
        nodes=job.nodes,
        warning=job.warning,
    )
