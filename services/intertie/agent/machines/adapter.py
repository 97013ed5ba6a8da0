"""Work on a pool of machines, as the site's desk asks for it: the head's own devices by its own supervisors, every node's by its node's.

An attempt lives on the one node whose devices it was given. What a node was told and what it answered is on the head's disk (`head`), so every verb
may be asked again after the head died. A node that is away costs an answer and never makes one up: what was started counts as running.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from intertie.agent.adapters.port import Adapter, Chunk, Presence
from intertie.agent.core import placed
from intertie.agent.core.attempts import Exit
from intertie.agent.core.leases import Deadline
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.agent.core.placed import Work
from intertie.agent.machines.head import Head
from intertie.bus.port import Message
from intertie.clock import Clock
from intertie.contracts.base import decode, encode
from intertie.contracts.job import Attribution, ResultRef
from intertie.contracts.link import OfferBody
from intertie.contracts.machines import AskBytes, BytesAnswer, Part
from intertie.errors import IntertieError, Refused, Unavailable
from intertie.ids import AttemptId, DeviceId, SiteName, TenantName, mint
from intertie.observe import log
from intertie.trust.seal import seal

LOG = log.get("machines.adapter")

# The go follows the claim within one sync: only a node that loses its line in between needs longer.
START_WITHIN_S = 60
# A local job waits so long for its node to take it; a hub's as long as its own `start_by`.
LOCAL_START_S = 120.0
# An answer about a log that takes longer is as good as none.
ASK_S = 5.0
# Between looks whether a node that was forgotten has joined again.
ADOPT_S = 2.0
# Long enough for a result of some MB to follow its end; a larger one is delivered when it is here.
RESULT_S = 20.0


class MachinesAdapter:
    """`Adapter` over a head and its nodes. `local` runs what the head's own devices were given."""

    def __init__(self, local: Adapter, head: Head, clock: Clock, *, node_of: Callable[[DeviceId], str], own: str, site: SiteName) -> None:
        """`node_of` a device; `own` is this machine's name."""
        self.local, self.head, self._clock = local, head, clock
        self._node_of, self._own, self._site = node_of, own, site
        self._answers: dict[str, asyncio.Future[BytesAnswer]] = {}
        self.owner_tenant = TenantName("")

    async def open(self) -> None:
        """Listen to answers."""
        await self.head.bus.subscribe("intertie.v1.up.*.answer", self._answered, workers=4)

    @property
    def single_user(self) -> bool:
        return self.local.single_user

    @property
    def self_stop(self) -> bool:
        return self.local.self_stop

    def may_run_as(self, account: str) -> str:
        """The head's own accounts are asked; a node asks its own again."""
        return self.local.may_run_as(account)

    def node_of(self, attempt: Attempt) -> str:
        """The one node that holds its devices; `Refused('agent.one_node')` for several, `agent.unknown_node` for none."""
        nodes = sorted({self._node_of(device) for device in attempt.devices})
        if len(nodes) > 1:
            raise Refused(
                "agent.one_node",
                f"the devices of {attempt.id} lie on {len(nodes)} nodes ({', '.join(nodes)}): one run lives on one node here",
                next_step="ask for at most as many devices as one node has",
            )
        if not nodes or (nodes[0] != self._own and SiteName(nodes[0]) not in self.head.nodes):
            raise Refused("agent.unknown_node", f"no node of this site holds {', '.join(attempt.devices)}")
        return nodes[0]

    def _remote(self, attempt: AttemptId) -> Work | None:
        return self.head.work(attempt)

    # --- until it runs ---

    async def prepare(self, attempt: Attempt, pack: Path | None) -> None:
        node = self.node_of(attempt)
        if node == self._own:
            await self.local.prepare(attempt, pack)
            return
        work = self.head.works.get(attempt.id)
        if pack is not None and attempt.spec.work is not None:
            await asyncio.to_thread(_keep, pack, self.head.packs / attempt.spec.work.digest)
        if work is None:
            # What was fenced before anybody knew its node is fenced here, by the local adapter.
            fenced = await self.local.presence(attempt.id) is not Presence.ABSENT
            await self.head.place(Work(attempt=attempt, node=SiteName(node), fenced=fenced))
        elif not (work.offer_number or work.fenced):
            await self.head.place(msgspec.structs.replace(work, attempt=attempt))

    async def start(self, attempt: Attempt) -> StartedRecord | Exit:
        """Offered, claimed, gone: then only the node's word counts, and is waited for. `Unavailable('agent.node_away')` before the go."""
        if self._remote(attempt.id) is None:
            return await self.local.start(attempt)
        work = await self.head.change(attempt.id, lambda now: self._offered(now))
        await self.head.nudge(work.node)
        until = self._clock.boot_s() + self._patience_s(attempt)
        while True:
            work = self.head.works[attempt.id]
            if work.started is not None:
                return work.started
            if work.refusal is not None or work.fenced:
                return placed.unstarted(work)
            if work.exit is not None:
                return work.exit  # Its start was told with its end.
            left_s = until - self._clock.boot_s()
            if left_s <= 0 and not work.go_number:
                raise Unavailable("agent.node_away", f"node {work.node} did not take {attempt.id} in time", retry_after_s=5)
            await self.head.news(max(0.05, left_s) if not work.go_number else None)

    def _patience_s(self, attempt: Attempt) -> float:
        if attempt.local is not None or attempt.go_boot_s is None:
            return LOCAL_START_S
        return attempt.go_boot_s + attempt.start_by_s - self._clock.boot_s()

    def _offered(self, work: Work) -> Work:
        if work.offer_number or work.fenced:
            return work
        return placed.offered(work, seal(self.head.key, encode(self._body(work)), "scheduler"), self.head.number)

    def _body(self, work: Work) -> OfferBody:
        """All that a node needs; the times are what is left of the desk's own."""
        attempt = work.attempt
        tenant = attempt.tenant or self.owner_tenant
        told = Attribution(
            tenant=tenant, job=attempt.job, attempt=attempt.id, site=self._site, pool=attempt.pool, spec=None, spec_revision=0
        )
        lease_s = int(self.head.left_s(work.deadline)) if work.deadline is not None else attempt.lease_s
        return OfferBody(
            job=attempt.job,
            attempt=attempt.id,
            number=1,
            epoch=attempt.epoch,
            generation=max(1, attempt.generation),
            tenant=tenant,
            site=work.node,
            pool=attempt.pool,
            account=attempt.local.user if attempt.local is not None and not self.single_user else attempt.account,
            spec=attempt.spec,
            env=dict(attempt.env),
            devices=list(attempt.devices),
            start_within_s=START_WITHIN_S,
            start_by_s=max(1, int(self._patience_s(attempt))),
            attribution=attempt.attribution or seal(self.head.key, encode(told), self.head.key.public),
            traceparent=attempt.traceparent,
            lease_s=max(1, lease_s) if attempt.lease_s > 0 else 0,
        )

    async def presence(self, attempt: AttemptId) -> Presence:
        work = self._remote(attempt)
        if work is None:
            return await self.local.presence(attempt)
        return Presence.BEGUN if work.go_number else Presence.PREPARED

    async def found(self) -> list[Attempt]:
        theirs = [
            msgspec.structs.replace(work.attempt, env={})
            for work in self.head.works.values()
            if not work.fenced and not work.trimmed and not work.forgotten
        ]
        return [*await self.local.found(), *theirs]

    async def fence(self, attempt: AttemptId) -> bool:
        if self._remote(attempt) is None:
            return await self.local.fence(attempt)
        work = await self.head.change(attempt, lambda now: now if now.over else placed.fenced(now, self.head.number))
        if work.withdraw_number:
            await self.head.nudge(work.node)
        return work.fenced or work.refusal is not None

    # --- leases ---

    async def renew(self, attempt: AttemptId, until: Deadline) -> None:
        before = self._remote(attempt)
        if before is None:
            await self.local.renew(attempt, until)
            return
        await self.head.change(attempt, lambda now: msgspec.structs.replace(now, deadline=until))
        if before.deadline is not None and until.boot_s < before.deadline.boot_s:
            await self.head.nudge(before.node)

    async def deadline(self, attempt: AttemptId) -> Deadline | None:
        work = self._remote(attempt)
        return work.deadline if work is not None else await self.local.deadline(attempt)

    # --- the end ---

    async def ended(self, attempt: Attempt) -> Exit:
        """By its node's word, however long that is away, and whatever this head has forgotten of it."""
        if self._remote(attempt.id) is None and await self._is_own(attempt):
            return await self.local.ended(attempt)
        while True:
            work = self.head.works.get(attempt.id) or await self._adopt(attempt)
            if work is None:
                await self.head.news(ADOPT_S)
                continue
            if work.exit is not None:
                return self._possible(work, work.exit)
            if work.refusal is not None:
                return placed.unstarted(work)
            await self.head.news()

    def _possible(self, work: Work, end: Exit) -> Exit:
        """No longer than since it began, by this head's own clock, whatever its node says."""
        if work.started is None:
            return end
        since_us = int(self._clock.now().timestamp() * 1_000_000) - work.started.utc_ns // 1_000
        return replace(end, ran_us=min(end.ran_us, max(0, since_us)))

    async def _is_own(self, attempt: Attempt) -> bool:
        """Its folder lies here, or all of its devices are this machine's."""
        nodes = {self._node_of(device) for device in attempt.devices}
        return nodes == {self._own} or await self.local.presence(attempt.id) is not Presence.ABSENT

    async def _adopt(self, attempt: Attempt) -> Work | None:
        """What the desk knows to run on a node, and the head's own file does not (it was lost): the node says again what became of it. None while
        that node is not known here again."""
        try:
            node = SiteName(self.node_of(attempt))
        except Refused:
            return None
        kept = msgspec.structs.replace(attempt, env={})
        adopted = Work(attempt=kept, node=node, offer_number=self.head.number(), go_number=self.head.number(), started=attempt.started)
        await self.head.place(adopted)
        LOG.warning("work on a node is adopted, the head's own file knew nothing of it", attempt=attempt.id, node=node)
        return adopted

    async def alive(self, attempt: AttemptId) -> bool:
        work = self._remote(attempt)
        if work is None:
            return await self.local.alive(attempt)
        row = self.head.rows.get(work.node)
        heard = self.head.reachable(work.node) and row is not None and row.at_head
        return heard and work.started is not None and not work.over

    async def stop(self, attempt: AttemptId, grace_s: int) -> None:
        if self._remote(attempt) is None:
            await self.local.stop(attempt, grace_s)
            return
        work = await self.head.change(attempt, lambda now: placed.stopping(now, grace_s, self.head.number))
        await self.head.nudge(work.node)

    # --- what it leaves ---

    async def pack(self, attempt: Attempt) -> ResultRef | None:
        work = self._remote(attempt.id)
        if work is None:
            return await self.local.pack(attempt)
        until = self._clock.boot_s() + RESULT_S
        while work is not None and work.result is not None and attempt.local is None:
            left_s = until - self._clock.boot_s()
            if left_s <= 0 or await asyncio.to_thread(self.result(attempt.id).exists):
                return work.result
            await self.head.news(min(left_s, 1.0))
            work = self._remote(attempt.id)
        return None

    def result(self, attempt: AttemptId) -> Path:
        work = self._remote(attempt)
        if work is None:
            return self.local.result(attempt)
        return self.head.results / (work.result.digest if work.result is not None else f"none-{attempt}")

    def at_node(self, source: Path) -> bool:
        """True if this is a result that is still on its way from its node."""
        return source.parent == self.head.results and not source.exists()

    async def log(self, attempt: AttemptId, offset: int, limit: int) -> Chunk:
        work = self._remote(attempt)
        if work is None:
            return await self.local.log(attempt, offset, limit)
        try:
            part = await self._ask(work, offset, limit)
            return Chunk(part.data, part.offset, part.total)
        except Unavailable:
            # Of ended work its last lines are here. Of other work nothing is: an empty answer would say that it wrote nothing.
            if work.exit is None:
                if limit == 0:
                    return Chunk(b"", 0, 0)
                raise
            tail = work.log_tail.encode()[-max(0, limit) :] if limit else b""
            return Chunk(tail, max(0, work.log_bytes - len(tail)), work.log_bytes)

    async def _ask(self, work: Work, offset: int, limit: int) -> Part:
        if work.node not in self.head.live:
            raise Unavailable("agent.node_away", f"node {work.node} is not heard: its logs lie there", retry_after_s=5)
        name = mint("ask")
        asked: asyncio.Future[BytesAnswer] = asyncio.get_running_loop().create_future()
        self._answers[name] = asked
        try:
            question = AskBytes(id=name, attempt=work.attempt.id, offset=offset, limit=min(limit, 262_144))
            await self.head.bus.publish(f"intertie.v1.down.{work.node}.ask", encode(question))
            async with asyncio.timeout(ASK_S):
                answer = await asked
        except TimeoutError:
            raise Unavailable("agent.node_away", f"node {work.node} does not answer", retry_after_s=5) from None
        finally:
            self._answers.pop(name, None)
        if answer.part is None:
            raise Unavailable("agent.no_log", f"node {work.node} has no log of {work.attempt.id}")
        return answer.part

    async def _answered(self, message: Message) -> None:
        try:
            answer = decode(message.body, BytesAnswer, what="answer")
        except IntertieError as err:
            LOG.warning("an answer cannot be read", code=err.code, text=err.text)
            return
        asked = self._answers.get(answer.id)
        if asked is not None and not asked.done():
            asked.set_result(answer)

    async def trim(self, attempt: AttemptId) -> None:
        await self._settle(attempt, forget=False)

    async def forget(self, attempt: AttemptId) -> None:
        await self._settle(attempt, forget=True)

    async def _settle(self, attempt: AttemptId, *, forget: bool) -> None:
        work = self._remote(attempt)
        if work is None:
            await (self.local.forget(attempt) if forget else self.local.trim(attempt))
            return
        await asyncio.to_thread(self.result(attempt).unlink, missing_ok=True)
        if (ref := work.attempt.spec.work) is not None and not self._shared(work):
            await asyncio.to_thread(partial((self.head.packs / ref.digest).unlink, missing_ok=True))
        after = await self.head.change(attempt, lambda now: placed.settled(now, self.head.number, forget=forget))
        if after.forgotten and not after.settle_number:
            await self.head.drop(attempt)

    def _shared(self, work: Work) -> bool:
        """Whether other work on a node is made of the same pack."""
        others = (one for one in self.head.works.values() if one.attempt.id != work.attempt.id and not one.trimmed)
        return any(one.attempt.spec.work == work.attempt.spec.work for one in others)

    def roots(self) -> dict[int, AttemptId]:
        """Of this machine; a node knows its own."""
        return self.local.roots()


def _keep(pack: Path, target: Path) -> None:
    """The desk removes its file; nodes fetch this one."""
    if target.exists():
        return
    try:
        with contextlib.suppress(OSError):
            os.link(pack, target)
            return
        part = target.with_name(f".{target.name}.part")
        shutil.copyfile(pack, part)
        part.rename(target)
    except OSError as err:
        raise Unavailable("agent.disk_full", f"the pack cannot be kept for its node: {err.strerror}", retry_after_s=10) from err
