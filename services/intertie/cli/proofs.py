"""What was proven of a pool and where it differs from its declaration: lines of `site show`, and the owner's `intertie local probe`."""

from __future__ import annotations

import click

from intertie.cli.client import Client
from intertie.cli.local_door import call, find_socket
from intertie.cli.out import ago, json_option, line, local, print_json, table
from intertie.cli.session import connect
from intertie.contracts.observed import Drift
from intertie.contracts.probe import LocalProbe, PoolProof, ProbeOutcome, ProbeReport, ProofsReply
from intertie.errors import NotFound
from intertie.ids import PoolName
from intertie.text import known, language, say


def proofs_of(client: Client, site: str) -> dict[PoolName, PoolProof]:
    """By pool; empty from a hub that keeps none."""
    try:
        return {one.pool: one for one in client.get(f"/v1/sites/{site}/proofs", ProofsReply).pools}
    except NotFound:
        return {}


def proof_lines(proof: PoolProof | None) -> list[str]:
    """The last probe with its age and numbers, the last that passed if that is another, and each difference."""
    if proof is None:
        return []
    lang = language()
    lines = [probe_line(proof.last) if proof.last is not None else say("proof.none", lang)]
    if proof.last is not None and proof.last.outcome is not ProbeOutcome.PASSED and proof.passed_at is not None:
        lines.append(say("proof.passed_before", lang, age=ago(proof.passed_at)))
    return [*lines, *(drift_line(one) for one in proof.drift)]


def probe_line(report: ProbeReport) -> str:
    said = say(f"proof.{report.outcome}", language(), age=ago(report.at), device=report.device or "-")
    numbers = "  ".join(f"{name} {value}" for name, value in sorted(report.measures.items()))
    return "  ".join(part for part in (said, report.reason, numbers) if part)


def drift_line(one: Drift) -> str:
    lang = language()
    what = say(f"drift.{one.what}", lang) if known(f"drift.{one.what}") else one.what
    return say("proof.drift", lang, what=what, declared=one.declared, observed=one.observed)


@click.command()
@click.argument("pool", required=False)
@json_option
@click.pass_obj
def probe(data: str | None, pool: str | None, as_json: bool) -> None:
    """What the small known job last proved of each pool here; with POOL, one now (also while lending is paused)."""
    method, target = ("POST", f"/v1/probe/{pool}") if pool else ("GET", "/v1/probe")
    told = call(find_socket(data), method, target, list[LocalProbe])
    if as_json:
        print_json(told)
        return
    lang = language()
    rows = [
        (
            one.pool,
            probe_line(one.last) if one.last is not None else say("proof.none", lang),
            say("proof.running", lang) if one.running else one.waits,
        )
        for one in told
    ]
    table((say("proof.pool", lang), say("proof.last", lang), say("proof.next", lang)), rows, empty="-")
    if pool:
        line(say("proof.asked", lang, pool=pool))


@click.command()
@click.argument("name")
@click.option("--pool", help="This pool only.")
@click.option("--limit", type=click.IntRange(1, 100), default=8, show_default=True, help="Probes of each pool.")
@json_option
def proof(name: str, pool: str | None, limit: int, as_json: bool) -> None:
    """What the daily probes of NAME's pools have shown, newest first, and where a pool differs from its declaration."""
    told = connect().get(f"/v1/sites/{name}/proofs", ProofsReply, {"pool": pool, "limit": limit})
    if as_json:
        print_json(told)
        return
    lang = language()
    rows = [(one.pool, local(report.at), probe_line(report)) for one in told.pools for report in one.trend]
    table((say("proof.pool", lang), say("proof.when", lang), say("proof.last", lang)), rows, empty=say("proof.none", lang))
    for one in told.pools:
        for differing in one.drift:
            line(f"{one.pool}: {drift_line(differing)}")
