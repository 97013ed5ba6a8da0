"""What a site tells a script of itself: the owner's own lists, and what its scheduler says where the owner says nothing."""

from __future__ import annotations

import pytest

from intertie.agent.core.place import MOST_NAMES, Tells, facts_of

ROWS: list[tuple[str, Tells | None, tuple[str, ...], list[str] | None]] = [
    ("nothing is told of", None, (), None),
    ("the scheduler's partitions are told", None, ("cpu", "gpu"), ["cpu", "gpu"]),
    ("beside the owner's modules", Tells(modules=["cuda"]), ("gpu",), ["gpu"]),
    ("the owner's own list stands", Tells(partitions=["gpu"]), ("cpu", "gpu"), ["gpu"]),
    ("an owner who says that there is none is heard", Tells(partitions=[]), ("cpu",), []),
    ("a scheduler that said nothing is no list", Tells(modules=["cuda"]), (), None),
    ("a list too long to be told whole is not told", None, tuple(f"p{n}" for n in range(MOST_NAMES + 1)), None),
]


@pytest.mark.parametrize(("tells", "partitions", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_partitions_are_told_as_far_as_somebody_knows_them(
    tells: Tells | None, partitions: tuple[str, ...], expected: list[str] | None
) -> None:
    told = facts_of(tells, partitions)
    assert (told.partitions if told is not None else None) == expected
    assert (told.modules if told is not None else None) == (tells.modules if tells is not None else None)
