"""What the owner says of the place where the agent lives: the way out of it, and what a script finds there. Two tables of `site.toml`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from intertie.contracts.facts import SiteFacts


class LinkWay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[link]`: the one HTTP proxy through which bus and gateway are reached. Without it the environment's HTTPS_PROXY and NO_PROXY hold."""

    proxy: str = ""
    """`http://[USER[:PASSWORD]@]HOST:PORT`; empty: none named."""
    proxy_password_file: str = ""
    """Where the password lies, if it shall not stand here: absolute, 0600."""
    direct: list[str] = []
    """Hosts, or endings such as `.example.cn`, that need no proxy."""


# It is journalled with each change of the inventory: far more than any script asks about, far less than a batch holds.
MOST_NAMES = 400
Names = Annotated[list[Annotated[str, msgspec.Meta(min_length=1, max_length=200)]], msgspec.Meta(max_length=MOST_NAMES)]


class Tells(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tells]`: what of this site a script may count on. Each list is all of its kind, or is left out: nothing is told of it then."""

    modules: Names | None = None
    images: Names | None = None
    partitions: Names | None = None
    folders: Names | None = None
    environments: Names | None = None
    commands: Names | None = None
    mpi: Names | None = None

    def facts(self) -> SiteFacts:
        return SiteFacts(**msgspec.structs.asdict(self))


def facts_of(tells: Tells | None, partitions: Sequence[str] = ()) -> SiteFacts | None:
    """All that is told of this site. `partitions`: what its own scheduler says; the owner's own list, if there is one, stands above it.

    A list that were cut would say of the rest that it is not there: none is."""
    told = tells.facts() if tells is not None else None
    if not 0 < len(partitions) <= MOST_NAMES or (told is not None and told.partitions is not None):
        return told
    return msgspec.structs.replace(told or SiteFacts(), partitions=list(partitions))
