"""Versions after a restore: the copy forgets how many it gave, and whoever heard of the lost tail takes only higher ones. So each raised epoch begins
above every version of the epochs before: a keeper lifts what it has when it starts (`lift_versions` of its store), and what is new begins there. Pure.
"""

from __future__ import annotations

# Changes of one entity in a second: a job's rounds and its site's entries, a few hundred at most. With it a version fits a double's 53 bits.
VERSIONS_PER_S = 1_000


def first_version(epoch: int) -> int:
    """Of whatever is new in this epoch, or changes in it first. An epoch is the second in which it was raised (`epoch.by_clock`), so that what came
    before it gave no version as high; 1 in a service's first epoch."""
    return 1 if epoch <= 1 else epoch * VERSIONS_PER_S


def numbered_version(number: int, first: int) -> int:
    """Of what has a number of its own that is never given anew (a revision, a count): that number in the first epoch, and above `first` later."""
    return first - 1 + number
