"""Which local account work runs as. Never root, never the account of the agent or of a database, only one that exists here."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass

# Accounts that the hub's parts may take on this machine (`ACCOUNTS` of `intertie.embedded.postgres` and `intertie.embedded.nats`, which an
# agent may not import: it stands without a hub; a test compares them), the agent's, and the usual ones of databases. A job with one of
# their uids could read the books or the bus.
FORBIDDEN = ("root", "intertie", "intertie-agent", "intertie-db", "intertie-bus", "postgres", "daemon", "bin", "mysql", "nats")


@dataclass(frozen=True, slots=True)
class LocalAccount:
    """What setuid needs."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def is_root() -> bool:
    return os.geteuid() == 0


def by_name(name: str) -> LocalAccount | None:
    try:
        return _account(pwd.getpwnam(name))
    except KeyError:
        return None


def by_uid(uid: int) -> LocalAccount | None:
    try:
        return _account(pwd.getpwuid(uid))
    except KeyError:
        return None


def _account(entry: pwd.struct_passwd) -> LocalAccount:
    groups = tuple(sorted(set(os.getgrouplist(entry.pw_name, entry.pw_gid)) - {0}))
    return LocalAccount(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def why_not(name: str) -> str:
    """Why federation work may not run as this account; empty if it may. Only asked when the agent is root."""
    if not name:
        return "no local account is named, and a root agent runs nothing as itself"
    account = by_name(name)
    if account is None:
        return f"there is no local account {name!r} on this machine"
    taken = {found.uid for found in map(by_name, FORBIDDEN) if found is not None} | {0, os.geteuid()}
    if account.uid in taken:
        return f"local account {name!r} (uid {account.uid}) belongs to the system, the agent, the bus or a database; jobs need one of their own"
    if account.gid == 0:
        return f"local account {name!r} has group root"
    return ""
