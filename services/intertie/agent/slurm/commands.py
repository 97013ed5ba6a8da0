"""Slurm by its own commands, over any `Shell`; and the port that slurmrestd fills as well.

Each method is one question to slurmctld or slurmdbd, and is counted: what looking costs the site is told to its owner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

from intertie.agent.slurm.core.names import ExitCode, parse_submitted
from intertie.agent.slurm.core.records import (
    EXIT_FORMAT,
    FIELD,
    SACCT,
    SQUEUE_FORMAT,
    Booked,
    Node,
    Queued,
    Read,
    parse_codes,
    parse_job,
    parse_nodes,
    parse_sacct,
    parse_squeue,
)
from intertie.agent.slurm.core.replies import Meaning, last_words, meaning_of
from intertie.agent.slurm.core.request import Request, options
from intertie.agent.slurm.core.rules import Become, SlurmRules
from intertie.agent.slurm.core.words import Unreadable
from intertie.agent.slurm.transport import ANSWER_BYTES, Done, Shell, Unsure
from intertie.clock import Clock
from intertie.errors import Refused, Unavailable


class Slurm(Protocol):
    """What is asked of a Slurm, whatever carries the question. Errors: `Refused`, `Unavailable`, and for a submit `Unsure`."""

    asked: int
    """Questions so far, for their price."""

    async def queue(self) -> Read[Queued]: ...

    async def books(
        self, start: datetime, end: datetime | None, *, users: Collection[str] = (), ids: Collection[int] = ()
    ) -> Read[Booked]: ...

    async def job(self, number: int) -> Queued | None:
        """The queue's own memory of one job; None if it has none."""
        ...

    async def codes(self, numbers: Collection[int]) -> Mapping[int, ExitCode]:
        """How these ended, as far as the queue remembers them: one question for all."""
        ...

    async def nodes(self) -> Read[Node]: ...

    async def cluster(self) -> str:
        """Its name."""
        ...

    async def submit(self, request: Request) -> tuple[int, str]:
        """(job id, cluster or empty)."""
        ...

    async def cancel(self, number: int, account: str, *, term: bool) -> None:
        """`term`: ask its first process to end it; else end it. Harmless if it is over."""
        ...

    async def close(self) -> None: ...


