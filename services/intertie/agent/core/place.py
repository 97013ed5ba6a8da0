"""What the owner says of the place where the agent lives: the way out of it, and what a script finds there. Two tables of `site.toml`."""

from __future__ import annotations

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
Names = Annotated[list[Annotated[str, msgspec.Meta(min_length=1, max_length=200)]], msgspec.Meta(max_length=400)]


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
