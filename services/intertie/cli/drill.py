"""`intertie drill …`: rehearse a cut of a site's link with its owner, read what happened, sign it, and check it years later without a hub."""

from __future__ import annotations

import getpass
import sys
import time
from pathlib import Path

import click

from intertie.cli.client import Client
from intertie.cli.config import config_dir
from intertie.cli.local_drill import cut_of, seconds_of, span
from intertie.cli.out import EXIT_FAILED, ago, json_option, line, note, now, print_json, read_as, table
from intertie.cli.out import local as clock_time
from intertie.cli.session import connect
from intertie.contracts.drill import (
    DrillConsent,
    DrillEvidence,
    DrillKind,
    DrillRecord,
    DrillsReply,
    DrillState,
    PlanDrill,
)
from intertie.contracts.http import ConsentBody, ReasonBody, SubmitBody, Whoami
from intertie.contracts.identity import Role
from intertie.contracts.job import JobSpec, SubmitReply
from intertie.contracts.site import SiteRecord
from intertie.errors import NotFound, Refused
from intertie.ids import PoolName, SiteName, mint
from intertie.text import language
from intertie.text.groups import Group
from intertie.trust.evidence import PASSED, PERSON, canonical, faults_of, sign_part, verify_file
from intertie.trust.keys import Key

KEY_FILE = "drill.nk"
REHEARSAL = "30s"

TEXTS = {
    "planned": (
        "{drill}: site {site} cuts its link for {seconds} s at {start}; its owner ends it at once with `intertie local drill stop`",
        "{drill}:站点 {site} 将于 {start} 断开链路 {seconds} 秒;所有者可随时用 `intertie local drill stop` 结束",
    ),
    "job": ("small job {job} runs through it", "小任务 {job} 将在演练期间运行"),
    "no_job": (
        "your token submits no jobs: see that something of the federation runs in pool {pool} by then",
        "当前令牌不能提交任务:请确保届时资源池 {pool} 中有联邦任务运行",
    ),
    "no_drills": ("No drill yet: intertie drill rehearse SITE/POOL", "尚无演练:intertie drill rehearse 站点/资源池"),
    "holds": (
        "{drill}: {count} signatures hold, and the verdict follows from what both sides saw: {verdict}",
        "{drill}:{count} 个签名有效,结论与双方记录一致:{verdict}",
    ),
    "fault": ("{drill}: {text}", "{drill}:{text}"),
    "signed": ("signed with the key {public} ({path})", "已用密钥 {public} 签名({path})"),
    "passed": ("passed", "通过"),
    "failed": ("failed", "未通过"),
    "consented": ("cuts of up to {longest} are allowed", "允许每次最长 {longest}的断链演练"),
    "not_consented": ("no drill is allowed", "不允许演练"),
    "no_drill_passed": ("no passed drill younger than {days} days (policy)", "{days} 天内没有通过的断链演练(策略要求)"),
    "drill_passed": ("last passed drill: {ago} ago", "最近一次通过的演练:{ago} 前"),
}


def _say(key: str, **values: object) -> str:
    english, chinese = TEXTS[key]
    return (chinese if language() == "zh" else english).format(**values)


def drill_line(site: SiteRecord, max_age_days: int) -> str:
    """What `site show` says of a site's drills; empty where the hub has no policy."""
    if max_age_days == 0:
        return ""
    passed = site.drill_passed_at
    if passed is None or (now() - passed).days >= max_age_days:
        return _say("no_drill_passed", days=max_age_days)
    return _say("drill_passed", ago=ago(passed))


@click.group(cls=Group)
def drill() -> None:
    """Rehearse a cut of a site's link with its owner, and sign what happened.

    First the owner allows it (`intertie local drill allow` at the site), then a short rehearsal of one pool, then the site's drill.
    """


def _plan(request: PlanDrill, as_json: bool) -> DrillRecord:
    record = connect().post("/v1/drills", DrillRecord, request)
    if as_json:
        print_json(record)
    else:
        note(_say("planned", drill=record.drill, site=record.site, seconds=record.seconds, start=clock_time(record.start)))
        line(record.drill)
    return record


