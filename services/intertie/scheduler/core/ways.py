"""Ways out of a broken link (ADR 0006), as far as jobs are concerned: a journal that was opened anew is compared with what is believed here, and
work that this hub does not know is taken up, by its own seal: from a signed offer (the hub was restored) or a signed grant (it was silent).

After a restore two kinds of list name such work: `JournalOpened.held`, where the journal had to be opened anew, and `HeldTold`, which every site tells
once in each new epoch. A site's word counts for that epoch only behind its list (`hearing.at_head`), so nothing is placed there, and nothing that may
run there is placed elsewhere, before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import msgspec

from intertie.contracts.base import encode
from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.job import AttemptRecord, Attribution, JobSpec, JobState, SubmitJob
from intertie.contracts.link import HeldAttempt, HeldTold, IslandedGrant, IslandedSubmit, JournalOpened, OfferBody
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused
from intertie.ids import NAME, Digest, JobId, TenantName, is_id
from intertie.lifecycle import JobEvent
from intertie.link.keeper import MOST_EPOCH
from intertie.scheduler.core import silence
from intertie.scheduler.core.interpret import NAME_LENGTH, Source, unfit
from intertie.scheduler.core.life import SPEC_BYTES, content_of, reruns
from intertie.scheduler.core.rows import VALUES_LOST, Attempt, AttemptState, Change, File, Ignored, Job, line, moved, noted

# A client key has at most 128 characters; ours for work that came by another way must never meet a client's.
ISLANDED_KEY, ADOPTED_KEY = "islanded:", "adopted:"
# Of one job: it is offered a few times. Each later attempt is numbered above what a site says here.
MOST_GENERATION = 1_000_000
# Of the names of one attempt's devices, which travel in each of its events: 3,000 GPUs.
DEVICES_BYTES = 128 * 1024
# Named in one incident; whoever holds more has one fault, not a hundred.
DOUBTS_TOLD = 5


# --- a journal opened anew ---------------------------------------------------------------------------------------------------------------


def opened(
    entry: JournalOpened, file: File, source: Source, now: datetime, *, lost_after: timedelta = silence.LOST_AFTER
) -> Change | Ignored:
    """One open attempt of the site against what its new journal holds. Named: it is held there now. Not named, and the same place: it is surely
    gone. Not named elsewhere, or claimed in yet another journal: nobody has looked where it ran, so it stays unreachable, with a date."""
    attempt = file.attempt
    if attempt is None or attempt.record.site != source.site or attempt.state is AttemptState.OFFERED:
        return Ignored("nothing of it can be there")
    evidence = f"entry {source.site}/{source.journal}/{entry.seq}"
    if entry.same_place and any(held.attempt == attempt.record.attempt for held in entry.held):
        return _about(file, noted(attempt, journal=source.journal), source, "held in a new journal", f"why: {entry.why}", evidence, now)
    of_another = attempt.journal is not None and entry.previous is not None and attempt.journal not in (entry.previous, source.journal)
    if entry.same_place and not of_another:
        why = f"{source.site} opened a new journal ({entry.why}) in the same place, searched its job folders and does not hold it"
        return silence.gone(file, actor=source.actor, why=why, evidence=evidence, now=now)
    promised = silence.promise(file, since=None, lost_after=lost_after, now=now)
    return promised if isinstance(promised, Change) else Ignored("its date is promised already")


def _about(file: File, attempt: Attempt, source: Source, what: str, why: str, evidence: str, now: datetime) -> Change:
    told = line(file.job, what, source.actor, now, now, why=why, attempt=attempt.record.attempt, evidence=evidence)
    return Change(file, file.job, attempt, source.actor, why, now, (told,))


# --- what this hub does not know -----------------------------------------------------------------------------------------------------------


def latest_first(said: JournalOpened | HeldTold) -> list[HeldAttempt]:
    """What it names, so that the latest attempt of a job is the one that the job has. A `HeldTold` leaves out what never started: whether it was
    refused, or cancelled in the hour that was lost, nobody knows any more."""
    named = [held for held in said.held if isinstance(said, JournalOpened) or held.state != "not_started"]
    return sorted(named, key=lambda held: (-held.epoch, -held.generation, held.attempt))


def adopted_job(offer: OfferBody, source: Source, now: datetime, *, version: int = 1) -> Job:
    """The job of a signed offer, as it was asked; environment values stay where they are, at the site. It is of the offer's epoch: before it is
    placed again, every site must have told what it holds."""
    if offer.site != source.site:
        raise Refused("scheduler.foreign_attempt", f"{source.site} holds an offer that was made to {offer.site}")
    job = _job(offer.job, offer.tenant, offer.spec, offer.client_key, offer.submitted_by or "unknown", offer.traceparent, now)
    content = Digest(f"{VALUES_LOST}{job.content}") if offer.spec.env_names else job.content
    return replace(job, content=content, epoch=offer.epoch, version=version)


def asks_the_same(known: Job, request: SubmitJob) -> bool:
    """Whether a repeated client key asks for what it asked for before; values that are not known any more are not compared."""
    if not known.values_lost:
        return content_of(known.job, request.spec, request.env) == known.content
    return content_of(known.job, request.spec, {}) == known.content.removeprefix(VALUES_LOST)


def check_held(held: HeldAttempt, offer: OfferBody) -> None:
    """Refuse what is held under another attempt's offer."""
    if (held.attempt, held.job, held.epoch, held.generation) != (offer.attempt, offer.job, offer.epoch, offer.generation):
        raise Refused("scheduler.foreign_attempt", f"{held.attempt[:64]} is held under the offer of {offer.attempt}")


