"""What a submit asks of sbatch, as options that no value can turn into others, and as slurmrestd's JSON.

Every value is validated where it comes from and stands behind its own `--name=`; the user's own text is in the script alone. The fence of a native
submit (LINK D6): never requeued, one at a time by the job's name, gone from the queue when its start comes too late.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import PurePath
from typing import Any

from intertie.agent.adapters.port import NativeWork
from intertie.agent.core.model import Attempt
from intertie.agent.slurm.core.amounts import memory_option
from intertie.agent.slurm.core.rules import Place, SlurmRules, place_of
from intertie.agent.slurm.core.tags import Tag, write_tag
from intertie.agent.slurm.core.times import wall_minutes
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}\Z", re.ASCII)
_PATH = re.compile(r"/[^\x00-\x1f\x7f%\\]{0,4000}\Z")
# slurmctld judges deadlines every half minute, and rounds limits up to minutes.
DEADLINE_SLACK_S = 90


@dataclass(frozen=True, slots=True)
class Request:
    """One submit, transport apart."""

    tag: Tag
    name: str
    """The job's id: one attempt of a job at a time has it here."""
    account: str
    """The local account that it runs as; empty: the agent's own user."""
    place: Place
    folder: PurePath
    minutes: int
    deadline_s: int
    """From now, seconds."""
    nodes: int
    cards: int
    card_type: str
    cards_per_node: int
    cpus: int
    memory: int
    """Bytes per node; 0: the site's default."""


def request_of(work: NativeWork, rules: SlurmRules, now: datetime) -> Request:
    """`Refused` for what sbatch would misread, and for what comes too late."""
    attempt = work.attempt
    left_s = (work.start_by - now) / timedelta(seconds=1)
    if left_s < 1:
        raise Refused("slurm.too_late", f"{attempt.id} had to begin by {work.start_by.isoformat(timespec='seconds')}")
    if not _NAME.match(attempt.job):
        raise Refused("slurm.name", f"{attempt.job!r} cannot be a job name of Slurm")
    if not _PATH.match(str(work.folder)) or ".." in work.folder.parts:
        raise Refused("slurm.folder", f"{str(work.folder)!r} cannot be a job's folder", next_step="choose a folder without % and \\")
    minutes = wall_minutes(attempt.spec.wall_s)
    gpu = attempt.kind is DeviceKind.GPU
    count = max(1, len(attempt.devices) or attempt.spec.resources.count)
    nodes, per_node = spread(count, rules.cards_per_node) if gpu else (1, 0)
    cpus = rules.cpus_per_card * per_node if gpu else count
    mib = rules.memory_mib_per_card * per_node if gpu else rules.memory_mib_per_slot * count
    return Request(
        tag=Tag(attempt.id, attempt.epoch, attempt.generation),
        name=attempt.job,
        account=attempt.account,
        place=place_of(rules, attempt.tenant or "", attempt.pool),
        folder=work.folder,
        minutes=minutes,
        deadline_s=int(left_s) + minutes * 60 + DEADLINE_SLACK_S,
        nodes=nodes,
        cards=count if gpu else 0,
        card_type=card_type(attempt, rules) if gpu else "",
        cards_per_node=per_node,
        cpus=cpus,
        memory=mib << 20,
    )


def spread(cards: int, per_node: int) -> tuple[int, int]:
    """(nodes, cards on each): what is asked of Slurm is per node, what it counts is the job's (BR-029)."""
    if per_node <= 0 or cards <= per_node:
        return 1, cards
    nodes = -(-cards // per_node)
    if cards % nodes:
        raise Refused(
            "slurm.uneven", f"{cards} cards cannot be spread evenly over nodes of {per_node}", next_step=f"ask for {nodes * per_node} cards"
        )
    return nodes, cards // nodes


def card_type(attempt: Attempt, rules: SlurmRules) -> str:
    """Slurm's word for the model; empty where the pool names none, or Slurm does not tell types apart."""
    model = attempt.model or attempt.spec.resources.gpu_model or ""
    return next((word for word, named in rules.models.items() if named == model), "")


def options(request: Request) -> Sequence[str]:
    """sbatch's options. `--export=NONE`: nothing of the agent's environment reaches the job; its values lie in a file of its folder."""
    place, folder = request.place, request.folder
    found = [
        "--parsable",
        "--no-requeue",
        f"--job-name={request.name}",
        "--dependency=singleton",
        f"--deadline=now+{request.deadline_s}",
        f"--comment={write_tag(request.tag)}",
        f"--time={request.minutes}",
        f"--nodes={request.nodes}",
        f"--ntasks={request.nodes}",
        f"--cpus-per-task={request.cpus}",
        "--export=NONE",
        f"--chdir={folder}/work",
        f"--output={folder}/native.log",
        "--open-mode=append",
    ]
    if request.cards:
        kind = f"{request.card_type}:" if request.card_type else ""
        found.append(f"--gres=gpu:{kind}{request.cards_per_node}")
    if request.memory:
        found.append(f"--mem={memory_option(request.memory)}")
    for name, value in (
        ("account", place.account),
        ("partition", place.partition),
        ("qos", place.qos),
        ("constraint", place.constraint),
        ("reservation", place.reservation),
    ):
        if value:
            found.append(f"--{name}={value}")
    return found


def body(request: Request, script: str, now: datetime, gres_key: str) -> Mapping[str, Any]:
    """`POST /slurm/v…/job/submit`."""
    place, folder = request.place, request.folder
    job: dict[str, Any] = {
        "name": request.name,
        "comment": write_tag(request.tag),
        "requeue": False,
        "dependency": "singleton",
        "time_limit": request.minutes,
        "tasks": request.nodes,
        "cpus_per_task": request.cpus,
        "current_working_directory": f"{folder}/work",
        "standard_output": f"{folder}/native.log",
        "standard_error": f"{folder}/native.log",
        "standard_input": "/dev/null",
    }
    # v0.0.38 takes a list where later ones take words of their own, and needs an environment that is not empty.
    old = gres_key == "gres"
    job["deadline"] = f"now+{request.deadline_s}" if old else int(now.timestamp()) + request.deadline_s
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    job["environment"] = environment if old else [f"{name}={value}" for name, value in environment.items()]
    job["nodes"] = [request.nodes, request.nodes] if old else str(request.nodes)
    if request.cards:
        kind = f"{request.card_type}:" if request.card_type else ""
        job[gres_key] = f"{'' if old else 'gres/'}gpu:{kind}{request.cards_per_node}"
    if request.memory:
        mib = -(-request.memory // (1 << 20))
        job["memory_per_node"] = mib if old else {"set": True, "number": mib}
    for name, value in (
        ("account", place.account),
        ("partition", place.partition),
        ("qos", place.qos),
        ("constraints", place.constraint),
        ("reservation", place.reservation),
    ):
        if value:
            job[name] = value
    return {"job": job, "script": script}
