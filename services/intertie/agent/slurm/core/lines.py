"""The lines that an owner applies, made from their own `[slurm]`: accounting, partition and QOS, folders, the wrapper and its one sudo rule.

Nothing here is run by us: the owner reads them, changes them, and applies them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from intertie.agent.slurm.core.rules import Become, SlurmRules


def lines(rules: SlurmRules, user: str, cards: int, wrapper: str = "ops/slurm/intertie-as") -> str:
    """`user`: the agent's own. `cards`: how many may be lent at once; 0: the owner sets no limit in Slurm. `wrapper`: where it lies, to be installed."""
    parts = [
        "# What Intertie needs of this Slurm, from [slurm] of site.toml. Read it, change it, then apply it as root.",
        *_section("1. Accounting: one account that everything lent is booked on", _accounting(rules, cards)),
        *_section("2. slurm.conf: lines to compare with yours; only the last is a command", _conf(rules, user)),
        *_section("3. Job folders, on storage that every node mounts", _folders(rules, user)),
        *_section("4. How the agent becomes a lent account", _become(rules, user, wrapper)),
        *_section("5. To see that it works, as the agent's user", _proof(rules)),
    ]
    return "\n".join(parts) + "\n"


def _section(title: str, body: Sequence[str]) -> Sequence[str]:
    return ("", f"# --- {title}", *body)


def accounts_of(rules: SlurmRules) -> Sequence[str]:
    return sorted({one for one in (rules.account or "intertie", *[row.account for row in rules.map]) if one})


def _accounting(rules: SlurmRules, cards: int) -> Sequence[str]:
    where = f" Cluster={rules.cluster}" if rules.cluster else ""
    found: list[str] = []
    for account in accounts_of(rules):
        found.append(f"sacctmgr -i add account {account}{where} Description=lent Organization=intertie")
    default = accounts_of(rules)[0]
    for user in rules.accounts:
        found.append(f"sacctmgr -i add user {user}{where} Account={default} DefaultAccount={default}")
        for account in accounts_of(rules)[1:]:
            found.append(f"sacctmgr -i add user {user}{where} Account={account}")
    qos = sorted({one for one in (rules.qos, *[row.qos for row in rules.map]) if one})
    limit = f" GrpTRES=gres/gpu={cards}" if cards else ""
    for name in qos:
        found.append(f"sacctmgr -i add qos {name}{limit}   # what is lent at once")
        for account in accounts_of(rules):
            found.append(f"sacctmgr -i modify account {account}{where} set qos+={name}")
    if cards and not qos:
        for account in accounts_of(rules):
            found.append(f"sacctmgr -i modify account {account}{where} set GrpTRES=gres/gpu={cards}   # what is lent at once")
    return found


def _conf(rules: SlurmRules, user: str) -> Sequence[str]:
    allowed = ",".join(accounts_of(rules))
    found = [
        "# AccountingStorageTRES=gres/gpu             else no card is in the books (slurmctld restarts for it)",
        "# AccountingStoreFlags=job_comment           the tag of each job; without it the job's folder is looked at instead",
        "# AccountingStorageEnforce=limits,qos        else the limit of section 1 holds nothing. It enforces associations, too: if it is new to you,",
        "#                                            each of your own users needs one first (sacctmgr show assoc), or can submit nothing",
        "# if PrivateData has jobs or nodes in it, the agent's user must see them:",
        f"#   sacctmgr -i modify user {user} set AdminLevel=Operator",
    ]
    for partition in sorted({part for part in (rules.partition, *[row.partition for row in rules.map]) if part}):
        found.append(f"# PartitionName={partition} … AllowAccounts=+{allowed}   (or leave AllowAccounts=ALL)")
        found.append("#   owner first: your own partition on the same nodes with a higher PriorityTier, PreemptMode=CANCEL here")
    return (*found, "scontrol reconfigure")


def _folders(rules: SlurmRules, user: str) -> Sequence[str]:
    folder = shlex.quote(rules.folder)
    if rules.become is Become.SUDO:
        made = [f"install -d -o root -g root -m 711 {folder}"]
        return [*made, *[f"install -d -o {one} -m 700 {shlex.quote(f'{rules.folder}/{one}')}" for one in rules.accounts]]
    if rules.become is Become.REST:
        return [f"install -d -o {user} -m 711 {folder}   # and the mapped accounts must be able to use folders that {user} makes there"]
    return [f"install -d -o {'root' if rules.become is Become.ROOT else user} -m 711 {folder}"]


def _become(rules: SlurmRules, user: str, wrapper: str) -> Sequence[str]:
    match rules.become:
        case Become.SUDO:
            conf = [f"folder={rules.folder}", f"path={rules.path}", *([f"slurm_conf={rules.conf}"] if rules.conf else [])]
            words = " ".join(shlex.quote(line) for line in conf)
            return [
                f"install -D -o root -g root -m 755 {shlex.quote(wrapper)} {shlex.quote(rules.wrapper)}",
                f"printf '%s\\n' {words} > {shlex.quote(f'{rules.wrapper}.conf')}",
                sudoers(rules, user),
            ]
        case Become.REST:
            tokens = rules.rest.tokens if rules.rest is not None else "TOKENS"
            readers = {*rules.accounts, *([rules.rest.reader] if rules.rest is not None else [])}
            renew = [
                f"scontrol token username={one} lifespan=86400 | install -o {user} -m 600 /dev/stdin {shlex.quote(f'{tokens}/{one}')}"
                for one in sorted(readers)
            ]
            return ["# each hour, by cron or a timer; the agent reads them again when they are refused", *renew]
        case Become.ROOT:
            return ["# the agent is root and sets the uid of what it runs: nothing to apply"]
        case _:
            return [f"# everything runs as {user}, for the owner's own tenant only: nothing to apply"]


def sudoers(rules: SlurmRules, user: str) -> str:
    """The one rule: these accounts, this command, nothing else."""
    return f"echo '{user} ALL=({','.join(rules.accounts)}) NOPASSWD: {rules.wrapper}' > /etc/sudoers.d/intertie && visudo -cf /etc/sudoers.d/intertie"


def _proof(rules: SlurmRules) -> Sequence[str]:
    where = f" --clusters={rules.cluster}" if rules.cluster else ""
    conf = [f"export SLURM_CONF={shlex.quote(rules.conf)}"] if rules.conf else []
    found = [*conf, f"squeue{where} | head", f"sacct{where} --allusers --starttime=now-1hours | head"]
    if rules.become is Become.SUDO and rules.accounts:
        found.append(f"sudo -n -u {rules.accounts[0]} -- {rules.wrapper} claimed att-none; echo $?   # 4: it may, and there is none")
    return [*found, "intertie-agent check --data DIR                # looks at all of this, by site.toml in DIR"]
