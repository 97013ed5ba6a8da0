"""The owner's pre-flight on a real site: everything well, and then each thing that goes wrong, with the command that mends it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from functools import partial

from tests.journeys.stack import Stack, running_stack

from intertie.trust.keys import Key


def check(stack: Stack, site: str, *options: str) -> tuple[int, dict[str, list[dict[str, str]]], str]:
    """(exit code, lines by what they are about, all of the text)."""
    command = [sys.executable, "-m", "intertie.agent", "check", "--json", "--data", str(stack.sites[site].folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout.startswith("{"), done.stderr
    lines: dict[str, list[dict[str, str]]] = {}
    for one in json.loads(done.stdout)["lines"]:
        lines.setdefault(one["what"], []).append(one)
    return done.returncode, lines, done.stdout


async def test_the_owner_sees_what_is_well_and_how_to_mend_the_rest() -> None:
    async with running_stack() as stack:
        await stack.add_site("site-a", slots=1)
        code, lines, text = await stack.do(partial(check, stack, "site-a"))
        assert code == 0, text
        for what in ("versions", "data folder", "disk", "agent", "gateway", "clock", "bus", "pool cpu"):
            assert [one["level"] for one in lines[what]] == ["ok"], lines[what]
        if stack.account:
            assert lines[f"account {stack.account}"][0]["level"] == "ok"
        folder = stack.sites["site-a"].folder
        seeds = [Key.read(file).credentials_seed() for file in (folder / "keys").glob("*.nk")]
        assert seeds and not any(seed in text for seed in seeds)

        # A key that others may read: the line says the command, and the command mends it.
        (folder / "keys" / "site.nk").chmod(0o644)
        code, lines, _ = await stack.do(partial(check, stack, "site-a"))
        [bad] = lines["data folder"]
        assert code == 1 and bad["level"] == "fail" and bad["fix"].startswith("chmod 600 ")
        await stack.do(partial(subprocess.run, bad["fix"].split(), check=True))
        assert (await stack.do(partial(check, stack, "site-a")))[0] == 0

        # The agent is gone: a warning, and how to start it. Its hub is gone too: that fails.
        child = stack.sites["site-a"].child
        assert child is not None
        await stack.do(lambda: child.stop(20.0))
        code, lines, _ = await stack.do(partial(check, stack, "site-a"))
        assert code == 0 and any(one["fix"].startswith("intertie-agent run") for one in lines["federation"] + lines["agent"])
        await stack.hub_down()
        code, lines, _ = await stack.do(partial(check, stack, "site-a"))
        assert (code, lines["gateway"][0]["level"], lines["bus"][0]["level"]) == (1, "fail", "fail")
        assert "pass" not in json.dumps(lines["bus"]).lower()


async def test_rules_and_a_proxy_that_cannot_be_read_are_lines_of_their_own() -> None:
    async with running_stack() as stack:
        await stack.add_site("site-a", slots=1)
        rules = stack.sites["site-a"].folder / "site.toml"
        await asyncio.to_thread(rules.write_text, '[link]\nproxy = "http://me:hunter22@127.0.0.1:1"\n', encoding="utf-8")
        code, lines, text = await stack.do(partial(check, stack, "site-a"))
        assert code == 1 and lines["proxy"][0]["level"] == "fail" and "127.0.0.1:1" in lines["proxy"][0]["text"] and "hunter22" not in text
        await asyncio.to_thread(rules.write_text, "disk_flour_mib = 1\n", encoding="utf-8")
        code, lines, _ = await stack.do(partial(check, stack, "site-a"))
        assert code == 1 and "disk_flour_mib" in lines["site.toml"][0]["text"]
