"""The ways to a real Slurm that need no root: one sudo rule for one wrapper, a login node by SSH, slurmrestd with a token per account."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import asyncssh
import msgspec
import pytest
from tests.adapters.slurm_shell import rules_of
from tests.adapters.slurm_world import GUEST, Slurm
from tests.fakes.agents import attempt

from intertie.agent.adapters.files import Content, Files, LocalFiles, Owned
from intertie.agent.adapters.port import NativeJob, NativeOutcome, NativePhase, NativeWork
from intertie.agent.adapters.stub import Start, start_sh
from intertie.agent.core.model import Attempt
from intertie.agent.slurm.cluster import SlurmCluster
from intertie.agent.slurm.commands import Commands
from intertie.agent.slurm.core.lines import lines, sudoers
from intertie.agent.slurm.core.rules import Become, SlurmRest, SlurmRules, SlurmSsh, check
from intertie.agent.slurm.folders import WrapperFiles
from intertie.agent.slurm.restd import Restd
from intertie.agent.slurm.transport import Done, LocalShell, SshShell, environment
from intertie.clock import SystemClock
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId
from intertie.pack import pack_folder

CLOCK = SystemClock()
LIMIT_S = 60.0
# An ordinary account that is neither root nor the one that jobs run as.
AGENT = "games"
WRAPPER = Path(__file__).resolve().parents[2] / "ops/slurm/intertie-as"


class AgentShell(LocalShell):
    """What the agent's ordinary user runs."""

    async def run(self, argv: Sequence[str], *, account: str = "", **how: object) -> Done:
        assert not account, "an ordinary user can be nobody else"
        return await super().run(argv, account=AGENT, **how)  # type: ignore[arg-type]


@dataclass
class Way:
    """One way in, whole."""

    slurm: Slurm
    rules: SlurmRules
    files: Files
    cluster: SlurmCluster
    folder: Path

    async def prepare(self, script: str, *, pack: Path | None = None, **about: object) -> Attempt:
        made = attempt(script, account=GUEST, **about)  # type: ignore[arg-type]
        owned = Owned(made.id, GUEST)
        start = Start(folder=self.files.seen(owned), wall_s=made.spec.wall_s)
        content = {"start.sh": (start_sh(start), 0o500), "script": (f"#!/bin/sh\n{script}".encode(), 0o500)}
        await self.files.make(owned, Content(content, pack))
        return made

    async def submit(self, made: Attempt) -> NativeJob:
        work = NativeWork(made, self.files.seen(Owned(made.id, GUEST)), CLOCK.now() + timedelta(seconds=300))
        return await self.cluster.submit(work)

    async def until(self, tag: AttemptId, *phases: NativePhase) -> NativeJob:
        deadline = time.monotonic() + LIMIT_S
        while True:
            job = (await self.cluster.status([tag])).jobs.get(tag)
            if job is not None and job.phase in phases:
                return job
            assert time.monotonic() < deadline, f"{tag} is {job}"
            await asyncio.sleep(0.2)


@pytest.fixture
def place(lab: Slurm) -> Iterator[Path]:
    """A folder of the site, with the wrapper, its settings and its one sudo rule, as `lines` prints them."""
    if shutil.which("sudo") is None:
        pytest.skip("sudo is not installed (apt-get install sudo)")
    folder = Path(tempfile.mkdtemp(prefix="jw-", dir="/var/tmp"))
    folder.chmod(0o711)
    jobs, wrapper = folder / "jobs", folder / "intertie-as"
    (jobs / GUEST).mkdir(parents=True)
    jobs.chmod(0o711)
    (jobs / GUEST).chmod(0o700)
    os.chown(jobs / GUEST, pwd.getpwnam(GUEST).pw_uid, -1)
    shutil.copyfile(WRAPPER, wrapper)
    wrapper.chmod(0o755)
    conf = wrapper.with_name("intertie-as.conf")
    conf.write_text(f"folder={jobs}\npath={lab.env['PATH']}\nslurm_conf={lab.conf}\n", encoding="ascii")
    rule = Path(f"/etc/sudoers.d/intertie-test-{os.getpid()}")
    said = sudoers(rules_of(lab, jobs, become=Become.SUDO, wrapper=str(wrapper)), AGENT)
    rule.write_text(said.split("'")[1] + "\n", encoding="ascii")
    rule.chmod(0o440)
    try:
        subprocess.run(["visudo", "-cf", str(rule)], check=True, capture_output=True)
        yield folder
    finally:
        rule.unlink()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def sudo(lab: Slurm, place: Path) -> AsyncIterator[Way]:
    rules = rules_of(lab, place / "jobs", become=Become.SUDO, wrapper=str(place / "intertie-as"))
    check(rules)
    shell = AgentShell(environment(rules))
    scratch = place / "scratch"
    files = WrapperFiles(shell, rules, scratch)
    cluster = SlurmCluster(Commands(shell, rules, CLOCK), rules, files, CLOCK)
    yield Way(lab, rules, files, cluster, place)
    await cluster.close()


