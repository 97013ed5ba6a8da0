"""`intertie audit …`: who did what, and the proof that nothing of it was changed, checked here and not believed."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from intertie.cli.client import Client
from intertie.cli.out import EXIT_FAILED, json_option, line, local, note, now, print_json, read_as, table
from intertie.cli.session import connect
from intertie.contracts.audit import (
    AuditAnchor,
    AuditAnchorsReply,
    AuditChainReply,
    AuditExport,
    AuditLink,
    AuditVerdict,
    ServiceChain,
)
from intertie.contracts.base import decode, encode
from intertie.contracts.identity import AuditReply
from intertie.errors import Refused
from intertie.text import language
from intertie.text.groups import Group
from intertie.trust.chain import verify_export

SERVICES = ("registry", "scheduler", "metering", "identity", "incident")
PAGE = 500

TEXTS = {
    "whole": (
        "{rows} rows in {chains} chains follow from one another and from {anchors} anchors, signed by {signer}",
        "{chains} 条审计链共 {rows} 行,与 {anchors} 个锚点首尾相符,锚点签名密钥 {signer}",
    ),
    "young": (
        "{service}: {count} rows are younger than its last anchor; these could have been removed unseen",
        "{service}:有 {count} 行晚于最近锚点,若被删除无法发现",
    ),
    "found": ("{count} things are wrong", "发现 {count} 处异常"),
    "unpinned": (
        "the anchors' key was taken from the anchors themselves: compare it with the one you know, or pass --key",
        "锚点密钥取自锚点本身:请与已知密钥核对,或用 --key 指定",
    ),
    "exported": ("{rows} rows written to {path}", "已导出 {rows} 行到 {path}"),
}


def _say(key: str, **values: object) -> str:
    english, chinese = TEXTS[key]
    return (chinese if language() == "zh" else english).format(**values)


@click.group(cls=Group)
def audit() -> None:
    """Who did what, on what, why, with which result: `intertie audit SERVICE`; and its proof: verify, export, heads."""


def _listing(service: str) -> click.Command:
    @click.command(service, short_help=f"Audit rows of the {service}, newest first.")
    @click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="How many rows.")
    @json_option
    def listing(limit: int, as_json: bool) -> None:
        """Who did what there, on what, why, with which result; newest first."""
        reply = connect().get(f"/v1/audit/{service}", AuditReply, {"limit": limit})
        if as_json:
            print_json(reply)
            return
        rows = [(r.id, local(r.at), r.actor, r.action, r.target, r.result, r.reason) for r in reply.rows]
        table(("#", "WHEN", "WHO", "ACTION", "ON", "RESULT", "WHY"), rows, empty="-")

    return listing


for _service in SERVICES:
    audit.add_command(_listing(_service))


@audit.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--heads", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Heads kept outside (`intertie audit heads`).")
@click.option("--key", default="", help="Identity's public key, if you know it: anchors of any other are refused.")
@json_option
def verify(file: Path | None, heads: Path | None, key: str, as_json: bool) -> None:
    """Compute every chain anew, here, and compare it with the rows and with the anchors; exit 1 if anything differs.

    With FILE (of `audit export`) no hub is asked. --heads finds a chain that was cut back even by someone who also rules identity.
    """
    export = _exported(file) if file is not None else collect(connect())
    verdict = verify_export(export, key=key, kept=_kept(heads) if heads is not None else ())
    if as_json:
        print_json(verdict)
    else:
        _tell(verdict, chains=len(export.chains), pinned=bool(key))
    if verdict.findings:
        sys.exit(EXIT_FAILED)


@audit.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def export(file: Path) -> None:
    """Write all rows, links and anchors to FILE: `intertie audit verify FILE` needs nothing else, now or in ten years."""
    found = collect(connect())
    file.write_bytes(encode(found))
    note(_say("exported", rows=sum(len(chain.links) for chain in found.chains), path=file))


@audit.command()
def heads() -> None:
    """Print the newest anchored head of each chain, signed, one JSON object a line: append it to a file that the hub's administrators cannot reach."""
    for anchor in connect().get("/v1/audit/anchors", AuditAnchorsReply).anchors:
        print_json(anchor)


def collect(client: Client) -> AuditExport:
    """Everything from the hub, page by page. Anchors first: a chain only grows, so it must reach what was anchored before it was read."""
    anchors = [anchor for service in SERVICES for anchor in _anchors(client, service)]
    chains = [_chain(client, service) for service in SERVICES]
    return AuditExport(hub=client.url, made_at=now(), chains=chains, anchors=anchors)


def _anchors(client: Client, service: str) -> list[AuditAnchor]:
    found: list[AuditAnchor] = []
    while True:
        last = found[-1].head if found else None
        query = {"service": service, "after_epoch": last.epoch if last else 0, "after_number": last.number if last else 0}
        page = client.get("/v1/audit/anchors", AuditAnchorsReply, query)
        found += page.anchors
        if not page.more or not page.anchors:
            return found


def _chain(client: Client, service: str) -> ServiceChain:
    links: list[AuditLink] = []
    while True:
        last = links[-1] if links else None
        query = {"after_epoch": last.epoch if last else 0, "after_number": last.number if last else 0, "limit": PAGE}
        page = client.get(f"/v1/audit/{service}/chain", AuditChainReply, query)
        links += page.links
        if not page.more or not page.links:
            return ServiceChain(service=service, links=links, unchained=page.unchained, waiting=page.waiting)


def _exported(file: Path) -> AuditExport:
    with read_as(file, "export of the audit", "intertie audit export FILE"):
        return decode(file.read_bytes(), AuditExport, what=str(file))


def _kept(path: Path) -> list[AuditAnchor]:
    lines = [text for text in path.read_text(encoding="utf-8").splitlines() if text.strip()]
    if not lines:
        raise Refused("audit.heads", f"{path} holds no head", next_step="intertie audit heads >> FILE")
    with read_as(path, "file of heads", "intertie audit heads >> FILE"):
        return [decode(text, AuditAnchor, what=f"a line of {path}") for text in lines]


def _tell(verdict: AuditVerdict, *, chains: int, pinned: bool) -> None:
    if verdict.findings:
        rows = [(f.kind, f.service, f"({f.epoch}, {f.number})", f.audit or "-", f.text) for f in verdict.findings]
        table(("WHAT", "SERVICE", "NUMBER", "ROW", "WHY"), rows, empty="-")
        note(_say("found", count=len(verdict.findings)))
    else:
        line(_say("whole", rows=verdict.rows, chains=chains, anchors=verdict.anchors, signer=verdict.key or "-"))
    for service, count in sorted(verdict.after_anchor.items()):
        if count:
            note(_say("young", service=service, count=count))
    if not pinned and verdict.key:
        note(_say("unpinned"))
