"""The real commands of a real Slurm, with the troubles that a test wants: lost answers, silence, empty lists, a word of tomorrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from tests.adapters.slurm_world import ACCOUNT, GUEST, Slurm

from intertie.agent.slurm.core.records import END, FIELD, SQUEUE
from intertie.agent.slurm.core.rules import Become, SlurmRules
from intertie.agent.slurm.transport import Done, LocalShell, Unsure
from intertie.errors import Unavailable

STATE, COMMENT = SQUEUE.index("%T"), SQUEUE.index("%k")


class TroubledShell(LocalShell):
    """`instead`: (command, what is said in its place or None, …) in the order in which they come; None as `before`: it is really run first."""

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(env)
        self.instead: list[tuple[str, Callable[[], Done] | None, Done | None]] = []
        self.ran: list[tuple[str, ...]] = []
        self.deaf = False
        self.lost_submits = 0
        self.deaf_looks = 0
        self.blind_looks = 0
        self.words: dict[str, str] = {}
        """Tag → the state that the queue shows of it."""

    async def run(self, argv: Sequence[str], **how: object) -> Done:
        self.ran.append(tuple(argv))
        if self.deaf:
            raise Unavailable("slurm.controller_away", "nobody answers")
        if self.instead and self.instead[0][0] == argv[0]:
            _, before, answer = self.instead.pop(0)
            if before is None:
                await super().run(argv, **how)  # type: ignore[arg-type]
            if answer is None:
                raise Unsure("slurm.no_answer", "no answer")
            return answer
        if argv[0] == "squeue" and self.deaf_looks > 0:
            self.deaf_looks -= 1
            raise Unavailable("slurm.controller_away", "nobody answers")
        done = await super().run(argv, **how)  # type: ignore[arg-type]
        if argv[0] == "sbatch" and self.lost_submits > 0:
            self.lost_submits -= 1
            # Nor does the queue answer while its tag is looked for at once.
            self.deaf_looks = 3
            raise Unsure("slurm.no_answer", "taken, and the answer is lost")
        if argv[0] == "squeue" and not any(word.startswith("--Format") for word in argv):
            if self.blind_looks > 0:
                self.blind_looks -= 1
                return Done(0, b"", b"")
            return Done(done.code, self._said(done.out), done.error)
        return done

    def _said(self, out: bytes) -> bytes:
        if not self.words:
            return out
        records = out.decode("utf-8", errors="replace").split(END)
        for at, record in enumerate(records):
            fields = record.split(FIELD)
            if len(fields) == len(SQUEUE):
                word = next((word for tag, word in self.words.items() if tag in fields[COMMENT]), "")
                fields[STATE] = word or fields[STATE]
                records[at] = FIELD.join(fields)
        return END.join(records).encode("utf-8")


def rules_of(slurm: Slurm, folder: Path, **more: object) -> SlurmRules:
    """As the owner of this cluster would write them."""
    base = SlurmRules(
        folder=str(folder),
        partition="train",
        account=ACCOUNT,
        accounts=[GUEST],
        become=Become.ROOT,
        conf=str(slurm.conf),
        path=slurm.env["PATH"],
        models={"a100": "A100-SXM4-80GB", "h20": "H20"},
    )
    return msgspec.structs.replace(base, **more) if more else base
