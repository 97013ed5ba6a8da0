"""Room for new work, looked at each tick: free space where the journal, the jobs and the packs lie, and the journal's own bound.

Without room nothing new is taken, here or from the hub, which is told so on the registry's lane. What runs goes on and all of it is recorded.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from intertie.agent.books import get_setting, put_setting
from intertie.agent.core.model import Failing
from intertie.agent.core.room import Floor, Space, shortage
from intertie.contracts.link import EntryBase, Lane, SiteCondition
from intertie.errors import Unavailable
from intertie.link.journal import NextSeq
from intertie.observe import log

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.room")

TOLD = "condition"


def spaces_of(folders: Iterable[Path]) -> list[Space]:
    """Each file system once; what cannot be asked (a mount that is gone) has no room."""
    found: dict[int, Space] = {}
    for folder in folders:
        try:
            device, about = os.stat(folder).st_dev, os.statvfs(folder)
        except OSError:
            found[-len(found) - 1] = Space(str(folder), 0, 1 << 40)
        else:
            found.setdefault(device, Space(str(folder), about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize))
    return list(found.values())


class Room:
    """Of one site. `why` says what is missing, None if nothing is."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.why: Failing | None = None
        self.floor = Floor(mib=site.rules.disk_floor_mib, percent=site.rules.disk_floor_percent)
        self.spaces: Callable[[], Sequence[Space]] = list
        """Asked in a thread: a disk may hang. Nothing is watched until the shell names folders."""
        self._told: str | None = None

    def must_have(self) -> None:
        """`Unavailable('agent.disk_low' | 'agent.journal_full')` if nothing new is taken."""
        if self.why is not None:
            raise Unavailable(
                f"agent.{self.why.code}",
                f"no new work is taken here: {self.why.text}",
                retry_after_s=60,
                next_step="free some space; what runs goes on" if self.why.code == "disk_low" else "it opens when the hub is heard again",
            )

    async def look(self) -> None:
        """Judge anew, and tell the hub of a change. What the disk refuses to record now is told by a later look."""
        spaces = await asyncio.to_thread(self.spaces) if self.spaces is not list else ()
        before, self.why = self.why, shortage(spaces, self.floor, journal_accepts=self._journal_accepts(), closed=self.why is not None)
        if (self.why is None) != (before is None):
            LOG.log(20 if self.why is None else 30, "new work is taken" if self.why is None else self.why.text)
        await self._tell()

    def _journal_accepts(self) -> bool:
        accepting: Callable[[], bool] | None = getattr(self._site.journal, "accepting", None)
        return accepting is None or accepting()

    async def _tell(self) -> None:
        site, why = self._site, self.why
        self_stop = site.adapter.self_stop
        now = f"{why is None} {why.code if why else ''} {self_stop}"
        if self._told is None:
            self._told = await site.journal.read(lambda cursor: get_setting(cursor, TOLD)) or ""
        if now == self._told:
            return

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            entry = SiteCondition(
                seq=following[Lane.REGISTRY],
                at=site.clock.now(),
                islanded=site.islanded(),
                accepting=why is None,
                code=why.code if why else "",
                text=why.text if why else "",
                self_stop=self_stop,
            )
            return {Lane.REGISTRY: [entry]}

        try:
            await site.append(entries, put_setting(TOLD, now))
        except Unavailable as err:
            LOG.warning("the hub is told later whether new work is taken", code=err.code, text=err.text)
        else:
            self._told = now
