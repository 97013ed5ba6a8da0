"""A job that names its image, at a site: what is told, what is refused, and in what it runs."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from tests.fakes.agents import offer, pool
from tests.fakes.sites import a_site

from intertie.agent.adapters.house import house_of
from intertie.agent.adapters.process import ProcessAdapter
from intertie.agent.config import Folder
from intertie.agent.core.images import ImageRules
from intertie.agent.core.rules import Rules
from intertie.contracts.image import PoolImages
from intertie.contracts.link import Ended, Inventory, Lane, OfferBody, OfferRefused, Started
from intertie.errors import Refused

IMAGE = "registry.example.cn/team/train@sha256:" + "a" * 64
RULES = Rules(images=ImageRules(sources=["registry.example.cn/team"], runtime="apptainer"))
# As apptainer is called: what comes after the image is run.
PROGRAM = '#!/bin/sh\nwhile [ "${1#docker://}" = "$1" ]; do shift; done\necho "in $1"\nshift\nexec "$@"\n'


def named(image: str, script: str = "echo inside\n") -> OfferBody:
    body = offer(script=script)
    return msgspec.structs.replace(body, spec=msgspec.structs.replace(body.spec, image=image))


async def test_a_job_runs_in_its_image_and_the_site_says_in_which(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 4."""
    (short_folder / "apptainer").write_text(PROGRAM, encoding="ascii")
    (short_folder / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{short_folder}:{os.environ['PATH']}")
    adapter = ProcessAdapter(short_folder / "jobs", house=house_of(RULES))
    async with a_site(short_folder, adapter=adapter, rules=RULES) as world:
        await world.site.observe({})
        told = [entry for entry in await world.entries(Lane.REGISTRY) if isinstance(entry, Inventory)][-1]
        assert [one.images for one in told.pools] == [PoolImages(runtime="apptainer", sources=["registry.example.cn/team"])]
        body = named(IMAGE)
        await world.run(body)
        assert (await world.first(Started)).image == IMAGE
        end = await world.first(Ended)
        assert (end.outcome, end.log_tail.splitlines()) == ("succeeded", [f"in docker://{IMAGE}", "inside"])


@pytest.mark.parametrize("rules", [Rules(), RULES])
async def test_an_image_from_elsewhere_and_any_where_none_is_declared_is_refused_and_never_left_out(
    short_folder: Path, rules: Rules
) -> None:
    async with a_site(short_folder, rules=rules, pools=[pool()]) as world:
        body = named(IMAGE.replace("team", "others"))
        await world.tell(world.offered(body))
        refused = await world.first(OfferRefused)
        assert (refused.code, refused.fault) == ("image", True) and "others" in refused.text
        plain = offer(script="exit 0\n", devices=("slot-2",))
        await world.run(plain)
        assert (await world.first(Started)).image == ""


def test_a_table_that_runs_nothing_is_refused_when_it_is_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for text, code in (
        ('[images]\nsources = ["registry.example.cn"]\n', "agent.images"),
        ('[images]\nsources = ["https://registry.example.cn"]\nruntime = "apptainer"\n', "agent.images"),
        ('[images]\nsources = ["registry.example.cn"]\nruntime = "docker"\n', "agent.rules"),
        ('[images]\nsources = []\nruntime = "apptainer"\n', "agent.rules"),
    ):
        folder.rules_file.write_text(text, encoding="ascii")
        with pytest.raises(Refused) as refused:
            folder.rules()
        assert refused.value.code == code and refused.value.next_step
    folder.rules_file.write_text('[images]\nsources = ["*"]\nruntime = "apptainer"\n', encoding="ascii")
    assert folder.rules().pool_images() == PoolImages(runtime="apptainer", sources=["*"])