@drill.command()
@click.argument("pool", metavar="SITE/POOL")
@click.option("--cut", default=REHEARSAL, show_default=True, help="How long, at most 2m.")
@click.option("--in", "after", default="20s", show_default=True, help="When, from now.")
@click.option("--no-job", is_flag=True, help="Submit no small job: something of the federation runs there anyway.")
@click.option("--reason", default="", help="Why; it stands in the evidence.")
@json_option
def rehearse(pool: str, cut: str, after: str, no_job: bool, reason: str, as_json: bool) -> None:
    """A short cut with one small job in SITE/POOL. A site is cut for longer only after one of these has passed."""
    site, _, name = pool.partition("/")
    if not site or not name:
        raise click.BadParameter("name it as SITE/POOL")
    seconds, wait_s = cut_of(cut), seconds_of(after)
    request = PlanDrill(site=SiteName(site), pool=PoolName(name), kind=DrillKind.REHEARSAL, seconds=seconds, after_s=wait_s, reason=reason)
    _plan(request, as_json)
    if not no_job:
        _small_job(connect(), SiteName(site), PoolName(name), wait_s + seconds + 15)


def _small_job(client: Client, site: SiteName, pool: PoolName, seconds: int) -> None:
    who = client.get("/v1/whoami", Whoami)
    if who.tenant is None or not {Role.TENANT_ADMIN, Role.TENANT_USER} & set(who.roles):
        note(_say("no_job", pool=f"{site}/{pool}"))
        return
    spec = JobSpec(name="drill-rehearsal", script=f"#!/bin/sh\nsleep {seconds}\n", site=site, pool=pool, wall_s=seconds + 60)
    reply = client.post("/v1/jobs", SubmitReply, SubmitBody(spec=spec), {"Idempotency-Key": mint("key")})
    if reply.job is not None:
        note(_say("job", job=reply.job.job))


@drill.command()
@click.argument("site")
@click.option("--cut", required=True, metavar="TIME", help="How long, such as 10m; no longer than the owner allows.")
@click.option("--in", "after", default="10s", show_default=True, help="When, from now.")
@click.option("--reason", default="", help="Why; it stands in the evidence.")
@json_option
def start(site: str, cut: str, after: str, reason: str, as_json: bool) -> None:
    """Cut the whole of SITE off for a while, as its owner allowed."""
    _plan(PlanDrill(site=SiteName(site), seconds=cut_of(cut), after_s=seconds_of(after), reason=reason), as_json)


@drill.command()
@click.argument("drill_id", metavar="[DRILL]", required=False)
@click.option("--site", default="", help="Of this site only.")
@click.option("--wait", is_flag=True, help="Wait until DRILL is judged; exit 1 if it did not pass.")
@json_option
def status(drill_id: str | None, site: str, wait: bool, as_json: bool) -> None:
    """Drills, newest first; or DRILL with its checks."""
    if drill_id is None:
        reply = connect().get("/v1/drills", DrillsReply, {"site": site})
        if as_json:
            print_json(reply)
            return
        rows = [
            (d.drill, d.site, d.pool or "-", d.kind, d.state, f"{d.seconds}s", clock_time(d.start), d.verdict or "-", d.text)
            for d in reply.drills
        ]
        table(("DRILL", "SITE", "POOL", "KIND", "STATE", "CUT", "START", "VERDICT", "WHY"), rows, empty=_say("no_drills"))
        return
    record = _find(drill_id)
    while wait and record.state not in (DrillState.JUDGED, DrillState.CALLED_OFF):
        time.sleep(1)
        record = _find(drill_id)
    if as_json:
        print_json(record)
    else:
        line(f"{record.drill}  {record.site}  {record.kind}  {record.state}  {record.verdict or '-'}  {record.text}".rstrip())
        for check in record.checks:
            line(f"  {'✓' if check.ok else '✗'} {check.name}: {check.text}")
    if wait and record.verdict != PASSED:
        sys.exit(EXIT_FAILED)


def _find(drill_id: str) -> DrillRecord:
    for record in connect().get("/v1/drills", DrillsReply, {"limit": 500}).drills:
        if record.drill == drill_id:
            return record
    raise NotFound("drill.not_found", f"no drill {drill_id} is known", next_step="intertie drill status")


