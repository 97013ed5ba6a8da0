"""Job offerings as the owner tells them: bounded, priced, on a pool of the site, and never of cards that are lent already. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.site import AccessMode, JobOffering, PoolRecord
from intertie.errors import Refused
from intertie.ids import PoolName, SiteName
from intertie.registry.core.shares import share_objection

# Of an hour of one device, in any currency; more is a mistyped number, and no product of it is money.
MOST_PRICE = 1_000_000_000
# Offerings of one site; an owner who lists more is not describing offers to people.
MOST = 64


@dataclass(frozen=True, slots=True)
class Offered:
    """A site's word after the rules: pools whose record changes, and what was not taken, by name."""

    pools: Sequence[PoolRecord]
    refused: Mapping[str, Refused]


def take(told: Sequence[JobOffering], pools: Sequence[PoolRecord]) -> Offered:
    """All offerings of the site as they are now. One that breaks a rule is left out, and the others stand."""
    by_name = {record.pool: record for record in pools}
    kept: dict[PoolName, list[JobOffering]] = {pool: [] for pool in by_name}
    refused: dict[str, Refused] = {}
    names: set[str] = set()
    for one in told:
        why = _objection(one, by_name.get(one.pool), kept.get(one.pool, []), names, len(names))
        if why is None:
            names.add(one.name)
            kept[one.pool].append(one)
        else:
            refused[one.name] = why
    changed = [
        msgspec.structs.replace(record, offerings=kept[pool], version=record.version + 1)
        for pool, record in by_name.items()
        if kept[pool] != record.offerings
    ]
    return Offered(changed, refused)


def _objection(one: JobOffering, pool: PoolRecord | None, beside: Sequence[JobOffering], names: set[str], count: int) -> Refused | None:
    """The first rule that the offering breaks."""
    if count >= MOST:
        return _refused("many", one, f"is beyond {MOST} of one site", "join offerings of one kind")
    if one.name in names:
        return _refused("twice", one, "is named twice", "give each offering a name of its own")
    if pool is None:
        return _refused("pool", one, f"is of pool {one.pool}, which the site does not declare", "declare the pool first")
    if pool.profile.mode is not AccessMode.SERVICE:
        text = f"is of pool {one.pool}, in which the hub decides where work lands ({pool.profile.mode})"
        return _refused("managed", one, text, f"intertie pool mode SITE/{one.pool} --mode service, and declare it so")
    if one.max_devices > one.devices:
        return _refused("devices", one, f"gives one request {one.max_devices} devices, and all together {one.devices}", "raise devices")
    if not 0 <= one.price_per_hour <= MOST_PRICE:
        return _refused("price", one, f"asks no price from 0 to {MOST_PRICE} for an hour", "give the price of one device-hour")
    if (why := share_objection(pool.profile, one.devices + sum(other.devices for other in beside))) is not None:
        return _refused("share", one, f"counts cards twice: {why.text}", why.next_step)
    return None


def _refused(what: str, one: JobOffering, text: str, next_step: str) -> Refused:
    return Refused(f"registry.offering.{what}", f"job offering {one.name} {text}", next_step=next_step)


def report(site: SiteName, refused: Mapping[str, Refused]) -> ReportIncident:
    """What a person is told of offerings that were not taken; nothing refused: it is over."""
    lines = [f"{why.text} ({why.code}). {why.next_step}" for _, why in sorted(refused.items())]
    return ReportIncident(
        key=f"registry.job_offering/{site}",
        kind="registry.job_offering",
        severity=Severity.WARNING,
        title=f"{len(refused)} job offerings of site {site} were not taken" if refused else f"The job offerings of site {site} are taken",
        text="\n".join(lines)[:3_900] or "A later word was accepted.",
        site=site,
        recovered=not refused,
    )