def adopt(
    held: HeldAttempt,
    offer: OfferBody,
    attribution: Attribution,
    file: File,
    source: Source,
    now: datetime,
    *,
    evidence: str,
    version: int = 1,
) -> Change | Ignored:
    """The attempt that the site holds becomes the job's, claimed; what the site says again moves it on. Where the job has a live attempt or is
    over by now, it is a stray, and stopped. What has ended there holds nothing, and its end is on its way. `evidence`: the entry that names it;
    `version`: above every one that a lost record of it can have had."""
    check_held(held, offer)
    if offer.tenant != file.job.tenant:
        raise Refused("scheduler.foreign_attempt", f"{source.site} holds an offer of tenant {offer.tenant} for a job of {file.job.tenant}")
    if held.state == "not_started" and file.job.terminal:
        return Ignored("its job is over here, and it is over there")
    record = AttemptRecord(
        attempt=offer.attempt,
        job=offer.job,
        tenant=offer.tenant,
        number=offer.number,
        epoch=offer.epoch,
        generation=offer.generation,
        site=source.site,
        pool=offer.pool,
        devices=list(offer.devices),
        kind=offer.spec.resources.kind,
        account=offer.account,
        state=AttemptState.CLAIMED.value,
        why_here="taken up from its signed offer: this hub had lost it",
        spec=attribution.spec,
        spec_revision=attribution.spec_revision,
        offered_at=now,
        claimed_at=now,
        offering=offer.offering,
        image=offer.spec.image,
        version=version,
    )
    lease_s = offer.lease_s if reruns(file.job) else 0
    holding = held.state not in ("ended", "not_started")
    attempt = Attempt(record, wall_s=offer.spec.wall_s, holding=holding, lease_s=lease_s, journal=source.journal)
    return _taken_up(file, attempt, "adopted", record.why_here, source, now, evidence=evidence)


def _taken_up(file: File, attempt: Attempt, what: str, why: str, source: Source, now: datetime, *, evidence: str = "") -> Change:
    job, record = file.job, attempt.record
    attempts, generation = max(job.attempts, record.number), max(job.generation, record.generation)
    if file.attempt is None and job.state is JobState.QUEUED:
        after = moved(job, JobEvent.PLACE, now, site=record.site, attempts=attempts, generation=generation)
    else:
        after = replace(job, version=job.version + 1, attempts=attempts, generation=generation)
        attempt = replace(attempt, live=False)
        why = f"{why}; the job is {job.state} with another attempt or over, so this one is not the job's"
    told = line(after, what, source.actor, now, now, why=why, attempt=record.attempt, evidence=evidence)
    return Change(replace(file, attempt=None), after, attempt, source.actor, why, now, (told,))


# --- taken in by the site while the hub was silent ---------------------------------------------------------------------------------------------


def check_grant(entry: IslandedSubmit, grant: IslandedGrant, source: Source, account: str | None) -> str:
    """Refuse what the grant does not cover; what it covers and was used beyond its measure is recorded, and told (returned). `account`: what the
    tenant is mapped to at the site now; None: to nothing."""
    if broken := _no_submit(entry):
        raise Refused("scheduler.unfit", f"{source.site} says what cannot be: {broken}")
    kind = entry.spec.resources.kind
    if (grant.tenant, grant.site, grant.kind) != (entry.tenant, source.site, kind):
        raise Refused("scheduler.grant", f"{source.site} used grant {grant.grant} for tenant {entry.tenant} and {kind}")
    if entry.at >= grant.valid_until:
        raise Refused(
            "scheduler.grant", f"grant {grant.grant} ended at {grant.valid_until.isoformat()}, it was used at {entry.at.isoformat()}"
        )
    if account is None:
        raise Refused("scheduler.grant", f"tenant {entry.tenant} has no account at {source.site}")
    told = [f"{len(entry.devices)} devices, the grant is of {grant.devices}"] if len(entry.devices) > grant.devices else []
    told += [f"account {entry.account!r}, mapped to {account!r}"] if entry.account != account else []
    return "; ".join(told)


