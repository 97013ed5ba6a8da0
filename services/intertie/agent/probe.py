"""The probe: a small known job per pool, at joining and daily, as local work that is never charged and makes room for anything that waits.

It runs through the site's own adapter as an account that jobs run as, on one free device. What it saw goes to the registry under the site's key and
stays here, so that an agent that was restarted knows when it ran last. A run that was interrupted proves nothing and is tried again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from intertie.agent import accounts, probe_job
from intertie.agent.accounts import LocalAccount
from intertie.agent.books import get_setting, put_setting, save, together
from intertie.agent.config import VERSION
from intertie.agent.core import probing
from intertie.agent.core.devices import Pool
from intertie.agent.core.model import Attempt, Failing, LocalWork, State, StopAsked
from intertie.contracts.base import decode, encode
from intertie.contracts.job import JobSpec, Resources
from intertie.contracts.link import LINK_VERSION, EntryBase, Lane, LaneState, OfferBody, ProbeTold
from intertie.contracts.probe import LocalProbe, ProbeOutcome, ProbeReport
from intertie.contracts.site import AccessMode, DeviceKind, DeviceState
from intertie.errors import IntertieError
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, mint
from intertie.link.journal import NextSeq
from intertie.link.site import Exchange
from intertie.observe import log
from intertie.trust.seal import seal

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.probe")

PROBES_VERSION = min(3, LINK_VERSION)
"""Registries from this link version on know probes."""
LOOK_S = 5.0
# While it runs: how soon it makes room for others.
YIELD_S = 0.2
LOG_BYTES = 64 * 1024
ROW = "probe/"
OVER = (State.ENDED, State.NOT_STARTED)


def script() -> str:
    """The job, whole: a shell that looks for a Python, and the measuring in it."""
    body = Path(probe_job.__file__).read_text(encoding="utf-8")
    none = probing.MARK + '{"not_measured": {"device": "there is no python3 in the job'
    return f"""#!/bin/sh
for python in python3 /usr/libexec/platform-python; do
  command -v "$python" >/dev/null 2>&1 && exec "$python" - <<'INTERTIE_PROBE_END'
{body}
INTERTIE_PROBE_END
done
echo '{none}"}}}}'
"""


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's last probe, and whether the registry's lane has it."""

    report: ProbeReport
    told: bool = False


@dataclass(slots=True)
class _Now:
    """A probe that runs."""

    pool: PoolName
    attempt: AttemptId
    device: DeviceId
    wanted: bool = False
    """An offer was refused for its sake."""