async def test_an_ordinary_user_runs_work_as_the_lent_account_by_one_rule(sudo: Way, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "data.txt").write_text("input\n", encoding="ascii")
    with (tmp_path / "pack.tar.gz").open("wb") as target:
        pack_folder(tmp_path / "w", target)
    made = await sudo.prepare(
        "id -un; cat data.txt; mkdir out; cp data.txt out/a.txt; echo x > '-n'; exit 7\n", pack=tmp_path / "pack.tar.gz", outputs=["out/*"]
    )
    owned = Owned(made.id, GUEST)
    job = await sudo.submit(made)
    assert (await sudo.submit(made)).native_id == job.native_id
    ended = await sudo.until(made.id, NativePhase.ENDED)
    assert ended.end is not None and (ended.end.outcome, ended.end.code) == (NativeOutcome.EXITED, 7)
    log = await sudo.cluster.logs(made.id, 0, 1_000)
    assert log.data == f"{GUEST}\ninput\n".encode()
    assert (await sudo.cluster.logs(made.id, 3, 4)).data == log.data[3:7]
    result = await sudo.files.pack(owned, ["out/*"], tmp_path / "result.tar.gz")
    assert result is not None and result.files == 1
    assert [await sudo.files.read(owned, name) is not None for name in ("started", "exit", "log")] == [True] * 3
    assert await sudo.files.claimed(owned)
    await sudo.files.remove(owned)
    assert not await sudo.files.claimed(owned) and await sudo.files.read(owned, "exit") is None


async def test_the_folder_is_claimed_once_whoever_comes(sudo: Way) -> None:
    made = await sudo.prepare("echo ran\n")
    owned = Owned(made.id, GUEST)
    assert [await sudo.files.claim(owned), await sudo.files.claim(owned)] == [True, False]
    await sudo.submit(made)
    await sudo.until(made.id, NativePhase.ENDED)
    assert (await sudo.cluster.logs(made.id, 0, 100)).data == b""
    with pytest.raises(Unavailable, match="claimed"):
        await sudo.files.make(owned, Content({}))


async def test_a_running_job_of_the_lent_account_is_cancelled_by_its_own_right(sudo: Way) -> None:
    made = await sudo.prepare("sleep 600\n")
    await sudo.submit(made)
    await sudo.until(made.id, NativePhase.RUNNING)
    await sudo.cluster.cancel(made.id, 0)
    ended = await sudo.until(made.id, NativePhase.ENDED)
    assert ended.end is not None and ended.end.outcome is NativeOutcome.CANCELLED


BAD = (
    ("submit", "att-1", "--wrap=id"),
    ("submit", "att-1", "--uid=root"),
    ("submit", "att-1", "--export=ALL"),
    ("submit", "att-1", "--chdir=/etc"),
    ("submit", "att-1", "--output=/etc/cron.d/mine"),
    ("submit", "att-1", "--comment=intertie/1/$(id)"),
    ("submit", "att-1", "--account=a b"),
    ("submit", "att-1", "--gres=gpu:1;id"),
    ("submit", "att-1", "/etc/passwd"),
    ("submit", "../att-1"),
    ("submit", "--wrap=id"),
    ("read", "att-1", "../../x", "0", "9"),
    ("read", "att-1", "-n", "0", "9"),
    ("read", "att-1", "log", "-1", "9"),
    ("read", "att-1", "log", "0", "9;id"),
    ("write", "att-1", "a/b"),
    ("remove", "att-1", ".."),
    ("cancel", "1 2", "kill"),
    ("cancel", "5", "hup"),
    ("cancel", "5", "kill", "--user=root"),
    ("sh", "att-1"),
    ("submit",),
)


@pytest.mark.parametrize("words", BAD, ids=" ".join)
async def test_the_wrapper_does_nothing_that_is_not_in_its_list(sudo: Way, words: tuple[str, ...]) -> None:
    shell = AgentShell(environment(sudo.rules))
    (sudo.folder / "jobs" / GUEST / "att-1").mkdir()
    os.chown(sudo.folder / "jobs" / GUEST / "att-1", pwd.getpwnam(GUEST).pw_uid, -1)
    (sudo.folder / "jobs" / GUEST / "att-1" / "start.sh").write_text("#!/bin/sh\n", encoding="ascii")
    argv = ("sudo", "--non-interactive", f"--user={GUEST}", "--", sudo.rules.wrapper, *words)
    done = await shell.run(argv, timeout_s=20)
    assert done.code == 64, done
    assert done.error.startswith(b"intertie-as: ")