@drill.command("call-off")
@click.argument("drill_id", metavar="DRILL")
@click.option("--reason", default="", help="Why.")
def call_off(drill_id: str, reason: str) -> None:
    """Call DRILL off before it begins. One that is on is ended at the site: intertie local drill stop."""
    record = connect().post(f"/v1/drills/{drill_id}/call-off", DrillRecord, ReasonBody(reason=reason))
    line(f"{record.drill}  {record.state}  {record.text}")


@drill.command()
@click.argument("site")
@click.option("--longest", default="15m", show_default=True, help="The longest cut that you allow, at most 1h.")
@click.option("--until", type=click.DateTime(), default=None, help="Until when (default: until taken back).")
@click.option("--revoke", is_flag=True, help="Take the consent back.")
def consent(site: str, longest: str, until: object, revoke: bool) -> None:
    """The owner's consent by a site owner's token. What is revoked at the site itself stands above it."""
    from datetime import datetime

    ends = until.astimezone() if isinstance(until, datetime) else None
    body = ConsentBody(allowed=not revoke, until=ends, longest_s=cut_of(longest))
    told = connect().call("PUT", f"/v1/sites/{site}/drill-consent", DrillConsent, body=_json(body))
    line(_say("consented", longest=span(told.longest_s)) if told.allowed else _say("not_consented"))


def _json(body: object) -> bytes:
    from intertie.contracts.base import encode

    return encode(body)


@drill.command()
@click.argument("drill_id", metavar="DRILL")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the signed evidence there, too.")
@click.option("--as", "name", default="", help="Your name in the evidence (default: this login).")
def sign(drill_id: str, out: Path | None, name: str) -> None:
    """Read DRILL's evidence, check it, and sign it with a key that is made here at the first use and never leaves."""
    client = connect()
    evidence = client.get(f"/v1/drills/{drill_id}/evidence", DrillEvidence)
    if faults := faults_of(evidence, need_person=False):
        raise Refused("drill.evidence", f"this is not signed: {'; '.join(faults)}")
    key, path = own_key()
    signature = sign_part(key, evidence.document, role=PERSON, name=name or getpass.getuser(), at=now())
    signed = client.post(f"/v1/drills/{drill_id}/signatures", DrillEvidence, signature)
    note(_say("signed", public=key.public, path=path))
    if out is not None:
        out.write_bytes(canonical(signed) + b"\n")
    else:
        line(signed.document.verdict)


def own_key() -> tuple[Key, Path]:
    """This person's key for drills, made at the first use, 0600."""
    path = config_dir() / KEY_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        Key.new("U").write(path)
    return Key.read(path), path


@drill.command()
@click.argument("drill_id", metavar="DRILL")
def evidence(drill_id: str) -> None:
    """Print DRILL's evidence in its canonical form: intertie drill evidence DRILL > FILE."""
    found = connect().get(f"/v1/drills/{drill_id}/evidence", DrillEvidence)
    sys.stdout.write(canonical(found).decode("utf-8") + "\n")


@drill.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--site-key", default="", help="The site's public key, if you know it.")
@click.option("--hub-key", default="", help="The registry's public key, if you know it.")
@json_option
def verify(file: Path, site_key: str, hub_key: str, as_json: bool) -> None:
    """Check FILE without any hub: every signature, and that the verdict follows from what both sides saw; exit 1 if not."""
    with read_as(file, "evidence of a drill", "intertie drill sign DRILL --out FILE"):
        found, faults = verify_file(file.read_bytes(), what=str(file))
    for role, key in (("site", site_key), ("hub", hub_key)):
        faults += [
            f"the {role}'s signature is by another key: {s.key}" for s in found.signatures if key and s.role == role and s.key != key
        ]
    document = found.document
    if as_json:
        print_json({"drill": document.drill, "verdict": document.verdict, "faults": faults, "signatures": found.signatures})
    else:
        for check in document.checks:
            line(f"  {'✓' if check.ok else '✗'} {check.name}: {check.text}")
        for signature in found.signatures:
            line(f"  {signature.role}  {signature.name}  {signature.key}  {clock_time(signature.at)}")
        for fault in faults:
            note(_say("fault", drill=document.drill, text=fault))
    if faults:
        sys.exit(EXIT_FAILED)
    if not as_json:
        line(_say("holds", drill=document.drill, count=len(found.signatures), verdict=_say(document.verdict)))
