"""Sites: invite, join, list, show, cordon, drain, revoke."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import click
from msgspec import structs

from intertie.cli.client import Client
from intertie.cli.drill import drill_line
from intertie.cli.leave import leave, receipt
from intertie.cli.out import ago, json_option, line, local, note, print_json, reason_option, table
from intertie.cli.pools import phase_word
from intertie.cli.proofs import proof, proof_lines, proofs_of
from intertie.cli.session import connect
from intertie.cli.site_lines import head_lines, kind_text, pool_lines, what_text
from intertie.contracts.http import CloseBody, CordonBody
from intertie.contracts.identity import Invited, InviteSite, SiteKeyRecord
from intertie.contracts.site import Freshness, PoolRecord, SiteKind, SiteRecord, SitesReply, TaskType
from intertie.errors import NotFound
from intertie.ids import PoolName, SiteName, TenantName
from intertie.text import language, say
from intertie.text.groups import Group


@click.group(cls=Group)
def site() -> None:
    """Sites: clusters that joined, or will."""


@site.command()
@click.argument("name")
@click.option("--kind", type=click.Choice([k.value for k in SiteKind]), default="machines", show_default=True, help="What the site runs.")
@click.option("--owner", required=True, help="Who answers for the site: a person or a team.")
@click.option("--tenant", required=True, help="The owner's own tenant.")
@click.option("--title", default="", help="Its full name.")
@click.option("--hours", type=click.IntRange(1, 720), default=72, help="How long the token is good.")
@json_option
def invite(name: str, kind: str, owner: str, tenant: str, title: str, hours: int, as_json: bool) -> None:
    """Make a one-time join token for site NAME."""
    client = connect()
    body = InviteSite(
        site=SiteName(name), kind=SiteKind(kind), title=title, owner=owner, owner_tenant=TenantName(tenant), valid_hours=hours
    )
    invited = client.post("/v1/invitations", Invited, body)
    if as_json:
        print_json(invited)
        return
    note(say("cli.invited", language(), url=client.url, until=local(invited.expires_at)))
    line(invited.token)


@site.command()
@click.option("--hub", "hub_url", required=True, help="Address of the hub, such as https://hub.example.")
@click.option("--token-file", type=click.File("r"), required=True, help="The one-time token; `-` reads it from standard input.")
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="The site's folder (keys, journal, jobs).")
@click.option("--profile", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="What the pool is, as TOML or JSON.")
@click.option("--interconnect", default="", help="Between GPUs, which cannot be seen from here: nvlink, pcie, infiniband or none.")
@click.option("--slots", type=click.IntRange(1), default=None, help="CPU slots to declare (default: the CPUs seen).")
def join(hub_url: str, token_file: TextIO, data: Path | None, profile: Path | None, interconnect: str, slots: int | None) -> None:
    """Join this machine to a hub. Keys are made here and never leave; only their public halves travel.

    Without --profile the machine is looked at: GPUs, their memory, CPUs. What is lent, and for which tasks, is the owner's to say in a profile.
    """
    from intertie.cli.agent import join_site

    joined, folder = join_site(hub_url, token_file.read().strip(), data, profile, interconnect=interconnect, slots=slots)
    note(say("cli.joined", language(), site=joined.site, data=folder))
    line(joined.site)


@site.command("list")
@click.option("--accelerator", help="Only pools with this GPU model.")
@click.option("--task-type", type=click.Choice([t.value for t in TaskType]), default=None, help="Only pools that take this type of task.")
@json_option
def list_sites(accelerator: str | None, task_type: str | None, as_json: bool) -> None:
    """Sites and their pools, by capability."""
    reply = all_sites(connect(), {"accelerator": accelerator, "task_type": task_type})
    if as_json:
        print_json(reply)
        return
    marks = {s.site: marked(s) for s in reply.sites}
    rows = [pool_row(pool, marks.get(pool.site, "")) for pool in reply.pools]
    pools_of = {pool.site for pool in reply.pools}
    rows += [
        (s.site, "-", kind_text(s.kind), say(f"freshness.{s.freshness}", language()) + marks[s.site], "-", "-", ago(s.last_heard))
        for s in reply.sites
        if s.site not in pools_of
    ]
    table(("SITE", "POOL", "KIND", "FRESHNESS", "FREE", "PHASE", "HEARD"), rows, empty=say("cli.no_sites", language()))


def all_sites(client: Client, query: Mapping[str, str | None]) -> SitesReply:
    """Every page of the answer, as one."""
    whole = page = client.get("/v1/sites", SitesReply, query)
    while page.next:
        page = client.get("/v1/sites", SitesReply, {**query, "after": page.next})
        whole = structs.replace(whole, sites=[*whole.sites, *page.sites], pools=[*whole.pools, *page.pools], next="")
    return structs.replace(whole, next="")


def marked(record: SiteRecord) -> str:
    """What stands beside a site's freshness in a list, if it takes no work of its own will."""
    found = "left" if record.left_at is not None else "paused" if record.paused else "" if record.accepting else "not_accepting"
    return f" · {say(f'site.mark_{found}', language())}" if found else ""


