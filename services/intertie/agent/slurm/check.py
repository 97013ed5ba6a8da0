"""The owner's pre-flight of a Slurm site, by the way that site.toml says: its commands, queue and books, what its accounts may use, the wrapper, the clock.

Nothing is submitted and nothing changed; each line that fails says what mends it.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from intertie.agent.check.report import Check, Level, Line, Place, line
from intertie.agent.slurm.cluster import SlurmCluster
from intertie.agent.slurm.commands import Commands
from intertie.agent.slurm.core.replies import last_words
from intertie.agent.slurm.core.rules import Become, SlurmRules, partitions, placements
from intertie.agent.slurm.core.site import parse_associations, parse_settings
from intertie.agent.slurm.transport import Shell
from intertie.agent.slurm.wiring import slurm_of
from intertie.clock import SystemClock
from intertie.errors import IntertieError

COMMANDS = ("sbatch", "squeue", "sacct", "scontrol", "scancel")
# Leases and latest starts are read on the nodes: more than this is more than a stub's own margin.
CLOCK_S = 5.0
SAID = 300
# What the wrapper leaves with where there is no such attempt: it was let in, and found its folder.
NONE_THERE = 4


async def slurm(place: Place) -> Sequence[Line]:
    """Silent where site.toml names no Slurm."""
    rules = place.rules.slurm
    if rules is None:
        return []
    shared = await asyncio.to_thread(_folder, rules)
    if shared and shared[0].level == "fail":
        return shared  # To go on would make it.
    try:
        cluster, _ = slurm_of(rules, place.folder.root, SystemClock())
    except IntertieError as err:
        return [line("fail", "slurm.bad", error=err.text, fix="rules", file=place.folder.rules_file)]
    shell = cluster.slurm.shell if isinstance(cluster.slurm, Commands) else None
    try:
        if shell is not None and (lacking := await _lacking(shell, rules)):
            return lacking
        found = await _queue(cluster, rules)
        if found[-1].level == "fail":
            return found
        found += await _books(cluster, rules)
        if shell is not None:
            settings = await _settings(shell, rules)
            found += _says(settings)
            found += await _rights(shell, rules, enforced="associations" in settings.get("AccountingStorageEnforce", ""))
        for account in rules.accounts:
            found += await _account(cluster, shell, rules, account, str(place.folder.rules_file))
        found += shared
    finally:
        await cluster.close()
    return found


async def _lacking(shell: Shell, rules: SlurmRules) -> list[Line]:
    """Commands that cannot be called there."""
    for command in COMMANDS:
        try:
            done = await shell.run((command, "--version"), timeout_s=rules.timeout_s)
            said = "" if done.code == 0 else last_words(done.error) or f"exit {done.code}"
        except (IntertieError, OSError) as err:
            said = err.text if isinstance(err, IntertieError) else str(err)
        if said:
            where = rules.ssh.host if rules.ssh is not None else "-"
            fix = "ssh" if rules.ssh is not None else "commands"
            return [line("fail", "slurm.no", command=command, said=said[:SAID], fix=fix, path=rules.path, host=where)]
    return []


async def _queue(cluster: SlurmCluster, rules: SlurmRules) -> list[Line]:
    try:
        told = await cluster.describe()
    except IntertieError as err:
        fix = "munge" if "munge" in err.code or "uthenticat" in err.text or "redential" in err.text else "slurm"
        return [line("fail", "slurm.away", error=err.text[:SAID], fix=fix)]
    usable = len({node.name for node in told.nodes if node.usable})
    count = len({node.name for node in told.nodes})
    found = [line("ok", "slurm.ok", version=" · ".join(word for word in (f"Slurm {told.version}".strip(), told.cluster) if word))]
    used = partitions(rules)
    if missing := sorted(used - set(told.queues)):
        return [*found, *(line("fail", "queue.none", queue=one, fix="partition", queues=", ".join(told.queues) or "-") for one in missing)]
    shown = ", ".join(sorted(used)) or "default"
    return [
        *found,
        line("ok" if usable else "warn", "queue.nodes", queue=shown, usable=usable, count=count, fix="" if usable else "drained"),
    ]


async def _books(cluster: SlurmCluster, rules: SlurmRules) -> list[Line]:
    now = SystemClock().now()
    try:
        await cluster.slurm.books(now - timedelta(hours=1), None, users=rules.accounts)
    except IntertieError as err:
        return [line("warn", "slurm.no_books", error=err.text[:SAID], fix="books")]
    return [line("ok", "slurm.books")]


async def _settings(shell: Shell, rules: SlurmRules) -> Mapping[str, str]:
    """Of slurmctld; empty where they cannot be read."""
    where = (f"--clusters={rules.cluster}",) if rules.cluster else ()
    try:
        done = await shell.run(("scontrol", *where, "show", "config"), timeout_s=rules.timeout_s)
    except IntertieError:
        return {}
    return parse_settings(done.out.decode("utf-8", "replace"))


def _says(settings: Mapping[str, str]) -> list[Line]:
    found: list[Line] = []
    at = settings.get("as of", "")
    if at.isascii() and at.isdigit():
        ahead_s = int(at) - SystemClock().now().timestamp()
        off = abs(ahead_s) > CLOCK_S
        found.append(line("warn" if off else "ok", "slurm.clock", ahead=ahead_s, fix="clock" if off else ""))
    if settings and "gres/gpu" not in settings.get("AccountingStorageTRES", ""):
        found.append(line("warn", "slurm.no_cards", fix="tres"))
    return found


async def _rights(shell: Shell, rules: SlurmRules, *, enforced: bool) -> list[Line]:
    """What each account may use, as slurmdbd has it."""
    done = await shell.run(
        ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", "format=cluster,account,user,qos", *_of_cluster(rules)),
        timeout_s=rules.timeout_s,
    )
    if done.code != 0:
        return []  # The books have their line already.
    held = parse_associations(done.out.decode("utf-8", "replace"))
    found: list[Line] = []
    level: Level = "fail" if enforced else "warn"
    cluster = f" Cluster={rules.cluster}" if rules.cluster else ""
    for user in rules.accounts:
        for place in placements(rules):
            if not place.account:
                continue
            qos = held.get((user, place.account))
            told = {"account": user, "booked": place.account, "qos": place.qos, "cluster": cluster}
            if qos is None:
                found.append(line(level, "account.no_booking", **told, fix="booking"))
            elif place.qos and place.qos not in qos:
                found.append(line(level, "account.no_qos", **told, fix="qos"))
    return found


def _of_cluster(rules: SlurmRules) -> Sequence[str]:
    return ("where", f"cluster={rules.cluster}") if rules.cluster else ()


async def _account(cluster: SlurmCluster, shell: Shell | None, rules: SlurmRules, account: str, file: str) -> list[Line]:
    if why := cluster.may_run_as(account):
        return [line("fail", "account.cannot", account=account, why=why, fix="account")]
    if rules.become is not Become.SUDO or shell is None:
        return [line("ok", "account.may", account=account, how=rules.become.value)]
    argv = ("sudo", "--non-interactive", f"--user={account}", "--", rules.wrapper, "claimed", "att-none")
    try:
        done = await shell.run(argv, timeout_s=rules.timeout_s)
        said = "" if done.code in (0, NONE_THERE) else last_words(done.error) or f"exit {done.code}"
    except IntertieError as err:
        said = err.text
    if not said:
        return [line("ok", "account.may", account=account, how=f"sudo {rules.wrapper}")]
    return [line("fail", "account.cannot", account=account, why=said[:SAID], fix="wrapper", file=shlex.quote(file))]


def _folder(rules: SlurmRules) -> list[Line]:
    """With a wrapper its accounts look for it."""
    if rules.become is Become.SUDO:
        return []
    folder = Path(rules.folder)
    if folder.is_dir():
        return [line("ok", "shared.ok", folder=folder)]
    return [line("fail", "shared.none", folder=folder, fix="shared")]


CHECKS: Sequence[Check] = (slurm,)
