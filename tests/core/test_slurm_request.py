"""What is asked of sbatch, what its failures mean, and what an owner may write into `[slurm]`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import PurePath

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.agents import attempt

from intertie.agent.adapters.port import NativeWork
from intertie.agent.slurm.core.images import command
from intertie.agent.slurm.core.lines import lines
from intertie.agent.slurm.core.replies import REPLIES, Meaning, meaning_of
from intertie.agent.slurm.core.request import Request, body, options, request_of, spread
from intertie.agent.slurm.core.rules import Become, Images, SlurmMap, SlurmRules, check, place_of
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused
from intertie.ids import JobId

NOW = datetime(2026, 5, 4, 9, tzinfo=UTC)
RULES = SlurmRules(folder="/shared/intertie", partition="gpu", account="lent", accounts=["guest"], models={"a100": "A100-SXM4-80GB"})


def request(
    rules: SlurmRules = RULES, *, cards: int = 0, start_by_s: float = 600, folder: str = "/shared/intertie/att-1", **about: object
) -> Request:
    devices = tuple(f"lent-{n}" for n in range(cards)) or ("slot-1",)
    kind = DeviceKind.GPU if cards else DeviceKind.SLOT
    made = attempt("exit 0\n", devices=devices, kind=kind, **about)  # type: ignore[arg-type]
    return request_of(NativeWork(made, PurePath(folder), NOW + timedelta(seconds=start_by_s)), rules, NOW)


def test_a_submit_carries_its_own_fence() -> None:
    """LINK D6: never requeued, one at a time by its name, gone when its start comes too late, with its tag."""
    asked = request(wall_s=3_600, start_by_s=600)
    words = options(asked)
    assert {"--no-requeue", "--dependency=singleton", "--parsable", "--export=NONE", f"--job-name={asked.name}"} <= set(words)
    assert "--deadline=now+4290" in words and "--time=60" in words
    assert f"--comment=intertie/1/{asked.tag.attempt}/1/1" in words


def test_br_029_cards_are_asked_for_per_node() -> None:
    rules = msgspec.structs.replace(RULES, cards_per_node=4)
    words = options(request(rules, cards=16, model="A100-SXM4-80GB"))
    assert {"--nodes=4", "--gres=gpu:a100:4", "--ntasks=4"} <= set(words)
    assert spread(3, 4) == (1, 3) and spread(12, 4) == (3, 4) and spread(5, 0) == (1, 5)
    with pytest.raises(Refused) as told:
        spread(5, 4)
    assert told.value.code == "slurm.uneven"


def test_br_032_memory_has_its_unit_and_is_never_everything() -> None:
    assert "--mem=8192M" in options(request(msgspec.structs.replace(RULES, memory_mib_per_card=4_096), cards=2))
    assert not any(word.startswith("--mem") for word in options(request()))


def test_a_card_whose_model_slurm_does_not_name_is_asked_for_by_count() -> None:
    assert "--gres=gpu:2" in options(request(cards=2, model="B300"))


@given(text=st.text(min_size=1, max_size=20))
def test_no_name_becomes_an_option(text: str) -> None:
    try:
        words = options(request(job=JobId(text)))
    except Refused as err:
        assert err.code == "slurm.name"
        return
    assert sum(word.startswith("--job-name=") for word in words) == 1
    assert all(word.startswith("--") and not word[2:].startswith("-") for word in words)


@pytest.mark.parametrize("folder", ["/shared/%u/att-1", "/shared/a\nb", "/shared/../etc", "/shared/\\x"])
def test_a_folder_that_sbatch_would_read_as_a_pattern_is_refused(folder: str) -> None:
    with pytest.raises(Refused) as told:
        request(folder=folder)
    assert told.value.code == "slurm.folder"


def test_what_comes_too_late_is_not_submitted() -> None:
    with pytest.raises(Refused) as told:
        request(start_by_s=0.5)
    assert told.value.code == "slurm.too_late"


def test_slurmrestd_is_asked_for_the_same() -> None:
    asked = request(cards=2, model="A100-SXM4-80GB", wall_s=600)
    old, new = (body(asked, "#!/bin/sh\n", NOW, key)["job"] for key in ("gres", "tres_per_node"))
    assert (old["gres"], new["tres_per_node"]) == ("gpu:a100:2", "gres/gpu:a100:2")
    assert old["requeue"] is False and old["dependency"] == "singleton" and old["time_limit"] == 10
    assert old["deadline"].startswith("now+") and new["deadline"] > NOW.timestamp()
    assert (old["account"], old["partition"]) == ("lent", "gpu")


def test_the_first_row_that_fits_a_tenant_and_a_pool_says_where_work_goes() -> None:
    rows = [
        SlurmMap(tenant="acme", pool="big", partition="huge"),
        SlurmMap(tenant="acme", qos="high"),
        SlurmMap(pool="big", account="other"),
    ]
    rules = msgspec.structs.replace(RULES, map=rows)
    assert place_of(rules, "acme", "big").partition == "huge"
    assert (place_of(rules, "acme", "small").qos, place_of(rules, "acme", "small").partition) == ("high", "gpu")
    assert (place_of(rules, "zeta", "big").account, place_of(rules, "zeta", "small").account) == ("other", "lent")


BAD_RULES = (
    {"partition": "--uid=root"},
    {"account": "a b"},
    {"accounts": ["-x"]},
    {"qos": "x;id"},
    {"folder": "shared"},
    {"folder": "/shared/../etc"},
    {"cluster": "a,b"},
    {"map": [SlurmMap(constraint="--wrap=x")]},
    {"become": Become.REST},
    {"models": {"a": "X", "b": "X"}},
)


@pytest.mark.parametrize("changes", BAD_RULES, ids=str)
def test_what_sbatch_would_read_as_something_else_is_refused_at_start(changes: dict[str, object]) -> None:
    with pytest.raises(Refused) as told:
        check(msgspec.structs.replace(RULES, **changes))
    assert told.value.code == "slurm.rules" and told.value.next_step
    check(RULES)


def test_a_setting_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="everyy_s"):
        msgspec.toml.decode(b'folder = "/x"\neveryy_s = 3\n', type=SlurmRules)


ANSWERS = (
    ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", Meaning.UNSURE),
    ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", Meaning.UNSURE),
    ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", Meaning.LATER),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available", Meaning.REFUSED),
    ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", Meaning.REFUSED),
    ("sbatch: error: Batch job submission failed: Something new", Meaning.REFUSED),
    ("sbatch: error: a plugin of the site says no", Meaning.UNSURE),
    ("slurm_load_jobs error: Invalid job id specified", Meaning.UNKNOWN_JOB),
    ("squeue: unrecognized option '--only-job-state'", Meaning.UNKNOWN_OPTION),
    ("sudo: a password is required", Meaning.REFUSED),
    ("", Meaning.UNSURE),
)


@pytest.mark.parametrize(("words", "meaning"), ANSWERS)
def test_what_a_failure_means_is_in_a_table_and_what_is_not_is_nobody_s_knowledge(words: str, meaning: Meaning) -> None:
    found, code = meaning_of(words)
    assert found is meaning and code.startswith("slurm.")


def test_every_row_of_the_replies_can_be_reached() -> None:
    for words, meaning, code in REPLIES:
        assert meaning_of(f"error: {words}")[0] is meaning or words in ("munged", "invalid option"), (words, code)


DIGEST = "sha256:" + "a" * 64


def test_an_image_runs_by_what_the_site_has_and_by_digest_alone() -> None:
    folder = PurePath("/shared/intertie/att-1")
    image = f"registry.example/team/train@{DIGEST}"
    apptainer = command(Images.APPTAINER, image, folder)
    assert apptainer[:2] == ["apptainer", "exec"] and apptainer[-2:] == ["--nv", f"docker://{image}"]
    assert "--nv" not in command(Images.APPTAINER, image, folder, cards=False)
    # The digest says what runs: apptainer takes no tag beside it, and enroot reads it where a tag would stand.
    tagged = image.replace("train@", "train:1.2@")
    assert command(Images.APPTAINER, tagged, folder) == apptainer
    assert f"--container-image=registry.example#team/train:{DIGEST}" in command(Images.PYXIS, tagged, folder)
    # What sbatch was told about the environment reaches srun, too.
    assert "--export=ALL" in command(Images.PYXIS, image, folder)
    assert command(Images.ENROOT, f"docker.io/library/ubuntu@{DIGEST}", folder)[-3:-1] == [
        str(folder),
        f"registry-1.docker.io#library/ubuntu:{DIGEST}",
    ]
    for images, named, code in (
        (Images.NONE, image, "slurm.no_images"),
        (Images.APPTAINER, "train:latest", "image.no_digest"),
        (Images.APPTAINER, f"--nv@{DIGEST}", "image.reference"),
    ):
        with pytest.raises(Refused) as told:
            command(images, named, folder)
        assert told.value.code == code


def test_the_owner_s_lines_speak_of_the_way_that_was_chosen() -> None:
    assert "nothing to apply" in lines(RULES, "intertie", 0)
    assert "NOPASSWD" in lines(msgspec.structs.replace(RULES, become=Become.SUDO), "intertie", 0)
    assert "set GrpTRES=gres/gpu=4" in lines(RULES, "intertie", 4)


@pytest.mark.parametrize("become", list(Become))
def test_what_an_owner_pastes_is_a_command_and_the_rest_a_remark(become: Become) -> None:
    """A line of slurm.conf that were pasted would do nothing, or lock out an owner's own users."""
    rules = msgspec.structs.replace(RULES, become=become, accounts=["guest"], qos="lent", conf="/etc/slurm.conf")
    told = lines(rules, "intertie", 8, "/opt/intertie/intertie-as").splitlines()
    words = {one.split()[0] for one in told if one and not one.startswith("#")}
    assert words <= {"sacctmgr", "scontrol", "install", "printf", "echo", "export", "squeue", "sacct", "sudo", "intertie-agent"}
    # The folder of the wrapper is not there on every system.
    assert all(one.startswith("install -D ") for one in told if one.endswith(rules.wrapper) and one.startswith("install "))
