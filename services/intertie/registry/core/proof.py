"""Declared against seen, and today's probe against those before: each difference as a line with its numbers. What was not read differs from nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from statistics import median

from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.observed import Drift
from intertie.contracts.probe import ProbeOutcome, ProbeReport
from intertie.contracts.site import AccessMode, DeviceState, PoolRecord, plain_model
from intertie.ids import PoolName, SiteName
from intertie.registry.core.profile import NO_ACCELERATOR

# A driver keeps some of a card's memory to itself; a card of the next size differs by a fifth at least.
MEMORY_SHARE = 0.05
# Below this share of what it was, a measure has drifted: a device is alone with the job, processor and disk are shared with others.
LEAST_SHARE: Mapping[str, float] = {"device_copy_mib_s": 0.8, "to_device_mib_s": 0.6, "cpu_hash_mib_s": 0.5, "disk_write_mib_s": 0.3}
# Probes that passed before, of which the middle is what it was; fewer say nothing yet.
LEAST_PAST = 5


def drift(record: PoolRecord, probes: Sequence[ProbeReport]) -> list[Drift]:
    """`probes`: newest first."""
    if record.profile.accelerator == NO_ACCELERATOR:
        return _trend(probes)
    return [*_counted(record), *_seen(record), *_trend(probes)]


def _counted(record: PoolRecord) -> list[Drift]:
    inventory, declared = record.inventory, record.profile.count
    # A pool in which its owner alone decides shows no devices: that says nothing of how many it has.
    if inventory is None or inventory.native is not None or record.profile.mode is AccessMode.SERVICE:
        return []
    found = len(inventory.devices)
    lost = sum(device.state is DeviceState.LOST for device in inventory.devices)
    drifts = []
    if found != declared:
        text = f"{declared} devices are declared, the site sees {found}"
        drifts.append(Drift(what="count", declared=str(declared), observed=str(found), text=text))
    if lost:
        drifts.append(Drift(what="lost", declared="0", observed=str(lost), text=f"{lost} of {found} devices are lost"))
    return drifts


def _seen(record: PoolRecord) -> list[Drift]:
    profile, seen = record.profile, record.inventory.seen if record.inventory is not None else None
    if seen is None:
        return []
    drifts = []
    strange = {
        model: count for model, count in seen.models.items() if plain_model(model).lower() != plain_model(profile.accelerator).lower()
    }
    missing = record.inventory is not None and len(record.inventory.devices) < profile.count
    if strange or (missing and seen.others):
        told = ", ".join(f"{count}×{model}" for model, count in sorted((strange or seen.others).items()))[:300]
        where = "in the pool" if strange else "on its machines and in no pool"
        drifts.append(
            Drift(what="model", declared=profile.accelerator, observed=told, text=f"{profile.accelerator} is declared; {where}: {told}")
        )
    if seen.memory_mib is not None and abs(seen.memory_mib - profile.memory_mib) > profile.memory_mib * MEMORY_SHARE:
        text = f"{profile.memory_mib} MiB are declared, the smallest device has {seen.memory_mib} MiB"
        drifts.append(Drift(what="memory", declared=f"{profile.memory_mib} MiB", observed=f"{seen.memory_mib} MiB", text=text))
    if seen.links is not None and (seen.links > 0) != (profile.interconnect.lower() == "nvlink"):
        observed = f"{seen.links} active NVLinks"
        text = f"{profile.interconnect} is declared, the device with the fewest has {observed}"
        drifts.append(Drift(what="interconnect", declared=profile.interconnect, observed=observed, text=text))
    if seen.unread:
        observed = ", ".join(f"{metric} of {count}" for metric, count in sorted(seen.unread.items()))[:300]
        text = f"for ten minutes or more could not be read: {observed} device(s)"
        drifts.append(Drift(what="unread", declared="readable", observed=observed, text=text))
    return drifts


def _trend(probes: Sequence[ProbeReport]) -> list[Drift]:
    if not probes or probes[0].outcome is ProbeOutcome.FAILED:
        return []
    last, past = probes[0], [probe for probe in probes[1:] if probe.outcome is ProbeOutcome.PASSED]
    drifts = []
    for measure, share in LEAST_SHARE.items():
        before = [probe.measures[measure] for probe in past if measure in probe.measures]
        if measure not in last.measures or len(before) < LEAST_PAST:
            continue
        was, now = round(median(before)), last.measures[measure]
        if now < was * share:
            text = f"{measure} is {now}, the middle of {len(before)} probes before is {was}"
            drifts.append(Drift(what=measure, declared=str(was), observed=str(now), text=text))
    return drifts


def drifted(site: SiteName, pool: PoolName, found: Sequence[Drift]) -> ReportIncident:
    """Opened with the numbers, renewed when they change, over when nothing differs."""
    return ReportIncident(
        key=f"registry.drift/{site}/{pool}",
        kind="registry.drift",
        severity=Severity.WARNING,
        title=f"Pool {pool} at site {site} is not what was declared" if found else f"Pool {pool} at site {site} is what was declared",
        text="; ".join(one.text for one in found)[:3_900] or "Nothing differs any more.",
        site=site,
        recovered=not found,
    )


def probed(report: ProbeReport) -> ReportIncident | None:
    """A probe that failed, or passed again; None for one that proves nothing: it changes nothing."""
    if report.outcome is ProbeOutcome.UNPROVEN:
        return None
    passed = report.outcome is ProbeOutcome.PASSED
    where = f"pool {report.pool} at site {report.site}"
    return ReportIncident(
        key=f"registry.probe/{report.site}/{report.pool}",
        kind="registry.probe",
        severity=Severity.WARNING,
        title=f"The probe of {where} passed" if passed else f"The probe of {where} failed",
        text="It passed again." if passed else f"On {report.device or 'one of its devices'}: {report.reason}"[:3_900],
        site=report.site,
        recovered=passed,
    )


def unproven(probes: Sequence[ProbeReport], passed_at: datetime | None, *, now: datetime, max_age_days: int) -> str:
    """Why a pool's capability is not proven by the hub's policy; empty if it is, or none is asked for. `passed_at`: when the last that passed was received.

    A probe that could see nothing (unproven) takes no proof away that is young enough.
    """
    if max_age_days == 0:
        return ""
    if probes and probes[0].outcome is ProbeOutcome.FAILED:
        return f"the last probe failed: {probes[0].reason}"[:1_000]
    if passed_at is None:
        return "no probe has passed yet"
    if now - passed_at > timedelta(days=max_age_days):
        return f"the last probe that passed is {(now - passed_at).days} days old, {max_age_days} are allowed"
    return ""
