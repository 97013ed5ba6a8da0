"""The demonstration jobs: one that computes, one that fails by its own fault, one that nothing here can run."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

from intertie.contracts.job import JobSpec, Resources
from intertie.errors import Refused

# Accounts that exist on every Linux and belong to nobody's data; the hub's own parts take others.
JOB_ACCOUNTS = ("intertie-job", "nobody", "games", "man")

COMPUTE = """#!{python}
# Sieve primes again and again for about six seconds, then leave a file whose hash anyone can check.
import hashlib, time

def primes(limit):
    sieve = bytearray([1]) * limit
    sieve[:2] = b"\\0\\0"
    for n in range(2, int(limit ** 0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = bytes(len(range(n * n, limit, n)))
    return [n for n in range(limit) if sieve[n]]

end, rounds = time.monotonic() + 6, 0
while time.monotonic() < end:
    found = primes(200_000)
    rounds += 1
text = "\\n".join(map(str, found)) + "\\n"
open("primes.txt", "w").write(text)
print(f"{{len(found)}} primes below 200000, {{rounds}} rounds")
print("sha256", hashlib.sha256(text.encode()).hexdigest())
"""

TICKS = """#!/bin/sh
# One line a second: a gap would be seen.
for n in $(seq 1 20); do date "+tick $n %T"; sleep 1; done
"""

BROKEN = """#!/bin/sh
echo "loading the data set"
echo "error: data/train.csv: no such file" >&2
exit 3
"""


def job_account() -> str:
    """The account that demonstration jobs become: empty if not root; `Refused('quickstart.no_account')` if root and none is there."""
    if os.geteuid() != 0:
        return ""
    for name in JOB_ACCOUNTS:
        try:
            if pwd.getpwnam(name).pw_uid != 0:
                return name
        except KeyError:
            continue
    raise Refused("quickstart.no_account", "no unprivileged account is here for jobs to run as", next_step="useradd --system intertie-job")


def job_python(account: str) -> str:
    """An interpreter that the job's account can really run, found by trying; `Refused('quickstart.no_python')`."""
    user = pwd.getpwnam(account) if account else None
    for candidate in dict.fromkeys(("/usr/bin/python3", "/usr/local/bin/python3", sys.executable)):
        if not Path(candidate).exists():
            continue
        try:
            done = subprocess.run(
                [candidate, "-c", "import hashlib"],
                user=user.pw_uid if user else None,
                group=user.pw_gid if user else None,
                extra_groups=[] if user else None,
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
                capture_output=True,
                timeout=20,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return candidate
    raise Refused(
        "quickstart.no_python",
        f"no Python here can be run by {account or 'this user'}",
        next_step="install the system's python3, or run as an ordinary user",
    )


def compute(python: str) -> JobSpec:
    """Some six seconds of work, with a result."""
    return JobSpec(name="primes", script=COMPUTE.format(python=python), outputs=["primes.txt"], wall_s=120)


def ticking() -> JobSpec:
    """Says the second, each second, some twenty times."""
    return JobSpec(name="ticks", script=TICKS, wall_s=120)


def broken() -> JobSpec:
    """Fails by its own fault."""
    return JobSpec(name="broken", script=BROKEN, wall_s=60)


def too_big() -> JobSpec:
    """Asks for what this machine does not have."""
    return JobSpec(
        name="too-big", script="#!/bin/sh\ntrue\n", resources=Resources(gpus=8, gpu_model="A100-SXM4-80GB", gpu_memory_mib=80 * 1024)
    )
