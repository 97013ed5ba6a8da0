"""How a native job is known to be ours: its comment names attempt, epoch and generation; where an accounting keeps no comments, its folder does.

An id of Slurm is given out again; only (cluster, id, submit time) names a job, and the tag says whose it is (BR-013). A tag counts only on a job of the
account that the attempt runs as: whoever else writes one into a comment has written a comment (BR-148).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

from intertie.ids import AttemptId

_TAG = re.compile(r"intertie/1/(?P<attempt>[A-Za-z0-9][A-Za-z0-9_-]{0,79})/(?P<epoch>\d{1,12})/(?P<generation>\d{1,12})\Z", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Tag:
    attempt: AttemptId
    epoch: int = 0
    generation: int = 0


def write_tag(tag: Tag) -> str:
    return f"intertie/1/{tag.attempt}/{tag.epoch}/{tag.generation}"


def read_tag(comment: str) -> Tag | None:
    """None if it is no tag of ours, which is no fault: most jobs are not ours."""
    match = _TAG.match(comment.strip())
    return Tag(AttemptId(match["attempt"]), int(match["epoch"]), int(match["generation"])) if match is not None else None


def tag_of_folder(folder: str, root: PurePath) -> Tag | None:
    """The attempt whose folder below `root` this job works in."""
    path = PurePath(folder)
    if not folder.startswith("/") or ".." in path.parts or not path.is_relative_to(root):
        return None
    inside = path.relative_to(root).parts
    if not inside or not _NAME.match(inside[0]):
        return None
    return Tag(AttemptId(inside[0]))
