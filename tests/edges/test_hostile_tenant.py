"""A tenant that tries everything a submit can carry, over HTTP against the whole hub; and that what it may say acts on nobody's terminal.

What one tenant can learn of another, and what a job can do to its machine, is in `journeys/test_isolation`; patterns of outputs and links in them
in `core/test_agent_outputs`, bombs in packs in `core/test_pack`.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tests.conftest import PgServer
from tests.edges.conftest import RunningHub
from tests.edges.hostile_world import ACME, RIVAL, Hub, Member, own_database, running_hub

from intertie.cli import out
from intertie.ids import SiteName, mint

pytestmark = pytest.mark.asyncio(loop_scope="module")

PACK = b"a pack"
PACK_DIGEST = "sha256:" + hashlib.sha256(PACK).hexdigest()
NEVER_STORED = "sha256:" + "0" * 64


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(session_hub: RunningHub, postgres_server: PgServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hub]:
    with own_database(postgres_server) as pg:
        async with running_hub(session_hub.layout, pg, tmp_path_factory.mktemp("gateway")) as running:
            member = await running.member(SiteName("site-plain"))
            await ready(running, member)
            async with running.http.put(f"/v1/objects/{PACK_DIGEST}", data=PACK, headers=running.bearer()) as stored:
                assert stored.status == 201
            yield running


async def ready(hub: Hub, member: Member) -> None:
    """Its pool is known to the scheduler: it was offered a job."""
    job = await hub.submit(member.name)
    await member.offered(job)


def asked(spec: dict[str, Any] | None = None, env: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    names = {"env_names": sorted(env)} if env else {}
    return {"spec": {"name": "one", "script": "true", **names, **(spec or {})}, **({"env": env} if env else {}), **body}


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("a script of a megabyte", asked({"script": "x" * 1_000_000}), 413, "http.too_large"),
    ("a script above its limit", asked({"script": "x" * 131_073}), 400, "contract.invalid"),
    ("no script", asked({"script": ""}), 400, "contract.invalid"),
    ("NUL in the script", asked({"script": "echo\x00"}), 422, "scheduler.nul"),
    ("NUL in an argument", asked({"args": ["a\x00b"]}), 422, "scheduler.nul"),
    ("NUL in a value", asked(env={"A": "a\x00b"}), 422, "scheduler.nul"),
    ("NUL in a name", asked({"name": "a\x00b"}), 422, "scheduler.name"),
    ("a terminal's escape in a name", asked({"name": "\x1b]0;owned\x07"}), 422, "scheduler.name"),
    ("a second line in a name", asked({"name": "one\njob-1  succeeded"}), 422, "scheduler.name"),
    ("a name that turns the writing round", asked({"name": "gpj.\u202eexe"}), 422, "scheduler.name"),
    ("a very long name", asked({"name": "x" * 129}), 400, "contract.invalid"),
    ("ten thousand patterns", asked({"outputs": ["*.txt"] * 10_000}), 400, "contract.invalid"),
    ("a pattern that climbs out", asked({"outputs": ["../../etc/passwd"]}), 422, "scheduler.outputs"),
    ("a pattern that climbs out later", asked({"outputs": ["a/../../b"]}), 422, "scheduler.outputs"),
    ("an absolute pattern", asked({"outputs": ["ok", "/etc/passwd"]}), 422, "scheduler.outputs"),
    ("a pattern without end", asked({"outputs": ["*a" * 1_000]}), 422, "scheduler.outputs"),
    ("our own variable", asked(env={"INTERTIE_JOB": "job-1"}), 422, "scheduler.env_reserved"),
    ("the cards' variable", asked(env={"CUDA_VISIBLE_DEVICES": "0,1,2,3"}), 422, "scheduler.env_reserved"),
    ("a variable with a sign", asked(env={"A=B": "c"}), 422, "scheduler.env_name"),
    ("a function of bash", asked(env={"BASH_FUNC_ls%%": "() { evil; }"}), 422, "scheduler.env_name"),
    ("a variable without a name", asked(env={"": "c"}), 422, "scheduler.env_name"),
    ("a variable in another script", asked(env={"变量": "c"}), 422, "scheduler.env_name"),
    ("values without names", {**asked(), "env": {"A": "b"}}, 422, "scheduler.env_names"),
    ("a very large environment", asked(env={"A": "x" * 70_000}), 422, "scheduler.env_too_large"),
    ("arguments without end", asked({"args": ["x" * 1_000] * 300}), 422, "scheduler.spec_too_large"),
    ("a body of megabytes", asked({"args": ["x" * 1_000] * 9_000}), 413, "http.too_large"),
    ("more devices than there are atoms", asked({"resources": {"gpus": 10**30}}), 400, "contract.invalid"),
    ("fewer than none", asked({"resources": {"slots": -1}}), 400, "contract.invalid"),
    ("for ever", asked({"wall_s": 10**30}), 400, "contract.invalid"),
    ("a pack that was never stored", asked({"work": {"digest": NEVER_STORED, "size": 1}}), 422, "job.work_missing"),
    ("a pack of another size", asked({"work": {"digest": PACK_DIGEST, "size": 10**12}}), 422, "job.work_size"),
    ("a pack that is a path", asked({"work": {"digest": "../../v1/tokens", "size": 1}}), 422, "object.digest"),
    ("another tenant", asked(tenant=RIVAL), 404, "not_found"),
    ("a tenant that is a subject", asked(tenant="a.*.>"), 404, "not_found"),
    ("a site that is a subject", asked({"site": "*"}), 422, "scheduler.no_site_fits"),
    ("half a character", asked(), 400, "contract.invalid"),
]


@pytest.mark.parametrize(("body", "status", "code"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
async def test_a_submit_that_cannot_be_is_refused_with_its_code_and_leaves_nothing(
    hub: Hub, body: dict[str, Any], status: int, code: str, request: pytest.FixtureRequest
) -> None:
    data = json.dumps(body).encode()
    if "half a character" in request.node.name:
        data = data.replace(b'"one"', b'"\\ud800"')
    headers = {**hub.bearer(), "Idempotency-Key": mint("key")}
    async with hub.http.post("/v1/jobs", data=io.BytesIO(data), headers=headers) as answer:
        told = await answer.json()
        assert (answer.status, told["code"]) == (status, code), told
        assert told["next_step"] or told["detail"]
        assert len(told["detail"]) < 4_096
    async with hub.http.get("/v1/jobs?limit=1000", headers=hub.bearer()) as answer:
        assert [job["spec"]["name"] for job in (await answer.json())["jobs"]] == ["one"], "only the job that made the pool known"


ALLOWED: list[tuple[str, dict[str, Any]]] = [
    ("markup", asked({"name": "<script>alert(1)</script> [red]{{7*7}}"})),
    ("any language", asked({"name": "训练 №1 – ünïcode 🚀"})),
    ("what loaders read, in force from the job's own exec on", asked(env={"LD_PRELOAD": "/tmp/x.so", "PATH": "/nowhere", "IFS": "x"})),
    ("a script with an escape of its own", asked({"script": "printf '\x1b[31mred\x1b[0m'"})),
    ("a pattern with many wildcards", asked({"outputs": ["*a" * 60 + "b", "**/" * 40 + "x"]})),
    ("a stored pack", asked({"work": {"digest": PACK_DIGEST, "size": len(PACK)}})),
]


@pytest.mark.parametrize("body", [row[1] for row in ALLOWED], ids=[row[0] for row in ALLOWED])
async def test_what_concerns_nobody_but_its_own_job_is_taken(hub: Hub, body: dict[str, Any]) -> None:
    # By name: sites of other tests on the same bus may be heard here too.
    asked = {**body, "spec": {**body["spec"], "site": "site-plain"}, "dry_run": True}
    async with hub.http.post("/v1/jobs", json=asked, headers=hub.bearer()) as answer:
        assert answer.status == 200, await answer.text()
        assert (await answer.json())["fits"] == ["site-plain/slots"]


async def test_idempotency_keys_are_ones_own(hub: Hub) -> None:
    """A rival's key opens nobody else's job, and its own tells nothing of ours."""
    key = mint("key")
    names = []
    for tenant in (ACME, RIVAL):
        body = {**asked({"name": f"key-{tenant}"}), "dry_run": True}
        async with hub.http.post("/v1/jobs", json=body, headers={**hub.bearer(tenant), "Idempotency-Key": key}) as answer:
            names.append(answer.status)
    assert names == [200, 200]


# --- what reaches a terminal -------------------------------------------------------------------------------------------------------------------

ACTS = "\x1b[2J\x1b]52;c;cm0gLXJmIH4=\x07 \x9b31m \r\x08 \u202egpj.exe\u2066 \u2028 \x00\x7f"
CELL = f"first{ACTS}\nsecond\tthird [bold red]x[/] [link=file:///etc/passwd]y[/link]"


def acts(text: str) -> list[str]:
    return sorted({char for char in text if not char.isprintable() and char not in "\n\t"})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_tables_on_a_terminal_show_what_was_written_and_do_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    out.table(("NAME",), [(CELL,)], empty="")
    assert acts(screen.getvalue()) == []
    told = " ".join(screen.getvalue().split())
    assert "[bold red]x[/]" in told and "[link=file:///etc/passwd]y[/link]" in told, "text, not markup"
    assert "\\u000asecond" in told, "a cell makes no line of its own"


async def test_tables_in_a_pipe_have_one_line_a_row_and_a_tab_a_border(capsys: pytest.CaptureFixture[str]) -> None:
    out.table(("A", "B"), [(CELL, "b")], empty="")
    [row] = capsys.readouterr().out.splitlines()
    assert len(row.split("\t")) == 2 and acts(row) == []


async def test_lines_notes_and_json_carry_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    out.line(CELL)
    out.note(CELL)
    out.print_json({"name": CELL})
    shown = capsys.readouterr()
    assert acts(shown.out) == [] and acts(shown.err) == []
    assert msgspec.json.decode(shown.out.splitlines()[-1]) == {"name": CELL}, "JSON means what it meant"


async def test_words_of_any_language_are_shown_as_they_are() -> None:
    text = "训练 №1 – ünïcode 🚀\n\tשלום"
    assert out.harmless(text) == text