async def test_the_rule_lets_the_agent_be_nobody_else_and_run_nothing_else(sudo: Way) -> None:
    shell = AgentShell(environment(sudo.rules))
    for words in (
        ("--user=root", "--", sudo.rules.wrapper, "claimed", "att-1"),
        (f"--user={GUEST}", "--", "/bin/sh", "-c", "id"),
        (f"--user={GUEST}", "--", "/bin/cat", "/etc/shadow"),
    ):
        done = await shell.run(("sudo", "--non-interactive", *words), timeout_s=20)
        assert done.code != 0 and b"password is required" in done.error, done


def test_the_lines_of_an_owner_name_everything_once(lab: Slurm) -> None:
    rules = rules_of(lab, Path("/shared/intertie"), become=Become.SUDO, qos="lent")
    told = lines(rules, "intertie", 8)
    for needed in (
        "sacctmgr -i add account intertie",
        f"sacctmgr -i add user {GUEST} Account=intertie",
        "GrpTRES=gres/gpu=8",
        "AccountingStoreFlags=job_comment",
        f"install -d -o {GUEST} -m 700 /shared/intertie/{GUEST}",
        f"intertie ALL=({GUEST}) NOPASSWD: /usr/local/libexec/intertie-as",
    ):
        assert needed in told, needed


# --- a login node ------------------------------------------------------------------------------------------------------------------------


class LoginNode(asyncssh.SSHServer):
    """An SSH server that knows one key."""

    def __init__(self, key: str) -> None:
        self._key = key

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return username == AGENT and key.export_public_key().decode().split()[1] == self._key


