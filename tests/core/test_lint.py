"""What of a script does not travel: each kind by a line that has it and a line that looks alike and has it not; verdicts only from what a site told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intertie.cli.lint_texts import TEXTS
from intertie.contracts.facts import SiteFacts
from intertie.contracts.image import PoolImages
from intertie.jobfile import directives
from intertie.lint import Finding, Kind, Severity, Verdict, lint

PINNED = "nvcr.io/nvidia/pytorch@sha256:" + "a" * 64
FOUND: dict[str, list[tuple[str, str]]] = {
    # the image that a job names, as pyxis spells it and as we do
    "#SBATCH --container-image=nvcr.io#nvidia/pytorch:24.01\nls": [("named_image", "nvcr.io/nvidia/pytorch:24.01")],
    f"#INTERTIE --image {PINNED}\nls": [("named_image", PINNED)],
    # paths: in words, options, lists, assignments, redirections
    "python train.py --data=/mnt/set": [("path", "/mnt/set")],
    "gcc -I/opt/inc -L /sw/lib a.c": [("path", "/opt/inc"), ("path", "/sw/lib")],
    "export PYTHONPATH=/sw/a:/sw/b": [("path", "/sw/a"), ("path", "/sw/b")],
    "DATA=/mnt/x": [("path", "/mnt/x")],
    "DATA='/mnt/x y/z'": [("path", "/mnt/x")],
    "run > /scratch/log 2>&1": [("path", "/scratch/log")],
    "run < /mnt/$USER/in": [("path", "/mnt/$USER/in")],
    "cd /mnt/x && ls": [("path", "/mnt/x")],
    "echo hi > /out/x": [("path", "/out/x")],
    "x=$(cat /mnt/n)": [("path", "/mnt/n")],
    "bash -c 'cd /mnt/x && run'": [("path", "/mnt/x")],
    "for f in /mnt/a/*; do run $f; done": [("path", "/mnt/a/*")],
    "A=(/mnt/a b)": [("path", "/mnt/a")],
    "cp /tmp/../mnt/x .": [("path", "/tmp/../mnt/x")],
    "/opt/python/bin/python a.py": [("path", "/opt/python/bin/python")],
    # homes
    "cd ~/run": [("home", "~/run")],
    "cp $HOME/a ${HOME}/b .": [("home", "$HOME/a"), ("home", "${HOME}/b")],
    "cat /users/li/x ~li/y": [("home", "/users/li/x"), ("home", "~li/y")],
    "source ~/.bashrc": [("home", "~/.bashrc")],
    "cd $SCRATCH/x": [("variable", "$SCRATCH")],
    "cd $SLURM_SUBMIT_DIR": [("variable", "$SLURM_SUBMIT_DIR")],
    # modules and environments
    "module load cuda/12.4 gcc": [("module", "cuda/12.4"), ("module", "gcc")],
    "ml openmpi": [("module", "openmpi")],
    "ml load a; module add b; module switch c d": [("module", "a"), ("module", "b"), ("module", "c"), ("module", "d")],
    "conda activate torch": [("environment", "torch")],
    "source activate": [("environment", "base")],
    "conda run -n torch python a.py": [("environment", "torch")],
    ". .venv/bin/activate": [("environment", ".venv")],
    "mamba activate": [("environment", "base")],
    # a site's own scheduler, containers
    "srun --mpi=pmix ./a": [("command", "srun"), ("mpi", "pmix")],
    "srun --mpi pmi2 ./a": [("command", "srun"), ("mpi", "pmi2")],
    "mpirun -np 4 ./a": [("command", "mpirun")],
    "scontrol show hostnames $X": [("command", "scontrol")],
    "sbatch next.sh": [("nested", "sbatch")],
    "apptainer exec --nv pt.sif python a.py": [("command", "apptainer"), ("image", "pt.sif")],
    "docker run org/img:1 a": [("command", "docker"), ("image", "org/img:1")],
    "srun apptainer run docker://a/b c": [("command", "srun"), ("command", "apptainer"), ("image", "docker://a/b")],
    # functions (BR-045)
    "export -f helper": [("function", "helper")],
    "declare -fx helper": [("function", "helper")],
    # directives
    "#SBATCH -p gpu,long": [("partition", "gpu"), ("partition", "long")],
    "#SBATCH --account=proj --qos high": [("account", "proj"), ("account", "high")],
    "#SBATCH -w node[1-4]": [("nodes", "node[1-4]")],
    "#SBATCH --output=/scratch/%j.log -e ~/err": [("output", "/scratch/%j.log"), ("output", "~/err")],
    "#SBATCH --chdir=/scratch/run": [("output", "/scratch/run")],
    "#SBATCH --export=ALL": [("export", "ALL")],
    "true\n#SBATCH --time=1:00": [("late", "--time=1:00")],
    "true\n#INTERTIE --gpus 2": [("late", "--gpus=2")],
    "#!/opt/anaconda/bin/python\nimport x": [("interpreter", "/opt/anaconda/bin/python")],
    "    #!/bin/bash\ntrue": [("blanks", "/bin/bash")],
    "#!/usr/bin/env python3\nopen('/mnt/x'), open(\"~/y\")": [("path", "/mnt/x"), ("home", "~/y")],
    "true\r\nfalse\r\n": [("line_ends", "CRLF")],
}

CLEAN = [
    "#!/bin/bash\n#SBATCH --time=1:00 --gres=gpu:1\nset -e\npython train.py --out out/",
    "#!/usr/bin/env python3\n# '/data/x'\nprint('a/b', '/tmp/x', 'x /data/y')\nmodule = load",
    "cp a /tmp/b; run > /dev/null 2>&1 < /dev/zero; cat /proc/cpuinfo /etc/os-release",
    "/usr/bin/python3 a.py; /bin/ls",
    "sed -i 's/a/b/' f; sed /foo/d f; awk '/foo/ {print}' f; grep -E '/a/b' f; tr / _ < f",
    "curl -L https://example.org/data/x -o x; git clone git@host:/a/b",
    "# /data/x\necho '# /data/y' /not/a/file",
    "cat <<EOF\n/data/x ~/y module load z\n#SBATCH -t 1\nEOF",
    "module purge; module list; ml",
    "SCRATCH=out; cd $SCRATCH/x",
    "export SCRATCH=out; mkdir $SCRATCH",
    "echo '$HOME/x' \"~/y\"",
    "run --ratio=1/2 a/b ./c ../d $X/y",
    "#SBATCH --output=logs/%j.log --export=NONE",
    "x=$((a / b)); ((c /= 2)); [[ -d /data/x ]] || true",
    "export NAME=value; declare -x OTHER=1; unset -f f",
    "source ./env.sh; . lib/functions",
]


@pytest.mark.parametrize("script", sorted(FOUND))
def test_what_does_not_travel_is_named(script: str) -> None:
    assert [(one.kind.value, one.what) for one in lint(script, {})] == FOUND[script]


@pytest.mark.parametrize("script", CLEAN)
def test_what_travels_is_left_alone(script: str) -> None:
    assert not lint(script, {"a": SiteFacts(folders=[], modules=[], commands=[])})


def test_every_kind_has_a_row_and_its_sentences_in_both_languages() -> None:
    assert {kind for rows in FOUND.values() for kind, _ in rows} == {kind.value for kind in Kind}
    assert {f"{what}.{kind}" for kind in Kind for what in ("what", "instead")} <= TEXTS.keys()


HERE = SiteFacts(
    modules=["cuda/12.4", "gcc"],
    images=["pt.sif"],
    partitions=["gpu"],
    folders=["/mnt/sets", "/users"],
    environments=["torch"],
    commands=["srun", "module"],
    mpi=["pmix"],
)
VERDICTS = [
    ("cat /mnt/sets/a", "exists"),
    ("cat /mnt/sets", "exists"),
    ("cat /mnt/setsuma", "absent"),
    ("cat /mnt/sets/../other", "absent"),
    ("cat /mnt/sets/$USER/a", "exists"),
    ("cat /mnt/$SET/a", "absent"),
    ("cat $HOME/x", "unknown"),
    ("cat /users/li/x", "exists"),
    ("module load cuda/12.4", "exists"),
    ("module load cuda", "exists"),
    ("module load cuda/11.8", "absent"),
    ("module load $CUDA", "unknown"),
    ("conda activate torch", "exists"),
    ("conda activate jax", "absent"),
    ("conda activate /mnt/sets/env", "exists"),
    ("#SBATCH -p gpu", "exists"),
    ("#SBATCH -p long", "absent"),
    ("#SBATCH -A proj", "unknown"),
    ("scontrol show job", "absent"),
    ("cd $SCRATCH", "unknown"),
]


@pytest.mark.parametrize(("script", "verdict"), VERDICTS)
def test_a_site_that_told_is_judged_by_what_it_told_and_one_that_did_not_is_unknown(script: str, verdict: str) -> None:
    found = lint(script, {"told": HERE, "silent": None, "empty": SiteFacts()})[0]
    assert (found.verdicts["told"], found.verdicts["silent"], found.verdicts["empty"]) == (verdict, Verdict.UNKNOWN, Verdict.UNKNOWN)


def test_lines_and_words_are_those_of_the_script() -> None:
    script = "#!/bin/bash\n#SBATCH --partition=gpu\nset -e\n\npython a.py \\\n  --data /mnt/x\nmodule load cuda\n"
    assert [(one.line, one.words, one.severity) for one in lint(script, {})] == [
        (2, "#SBATCH --partition=gpu", Severity.CHANGES),
        (6, "/mnt/x", Severity.FAILS),
        (7, "module load cuda", Severity.FAILS),
    ]


def test_one_thing_is_said_once_a_line() -> None:
    assert len(lint("cp /mnt/x /mnt/x\ncat /mnt/x", {})) == 2


def test_br_044_a_directive_after_the_first_command_is_reported_and_one_in_a_text_is_not() -> None:
    script = "#!/bin/sh\n#SBATCH -J 'Big simulation'\ntrue\n#SBATCH --time=1:00\ncat > next.sh <<EOF\n#SBATCH --gpus=8\nEOF\n"
    assert [(one.line, one.option, one.value, one.late) for one in directives(script)] == [
        (2, "J", "Big simulation", False),
        (4, "time", "1:00", True),
        (6, "gpus", "8", True),
    ]
    assert [(one.line, one.kind) for one in lint(script, {})] == [(4, Kind.LATE)]


def test_br_045_an_exported_function_is_said_to_stay_behind() -> None:
    [found] = lint("f() { true; }\nexport -f f\n", {"a": HERE})
    assert (found.line, found.kind, found.severity, dict(found.verdicts)) == (2, Kind.FUNCTION, Severity.CHANGES, {})


def test_what_every_site_has_needs_no_warning() -> None:
    found = lint("cat /mnt/sets/a", {"a": HERE, "b": HERE})[0]
    assert found.holds_everywhere
    assert not Finding(1, Kind.LATE, Severity.CHANGES, "", "").holds_everywhere


@given(st.text(alphabet=" \n/~$#'\"`(){}<>|&;=:abHOME", max_size=300))
def test_no_script_is_too_strange_to_be_judged(script: str) -> None:
    for one in lint(script, {"a": HERE, "b": None}):
        assert 1 <= one.line <= script.count("\n") + 1


def test_an_image_that_a_job_names_is_there_where_its_site_told_that_it_runs() -> None:
    sites = dict.fromkeys(("takes", "others", "none", "silent"), HERE)
    images = {
        "takes": PoolImages(runtime="pyxis", sources=["nvcr.io/nvidia"]),
        "others": PoolImages(runtime="kubernetes", sources=["registry.example.cn"]),
        "none": PoolImages(),
        "silent": None,
    }
    [found] = lint(f"#SBATCH --container-image={PINNED}\nls", sites, images)
    assert found.severity is Severity.CHANGES
    assert [found.verdicts[site] for site in sites] == [Verdict.EXISTS, Verdict.ABSENT, Verdict.ABSENT, Verdict.UNKNOWN]
    [tagged] = lint("#SBATCH --container-image=nvcr.io#nvidia/pytorch:24.01\nls", sites, images)
    assert tagged.severity is Severity.FAILS and tagged.verdicts["takes"] is Verdict.ABSENT
