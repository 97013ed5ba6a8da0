"""The start stub itself, under every shell that is here: what it refuses, what it records, how it stops what it began."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from intertie.agent.adapters.stub import Start, env_sh, start_sh
from intertie.agent.core.native import BROKEN, TOO_LATE, TWICE, StubEnded, ended_of, refused_of, started_of
from intertie.agent.slurm.core.images import PASSED, command
from intertie.agent.slurm.core.rules import Images
from intertie.errors import Refused

SHELLS = [shell for shell in ("dash", "bash", "busybox sh", "sh") if shutil.which(shell.split()[0])]
LIMIT_S = 60.0
NAME = pwd.getpwuid(os.geteuid()).pw_name


@dataclass
class Job:
    folder: Path
    shell: str

    def make(self, script: str, *, env: dict[str, str] | None = None, lease_s: float | None = None, **fields: object) -> Job:
        (self.folder / "work").mkdir()
        (self.folder / "script").write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}", encoding="utf-8")
        (self.folder / "script").chmod(0o500)
        (self.folder / "env.sh").write_bytes(env_sh(env or {}))
        if lease_s is not None:
            self.write("lease", f"{int(time.time() + lease_s)}\n")  # noqa: TID251  # as the agent's wall clock would
        (self.folder / "start.sh").write_bytes(start_sh(Start(folder=self.folder, **fields)))  # type: ignore[arg-type]
        return self

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="ascii")

    async def start(self, **environ: str) -> asyncio.subprocess.Process:
        null = asyncio.subprocess.DEVNULL
        env = {"PATH": os.environ["PATH"], **environ}
        return await asyncio.create_subprocess_exec(
            *self.shell.split(), str(self.folder / "start.sh"), stdin=null, stdout=null, stderr=null, env=env
        )

    async def run(self, **environ: str) -> int:
        process = await self.start(**environ)
        async with asyncio.timeout(LIMIT_S):
            return await process.wait()

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def end(self) -> StubEnded:
        found = ended_of((self.folder / "exit").read_bytes())
        assert found is not None, self.text("exit")
        return found

    async def begun(self) -> None:
        loop = asyncio.get_running_loop()
        by = loop.time() + LIMIT_S
        while "up" not in self.text("log"):
            assert loop.time() < by, "it does not begin"
            await asyncio.sleep(0.02)


@pytest.fixture(params=SHELLS)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    return Job(tmp_path, request.param)


async def test_it_records_the_start_runs_the_script_in_its_folder_and_records_the_end(job: Job) -> None:
    job.make('echo "$GREETING $1 $(pwd)"\n', env={"GREETING": "it's\n$HOME"}, args=["a b"])
    assert await job.run(SLURM_JOB_ID="4711", SLURM_JOB_GPUS="0,3") == 0
    began = started_of((job.folder / "started").read_bytes())
    assert began is not None and began.native_id == "4711" and began.cards == ("0", "3") and began.node == os.uname().nodename
    assert job.text("log") == f"it's\n$HOME a b {job.folder}/work\n"
    end = job.end()
    assert (end.code, end.signal, end.stopped) == (0, None, "") and end.at.boot_id == began.at.boot_id
    assert end.at.boot_ns >= began.at.boot_ns and end.at.utc_ns >= began.at.utc_ns
    assert not (job.folder / "env.sh").exists(), "values live no longer than the work needs them"


@pytest.mark.parametrize("code", [0, 7, 126, 127, 137, 221, 222, 255])
async def test_its_exit_code_is_the_job_s_and_137_is_no_signal(job: Job, code: int) -> None:
    assert await job.make(f"sleep 0.3\nexit {code}\n").run() == code
    assert (job.end().code, job.end().signal) == (code, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_signal_is_recorded_as_one(job: Job, number: signal.Signals) -> None:
    job.make(f"sleep 0.5\nkill -{int(number)} $$\n")
    await job.run()
    assert (job.end().code, job.end().signal) == (None, int(number))


async def test_a_job_hears_its_own_interrupt(job: Job) -> None:
    await job.make('trap "exit 3" INT\nkill -INT $$\nsleep 0.1\nexit 4\n').run()
    assert job.end().code in ((3,) if shutil.which("env") and job.shell != "busybox sh" else (3, 4))


async def test_a_script_without_its_interpreter_is_told_apart(job: Job) -> None:
    assert await job.make("#!/no/such/interpreter -x\n").run() == 127
    assert (job.end().refused_errno, job.end().refused_file) == (2, "/no/such/interpreter")


async def test_it_begins_once_whoever_starts_it_again(job: Job) -> None:
    """LINK D6: a scheduler that starts the same job twice."""
    job.make("echo up\nsleep 1\n")
    first = await job.start()
    await job.begun()
    assert await job.run() == TWICE
    assert await first.wait() == 0
    assert job.text("log") == "up\n" and job.end().code == 0


async def test_what_was_fenced_begins_nothing(job: Job) -> None:
    job.make("echo up\n")
    (job.folder / "claimed").mkdir()
    assert await job.run() == TWICE
    assert job.text("log") == "" and not (job.folder / "started").exists()


LATE: list[tuple[str, dict[str, object]]] = [
    ("its time has passed", {"by": 1}),
    ("its lease has passed", {"leased": True, "lease_s": -5}),
    ("its lease cannot be read", {"leased": True}),
]


@pytest.mark.parametrize("fields", [row[1] for row in LATE], ids=[row[0] for row in LATE])
async def test_what_is_too_late_begins_nothing_and_says_so(job: Job, fields: dict[str, object]) -> None:
    assert await job.make("echo up\n", **fields).run() == TOO_LATE  # type: ignore[arg-type]
    told = refused_of((job.folder / "refused").read_bytes())
    assert told is not None and told.why == "too_late"
    assert job.text("log") == "" and not (job.folder / "exit").exists()


async def test_a_folder_that_is_gone_is_no_end_of_a_job(job: Job) -> None:
    job.make("echo up\n")
    text = (job.folder / "start.sh").read_bytes()
    other = job.folder.parent / "spool"
    other.mkdir(exist_ok=True)
    (other / "start.sh").write_bytes(text)
    shutil.rmtree(job.folder)
    assert await Job(other, job.shell).run() == BROKEN


async def test_leased_work_is_stopped_at_the_end_of_its_lease_and_a_renewal_moves_it(job: Job) -> None:
    job.make("echo up\nsleep 300\n", leased=True, lease_s=3600)
    process = await job.start()
    await job.begun()
    job.write("lease", f"{int(time.time()) + 1}\n")  # noqa: TID251
    async with asyncio.timeout(LIMIT_S):
        await process.wait()
    assert job.end().stopped == "lease_ended"


async def test_a_stop_ends_all_below_it_and_what_ignores_it_too(job: Job) -> None:
    job.make('trap "" TERM\nsleep 301 & one=$!\nsleep 302 &\necho "$one $! up"\nwait\nsleep 303\n', grace_s=1)
    process = await job.start()
    await job.begun()
    pids = [int(word) for word in job.text("log").split()[:2]]
    process.terminate()
    async with asyncio.timeout(LIMIT_S):
        await process.wait()
    assert (job.end().stopped, job.end().signal) == ("signalled", 9)
    async with asyncio.timeout(LIMIT_S):
        while any(map(lives, pids)):  # noqa: ASYNC110  # the kernel takes what was killed away in its own time
            await asyncio.sleep(0.02)


def lives(pid: int) -> bool:
    """Not gone, and no zombie either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_stop_that_lies_in_its_folder_is_seen(job: Job) -> None:
    job.make("echo up\nsleep 300\n", leased=True, lease_s=3600)
    process = await job.start()
    await job.begun()
    job.write("stop", "1\n")
    async with asyncio.timeout(LIMIT_S):
        await process.wait()
    assert job.end().stopped == "asked"


