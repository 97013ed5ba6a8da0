"""The README's commands, as a reader pastes them: each block that is marked `run` in order, in one folder, against a real hub and site.

Only three things differ from a reader's morning: the tenant is the stack's own, beats are five times faster, and nobody types.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.journeys.stack import TENANT, Stack, new_folder, running_stack

from intertie.agent.join import read_profiles
from intertie.cli.quickstart import demo_environment
from intertie.contracts.identity import CreateToken, Role, TokenCreated
from intertie.contracts.job import JobsReply
from intertie.lifecycle import JOB_TERMINAL

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^```(?P<kind>\S+)(?P<run> run)?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

# Words that the reader must see, by block in order. A block that only reads is read again until they are there, as a reader would.
READS_ONLY = "reads only"
WORDS: tuple[tuple[str, ...], ...] = (
    ("job-", socket.gethostname()),
    ("fits site-a/cpu", "train.sh:5:", "--partition", "epoch 1 done", "11 data.txt"),
    ("all devices that fit are busy", "no_free_device", "round-", "cancel"),
    (READS_ONLY, "× ¥6.00/card-hour = ¥", "the tenant pays", "train", "platform → *"),
    ("tick 1", "tick 3"),
    ("works alone since", "still here", "exit 5", "tick 3"),
    ("joined as annex", "annex\tcpu"),
    ("job-", socket.gethostname()),
    ("hello", "token.create", "alice"),
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    kind: str
    run: bool
    text: str


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page of the repository's root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(found["kind"], found["run"] is not None, found["text"]) for found in FENCED.finditer(text)]


@dataclass
class Reader:
    """A shell in a folder: variables, functions and the place outlive a block, as in a terminal."""

    folder: Path
    env: dict[str, str]
    groups: list[int] = field(default_factory=list)

    def paste(self, text: str, *, limit_s: float = 60.0) -> tuple[int, str]:
        """(exit code, all that was written). Output goes to a file: what a block leaves running must not hold a pipe open."""
        state, written = self.folder / ".state", self.folder / ".written"
        state.touch()
        script = f'. "{state}"\nset -aeu -o pipefail\n{text}code=$?\n{{ declare -fp; export -p; }} > "{state}"\nexit $code\n'
        with written.open("wb") as out:
            shell = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=self.env,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.groups.append(shell.pid)
            try:
                code = shell.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = -1
        return code, written.read_text(encoding="utf-8", errors="replace")

    def leave(self) -> None:
        """End what the blocks left running."""
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


@contextlib.contextmanager
def reader(stack: Stack) -> Iterator[Reader]:
    """Sourced what quickstart tells to source; nothing of the caller's own settings."""
    made = stack.admin.post("/v1/tokens", TokenCreated, CreateToken(name="reader", roles=[Role.TENANT_ADMIN], tenant=TENANT))
    token = stack.folder / "reader.token"
    token.write_text(made.token, encoding="ascii")
    lines = demo_environment(stack.layout.data, stack.layout.public_url, token, stack.sites["site-a"].folder)
    folder = new_folder()
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8", "INTERTIE_BEAT_S": "0.2"}
    shell = Reader(folder, env)
    try:
        (folder / ".state").write_text(lines, encoding="utf-8")
        yield shell
    finally:
        shell.leave()
        shutil.rmtree(folder, ignore_errors=True)


def quiet(stack: Stack) -> bool:
    """Everything submitted so far has ended and is in the books."""
    jobs = stack.user.get("/v1/jobs", JobsReply).jobs
    ran = {job.job for job in jobs if any(a.started_at for a in job.attempts)}
    return all(job.state in JOB_TERMINAL for job in jobs) and (not ran or stack.complete_statement(ran) is not None)


async def test_every_marked_block_of_the_readme_works_as_pasted() -> None:
    marked = [block.text.replace("demo", TENANT) for block in blocks("README.md") if block.run]
    assert len(marked) == len(WORDS)
    async with running_stack() as stack:
        await stack.add_site("site-a", slots=len(os.sched_getaffinity(0)), env={"INTERTIE_BEAT_S": "0.2"})
        with reader(stack) as shell:
            for text, (*words,) in zip(marked, WORDS, strict=True):
                await stack.until(lambda: quiet(stack), what="what the block before submitted has ended and is in the books")
                reads_only = words[0] == READS_ONLY

                def read(text: str = text, words: list[str] = words, reads_only: bool = reads_only) -> bool:
                    code, written = shell.paste(text)
                    missing = [word for word in words if word != READS_ONLY and word not in written]
                    assert code == 0 and (reads_only or not missing), f"exit {code}, missing {missing}\n$ {text}\n{written}"
                    return not missing

                await stack.until(read, what=f"the words {words}", limit_s=20)


def test_the_chinese_page_has_the_same_commands() -> None:
    english, chinese = blocks("README.md"), blocks("README.zh.md")
    assert [b for b in english if b.kind != "text"] == [b for b in chinese if b.kind != "text"]
    assert [b.kind for b in english] == [b.kind for b in chinese]


def test_the_profile_shown_is_one_that_join_takes(tmp_path: Path) -> None:
    (shown,) = [block.text for block in blocks("README.md") if block.kind == "toml"]
    file = tmp_path / "profile.toml"
    file.write_text(shown, encoding="utf-8")
    (pool,) = read_profiles(file)
    assert (pool.accelerator, pool.count, pool.lendable.devices) == ("A100-SXM4-80GB", 8, 4)


def test_every_file_that_the_pages_name_is_there() -> None:
    for page in ("README.md", "README.zh.md", "ops/docs/tour.md", "ops/docs/tour.zh.md", "ops/docs/bus.md", "ops/docs/operate.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        named = re.findall(r"\]\(([^)#:]+)\)", text)
        folder = (ROOT / page).parent
        named += [str(ROOT / name) for name in re.findall(r"`((?:libs|ops|services|tests)/[\w./-]+\.\w+)`", text)]
        assert not [name for name in named if not (folder / name).exists()], page
