"""Builders for the agent's tests: an attempt, an offer, a pool. Every field that a test does not speak of has a value that fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from intertie.agent.core.devices import Pool
from intertie.agent.core.model import Attempt, State
from intertie.clock import kernel_boot
from intertie.contracts.job import Attribution, JobSpec, Resources
from intertie.contracts.link import OfferBody, Sealed
from intertie.contracts.site import Device, DeviceKind, Lendable, PoolProfile, TaskType
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SiteName, SpecId, TenantName, mint

# An unprivileged account that every Debian has and that no part of a hub takes (databases never run as `nobody`).
GUEST = "nobody" if os.geteuid() == 0 else ""
OTHER = "games" if os.geteuid() == 0 else ""


def spec(script: str = "exit 0\n", *, slots: int = 1, gpus: int = 0, wall_s: int = 60, outputs: list[str] | None = None) -> JobSpec:
    return JobSpec(name="test", script=script, resources=Resources(slots=slots, gpus=gpus), wall_s=wall_s, outputs=outputs or [])


def attempt(
    script: str = "exit 0\n",
    *,
    state: State = State.STAGING,
    account: str = GUEST,
    wall_s: int = 60,
    outputs: list[str] | None = None,
    env: dict[str, str] | None = None,
    devices: tuple[str, ...] = ("slot-1",),
    kind: DeviceKind = DeviceKind.SLOT,
    boot: str | None = None,
    **fields: object,
) -> Attempt:
    made = Attempt(
        id=AttemptId(mint("att")),
        job=JobId(mint("job")),
        state=state,
        pool=PoolName("main"),
        kind=kind,
        devices=[DeviceId(device) for device in devices],
        spec=spec(script, wall_s=wall_s, outputs=outputs, slots=max(1, len(devices))),
        account=account,
        env=env or {},
        tenant=TenantName("acme"),
        epoch=1,
        generation=1,
        kernel_boot=boot or kernel_boot(),
    )
    return msgspec.structs.replace(made, **fields) if fields else made


def pool(slots: int = 4, *, name: str = "main", gpus: tuple[str, ...] = (), lend: int | None = None) -> Pool:
    count = len(gpus) or slots
    profile = PoolProfile(
        pool=PoolName(name),
        accelerator="A100-SXM4-80GB" if gpus else "none",
        count=count,
        memory_mib=81_920 if gpus else 4_096,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=count if lend is None else lend),
    )
    kind = DeviceKind.GPU if gpus else DeviceKind.SLOT
    names = gpus or tuple(f"slot-{n}" for n in range(1, slots + 1))
    return Pool(profile, [Device(id=DeviceId(n), kind=kind, node="here") for n in names])


def offer(
    *,
    script: str = "exit 0\n",
    site: str = "lab",
    tenant: str = "acme",
    account: str = GUEST,
    pool: str = "main",
    devices: tuple[str, ...] = ("slot-1",),
    generation: int = 1,
    epoch: int = 1,
    job: str | None = None,
    attempt: str | None = None,
    outputs: list[str] | None = None,
    gpus: int = 0,
    wall_s: int = 60,
    start_within_s: int = 30,
    start_by_s: int = 600,
    env: dict[str, str] | None = None,
    lease_s: int = 0,
    after: Sequence[AttemptId] = (),
) -> OfferBody:
    job_id, attempt_id = JobId(job or mint("job")), AttemptId(attempt or mint("att"))
    told = Attribution(
        tenant=TenantName(tenant),
        job=job_id,
        attempt=attempt_id,
        site=SiteName(site),
        pool=PoolName(pool),
        spec=SpecId("spec-1"),
        spec_revision=1,
    )
    return OfferBody(
        job=job_id,
        attempt=attempt_id,
        number=generation,
        epoch=epoch,
        generation=generation,
        tenant=TenantName(tenant),
        site=SiteName(site),
        pool=PoolName(pool),
        account=account,
        spec=spec(script, slots=1 if gpus else len(devices), gpus=gpus, outputs=outputs, wall_s=wall_s),
        env=env or {},
        devices=[DeviceId(device) for device in devices],
        start_within_s=start_within_s,
        start_by_s=start_by_s,
        lease_s=lease_s,
        after=list(after),
        attribution=Sealed(payload=msgspec.json.encode(told).decode(), signer="scheduler", signature="-"),
    )


def root_is_a_mount() -> bool:
    """False in a chroot whose root is a plain folder: no mount namespace can be made private there."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return any(line.split()[4] == "/" for line in lines)
