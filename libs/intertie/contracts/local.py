"""The owner's own door: what `intertie local` and the agent say to each other over the unix socket `agent.sock` (HTTP, JSON).

    POST /v1/jobs               LocalSubmit → LocalJob
    GET  /v1/jobs               → LocalJobs
    GET  /v1/jobs/{job}         → LocalJob
    GET  /v1/jobs/{job}/log     ?offset= → LocalLog
    POST /v1/jobs/{job}/cancel  → LocalJob
    GET  /v1/status             → LocalStatus

Who calls is what the kernel says of the other end of the socket. An error is a `contracts.base.Problem`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from intertie.contracts.base import Contract, Instant, NonNegative, Positive, Text
from intertie.contracts.site import PoolInventory
from intertie.ids import DeviceId, JobId, PoolName, SiteName


class LocalSubmit(Contract, frozen=True, kw_only=True):
    """Run this here, now or when devices are free."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    script: Annotated[str, msgspec.Meta(min_length=1, max_length=131_072)]
    """Run by its `#!` line, `/bin/sh` without one, in `cwd`."""
    cwd: Annotated[str, msgspec.Meta(pattern="^/", max_length=4_096)]
    env: dict[str, str] = {}
    slots: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    gpus: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    wall_s: Positive | None = None
    """None: no limit but a year."""
    as_user: str = ""
    """Only root may name another user than itself."""


class LocalJob(Contract, frozen=True, kw_only=True):
    """A local job as its user sees it: `waiting` · `preparing` · `running` · `ended`."""

    job: JobId
    name: str
    user: str
    word: str
    pool: PoolName
    devices: list[DeviceId]
    submitted: Instant
    started: Instant | None = None
    ended: Instant | None = None
    outcome: str | None = None
    exit_code: int | None = None
    reason: Text = ""
    ran_us: NonNegative = 0


class LocalJobs(Contract, frozen=True, kw_only=True):
    """Newest first; all users' for root and the agent's own user, else the caller's."""

    jobs: list[LocalJob]


class LocalLog(Contract, frozen=True, kw_only=True):
    """Whole characters of a log; go on at `next_offset` until `ended`."""

    offset: NonNegative
    next_offset: NonNegative
    text: str
    total: NonNegative
    ended: bool


class LocalStatus(Contract, frozen=True, kw_only=True):
    """The site as its agent sees it, whoever else is away."""

    site: SiteName
    node: str
    version: str
    single_user: bool
    agent_started: Instant
    islanded_since: Instant | None
    """None while the hub is heard."""
    lanes: dict[str, str]
    """Each lane: `heard`, or `silent since …`, or its trouble."""
    pools: list[PoolInventory]
    lent_jobs: NonNegative
    """Federation attempts that hold devices now."""
    local_running: NonNegative
    local_waiting: NonNegative
    journal_entries: NonNegative
    """Entries not yet acknowledged by the hub."""
    no_gpu: str = ""
    """Why there is no GPU here, as the driver says it; empty if there are some or none were looked for."""
