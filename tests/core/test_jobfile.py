"""Directives of job scripts: what they ask for, and what is told about those that were not taken."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intertie.contracts.job import OnSilence, Resources
from intertie.contracts.site import TaskType
from intertie.errors import Refused
from intertie.jobfile import parse_memory_mib, parse_script, parse_wall

SCRIPT = """#!/bin/bash
#SBATCH --job-name=train-7b
#SBATCH -t 1-02:00:00
#SBATCH --nodes=2 --gres=gpu:a100:4
#SBATCH --partition gpu
#SBATCH --hint=nomultithread
#INTERTIE --gpu-memory 80G --outputs "out/*.pt metrics.json"
#INTERTIE --task-type=train --if-site-silent rerun

python train.py
#SBATCH --time=5
"""


def test_an_existing_sbatch_script_is_accepted_unchanged() -> None:
    job = parse_script(SCRIPT)
    assert job.spec.script == SCRIPT
    assert job.spec.name == "train-7b"
    assert job.spec.wall_s == 26 * 3_600
    assert job.spec.resources == Resources(gpus=8, gpu_model="a100", gpu_memory_mib=80 * 1024)
    assert job.spec.outputs == ["out/*.pt", "metrics.json"]
    assert job.spec.task_type is TaskType.TRAIN
    assert (job.spec.on_silence, job.spec.restartable) == (OnSilence.RERUN, True)


def test_directives_that_are_not_taken_are_told_with_their_line() -> None:
    told = {w.line: w.text for w in parse_script(SCRIPT).warnings}
    assert told.keys() == {5, 6}
    assert "--pool" in told[5]
    assert "--hint is not known here" in told[6]


@pytest.mark.parametrize(
    ("directive", "told"),
    [
        ("--array=0-9", "one job runs, and no SLURM_ARRAY_TASK_ID is set"),
        ("-a 0-9", "one job runs, and no SLURM_ARRAY_TASK_ID is set"),
        ("--dependency=afterok:123", "nothing is waited for"),
        ("--begin=now+1hour", "it may begin at once"),
    ],
)
def test_what_slurm_would_have_done_otherwise_is_told_and_not_called_unknown(directive: str, told: str) -> None:
    (warned,) = parse_script(f"#!/bin/sh\n#SBATCH {directive}\nhostname\n").warnings
    assert warned.line == 2 and told in warned.text and "not known" not in warned.text


def test_directives_end_at_the_first_command() -> None:
    assert parse_script("#!/bin/sh\nhostname\n#SBATCH --gpus=8\n").spec.resources.gpus == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1_800),
        ("90", 5_400),
        ("1:30", 90),
        ("4:00", 240),
        ("1:00:00", 3_600),
        ("1:30:00", 5_400),
        ("2-0", 172_800),
        ("2-12", 216_000),
        ("2-12:30", 217_800),
        ("1-02:03:04", 93_784),
        ("0-00:00:05", 5),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    """BR-033."""
    assert parse_wall(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "abc", "1:2:3:4", "-5", "UNLIMITED", "INFINITE", "Partition_Limit", "NOT_SET", "INVALID", "1.5"])
def test_what_is_no_time_limit_is_refused(text: str) -> None:
    """BR-033: what cannot be read is never the same as no limit; a job here always has one."""
    with pytest.raises(ValueError, match="time"):
        parse_wall(text)


@pytest.mark.parametrize(("text", "mib"), [("512", 512), ("40G", 40_960), ("1T", 1_048_576), ("2048K", 2), ("80GiB", 81_920)])
def test_memory_is_read_with_its_unit(text: str, mib: int) -> None:
    assert parse_memory_mib(text) == mib


@pytest.mark.parametrize(
    "line",
    [
        "#SBATCH --time=soon",
        "#SBATCH --gres=fpga:2",
        "#SBATCH --nodes=0",
        '#SBATCH --job-name="open',
        "#INTERTIE --task-type dance",
        "#SBATCH loose",
    ],
)
def test_a_directive_that_cannot_be_read_is_a_warning_and_changes_nothing(line: str) -> None:
    job = parse_script(f"#!/bin/sh\n{line}\nhostname\n")
    assert [w.line for w in job.warnings] == [2]
    assert job.spec.resources == Resources()
    assert job.spec.wall_s == 3_600


def test_an_empty_script_is_refused() -> None:
    with pytest.raises(Refused, match="jobfile.empty"):
        parse_script(" \n")


@given(st.text(max_size=400))
def test_no_text_makes_the_reader_fail(text: str) -> None:
    try:
        parse_script("#SBATCH " + text)
    except Refused:
        pass


DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("line", "image"),
    [
        (f"#INTERTIE --image registry.example.cn/team/train@{DIGEST}", f"registry.example.cn/team/train@{DIGEST}"),
        (f"#SBATCH --container-image=nvcr.io#nvidia/pytorch:24.01-py3@{DIGEST}", f"nvcr.io/nvidia/pytorch:24.01-py3@{DIGEST}"),
        (f"#SBATCH --container-image docker://nvcr.io#nvidia/pytorch@{DIGEST}  # pinned", f"nvcr.io/nvidia/pytorch@{DIGEST}"),
        (f"#SBATCH --container-image=nvcr.io/nvidia/pytorch@{DIGEST}", f"nvcr.io/nvidia/pytorch@{DIGEST}"),
        (f"#SBATCH --container-image=localhost:5000#a/b@{DIGEST}", f"localhost:5000/a/b@{DIGEST}"),
        (f"#SBATCH --container-image=team/train@{DIGEST}", f"docker.io/team/train@{DIGEST}"),
        (f"#SBATCH --container-image=ubuntu@{DIGEST} --no-container-mount-home --time=5", f"docker.io/library/ubuntu@{DIGEST}"),
    ],
)
def test_an_image_is_named_by_our_directive_or_as_pyxis_spells_it(line: str, image: str) -> None:
    job = parse_script(f"#!/bin/sh\n\n{line}\nhostname\n")
    assert job.checked().image == image and job.image_line == 3


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("#SBATCH --container-image=nvcr.io#nvidia/pytorch:24.01-py3", "image.no_digest"),
        ("#SBATCH --container-image=/images/pytorch.sqsh", "image.no_digest"),
        ("#INTERTIE --image ubuntu:22.04", "image.no_digest"),
        (f"#INTERTIE --image team/train@{DIGEST}", "image.no_registry"),
    ],
)
def test_an_image_that_is_none_refuses_the_job_with_its_line_unless_an_option_names_another(line: str, code: str) -> None:
    """Left out, the job would be another one."""
    job = parse_script(f"#!/bin/sh\n{line}\nhostname\n")
    with pytest.raises(Refused, match="line 2: ") as refused:
        job.checked()
    assert refused.value.code == code and refused.value.next_step
    given = msgspec.structs.replace(job.spec, image=f"nvcr.io/nvidia/pytorch@{DIGEST}")
    assert job.checked(given) is given
    with pytest.raises(Refused) as refused:
        job.checked(msgspec.structs.replace(job.spec, image="nvcr.io/nvidia/pytorch"))
    assert "line" not in refused.value.text


def test_a_comment_behind_a_directive_stays_one_and_a_sign_inside_a_word_is_the_word_s() -> None:
    job = parse_script("#SBATCH --time=5 # not --gpus=3\n#SBATCH --job-name=a#b\nhostname\n")
    assert (job.spec.wall_s, job.spec.resources.gpus, job.spec.name, list(job.warnings)) == (300, 0, "a#b", [])
