"""What the owner declares for work on their machines is held: limits by the cgroup hierarchies of this host, folders by mounts, an image by its program.

Version 2's limits are tried against a fake tree where the host has none (ops/docs/machines.md says so).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
from tests.fakes.agents import GUEST, attempt, root_is_a_mount

from intertie.agent.adapters.house import House, find_hierarchies
from intertie.agent.adapters.process import ProcessAdapter
from intertie.agent.core.attempts import Exit, verdict
from intertie.agent.core.containment import Hierarchies
from intertie.agent.core.machines import Container, DataFolder, Limits
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.contracts.image import PoolImages
from intertie.contracts.job import Cause
from intertie.errors import Refused

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make mounts and groups for others")


async def limiting(folder: Path, limits: Limits) -> ProcessAdapter | None:
    """None where no cgroup of this host holds a run to them: then the work was refused by that name."""
    hierarchies = find_hierarchies()
    held = {controller for controller in ("memory", "cpu", "pids") if hierarchies.of(controller) is not None}
    wanted = {name for name, value in (("memory", limits.memory_mib), ("cpu", limits.cpus), ("pids", limits.pids)) if value}
    adapter = ProcessAdapter(folder / "jobs", house=House(limits, hierarchies=hierarchies))
    if wanted <= held:
        return adapter
    with pytest.raises(Refused) as refused:
        await adapter.prepare(attempt("exit 0\n"), None)
    assert refused.value.code == "agent.limits" and any(name in refused.value.text for name in wanted - held)
    return None


async def ran(adapter: ProcessAdapter, work: Attempt) -> tuple[Exit, str]:
    await adapter.prepare(work, None)
    assert isinstance(await adapter.start(work), StartedRecord)
    end = await adapter.ended(work)
    return end, (await adapter.log(work.id, 0, 10_000)).data.decode()


@root_only
async def test_out_of_memory_is_told_from_a_kill(short_folder: Path) -> None:
    """137 alone says neither."""
    if (adapter := await limiting(short_folder, Limits(memory_mib=64))) is None:
        return
    hungry = attempt("#!/bin/sh\nhead -c 300000000 /dev/zero | tail\nexit $?\n")
    end, _ = await ran(adapter, hungry)
    assert end.out_of_memory and end.code == 137
    judged = verdict(end, hungry)
    assert (judged.outcome, judged.cause) == ("failed", Cause.JOB) and "memory limit" in judged.reason

    killed = attempt("#!/bin/sh\nkill -9 $$\n")
    end, _ = await ran(adapter, killed)
    assert (end.out_of_memory, end.signal) == (False, 9)
    assert "killed by signal 9" in verdict(end, killed).reason


@root_only
async def test_a_run_makes_no_more_processes_than_it_may(short_folder: Path) -> None:
    if (adapter := await limiting(short_folder, Limits(pids=8))) is None:
        return
    end, said = await ran(adapter, attempt("#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 5 & done\nwait\n", wall_s=30))
    assert end.code != 0 and "fork" in said.lower()


@root_only
async def test_the_limits_of_a_run_are_those_of_its_devices_and_gone_with_it(short_folder: Path) -> None:
    if (adapter := await limiting(short_folder, Limits(memory_mib=32, cpus=0.5))) is None:
        return
    work = attempt("#!/bin/sh\ncat /proc/self/cgroup\nsleep 0.2\n", devices=("slot-1", "slot-2"))
    await adapter.prepare(work, None)
    assert isinstance(await adapter.start(work), StartedRecord)
    places = [place for place in (find_hierarchies().of("cpu"), find_hierarchies().of("memory")) if place is not None]
    said = {name: value for version, place in places for name, value in said_in(f"{place}/{work.id}").items() if version == 1}
    assert said in ({}, {"cpu.cfs_quota_us": "100000", "memory.limit_in_bytes": str(64 * 1_048_576)})
    await adapter.ended(work)
    assert not any(work.id in os.listdir(place) for _, place in places)


def said_in(group: str) -> dict[str, str]:
    names = ("cpu.cfs_quota_us", "memory.limit_in_bytes")
    return {name: file.read_text(encoding="ascii").strip() for name in names if (file := Path(group) / name).exists()}


async def test_a_limit_that_this_host_cannot_hold_refuses_the_work(short_folder: Path) -> None:
    adapter = ProcessAdapter(short_folder / "jobs", house=House(Limits(memory_mib=64), hierarchies=Hierarchies()))
    with pytest.raises(Refused) as refused:
        await adapter.prepare(attempt("exit 0\n"), None)
    assert refused.value.code == "agent.limits" and "memory" in refused.value.text


def test_version_2_is_taken_where_its_controllers_can_be_handed_down(tmp_path: Path) -> None:
    """Against a fake tree: most containers, this one too, have version 2 without controllers."""
    mounts = f"none {tmp_path} cgroup2 rw 0 0\ncgroup {tmp_path}/v1m cgroup rw,memory 0 0\n"
    home = tmp_path / "intertie"
    home.mkdir()
    for folder in (tmp_path, home):
        (folder / "cgroup.subtree_control").write_text("", encoding="ascii")

    def own(folder: Path) -> bool:
        # The kernel lists what was handed down; a plain file keeps the last word.
        (folder / "cgroup.subtree_control").parent.mkdir(parents=True, exist_ok=True)
        return True

    found = find_hierarchies(mounts, own)
    assert found.v2 == f"{tmp_path}/intertie" and found.of("memory") == (1, f"{tmp_path}/v1m/intertie")
    (home / "cgroup.subtree_control").write_text("memory pids", encoding="ascii")
    assert Hierarchies(v2=found.v2, v2_has=frozenset({"memory", "pids"}), v1=found.v1).of("memory") == (2, found.v2)


# --- folders -------------------------------------------------------------------------------------------------------------------------------

LOOK = "#!/bin/sh\ncat $1/open.txt; cat $2/mine.txt; echo more > $2/new.txt && echo wrote; echo x > $1/no.txt || echo readonly; ls $3 || echo hidden\n"


def shared(folder: Path) -> tuple[Path, Path, Path]:
    made = []
    for name in ("open", "mine", "theirs"):
        place = folder / name
        place.mkdir()
        (place / f"{name}.txt").write_text(f"{name}\n", encoding="ascii")
        place.chmod(0o777)
        made.append(place)
    return made[0], made[1], made[2]


@root_only
async def test_a_tenant_reads_and_writes_what_was_declared_for_it_and_nothing_else(short_folder: Path) -> None:
    """FEATURES 39: enforced, not advised. File permissions here would let anybody do anything."""
    everybodys, mine, theirs = shared(short_folder)
    folders = (
        DataFolder(path=str(everybodys)),
        DataFolder(path=str(mine), tenants=["acme"], mode="rw"),
        DataFolder(path=str(theirs), tenants=["other"], mode="rw"),
    )
    adapter = ProcessAdapter(short_folder / "jobs", house=House(folders=folders))
    work = attempt(LOOK)
    spec = msgspec.structs.replace(work.spec, args=[str(everybodys), str(mine), str(theirs)])
    end, said = await ran(adapter, msgspec.structs.replace(work, spec=spec))
    if not root_is_a_mount():
        assert (end.refused_errno, end.refused_file) == (errno.EINVAL, "data namespace"), "what cannot be held does not begin"
        return
    lines = said.splitlines()
    assert end.code == 0, said
    assert "open" in lines and "mine" in lines and "wrote" in lines and "readonly" in lines and "hidden" in lines
    assert "theirs.txt" not in said
    assert (mine / "new.txt").exists() and not (everybodys / "no.txt").exists(), "and the machine itself is as it was"
    assert (theirs / "theirs.txt").exists()


@root_only
async def test_a_folder_that_is_not_there_refuses_the_work_and_so_do_nested_ones(short_folder: Path) -> None:
    for folders, code in (
        ([DataFolder(path=f"{short_folder}/none")], "agent.data_missing"),
        ([DataFolder(path=str(short_folder)), DataFolder(path=f"{short_folder}/a")], "agent.data_nested"),
    ):
        adapter = ProcessAdapter(short_folder / "jobs", house=House(folders=folders))
        with pytest.raises(Refused) as refused:
            await adapter.prepare(attempt("exit 0\n"), None)
        assert refused.value.code == code


async def test_without_the_right_to_hide_folders_the_work_is_refused(short_folder: Path) -> None:
    adapter = ProcessAdapter(short_folder / "jobs", house=House(folders=[DataFolder(path=str(short_folder))], root=False))
    with pytest.raises(Refused) as refused:
        await adapter.prepare(attempt("exit 0\n"), None)
    assert refused.value.code == "agent.data_not_enforced"


# --- containers ----------------------------------------------------------------------------------------------------------------------------

PROGRAM = '#!/bin/sh\necho "in $(for word in "$@"; do echo $word; done | grep sif)"\nwhile [ "${1%.sif}" = "$1" ]; do shift; done\nshift\nexec "$@"\n'


async def test_a_job_runs_in_the_owner_s_image_where_one_is_declared(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = short_folder / "apptainer"
    program.write_text(PROGRAM, encoding="ascii")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{short_folder}:{os.environ['PATH']}")
    house = House(container=Container(runtime="apptainer", image=f"{short_folder}/base.sif"))
    end, said = await ran(ProcessAdapter(short_folder / "jobs", house=house), attempt("#!/bin/sh\necho inside\nexit 3\n", account=GUEST))
    assert end.code == 3 and said.splitlines() == [f"in {short_folder}/base.sif", "inside"]


async def test_a_declared_container_program_that_is_not_there_refuses_the_work(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(short_folder))
    adapter = ProcessAdapter(short_folder / "jobs", house=House(container=Container(runtime="apptainer", image="/srv/base.sif")))
    with pytest.raises(Refused) as refused:
        await adapter.prepare(attempt("exit 0\n"), None)
    assert refused.value.code == "agent.container_runtime" and "apptainer" in refused.value.text


NAMED = "registry.example.cn/team/train:1.2@sha256:" + "b" * 64
# As apptainer is called: what comes after the image is run.
BY_DIGEST = '#!/bin/sh\nwhile [ "${1#docker://}" = "$1" ]; do shift; done\necho "in $1"\nshift\nexec "$@"\n'


async def test_a_job_runs_in_the_image_that_it_names_where_its_owner_takes_it(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own goes before the owner's, by its digest; an image from elsewhere is refused, never left out."""
    program = short_folder / "apptainer"
    program.write_text(BY_DIGEST, encoding="ascii")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{short_folder}:{os.environ['PATH']}")
    taken = PoolImages(runtime="apptainer", sources=["registry.example.cn/team"])
    house = House(container=Container(runtime="singularity", image="/srv/base.sif"), images=taken)
    adapter = ProcessAdapter(short_folder / "jobs", house=house)
    work = attempt("#!/bin/sh\necho inside\nexit 3\n", account=GUEST)
    named = msgspec.structs.replace(work, spec=msgspec.structs.replace(work.spec, image=NAMED))
    end, said = await ran(adapter, named)
    assert end.code == 3 and said.splitlines() == [f"in docker://{NAMED.replace(':1.2@', '@')}", "inside"]

    for image, images in ((NAMED.replace("team", "others"), taken), (NAMED, PoolImages())):
        elsewhere = msgspec.structs.replace(named, spec=msgspec.structs.replace(work.spec, image=image))
        with pytest.raises(Refused) as refused:
            await ProcessAdapter(short_folder / "jobs", house=House(images=images)).prepare(elsewhere, None)
        assert refused.value.code == "agent.image"
