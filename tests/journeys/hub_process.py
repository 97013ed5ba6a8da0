"""A whole hub as one process of its own, for tests that put it on a machine of its own: `python -m tests.journeys.hub_process FOLDER [NAME=VALUE …]`.

As `intertie hub up`, with settings added to every service and a supervisor that bears many kills.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from intertie.cli.hub import run_hub
from intertie.embedded.hub import open_hub
from intertie.embedded.supervise import HubSupervisor, RestartPolicy


def main(folder: str, *settings: str) -> int:
    extra = dict(setting.split("=", 1) for setting in settings)
    supervisor = HubSupervisor(open_hub(Path(folder)), policy=RestartPolicy(most_s=1.0, limit=50), extra_env=extra)
    return asyncio.run(run_hub(supervisor))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
