"""The pre-flight's judgements: a profile against what is seen, a clock against the hub's, a queue's own words; nothing in it is for few."""

from __future__ import annotations

import string
import sys
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import ModuleType

import pytest

from intertie.agent.check import Line, Place, checks_of, machine, run
from intertie.agent.check.detect import interconnect_of, storage_of, written
from intertie.agent.check.pools import judged
from intertie.agent.check.reach import _clock, gateway
from intertie.agent.check.report import line, shareable
from intertie.agent.check.slurm import Partition, partitions_of
from intertie.agent.check.texts import TEXTS
from intertie.agent.config import Folder
from intertie.agent.join import read_profiles, slots_pool
from intertie.agent.sources.reading import CardReading, Reading
from intertie.contracts.site import Lendable, PoolProfile, TaskType
from intertie.ids import PoolName


def card(index: int, model: str = "A100-SXM4-80GB", memory: int = 81_920, links: int | None = None) -> CardReading:
    return CardReading(index=index, uuid=f"GPU-{index}", name=f"NVIDIA {model}", memory_total_mib=memory, links=links)


def profile(count: int, model: str = "A100-SXM4-80GB", memory: int = 81_920) -> PoolProfile:
    return PoolProfile(
        pool=PoolName("gpu"),
        accelerator=model,
        count=count,
        memory_mib=memory,
        interconnect="nvlink",
        task_types=[TaskType.TRAIN],
        lendable=Lendable(devices=count),
    )


JUDGED = {
    "as declared": ([profile(2)], [card(0), card(1)], ["ok"]),
    "fewer": ([profile(4)], [card(0)], ["fail"]),
    "another model": ([profile(1, "H20")], [card(0)], ["fail", "warn"]),
    "more than declared": ([profile(1)], [card(0), card(1)], ["ok", "warn"]),
    "less memory": ([profile(1)], [card(0, memory=40_960)], ["warn"]),
    "a driver's own share of the memory": ([profile(1)], [card(0, memory=81_000)], ["ok"]),
    "slots": ([slots_pool(2)], [], ["ok"]),
    "more slots than processors": ([slots_pool(9)], [], ["warn"]),
}


@pytest.mark.parametrize("case", sorted(JUDGED))
def test_a_profile_is_judged_by_what_is_seen(case: str) -> None:
    profiles, cards, levels = JUDGED[case]
    assert [one.level for one in judged(profiles, Reading(cards=cards), 4, "pools.json")] == levels


def test_cards_that_cannot_be_read_are_unknown_and_not_missing() -> None:
    found = judged([profile(1)], Reading(error="stuck"), 4, "pools.json")
    assert [(one.level, "stuck" in one.text) for one in found] == [("warn", False), ("warn", True)]


def test_cards_of_a_queue_s_nodes_are_not_missed_on_this_machine() -> None:
    nothing = Reading(none="NVML Shared Library Not Found")
    assert [one.level for one in judged([profile(64), slots_pool(512)], nothing, 4, "pools.json", elsewhere=True)] == ["ok", "ok"]
    assert [one.level for one in judged([profile(64)], nothing, 4, "pools.json")] == ["fail"]


async def test_a_node_is_told_its_head_and_not_to_join_a_hub(tmp_path: Path) -> None:
    place = Place(folder=Folder(tmp_path))
    assert [one.level for one in await machine.agent(place)] == ["warn"]
    (tmp_path / "node.json").write_text('{"node": "gpu7", "site": "rack", "head": "10.0.0.5:7443", "slots": 2}')
    (told,) = await machine.agent(place)
    assert (told.level, "gpu7" in told.text, "10.0.0.5:7443" in told.text) == ("ok", True, True)
    assert await gateway(place) == []


NOW = datetime(2026, 12, 1, 12, 0, 0, 500_000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("ahead_s", "level"), [(0, "ok"), (2, "ok"), (-2, "ok"), (10, "warn"), (-10, "warn"), (300, "fail"), (-300, "fail")]
)
def test_a_clock_is_judged_beyond_the_error_of_its_reading(ahead_s: int, level: str) -> None:
    hubs = format_datetime((NOW - timedelta(seconds=ahead_s)).replace(microsecond=0), usegmt=True)
    assert _clock(hubs, NOW, 0.1).level == level


@pytest.mark.parametrize("date", ["", "soon", "Tue, 99 Foo 2026 12:00:00 GMT"])
def test_a_clock_that_was_not_told_is_unknown(date: str) -> None:
    found = _clock(date, NOW, 0.1)
    assert (found.level, found.fix) == ("warn", "")


def test_partitions_are_read_as_sinfo_writes_them_and_nothing_is_made_up() -> None:
    text = "gpu*|up|4|gpu:a100:8|64|512000\nlong|drain|2|(null)|32|128000\nlong|drain|1|(null)|32|64000\nodd\n|up|3\nshort|up|1\n"
    assert partitions_of(text) == [
        Partition("gpu", "up", "4", "gpu:a100:8", "64", "512000"),
        Partition("long", "drain", "2", "(null)", "32", "128000"),
        Partition("short", "up", "1"),
    ]