def _no_submit(entry: IslandedSubmit) -> str:
    """What of it no agent says, and would stand in the way of others: as an id, in an event, in an offer, as the last of the generations; empty if
    nothing."""
    if why := unfit(entry):
        return why
    if not (is_id(entry.job) and is_id(entry.attempt)):
        return "its job or attempt has no id"
    if not NAME.match(entry.pool):
        return f"{entry.pool[:80]!r} is no name of a pool"
    if entry.epoch > MOST_EPOCH or entry.generation > MOST_GENERATION:
        return f"generation {entry.generation:.1e} of epoch {entry.epoch:.1e} is none"
    if not entry.devices or len(set(entry.devices)) < len(entry.devices):
        return "its devices are none, or named twice"
    if max(map(len, entry.devices)) > NAME_LENGTH or sum(map(len, entry.devices)) > DEVICES_BYTES:
        return f"its {len(entry.devices)} devices have more than {DEVICES_BYTES} characters"
    if (size := len(encode(entry.spec))) > SPEC_BYTES:
        return f"the job has {size} bytes, at most {SPEC_BYTES}"
    return ""


def islanded_job(entry: IslandedSubmit, source: Source, now: datetime) -> Job:
    """What is known of it is the site's word alone, and no tenant's: it never runs anywhere else (or any site could run anything at any other)."""
    who = f"{source.site}:{entry.submitted_by}"[:128]
    spec = msgspec.structs.replace(entry.spec, site=source.site)
    return _job(entry.job, entry.tenant, spec, f"{ISLANDED_KEY}{entry.attempt}", who, "", now)


def islanded(entry: IslandedSubmit, grant: IslandedGrant, beyond: str, file: File, source: Source, now: datetime) -> Change | Ignored:
    """The site took the work in and holds its devices. A job that came by any other way is nobody's to take in."""
    own = (f"{ISLANDED_KEY}{entry.attempt}", fallback_key(entry.job))
    if file.job.tenant != entry.tenant or file.job.client_key not in own or file.job.attempts or file.job.state is not JobState.QUEUED:
        raise Refused("scheduler.foreign_attempt", f"{source.site} says that it took in job {entry.job}, which is another's")
    kind: DeviceKind = entry.spec.resources.kind
    record = AttemptRecord(
        attempt=entry.attempt,
        job=entry.job,
        tenant=entry.tenant,
        number=file.job.attempts + 1,
        epoch=entry.epoch,
        generation=max(entry.generation, file.job.generation + 1, 1),
        site=source.site,
        pool=entry.pool,
        devices=list(entry.devices),
        kind=kind,
        account=entry.account,
        state=AttemptState.CLAIMED.value,
        why_here=f"taken in by {source.site} under {grant.grant}" + (f", beyond it: {beyond}" if beyond else ""),
        spec=grant.spec,
        spec_revision=grant.spec_revision,
        offered_at=entry.at,
        claimed_at=entry.at,
        islanded=True,
        islanded_submit=True,
        image=entry.spec.image,
        version=1,
    )
    attempt = Attempt(record, wall_s=entry.spec.wall_s, journal=source.journal)
    evidence = f"entry {source.site}/{source.journal}/{entry.seq}"
    change = _taken_up(file, attempt, "taken in while islanded", record.why_here, source, now, evidence=evidence)
    return replace(change, incident=_over_use(entry, grant, beyond, source)) if beyond else change


def not_adopted(doubts: Sequence[str], source: Source) -> ReportIncident:
    """What a site says that it holds, and nothing of ours shows: the rest of its list counts."""
    told = "; ".join(doubts[:DOUBTS_TOLD]) + (f"; and {len(doubts) - DOUBTS_TOLD} more" if len(doubts) > DOUBTS_TOLD else "")
    return ReportIncident(
        key=f"scheduler.not_adopted/{source.site}",
        kind="scheduler.not_adopted",
        severity=Severity.CRITICAL,
        title=f"Site {source.site} holds {len(doubts)} attempts that are not its own",
        text=told.replace("\x00", "\ufffd")[:4_000],
        site=source.site,
    )


def _over_use(entry: IslandedSubmit, grant: IslandedGrant, beyond: str, source: Source) -> ReportIncident:
    return ReportIncident(
        key=f"scheduler.grant_exceeded/{source.site}/{entry.tenant}",
        kind="scheduler.grant_exceeded",
        severity=Severity.WARNING,
        title=f"Site {source.site} took in more than {entry.tenant}'s islanded allowance",
        text=f"Attempt {entry.attempt} under {grant.grant}: {beyond}. It is recorded and was not ended."[:4_000],
        site=source.site,
        tenant=entry.tenant,
    )


def _job(job: JobId, tenant: TenantName, spec: JobSpec, client_key: str, actor: str, traceparent: str, now: datetime) -> Job:
    return Job(
        job=job,
        tenant=tenant,
        submitted_by=actor,
        spec=spec,
        client_key=client_key or f"{ADOPTED_KEY}{job}",
        content=content_of(job, spec, {}),
        state=JobState.QUEUED,
        submitted_at=now,
        queued_at=now,
        traceparent=traceparent,
    )


def fallback_key(job: JobId) -> str:
    """For adopted work whose client key was used again meanwhile: the client's retry made another job."""
    return f"{ADOPTED_KEY}{job}"
