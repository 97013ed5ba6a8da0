"""A script as people have it for pyxis, told what is wrong with its tag, then run by digest at the one site that takes such images."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.journeys.stack import Stack, running_stack

from intertie.contracts.image import PoolImages
from intertie.contracts.job import JobState
from intertie.contracts.site import SitesReply
from intertie.ids import JobId, SiteName

pytestmark = pytest.mark.asyncio(loop_scope="module")

IMAGE = "nvcr.io/nvidia/pytorch@sha256:" + "a" * 64
SCRIPT = '#!/bin/sh\n#SBATCH --container-image=nvcr.io#nvidia/pytorch:24.01-py3\n#SBATCH --time=5\necho "inside, $1"\n'
# As apptainer is called: what comes after the image is run.
PROGRAM = '#!/bin/sh\nwhile [ "${1#docker://}" = "$1" ]; do shift; done\necho "in $1"\nshift\nexec "$@"\n'


def cli(stack: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    """As a user runs it."""
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "INTERTIE_LANG": "en", "HOME": str(stack.folder), "INTERTIE_URL": stack.user.url}
    token = stack.folder / "user.token"
    if not token.exists():
        token.touch(mode=0o600)
        token.write_text(stack.user._token, encoding="ascii")
    command = [sys.executable, "-m", "intertie.cli", *words]
    env["INTERTIE_TOKEN_FILE"] = str(token)
    return subprocess.run(command, env=env, cwd=stack.folder, capture_output=True, text=True, timeout=60, check=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as made:
        await made.add_site("site-plain", slots=1)
        yield made


async def with_images(stack: Stack) -> None:
    folder = stack.folder / "site-boxes"
    programs = stack.folder / "programs"

    def write() -> None:
        for each in (folder, programs):
            each.mkdir(mode=0o755)
        (programs / "apptainer").write_text(PROGRAM, encoding="ascii")
        (programs / "apptainer").chmod(0o755)
        (folder / "site.toml").write_text('[images]\nsources = ["nvcr.io/nvidia"]\nruntime = "apptainer"\n', encoding="ascii")

    await asyncio.to_thread(write)
    await stack.add_site("site-boxes", slots=1, env={"PATH": f"{programs}:{os.environ['PATH']}"})


def told(stack: Stack) -> dict[SiteName, PoolImages | None]:
    reply = stack.admin.get("/v1/sites", SitesReply)
    return {pool.site: pool.inventory.images for pool in reply.pools if pool.inventory is not None}


async def test_a_script_with_an_image_runs_in_it_at_the_site_that_takes_it_and_nowhere_else(stack: Stack) -> None:
    script = stack.folder / "train.sh"
    await asyncio.to_thread(script.write_text, SCRIPT)
    await stack.until(
        lambda: told(stack).get(SiteName("site-plain")) == PoolImages() or None, what="the plain site tells that it runs none"
    )
    tagged = await stack.do(lambda: cli(stack, "submit", "--no-work", str(script), "one"))
    assert tagged.returncode != 0 and "line 2: " in tagged.stderr and "has no digest" in tagged.stderr and "@sha256:" in tagged.stderr
    nowhere = await stack.do(lambda: cli(stack, "submit", "--no-work", "--image", IMAGE, str(script), "one"))
    assert nowhere.returncode != 0 and "runs no images that a job names" in nowhere.stderr

    await with_images(stack)
    await stack.until(lambda: told(stack).get(SiteName("site-boxes")), what="the other site tells what it takes")
    made = await stack.do(lambda: cli(stack, "submit", "--no-work", "--image", IMAGE, str(script), "one"))
    assert made.returncode == 0, made.stderr
    job = JobId(made.stdout.strip())
    record = await stack.until(lambda: stack.ended(job), what="it ends")
    assert record.state is JobState.SUCCEEDED, record.attempts
    assert [(one.site, one.image) for one in record.attempts] == [("site-boxes", IMAGE)]
    shown = await stack.do(lambda: cli(stack, "job", job))
    assert f"Image: {IMAGE}" in shown.stdout
    log = await stack.do(lambda: cli(stack, "logs", job))
    assert log.stdout.splitlines() == [f"in docker://{IMAGE}", "inside, one"]