def pool_row(pool: PoolRecord, mark: str = "") -> tuple[str, str, str, str, str, str, str]:
    """A pool as a row; what is not known is `?`, never zero."""
    lang, free = language(), "?"
    if pool.inventory is not None and pool.freshness == "fresh":
        free = str(sum(1 for d in pool.inventory.devices if d.state == "free"))
    marks = [say(f"site.mark_{word}", lang) for word, on in (("cordoned", pool.cordoned), ("draining", pool.draining)) if on]
    return (
        pool.site,
        pool.pool,
        kind_text(pool.kind),
        say(f"freshness.{pool.freshness}", lang) + mark,
        f"{free}/{pool.profile.lendable.devices} {what_text(pool)}",
        " ".join([phase_word(pool.phase), *marks]),
        ago(pool.last_heard),
    )


@site.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """One site: its pools, what they declare and hold, how old that is."""
    reply = all_sites(connect(), {"site": name})
    if not reply.sites:
        raise NotFound("site.not_found", f"no site {name} is known", next_step="intertie site list")
    if as_json:
        print_json(reply)
        return
    for s in reply.sites:
        for words in head_lines(s):
            line(words)
        if said := drill_line(s, reply.drill_max_age_days):
            line(said)
    proven = proofs_of(connect(), name)
    for p in reply.pools:
        line()
        for words in [*pool_lines(p), *[f"  {said}" for said in proof_lines(proven.get(p.pool))]]:
            line(words)


def _cordon(name: str, pool: str | None, *, on: bool, drain: bool, reason: str) -> None:
    body = CordonBody(pool=PoolName(pool) if pool else None, on=on, drain=drain, reason=reason)
    connect().post(f"/v1/sites/{name}/cordon", SitesReply, body)
    where = f"{name}/{pool}" if pool else name
    note(say("cli.cordoned" if on else "cli.uncordoned", language(), site=where))


@site.command()
@click.argument("name")
@click.option("--pool", help="This pool only.")
@reason_option("Why: it is shown to those who wait.")
def cordon(name: str, pool: str | None, reason: str) -> None:
    """Give NAME no new work. What runs goes on. `site uncordon` takes it back."""
    _cordon(name, pool, on=True, drain=False, reason=reason)


@site.command()
@click.argument("name")
@click.option("--pool", help="This pool only.")
@click.option("--reason", default="lifted", help="Why.")
def uncordon(name: str, pool: str | None, reason: str) -> None:
    """Let NAME take work again."""
    _cordon(name, pool, on=False, drain=False, reason=reason)


@site.command()
@click.argument("name")
@click.option("--pool", help="This pool only.")
@reason_option("Why: it is shown to those who wait.")
@click.option("--wait", is_flag=True, help="Wait until nothing of ours runs there.")
def drain(name: str, pool: str | None, reason: str, wait: bool) -> None:
    """Give NAME no new work and wait for what runs to end."""
    import time

    _cordon(name, pool, on=True, drain=True, reason=reason)
    while wait:
        reply = all_sites(connect(send_waiting=False), {"site": name})
        left = still_running([p for p in reply.pools if pool in (None, p.pool)])
        if left == 0:
            return
        if sys.stderr.isatty():
            note(say("cli.drain_unknown", language(), site=name) if left is None else say("cli.drain_left", language(), count=left))
        time.sleep(2)


@site.command()
@click.argument("name")
@reason_option("Why; it stands in the audit.")
@json_option
def revoke(name: str, reason: str, as_json: bool) -> None:
    """Take NAME's keys away: a stolen key, a site that leaves. It is dropped at once and placed no work; what runs there goes on."""
    record = connect().post(f"/v1/sites/{name}/revoke", SiteKeyRecord, CloseBody(reason=reason))
    if as_json:
        print_json(record)
        return
    note(say("cli.revoked_site", language(), site=record.site))


def still_running(pools: Sequence[PoolRecord]) -> int | None:
    """Attempts that the site says run in these pools; None while it is not heard or has not said: that is no proof of nothing."""
    told = [p.inventory for p in pools if p.inventory is not None and p.freshness is Freshness.FRESH]
    return sum(inventory.running for inventory in told) if len(told) == len(pools) else None


site.add_command(leave)
site.add_command(proof)
site.add_command(receipt)