class Commands:
    """squeue, sacct, scontrol, sbatch, scancel."""

    def __init__(self, shell: Shell, rules: SlurmRules, clock: Clock) -> None:
        self.shell, self.rules, self.clock = shell, rules, clock
        self.asked = 0

    # --- reading ---

    async def _ask(self, *argv: str, limit: int = ANSWER_BYTES) -> bytes:
        done = await self._run(argv, limit=limit)
        if done.code != 0:
            raise self._failed(argv[0], done)
        return done.out

    async def _run(self, argv: Sequence[str], *, account: str = "", stdin: Path | bytes = b"", limit: int = ANSWER_BYTES) -> Done:
        self.asked += 1
        return await self.shell.run(argv, account=account, stdin=stdin, timeout_s=self.rules.timeout_s, limit=limit)

    @property
    def _where(self) -> tuple[str, ...]:
        return (f"--clusters={self.rules.cluster}",) if self.rules.cluster else ()

    def _failed(self, command: str, done: Done) -> Refused | Unavailable:
        words = last_words(done.error)
        meaning, code = meaning_of(words)
        text = f"{command} ended with {done.code}: {words or 'without a word'}"
        if meaning is Meaning.REFUSED:
            return Refused(code, text)
        if meaning is Meaning.UNKNOWN_OPTION:
            return Unavailable(code, f"{text} (this version of Slurm is not known to take what is asked)", retry_after_s=300)
        return Unavailable(code, text, retry_after_s=5)

    async def queue(self) -> Read[Queued]:
        return parse_squeue(await self._ask("squeue", *self._where, "--noheader", "--all", "--states=all", f"--format={SQUEUE_FORMAT}"))

    async def books(self, start: datetime, end: datetime | None, *, users: Collection[str] = (), ids: Collection[int] = ()) -> Read[Booked]:
        now = self.clock.now()

        def ago(moment: datetime) -> str:
            # By Slurm's own clock, whatever the zones: a second more, since `now` moves while it is asked.
            return f"now-{max(0, int((now - moment).total_seconds()) + 1)}"

        words = ["sacct", *self._where, "--allocations", "--noheader", "--parsable2", f"--delimiter={FIELD}", "--duplicates", "--noconvert"]
        words += [f"--format={','.join(SACCT)}", f"--starttime={ago(start)}"]
        if end is not None and end < now:
            words.append(f"--endtime={ago(end)}")
        words.append(f"--user={','.join(sorted(users))}" if users else "--allusers")
        if ids:
            words.append(f"--jobs={','.join(str(one) for one in sorted(ids))}")
        return parse_sacct(await self._ask(*words))

    async def job(self, number: int) -> Queued | None:
        argv = ("scontrol", *self._where, "--oneliner", "show", "job", str(number))
        done = await self._run(argv)
        if done.code != 0:
            if meaning_of(last_words(done.error))[0] is Meaning.UNKNOWN_JOB:
                return None
            raise self._failed("scontrol", done)
        rows = parse_job(done.out).rows
        return rows[0] if rows else None

    async def codes(self, numbers: Collection[int]) -> Mapping[int, ExitCode]:
        listed = ",".join(str(one) for one in sorted(numbers))
        done = await self._run(("squeue", *self._where, "--noheader", "--states=all", f"--jobs={listed}", f"--Format={EXIT_FORMAT}"))
        # A single id that the queue has forgotten is an error to squeue, several are none: neither is one to us.
        return parse_codes(done.out)

    async def nodes(self) -> Read[Node]:
        return parse_nodes(await self._ask("scontrol", *self._where, "--oneliner", "--details", "show", "node"))

    async def cluster(self) -> str:
        if self.rules.cluster:
            return self.rules.cluster
        told = await self._ask("scontrol", "show", "config")
        for line in told.decode("utf-8", errors="replace").splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "ClusterName":
                return value.strip()
        raise Unavailable("slurm.no_name", "scontrol show config names no cluster", retry_after_s=60)

    # --- doing ---

    def as_account(self, account: str, verb: str, *words: str, argv: Sequence[str]) -> tuple[Sequence[str], str]:
        """(the command, whom the shell must become) for something that is done as a mapped account."""
        match self.rules.become:
            case Become.SUDO:
                return ("sudo", "--non-interactive", f"--user={account}", "--", self.rules.wrapper, verb, *words), ""
            case Become.ROOT:
                return argv, account
            case _:
                return argv, ""

    async def submit(self, request: Request) -> tuple[int, str]:
        asked = [*self._where, *options(request)]
        script = f"{request.folder}/start.sh"
        argv, become = self.as_account(request.account, "submit", request.tag.attempt, *asked, argv=("sbatch", *asked, script))
        done = await self._run(argv, account=become)
        words = last_words(done.error)
        try:
            return parse_submitted(done.out.decode("utf-8", errors="replace"))
        except Unreadable as err:
            if done.code == 0:
                raise Unsure("slurm.no_id", f"sbatch said that all is well, and no job id; {words}") from err
        meaning, code = meaning_of(words)
        text = f"sbatch ended with {done.code}: {words or 'without a word'}"
        match meaning:
            case Meaning.REFUSED | Meaning.UNKNOWN_OPTION:
                raise Refused(code, text)
            case Meaning.LATER:
                raise Unavailable(code, text, retry_after_s=10)
            case _:
                raise Unsure(code, text, retry_after_s=5)

    async def cancel(self, number: int, account: str, *, term: bool) -> None:
        how = ("--batch", "--signal=TERM") if term else ()
        argv, become = self.as_account(
            account, "cancel", str(number), "term" if term else "kill", *self._where, argv=("scancel", *self._where, *how, str(number))
        )
        done = await self._run(argv, account=become)
        if done.code != 0 and meaning_of(last_words(done.error))[0] not in (Meaning.UNKNOWN_JOB, Meaning.OVER):
            raise self._failed("scancel", done)

    async def close(self) -> None:
        await self.shell.close()
