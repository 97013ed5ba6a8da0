"""What a Slurm says of its own settings and of who may use what: read for the owner's pre-flight, never for a decision about a job."""

from __future__ import annotations

from collections.abc import Mapping


def parse_settings(text: str) -> Mapping[str, str]:
    """`scontrol show config`: name → value. `as of`: slurmctld's clock when it answered, in seconds where SLURM_TIME_FORMAT=%s."""
    found = dict[str, str]()
    for row in text.splitlines():
        name, is_one, value = row.partition("=")
        if is_one:
            found.setdefault(name.strip(), value.strip())
        elif row.startswith("Configuration data as of "):
            found["as of"] = row.rpartition(" ")[2].strip()
    return found


def parse_associations(text: str) -> Mapping[tuple[str, str], frozenset[str]]:
    """`sacctmgr -nP show assoc format=cluster,account,user,qos`: (user, account) → its QOS. Rows of another shape and those of no user are left out."""
    found = dict[tuple[str, str], frozenset[str]]()
    for row in text.splitlines():
        fields = row.strip().split("|")
        if len(fields) == 4 and fields[1] and fields[2]:
            key = (fields[2], fields[1])
            found[key] = found.get(key, frozenset()) | {one for one in fields[3].split(",") if one}
    return found
