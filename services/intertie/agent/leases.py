"""Deadlines of this site's leased work: given with the go, renewed by each answer of the scheduler, and never again once a stop was named.

The deadline lies in the job's folder, where its supervisor reads it. What the disk refuses leaves the earlier deadline standing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from intertie.agent.core import leases
from intertie.agent.core.leases import Deadline
from intertie.agent.core.model import OPEN, Attempt
from intertie.errors import Unavailable
from intertie.ids import AttemptId
from intertie.observe import log

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.leases")


class Leases:
    """Of one site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._until: dict[AttemptId, Deadline] = {}
        self._said: set[AttemptId] = set()
        """Those whose deadline lies where a supervisor may read it."""
        self._ending: set[AttemptId] = set()

    def end(self, attempt: AttemptId) -> None:
        """A stop of it came, acted on or not: from here on no answer gives it more time."""
        self._ending.add(attempt)

    async def until(self, attempt: Attempt) -> Deadline:
        """What counts for it now: what was said to its supervisor, or what came with its go."""
        if (held := self._until.get(attempt.id)) is not None:
            return held
        held = await self._site.adapter.deadline(attempt.id)
        if held is not None:
            self._said.add(attempt.id)
        else:
            sent_boot_s = attempt.go_sent_boot_s if attempt.go_sent_boot_s is not None else 0.0
            held = leases.deadline(attempt.lease_s, sent_boot_s, self._site.moment())
        return held

    async def begin(self, attempt: Attempt) -> bool:
        """Its deadline into its folder, before its supervisor is there to read it; False if it has passed, and nothing may start."""
        held = await self.until(attempt)
        if leases.is_over(held, self._site.moment()):
            return False
        self._said.add(attempt.id)
        await self._site.adapter.renew(attempt.id, held)
        return True

    async def renew(self, given_s: float, sent_boot_s: float) -> None:
        """An answer of the scheduler, its stops acted on: `given_s` from the sending of the sync that it answers."""
        if given_s <= 0:
            return
        for name in [attempt.id for attempt in self._site.books.attempts.values() if leases.may_renew(attempt)]:
            attempt = self._site.books.attempts[name]
            if name in self._ending or not leases.may_renew(attempt):
                continue
            held = await self.until(attempt)
            later = leases.renewed(attempt, held, given_s, sent_boot_s, self._site.moment())
            if later is None:
                continue
            try:
                if name in self._said:
                    await self._site.adapter.renew(name, later)
            except Unavailable as err:
                LOG.warning("a lease is not renewed", attempt=name, code=err.code, text=err.text)
                continue
            self._until[name] = later
        self._forget()

    def _forget(self) -> None:
        attempts = self._site.books.attempts
        for name in [name for name in self._until if (attempt := attempts.get(name)) is None or attempt.state not in OPEN]:
            del self._until[name]
        self._said &= self._until.keys()
        self._ending &= attempts.keys()