async def test_its_wall_limit_stops_it(job: Job) -> None:
    await job.make("sleep 300\n", wall_s=1, leased=True, lease_s=3600).run()
    assert job.end().stopped == "wall_limit"


async def test_the_scheduler_s_word_on_cards_is_not_overruled_by_the_user_s(job: Job) -> None:
    job.make("echo $CUDA_VISIBLE_DEVICES\n", env={"CUDA_VISIBLE_DEVICES": "7"})
    await job.run(CUDA_VISIBLE_DEVICES="0,1")
    assert job.text("log") == "0,1\n"


USUAL = [
    ("nothing is told", {}, {}, (os.path.expanduser(f"~{NAME}"), NAME, "C.UTF-8")),
    ("the scheduler tells them", {"HOME": "/tmp", "USER": "guest", "LANG": "C"}, {}, ("/tmp", "guest", "C")),
    ("a home that is not there", {"HOME": "/no/such/home"}, {}, ("{work}", NAME, "C.UTF-8")),
    ("an image's home of an account that it does not know", {"HOME": "/"}, {}, ("{work}", NAME, "C.UTF-8")),
    ("the user's own values", {"HOME": "/"}, {"HOME": "/var", "LANG": "zh_CN.UTF-8"}, ("/var", NAME, "zh_CN.UTF-8")),
]


