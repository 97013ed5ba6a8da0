"""Tenants, tokens, the login, the audit trail."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import TextIO

import click

from intertie.cli.client import Client
from intertie.cli.config import Login, save_login
from intertie.cli.out import json_option, line, local, note, print_json, table
from intertie.cli.session import connect
from intertie.contracts.http import AllowanceBody, MappingBody, QuotaBody, ReasonBody, Whoami
from intertie.contracts.identity import (
    CreateTenant,
    CreateToken,
    MappingsReply,
    Role,
    TenantRecord,
    TenantsReply,
    TokenCreated,
    TokenRecord,
    TokensReply,
)
from intertie.contracts.job import QuotasReply
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import Allowance
from intertie.ids import SiteName, TenantName
from intertie.text import language, say
from intertie.text.groups import Group


@click.group(cls=Group)
def tenant() -> None:
    """Tenants: who pays."""


@tenant.command()
@click.argument("name")
@click.option("--title", default="", help="Its full name.")
@json_option
def create(name: str, title: str, as_json: bool) -> None:
    """Create tenant NAME."""
    record = connect().post("/v1/tenants", TenantRecord, CreateTenant(tenant=TenantName(name), title=title))
    if as_json:
        print_json(record)
    else:
        line(record.tenant)


@tenant.command("list")
@json_option
def list_tenants(as_json: bool) -> None:
    """Tenants and the local accounts they become at sites."""
    client = connect()
    tenants, mappings = client.get("/v1/tenants", TenantsReply), client.get("/v1/mappings", MappingsReply)
    if as_json:
        print_json({"tenants": tenants.tenants, "mappings": mappings.mappings})
        return
    of: dict[str, list[str]] = {}
    for m in mappings.mappings:
        of.setdefault(m.tenant, []).append(f"{m.site}:{m.account or '(agent)'}")
    rows = [(t.tenant, t.title, ", ".join(of.get(t.tenant, [])) or "-") for t in tenants.tenants]
    table(("TENANT", "TITLE", "ACCOUNTS"), rows, empty=say("cli.no_tenants", language()))


@tenant.command("map")
@click.argument("name")
@click.argument("site")
@click.argument("account", required=False)
@click.option("--remove", is_flag=True, help="Take the mapping away.")
def map_account(name: str, site: str, account: str | None, remove: bool) -> None:
    """Tenant NAME becomes local ACCOUNT at SITE."""
    if (account is None) != remove:
        raise click.UsageError("give an ACCOUNT, or --remove")
    connect().put(f"/v1/tenants/{name}/mappings/{site}", MappingsReply, MappingBody(account=account))
    note(f"{name} @ {site} → {account or '-'}")


@tenant.command()
@click.argument("name")
@click.option("--kind", type=click.Choice([k.value for k in DeviceKind]), default="gpu", show_default=True, help="Of which devices.")
@click.option("--site", default=None, help="At this site only (default: everywhere together).")
@click.option("--limit", type=click.IntRange(0), default=None, help="Devices at once; without it the quota is removed.")
@json_option
def quota(name: str, kind: str, site: str | None, limit: int | None, as_json: bool) -> None:
    """How many devices NAME may hold at once."""
    body = QuotaBody(site=SiteName(site) if site else None, kind=DeviceKind(kind), limit=limit)
    reply = connect().put(f"/v1/tenants/{name}/quota", QuotasReply, body)
    if as_json:
        print_json(reply)
        return
    table(
        ("TENANT", "SITE", "KIND", "LIMIT"),
        [(q.tenant, q.site or "*", q.kind, q.limit) for q in reply.quotas],
        empty=say("cli.no_quotas", language()),
    )


@tenant.command()
@click.argument("name")
@click.argument("amount")
@json_option
def allowance(name: str, amount: str, as_json: bool) -> None:
    """What may be spent for NAME before new jobs wait: an AMOUNT, or `unlimited`."""
    try:
        value = None if amount == "unlimited" else Decimal(amount)
    except InvalidOperation as err:
        raise click.UsageError(f"{amount!r} is neither an amount nor `unlimited`") from err
    record = connect().put(f"/v1/tenants/{name}/allowance", Allowance, AllowanceBody(amount=value))
    if as_json:
        print_json(record)
    else:
        line(f"{record.tenant}  {record.amount if record.amount is not None else 'unlimited'} {record.currency}")


@click.group(cls=Group)
def token() -> None:
    """API tokens: who acts."""


@token.command("create")
@click.argument("name")
@click.option(
    "--role",
    "roles",
    multiple=True,
    required=True,
    type=click.Choice([r.value for r in Role if r not in (Role.SERVICE, Role.SITE)]),
    help="What it may do; may be repeated.",
)
@click.option("--tenant", default=None, help="Whose: needed for tenant_admin and tenant_user.")
@click.option("--site", default=None, help="Whose: needed for site_owner.")
@click.option("--days", type=click.IntRange(1, 366), default=90, show_default=True, help="How long it is good.")
@json_option
def create_token(name: str, roles: tuple[str, ...], tenant: str | None, site: str | None, days: int, as_json: bool) -> None:
    """Make a token for NAME (a person or a program)."""
    body = CreateToken(
        name=name,
        roles=[Role(r) for r in roles],
        tenant=TenantName(tenant) if tenant else None,
        site=SiteName(site) if site else None,
        valid_days=days,
    )
    made = connect().post("/v1/tokens", TokenCreated, body)
    if as_json:
        print_json(made)
        return
    note(say("cli.token_once", language()))
    line(made.token)


@token.command("list")
@json_option
def list_tokens(as_json: bool) -> None:
    """Tokens, without their secrets."""
    reply = connect().get("/v1/tokens", TokensReply)
    if as_json:
        print_json(reply)
        return
    rows = [
        (
            t.id,
            t.name,
            ",".join(t.roles),
            t.tenant or t.site or "-",
            local(t.expires_at),
            "revoked" if t.revoked_at else local(t.last_used_at),
        )
        for t in reply.tokens
    ]
    table(("ID", "NAME", "ROLES", "FOR", "EXPIRES", "LAST USED"), rows, empty=say("cli.no_tokens", language()))


@token.command()
@click.argument("id")
@click.option("--reason", default="", help="Why; kept in the audit trail.")
def revoke(id: str, reason: str) -> None:
    """Revoke a token; claims already given from it end within five minutes."""
    record = connect().post(f"/v1/tokens/{id}/revoke", TokenRecord, ReasonBody(reason=reason))
    line(record.id)


@click.command()
@click.option("--url", required=True, help="Address of the hub.")
@click.option("--token-file", type=click.File("r"), default=None, help="File with the token; `-` for standard input (default: asked for).")
def login(url: str, token_file: TextIO | None) -> None:
    """Remember a hub and a token, after trying them."""
    secret = token_file.read().strip() if token_file else click.prompt("token", hide_input=True, err=True).strip()
    known = Login(url=url.rstrip("/"), token=secret)
    Client(known).get("/v1/whoami", Whoami)
    path = save_login(known)
    note(say("cli.logged_in", language(), url=known.url, path=path))
