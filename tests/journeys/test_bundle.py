"""The offline bundle: made once, installed by an ordinary user into an empty folder of a machine without any network, and taken away again.

Another machine's architecture is built and looked into, not run. The journey at the end is an owner's: install, join, lend, leave, uninstall.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.journeys.stack import TENANT, Site, Stack, running_stack

from intertie.contracts.http import MappingBody
from intertie.contracts.identity import Invited, InviteSite, MappingsReply
from intertie.contracts.job import JobSpec, JobState
from intertie.contracts.site import SiteKind
from intertie.embedded.process import start_child
from intertie.ids import JobId, SiteName

ROOT = Path(__file__).resolve().parents[2]
# An account that exists nowhere else.
SOMEBODY = 64_871
MACHINE = os.uname().machine

pytestmark = pytest.mark.skipif(MACHINE not in ("x86_64", "aarch64"), reason="bundles are made for x86_64 and aarch64")


def made(folder: Path, *options: str) -> Path:
    """The folder in a fresh bundle."""
    out = folder / "bundle.tar.gz"
    command = [sys.executable, "-m", "ops.lib.bundle", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    subprocess.run(["tar", "-xzf", str(out), "-C", str(folder)], check=True, timeout=120)  # As its reader does.
    [top] = [path for path in folder.iterdir() if path.is_dir()]
    return top


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Passed by every account."""
    folder = Path(tempfile.mkdtemp(prefix="bundle-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def bundle(place: Path) -> Path:
    folder = place / "bundle"
    folder.mkdir()
    return made(folder)


@pytest.fixture
def home(place: Path) -> Iterator[Path]:
    """An empty home, of somebody if we are root."""
    folder = Path(tempfile.mkdtemp(prefix="home-", dir=place))
    if os.geteuid() == 0:
        os.chown(folder, SOMEBODY, SOMEBODY)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def somebody(home: Path, *command: str | Path, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    """As an ordinary user of a machine that has no network at all: not even its own loopback is up."""
    alone: Sequence[str] = ("unshare", "-rn")
    if os.geteuid() == 0:
        alone = ("unshare", "-n", "setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups", "--")
    env = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8"}
    return subprocess.run([*alone, *map(str, command)], env=env, cwd=home, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_an_ordinary_user_installs_it_without_network_and_takes_it_away_without_a_trace(bundle: Path, home: Path) -> None:
    done = somebody(home, bundle / "install.sh")
    assert done.returncode == 0, done.stderr
    prefix = home / ".local/share/intertie-agent"
    agent = prefix / "bin/intertie-agent"
    assert f"next: {agent} check" in done.stdout
    assert somebody(home, agent, "--version").stdout.startswith("intertie-agent, version ")
    assert somebody(home, prefix / "bin/intertie", "--version").returncode == 0

    checked = somebody(home, agent, "check", "--json")
    report = json.loads(checked.stdout)
    assert checked.returncode == 0 and report["worst"] == "warn", checked.stdout
    assert str(home) not in checked.stdout

    again = somebody(home, bundle / "install.sh")
    assert again.returncode == 0, again.stderr
    assert [path.name for path in (prefix / "versions").iterdir()] == [report["version"]]

    gone = somebody(home, agent, "uninstall", "--yes", "--json")
    assert gone.returncode == 0, gone.stderr
    assert json.loads(gone.stdout)["stays"] == []
    left = [path for path in home.rglob("*") if path.is_file()]
    assert left == [] and not prefix.exists()


def fake(folder: Path, name: str, says: str) -> str:
    """A PATH on which this command says something else."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    (folder / name).write_text(f"#!/bin/sh\n{says}\n", encoding="utf-8")
    (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_what_it_cannot_run_on_is_refused_before_anything_is_written(bundle: Path, home: Path, place: Path) -> None:
    def refused(path: str, *words: str) -> None:
        done = somebody(home, bundle / "install.sh", path=path)
        assert done.returncode == 1 and all(word in done.stderr for word in (*words, "next: ")), done.stderr
        assert list(home.iterdir()) == []

    refused(fake(place / "other", "uname", 'case "$1" in -s) echo Linux;; *) echo riscv64;; esac'), "riscv64")
    refused(fake(place / "old", "getconf", "echo glibc 2.12"), "glibc 2.12")
    refused(fake(place / "musl", "getconf", "exit 1"), "no glibc")


def test_a_damaged_bundle_and_a_folder_of_another_are_refused(bundle: Path, home: Path, place: Path) -> None:
    theirs = home / "theirs"
    theirs.mkdir()
    (theirs / "precious").write_text("1", encoding="utf-8")
    done = somebody(home, bundle / "install.sh", "--prefix", theirs)
    assert done.returncode == 1 and "not ours" in done.stderr and [path.name for path in theirs.iterdir()] == ["precious"]
    manifest = bundle / "MANIFEST.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole + b" ")
    try:
        done = somebody(home, bundle / "install.sh")
        assert done.returncode == 1 and "damaged" in done.stderr
    finally:
        manifest.write_bytes(whole)


def elves(folder: Path) -> list[bytes]:
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as body:
                head = body.read(20)
            if head[:4] == b"\x7fELF":
                found.append(head)
    return found


def test_the_manifest_says_what_each_part_asks_of_the_machine(bundle: Path) -> None:
    manifest = json.loads((bundle / "MANIFEST.json").read_text(encoding="utf-8"))
    assert (manifest["arch"], manifest["python"]["version"]) == (MACHINE, "{}.{}".format(*sys.version_info[:2]))
    # Only the Python is as new as the machine that it was taken from; every part is for glibc 2.17 or says that it is not.
    assert "intertie" not in manifest["newer_than_2.17"]
    assert {one["file"].partition("-")[0] for one in manifest["wheels"]} >= {
        "aiohttp",
        "intertie",
        "msgspec",
        "nats_py",
        "uvloop",
        "cryptography",
    }
    rows = (row.split("  ", 1) for row in (bundle / "SHA256SUMS").read_text(encoding="utf-8").splitlines())
    sums = {name: digest for digest, name in rows}
    files = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file() and not path.is_symlink()} - {"SHA256SUMS"}
    assert sums.keys() == files
    assert sums["install.sh"] == hashlib.sha256((bundle / "install.sh").read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_bundle_for_another_architecture_holds_only_its_machine_code_and_says_that_it_has_no_python(tmp_path: Path) -> None:
    other, code = ("aarch64", 183) if MACHINE == "x86_64" else ("x86_64", 62)
    top = made(tmp_path, "--arch", other, "--no-python", "--python-version", "3.11")
    manifest = json.loads((top / "MANIFEST.json").read_text(encoding="utf-8"))
    assert (manifest["arch"], manifest["python"]) == (other, {"version": "3.11", "source": "none: the machine's own"})
    heads = elves(top / "parts")
    assert len(heads) > 10 and {int.from_bytes(head[18:20], "little") for head in heads} == {code}
    done = subprocess.run([top / "install.sh", "--prefix", tmp_path / "p"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and f"for Linux on {other}" in done.stderr and not (tmp_path / "p").exists()


def test_a_python_for_another_architecture_that_is_not_to_be_had_is_said(tmp_path: Path) -> None:
    other = "aarch64" if MACHINE == "x86_64" else "x86_64"
    command = [sys.executable, "-m", "ops.lib.bundle", "--arch", other, "--out", str(tmp_path / "b")]
    env = {name: value for name, value in os.environ.items() if name != "UV_PYTHON_INSTALL_MIRROR"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "--python" in done.stderr and not (tmp_path / "b").exists()


def test_the_registry_that_is_named_is_the_one_that_is_asked(tmp_path: Path) -> None:
    """A mirror by pip's own variable: here one where nobody is."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    env |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "ops.lib.bundle", "--no-python", "--out", str(tmp_path / "b")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "no bundle was made" in done.stderr and "No matching distribution" in done.stderr
    assert not (tmp_path / "b").exists()


# --- the owner's way ---


def as_owner(agent: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([agent, *map(str, words)], capture_output=True, text=True, timeout=150, check=False)


async def lent(stack: Stack, agent: Path, folder: Path) -> JobId:
    """Join by the bundle's own program, and run one job that waits for a flag."""
    invite = InviteSite(site=SiteName("site-a"), kind=SiteKind.MACHINES, owner="tester", owner_tenant=TENANT)
    invited = await stack.do(partial(stack.admin.post, "/v1/invitations", Invited, invite))
    token = stack.folder / "token"
    token.write_text(invited.token, encoding="ascii")
    joined = await stack.do(
        partial(
            as_owner, agent, "join", "--hub", stack.layout.public_url, "--token-file", token, "--detect", "--slots", "1", "--data", folder
        )
    )
    assert joined.returncode == 0, joined.stderr
    if stack.account:
        body = MappingBody(account=stack.account)
        await stack.do(partial(stack.admin.put, f"/v1/tenants/{TENANT}/mappings/site-a", MappingsReply, body))
    site = stack.sites["site-a"] = Site(SiteName("site-a"), folder)
    command = (str(agent), "run", "--data", str(folder))
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    site.child = await stack.do(lambda: start_child("agent-site-a", command, run_dir=stack.layout.run, log_dir=stack.layout.log, env=env))
    await stack.until(partial(stack.fresh, "site-a"), what="the site is heard")
    spec = JobSpec(name="long", script="#!/bin/sh\nuntil [ -e go ]; do sleep 0.1; done\n")
    job = await stack.do(partial(stack.submit, spec))
    await stack.until(lambda: stack.job(job).state is JobState.RUNNING, what="it runs")
    return job


@pytest.mark.slow
async def test_an_owner_installs_lends_and_leaves_with_a_receipt(bundle: Path) -> None:
    async with running_stack() as stack:
        prefix, folder = stack.folder / "agent", stack.folder / "site-a"
        done = await stack.do(
            lambda: subprocess.run([bundle / "install.sh", "--prefix", prefix], capture_output=True, text=True, check=False)
        )
        assert done.returncode == 0, done.stderr
        agent = prefix / "bin/intertie-agent"
        job = await lent(stack, agent, folder)

        # Not while work runs, not while this is a site.
        refused = await stack.do(partial(as_owner, agent, "uninstall", "--yes", "--data", folder))
        assert refused.returncode == 1 and "uninstall.work_runs" in refused.stderr and (folder / "journal.db").exists()
        [attempt] = stack.job(job).attempts
        (folder / "jobs" / attempt.attempt / "work" / "go").touch()
        await stack.until(partial(stack.ended, job), what="it ends")
        refused = await stack.do(partial(as_owner, agent, "uninstall", "--yes", "--data", folder))
        assert refused.returncode == 1 and "uninstall.joined" in refused.stderr

        receipt = stack.folder / "receipt.json"
        gone = await stack.do(partial(as_owner, agent, "uninstall", "--drain", "--yes", "--receipt", receipt, "--data", folder))
        assert gone.returncode == 0, gone.stderr
        assert "it was site site-a" in gone.stdout and str(prefix / "versions") in gone.stdout and "nothing of it runs on" in gone.stdout
        assert receipt.exists() and not folder.exists() and not prefix.exists()
        record = await stack.do(lambda: stack.site_record("site-a"))
        assert record.left_at is not None