@pytest.mark.parametrize(("environ", "env", "expected"), [row[1:] for row in USUAL], ids=[row[0] for row in USUAL])
async def test_a_script_finds_a_home_a_name_and_a_language_wherever_it_runs(
    job: Job, environ: dict[str, str], env: dict[str, str], expected: tuple[str, ...]
) -> None:
    job.make('printf "%s\n" "$HOME" "$USER" "$LANG"\n', env=env)
    assert await job.run(**environ) == 0
    assert job.text("log").splitlines() == [word.format(work=job.folder / "work") for word in expected]


async def test_a_script_s_own_children_are_given_a_path_where_the_scheduler_gives_none(job: Job) -> None:
    job.make("env | grep -c ^PATH=/\n")
    shell = shutil.which(job.shell.split()[0])
    assert shell is not None
    process = await asyncio.create_subprocess_exec(shell, *job.shell.split()[1:], str(job.folder / "start.sh"), env={})
    async with asyncio.timeout(LIMIT_S):
        assert await process.wait() == 0
    assert job.text("log") == "1\n"


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A;rm", "Ä"])
def test_a_name_that_no_shell_exports_is_refused(name: str) -> None:
    with pytest.raises(Refused) as refused:
        env_sh({name: "1"})
    assert refused.value.code == "agent.env_name"


# --- images --------------------------------------------------------------------------------------------------------------------------------

IMAGE = "registry.example.cn/team/train@sha256:" + "b" * 64
# Each as its program is called: it sees what it was given, and runs what comes after its own words in the environment that it would make.
PROGRAMS = {
    "apptainer": '#!/bin/sh\nwhile [ "${1#docker://}" = "$1" ]; do [ "$1" != --pwd ] || { cd "$2" && shift; }; shift; done\n'
    'echo "apptainer $1"; shift; exec "$@"\n',
    "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do case $1 in --container-image=*) echo "srun ${1#*=}" ;; '
    '--container-workdir=*) cd "${1#*=}" ;; --export=ALL) all=1 ;; esac; shift; done\n[ -n "$all" ] || exec env -i "$@"\nexec "$@"\n',
    "enroot": '#!/bin/sh\nif [ "$1" = import ]; then echo "enroot $4"; echo squash >"$3"; exit; fi\nshift\n'
    'while [ "${1#--}" != "$1" ]; do case $1 in --env) kept="$kept $2"; shift ;; --mount) shift ;; esac; shift; done\n'
    '[ -s "$1" ] || exit 9\nshift; cd /\nfor n in $(env | sed -n "s/^\\([A-Za-z_][A-Za-z0-9_]*\\)=.*/\\1/p"); do '
    'case " $kept PATH " in *" $n "*) ;; *) unset "$n" ;; esac; done\nexec "$@"\n',
}


@pytest.mark.parametrize(
    ("images", "seen"),
    [
        (Images.APPTAINER, f"apptainer docker://{IMAGE}"),
        (Images.PYXIS, f"srun registry.example.cn#team/train:sha256:{'b' * 64}"),
        (Images.ENROOT, f"enroot docker://registry.example.cn#team/train:sha256:{'b' * 64}"),
    ],
)
async def test_in_an_image_the_script_has_its_folder_its_arguments_and_its_environment(job: Job, images: Images, seen: str) -> None:
    """Whatever the program that runs it passes on by itself: enroot nothing, srun what sbatch was told."""
    programs = job.folder / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text, encoding="ascii")
        (programs / name).chmod(0o755)
    through = command(images, IMAGE, job.folder, names=(*PASSED, "GREETING", "NOT_SET"), cards=False)
    job.make('echo "$GREETING $1 $(pwd) ${NOT_SET-none}"\nexit 3\n', env={"GREETING": "it's\n$HOME"}, args=["a b"], through=through)
    assert await job.run(PATH=f"{programs}:{os.environ['PATH']}") == 3
    assert job.text("log") == f"{seen}\nit's\n$HOME a b {job.folder}/work none\n"
    assert job.end().code == 3


OVERRULES = {"PATH": "/nowhere", "IFS": "e", "intertie_wall": "99999", "intertie_job": "/", "intertie_look": "999", "intertie_leased": "0"}


async def test_no_value_of_the_user_s_environment_reaches_the_stub_itself(job: Job) -> None:
    """Their PATH is their job's; the stub still finds its own commands, and knows its own limit and lease."""
    script = 'echo "up $PATH $intertie_wall"\n/bin/sleep 60\n'
    code = await job.make(script, env=OVERRULES, wall_s=2, grace_s=1).run()
    assert job.text("log") == "up /nowhere 99999\n"
    end = job.end()
    assert (code, end.stopped, end.signal) == (128 + signal.SIGTERM, "wall_limit", signal.SIGTERM)
    assert not (job.folder / "env.sh").exists()