class Probe:
    """One site's. `await recover()`, then `run` for ever; `answered` hears what the registry's keeper can understand."""

    def __init__(self, site: Site, *, beat: float = 1.0) -> None:
        self._site, self._beat = site, beat
        self._started = site.clock.now()
        self._rows: dict[PoolName, _Row] = {}
        self._waits: dict[PoolName, str] = {}
        self._now: _Now | None = None
        site.turned_away = self._turned_away
        self._keeper_knows = False
        self.asked: set[PoolName] = set()
        """The owner wants one now."""
        self.driver: str = ""

    async def recover(self) -> None:
        """What was said last; a probe that outlived its agent is ended."""
        for pool in self._site.pools:
            stored = await self._site.journal.read(lambda cursor, pool=pool: get_setting(cursor, f"{ROW}{pool}"))  # type: ignore[misc]
            if stored:
                self._rows[pool] = decode(stored, _Row, what="stored probe")
        for attempt in list(self._site.books.attempts.values()):
            if _is_probe(attempt) and attempt.state not in OVER:
                await self._stop(attempt.id)

    def answered(self, exchange: Exchange) -> None:
        """The registry's keeper answered."""
        self._keeper_knows = exchange.synced.state is LaneState.OK and exchange.synced.v >= PROBES_VERSION

    def told(self) -> list[LocalProbe]:
        """For the owner's door."""
        return [
            LocalProbe(
                pool=pool,
                last=self._rows[pool].report if pool in self._rows else None,
                waits=self._waits.get(pool, ""),
                running=self._now is not None and self._now.pool == pool,
            )
            for pool in self._site.pools
        ]

    async def run(self) -> None:
        while True:
            for pool in list(self._site.pools.values()):
                try:
                    await self._tell(pool.name)
                    await self._consider(pool)
                except IntertieError as err:
                    self._waits[pool.name] = err.text
                    LOG.warning("a probe was put off", pool=pool.name, code=err.code, text=err.text)
            await asyncio.sleep(max(0.05, LOOK_S * self._beat))

    def _turned_away(self, body: OfferBody) -> None:
        if self._now is not None and self._now.pool == body.pool and self._now.device in body.devices:
            self._now.wanted = True

    # --- one probe ---

    async def _consider(self, pool: Pool) -> None:
        site, row = self._site, self._rows.get(pool.name)
        known = probing.Known(last_at=row.report.at if row else None)
        if pool.name not in self.asked and not probing.due(site.rules.probe, pool, known, started=self._started, now=site.clock.now()):
            self._waits.pop(pool.name, None)
            return
        paused = site.pause.on and not site.rules.probe.while_paused and pool.name not in self.asked
        found = probing.pick(
            pool, site.books.holds, site.books.attempts.values(), site.books.observed, row.report.device if row else None, paused=paused
        )
        who = self._account()
        if isinstance(who, str) or not _is_device(pool, found):
            self._waits[pool.name] = who if isinstance(who, str) else found
            return
        self._waits.pop(pool.name, None)
        report = await self._probe(pool, DeviceId(found), who)
        if report is not None:
            self.asked.discard(pool.name)
            await self._keep(_Row(report=report))
            await self._tell(pool.name)

    def _account(self) -> LocalAccount | str:
        """Who it runs as, or why nobody: never root, and where the agent is not root it is the agent's own user."""
        if not accounts.is_root():
            return accounts.by_uid(os.geteuid()) or LocalAccount(str(os.geteuid()), os.geteuid(), os.getegid(), (), "/")
        named = self._site.rules.probe.account
        choices = [named] if named else ["probe", *sorted({one.account for one in self._site.settings.mappings if one.account})]
        for name in choices:
            account = accounts.by_name(name)
            if account is not None and not accounts.why_not(name):
                return account
        return accounts.why_not(named) if named else "no account to probe as: map a tenant, or name one in site.toml: [probe] account"

    async def _probe(self, pool: Pool, device: DeviceId, who: LocalAccount) -> ProbeReport | None:
        """Its report; None if it made room for others, and will be tried again."""
        site = self._site
        mine = mint(f"local-{site.joined.site}")
        gpu = pool.kind is DeviceKind.GPU
        attempt = Attempt(
            id=AttemptId(mine),
            job=JobId(mine),
            state=State.STAGING,
            pool=pool.name,
            kind=pool.kind,
            model=pool.profile.accelerator if gpu else "",
            devices=[device],
            spec=JobSpec(name="probe", script=script(), resources=Resources(gpus=1 if gpu else 0), wall_s=probing.WALL_S),
            account=who.name,
            local=LocalWork(user=who.name, uid=who.uid, cwd="/tmp", submitted=site.clock.now(), probe=True),  # noqa: S108  # readable by any account
            kernel_boot=site.boot,
        )
        asked_ns = int(site.clock.boot_s() * 1e9)
        site.put(attempt)
        try:
            await site.journal.write(save(attempt))
        except BaseException:
            site.books.holds.release(attempt)
            site.books.attempts.pop(attempt.id, None)
            raise
        self._now = _Now(pool.name, attempt.id, device)
        try:
            site.set_out(attempt.id)
            ended = await self._until_over(attempt, device)
        finally:
            self._now = None
        if ended is None:
            return None
        started_us = max(0, (ended.started.boot_ns - asked_ns) // 1_000) if ended.started else None
        log_end = await self._log(ended.id)
        proven = probing.not_begun(ended.refusal) if ended.refusal is not None else probing.prove(pool, ended.ended, log_end)
        return self._report(pool, ended, proven, started_us)

    async def _until_over(self, attempt: Attempt, device: DeviceId) -> Attempt | None:
        """The attempt when it is over; None if it was ended for somebody else's sake."""
        site, stopped = self._site, False
        while (now := site.books.attempts[attempt.id]).state not in OVER:
            if not stopped and self._in_the_way(attempt, device):
                LOG.info("the probe makes room", pool=attempt.pool, device=device)
                stopped = True
                await self._stop(attempt.id)
            await asyncio.sleep(YIELD_S)
        if stopped:
            self._waits[attempt.pool] = "it made room for other work"
        return None if stopped else now

    def _in_the_way(self, attempt: Attempt, device: DeviceId) -> bool:
        site = self._site
        waits = any(a.state is State.WAITING and a.kind is attempt.kind for a in site.books.attempts.values())
        wanted = self._now is not None and self._now.wanted
        lost = site.books.observed.get(device) in (DeviceState.LOST, DeviceState.FOREIGN)
        return waits or wanted or lost

    async def _stop(self, attempt: AttemptId) -> None:
        site = self._site
        found = site.books.attempts[attempt]
        if found.state is State.STAGING and await site.adapter.fence(attempt):
            if site.books.attempts[attempt].state is State.STAGING:
                await site.give_up(found, Failing(code="stopped", text="the probe made room"))
            return
        site.put(msgspec.structs.replace(site.books.attempts[attempt], stop=StopAsked(reason="the probe made room", grace_s=0, by="probe")))
        await site.adapter.stop(attempt, 0)

    async def _log(self, attempt: AttemptId) -> str:
        total = (await self._site.adapter.log(attempt, 0, 0)).total
        chunk = await self._site.adapter.log(attempt, max(0, total - LOG_BYTES), LOG_BYTES)
        return chunk.data.decode("utf-8", "replace")

    def _report(self, pool: Pool, ended: Attempt, proven: probing.Proven, start_us: int | None) -> ProbeReport:
        site = self._site
        return ProbeReport(
            probe=str(ended.id),
            site=site.joined.site,
            pool=pool.name,
            kind=pool.kind,
            device=ended.devices[0],
            account=ended.account[:64],
            at=site.clock.now(),
            outcome=proven.outcome,
            reason=proven.reason,
            ran_us=ended.ended.ran_us if ended.ended else 0,
            model=proven.model,
            visible=proven.visible,
            measures={**proven.measures, **({"start_us": start_us} if start_us is not None else {})},
            not_measured=dict(proven.not_measured),
            driver=self.driver[:128],
            agent_version=VERSION[:64],
            profile_revision=pool.profile.revision,
        )

    # --- its report ---

    async def _keep(self, row: _Row) -> None:
        pool = row.report.pool
        await self._site.journal.write(put_setting(f"{ROW}{pool}", encode(row).decode()))
        self._rows[pool] = row
        level = LOG.info if row.report.outcome is ProbeOutcome.PASSED else LOG.warning
        level("probed", pool=pool, outcome=row.report.outcome.value, reason=row.report.reason, **row.report.measures)

    def _shown(self, report: ProbeReport) -> ProbeReport:
        """What the registry is told of it: of a pool in which the owner alone decides not on which card and as whom."""
        pool = self._site.pools.get(report.pool)
        if pool is not None and pool.profile.mode is not AccessMode.SERVICE:
            return report
        return msgspec.structs.replace(report, device=DeviceId(""), account="")

    async def _tell(self, pool: PoolName) -> None:
        """To the registry, once, as soon as it is one that understands."""
        site, row = self._site, self._rows.get(pool)
        if row is None or row.told or not self._keeper_knows:
            return
        sealed = seal(site.key, encode(self._shown(row.report)), site.key.public)

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            entry = ProbeTold(seq=following[Lane.REGISTRY], at=site.clock.now(), islanded=site.islanded(), pool=pool, sealed=sealed)
            return {Lane.REGISTRY: [entry]}

        told = msgspec.structs.replace(row, told=True)  # Here, to its owner, it stays whole.
        await site.append(entries, together(put_setting(f"{ROW}{pool}", encode(told).decode())))
        self._rows[pool] = told


def _is_probe(attempt: Attempt) -> bool:
    return attempt.local is not None and attempt.local.probe


def _is_device(pool: Pool, found: DeviceId | str) -> bool:
    return any(device.id == found for device in pool.devices)