def test_a_detected_profile_is_one_that_join_reads(tmp_path: Path) -> None:
    text = written(
        [profile(8), slots_pool(64)],
        file="pools.toml",
        storage=["lustre /lustre"],
        adapters=["mlx5_0"],
        queues=[Partition("gpu", "up", "4", "gpu:a100:8", "64", "512000")],
    )
    file = tmp_path / "pools.toml"
    file.write_text(text, encoding="utf-8")
    gpu, cpu = read_profiles(file)
    assert (gpu.count, gpu.interconnect, gpu.storage, gpu.lendable.devices) == (8, "nvlink", "lustre /lustre", 8)
    assert (cpu.accelerator, cpu.lendable.windows) == ("none", [])
    assert [text.count(f"# {n} ·") for n in (1, 2, 3)] == [2, 2, 2] and "mlx5_0" in text and "gpu:a100:8" in text
    assert tomllib.loads(text)["pool"][0]["task_types"] == ["train"]


def test_how_cards_are_connected_is_seen_or_asked_and_never_guessed(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    linked, alone, mute = [card(0, links=4)], [card(0, links=0)], [card(0), card(1, links=0)]
    none = tmp_path / "none"
    assert interconnect_of(Reading(cards=linked), tmp_path) == "nvlink"
    assert interconnect_of(Reading(cards=alone), tmp_path) == "infiniband"
    assert interconnect_of(Reading(cards=alone), none) == "pcie"
    assert interconnect_of(Reading(cards=mute), tmp_path) == ""
    assert interconnect_of(Reading(), none) == ""


def test_shared_storage_is_told_from_a_machine_s_own() -> None:
    mounts = "/dev/sda1 / ext4 rw 0 0\nmgs:/l /lustre lustre rw 0 0\nnas:/h /home nfs4 rw 0 0\nproc /proc proc rw 0 0\nbroken\n"
    assert storage_of(mounts) == ["lustre /lustre", "nfs4 /home"]


# --- the report ---


async def test_a_check_that_breaks_or_another_room_s_is_a_line_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(place: Place) -> Sequence[Line]:
        raise ValueError("no such thing")

    async def fine(place: Place) -> Sequence[Line]:
        return [Line(what="queue", level="ok", text="up")]

    room = ModuleType("tests_room_check")
    room.CHECKS = (fine,)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "intertie.agent.check.tests_room", room)
    room.__spec__ = type("Spec", (), {})()
    assert checks_of(["intertie.agent.check.tests_room", "intertie.agent.none.check", "intertie.agent.check.nothing"]) == [fine]
    report = await run(Place(folder=Folder(Path("/nowhere"))), [broken, fine])
    assert [(one.what, one.level) for one in report.lines] == [("check", "warn"), ("queue", "ok")]
    assert report.worst == "warn" and "no such thing" in report.lines[0].text


async def test_a_room_whose_extra_is_not_installed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rooms").mkdir()
    (tmp_path / "rooms" / "__init__.py").touch()
    (tmp_path / "rooms" / "check.py").write_text("import no_such_package_at_all\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    [missing] = checks_of(["rooms.check"])
    [found] = await missing(Place(folder=Folder(tmp_path)))
    assert found.level == "warn" and "rooms.check" in found.text and "no_such_package_at_all" in found.text


def test_the_worst_line_is_what_the_exit_code_says() -> None:
    assert [line(level, "agent.not", fix="start", folder="d").level for level in ("ok", "warn", "fail")] == ["ok", "warn", "fail"]


def test_a_report_holds_no_secret_and_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/zhang.san")
    seed = "SUAMK2FG4MI6UE3ACF3FK3OIQBCEIEZV7NSWFFEW63UXMRLFM2XLAXK4GY"
    found = shareable(Line(what="x", level="fail", text=f"/home/zhang.san/.local: {seed}\nhttp://me:pw12345@p:1", fix="cd /home/zhang.san"))
    assert "zhang" not in found.text + found.fix and seed not in found.text and "pw12345" not in found.text and "\n" not in found.text


@pytest.mark.parametrize("key", sorted(TEXTS))
def test_both_languages_say_it_with_the_same_fields(key: str) -> None:
    english, chinese = TEXTS[key]
    fields = [{name for _, name, _, _ in string.Formatter().parse(text) if name} for text in (english, chinese)]
    assert fields[0] == fields[1]
    assert not any("\u4e00" <= c <= "\u9fff" for c in english)


def test_every_line_has_its_heading() -> None:
    nouns = {key.partition(".")[0] for key in TEXTS} - {"what", "fix"}
    assert {f"what.{noun}" for noun in nouns} <= TEXTS.keys()


async def test_declared_images_whose_program_is_not_there_are_a_failure(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('[images]\nsources = ["nvcr.io/nvidia"]\nruntime = "apptainer"\n', encoding="ascii")
    (tmp_path / "bin").mkdir()
    place = Place(folder=Folder(tmp_path), joined=None, profiles=[], environ={"PATH": str(tmp_path / "bin")})
    [told] = await machine.rules(place)
    assert (told.level, told.what) == ("fail", "images") and "install apptainer" in told.fix
    (tmp_path / "bin" / "apptainer").touch(mode=0o755)
    [told] = await machine.rules(place)
    assert told.level == "ok" and "nvcr.io/nvidia by apptainer" in told.text
    (tmp_path / "site.toml").unlink()
    assert await machine.rules(place) == []