async def _serve(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """The command by a shell, as sshd runs it, as the agent's user of the login node."""
    who = pwd.getpwnam(AGENT)
    child = await asyncio.create_subprocess_exec(
        *("sh", "-c", process.command or "exit 1"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"]},
        user=who.pw_uid,
        group=who.pw_gid,
        extra_groups=[],
        cwd="/",
    )
    try:
        out, error = await child.communicate(await process.stdin.read())
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    process.stdout.write(out)
    process.stderr.write(error)
    process.exit(child.returncode if child.returncode is not None and child.returncode >= 0 else 1)


@dataclass
class Login:
    """A running login node and what the agent needs to reach it."""

    settings: SlurmSsh
    server: asyncssh.SSHAcceptor


@pytest.fixture
async def login(short_folder: Path) -> AsyncIterator[Login]:
    host_key, user_key = asyncssh.generate_private_key("ssh-ed25519"), asyncssh.generate_private_key("ssh-ed25519")
    public = user_key.export_public_key().decode().split()[1]
    server = await asyncssh.listen(
        "127.0.0.1", 0, server_factory=lambda: LoginNode(public), server_host_keys=[host_key], process_factory=_serve, encoding=None
    )
    port = server.get_port()
    user_key.write_private_key(str(short_folder / "key"))
    known = short_folder / "known_hosts"
    await asyncio.to_thread(known.write_bytes, b"[127.0.0.1]:%d " % port + host_key.export_public_key())
    yield Login(SlurmSsh(host="127.0.0.1", port=port, user=AGENT, key=str(short_folder / "key"), known_hosts=str(known)), server)
    server.close()
    await server.wait_closed()


async def test_a_login_node_and_its_wrapper_are_all_that_is_needed(lab: Slurm, place: Path, login: Login) -> None:
    rules = rules_of(lab, place / "jobs", become=Become.SUDO, wrapper=str(place / "intertie-as"), ssh=login.settings)
    check(rules)
    shell = SshShell(login.settings, environment(rules))
    files = WrapperFiles(shell, rules, place / "scratch")
    way = Way(lab, rules, files, SlurmCluster(Commands(shell, rules, CLOCK), rules, files, CLOCK), place)
    made = await way.prepare("id -un; exit 3\n")
    await way.submit(made)
    ended = await way.until(made.id, NativePhase.ENDED)
    assert ended.end is not None and ended.end.code == 3
    assert (await way.cluster.logs(made.id, 0, 100)).data == f"{GUEST}\n".encode()
    told = await way.cluster.describe()
    assert told.cluster == "lab" and len(told.nodes) == 4
    await way.cluster.close()


async def test_a_login_node_with_another_host_key_gets_no_word(lab: Slurm, login: Login, short_folder: Path) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key()
    await asyncio.to_thread((short_folder / "other").write_bytes, b"[127.0.0.1]:%d " % login.settings.port + other)
    settings = msgspec.structs.replace(login.settings, known_hosts=str(short_folder / "other"))
    shell = SshShell(settings, {})
    with pytest.raises(Refused) as told:
        await shell.run(("true",), timeout_s=20)
    assert told.value.code == "slurm.host_key"
    await shell.close()


async def test_words_reach_a_login_node_as_they_are(login: Login) -> None:
    shell = SshShell(login.settings, {"LC_ALL": "C.UTF-8"})
    done = await shell.run(("printf", "%s|", "a b", "$(id)", "'", "*", "-n", "训练"), timeout_s=20)
    assert done.out.decode() == "a b|$(id)|'|*|-n|训练|"
    with pytest.raises(Unavailable):
        await shell.run(("sleep", "60"), timeout_s=0.5)
    assert (await shell.run(("cat",), stdin=b"\x00\xff" * 50_000, timeout_s=20)).out == b"\x00\xff" * 50_000
    await shell.close()
    login.server.close()
    with pytest.raises(Unavailable):
        await shell.run(("true",), timeout_s=20)


# --- slurmrestd --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def restd(lab: Slurm) -> AsyncIterator[Way]:
    folder = Path(tempfile.mkdtemp(prefix="jr-", dir="/var/tmp"))
    os.chmod(folder, 0o711)
    tokens = folder / "tokens"
    await asyncio.to_thread(tokens.mkdir, 0o700)
    for user in (GUEST, "root"):
        _put(tokens / user, await asyncio.to_thread(lab.token, user))
    rest = SlurmRest(url=lab.rest_url, tokens=str(tokens), reader="root")
    rules = rules_of(lab, folder / "jobs", become=Become.REST, rest=rest, cluster="lab")
    check(rules)
    files = LocalFiles(folder / "jobs")
    slurm = Restd(rules, CLOCK, files)
    yield Way(lab, rules, files, SlurmCluster(slurm, rules, files, CLOCK), folder)
    await slurm.close()
    shutil.rmtree(folder, ignore_errors=True)


def _put(path: Path, token: str) -> None:
    path.write_text(f"{token}\n", encoding="ascii")
    path.chmod(0o600)


async def test_slurmrestd_carries_the_same_questions(restd: Way) -> None:
    made = await restd.prepare(
        'echo "cards $CUDA_VISIBLE_DEVICES"; id -un; exit 200\n', kind=DeviceKind.GPU, devices=("lent-1",), model="H20"
    )
    job = await restd.submit(made)
    assert (await restd.submit(made)).native_id == job.native_id
    ended = await restd.until(made.id, NativePhase.ENDED)
    # slurmrestd tells the whole wait status, where sacct's text does not.
    assert ended.end is not None and (ended.end.outcome, ended.end.code) == (NativeOutcome.EXITED, 200)
    assert ended.nodes == ("lab2",) and ended.submitted is not None
    assert (await restd.cluster.logs(made.id, 0, 100)).data == f"cards 0\n{GUEST}\n".encode()
    told = await restd.cluster.describe()
    assert {(node.model, node.devices) for node in told.nodes if node.model != "slot"} == {("A100-SXM4-80GB", 4), ("H20", 4)}


async def test_work_by_slurmrestd_is_cancelled(restd: Way) -> None:
    made = await restd.prepare("sleep 600\n")
    await restd.submit(made)
    await restd.until(made.id, NativePhase.RUNNING)
    await restd.cluster.cancel(made.id, 0)
    ended = await restd.until(made.id, NativePhase.ENDED)
    assert ended.end is not None and ended.end.outcome is NativeOutcome.CANCELLED
    await restd.cluster.cancel(made.id, 0)


async def test_br_137_a_token_that_is_renewed_on_disk_is_read_again_and_a_bad_one_ends_nothing(restd: Way, lab: Slurm) -> None:
    made = await restd.prepare("sleep 600\n")
    await restd.submit(made)
    tokens = restd.folder / "tokens"
    good = await asyncio.to_thread((tokens / "root").read_text)
    old = restd.cluster.slurm
    assert isinstance(old, Restd)
    bad = good.strip()[:-4] + "AAAA"
    reads = iter([bad, good.strip(), good.strip()])
    real = old._token
    old._token = lambda account: next(reads)  # type: ignore[method-assign]  # the file changed between two reads
    assert made.id in (await restd.cluster.status([made.id])).jobs
    old._token = real  # type: ignore[method-assign]
    _put(tokens / "root", bad)
    with pytest.raises(Unavailable) as told:
        await restd.cluster.status([made.id])
    assert told.value.code in ("slurm.token_refused", "slurm.rest_error")
    _put(tokens / "root", good.strip())
    assert (await restd.cluster.status([made.id])).jobs[made.id].phase in (NativePhase.QUEUED, NativePhase.RUNNING)
    os.chmod(tokens / "root", 0o644)
    with pytest.raises(Refused) as open_to_all:
        await restd.cluster.status([made.id])
    assert open_to_all.value.code == "slurm.token_open"
