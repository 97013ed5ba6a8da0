"""What a person does wrong at the command line is said in a sentence, with what to do instead; and no text names a command that is not there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from intertie.cli.__main__ import COMMANDS, cli
from intertie.cli.local_drill import span
from intertie.cli.quickstart import ports_of
from intertie.contracts.base import encode
from intertie.contracts.http import Health
from intertie.embedded.hub import HubPorts, read_settings
from intertie.errors import Refused

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "ops").rglob("*.md"))]
CALLED = re.compile(r"\bintertie ([a-z][a-z-]*(?: [^`\n;|]*)?)")
OPTION = re.compile(r"--[a-z][a-z-]*")


def python_texts() -> Iterator[tuple[str, str]]:
    """(where, text) of each string of the product; what is filled in later is `X`."""
    for file in sorted(file for base in ("services", "libs") for file in (ROOT / base).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                yield where, "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield where, node.value


def page_texts() -> Iterator[tuple[str, str]]:
    """(where, text) of what stands in backticks, and of each line that has none: a block's, most often."""
    for file in PAGES:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for span_of in re.findall(r"`([^`]+)`", line) or [line]:
                yield f"{file.relative_to(ROOT)}:{number}", span_of


def wrong(call: str) -> str:
    """What is wrong with `call`, words after `intertie`; nothing where it is prose or all of it exists."""
    words, command = call.split(), cli
    if words[0] not in COMMANDS or words[0] == "agent":
        return ""
    path: list[str] = []
    found: click.Command = command
    while isinstance(found, click.Group) and words and re.fullmatch(r"[a-z][a-z-]*[.,)]?", words[0]):
        name = words.pop(0).rstrip(".,)")
        path.append(name)
        below = found.get_command(click.Context(found), name)
        if below is None:
            return f"there is no {' '.join(path)}"
        found = below
    if isinstance(found, click.Group):
        return ""
    if found.context_settings.get("ignore_unknown_options"):
        return ""
    has = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    upto = words.index("--") if "--" in words else len(words)
    missing = [option[0] for word in words[:upto] if (option := OPTION.match(word)) and option[0] not in has]
    return f"{' '.join(path)} has no {', '.join(missing)}" if missing else ""


def test_no_text_and_no_page_names_a_command_or_an_option_that_is_not_there() -> None:
    said = [(where, found[1]) for where, text in (*python_texts(), *page_texts()) for found in CALLED.finditer(text)]
    assert len(said) > 200, "the pages and the code name commands: something is not read"
    assert not [(where, call, trouble) for where, call in said if (trouble := wrong(call))]


@pytest.mark.parametrize(
    ("call", "trouble"),
    [
        ("local pause --until 18:00", ""),
        ("local pose", "there is no local pose"),
        ("site show NAME --colour", "site show has no --colour"),
        ("local submit -- echo --x", ""),
        ("and its owner", ""),
    ],
)
def test_the_check_itself_sees_what_is_wrong(call: str, trouble: str) -> None:
    assert wrong(call) == trouble


SHORT_REASONS = [
    "local reclaim att-1 --reason x",
    "preempt job-1 --reason x",
    "close-attempt att-1 --reason x",
    "quarantine retry a --service metering --reason x",
    "suspense release seg-1 --reason x",
    "site cordon a --reason x",
    "site revoke a --reason x",
    "incident close inc-1 --reason x",
]


@pytest.mark.parametrize("call", SHORT_REASONS)
def test_a_reason_that_says_nothing_is_refused_before_anybody_is_asked(call: str) -> None:
    done = CliRunner().invoke(cli, call.split())
    assert (done.exit_code, "say why" in done.output) == (2, True), done.output


@pytest.mark.parametrize(
    "call", ["local drill allow --longest 3h", "drill start a --cut 2h", "drill rehearse a/b --cut 1s", "drill consent a --longest 2h"]
)
def test_a_cut_that_nobody_may_agree_to_is_refused_with_the_bounds(call: str) -> None:
    done = CliRunner().invoke(cli, call.split())
    assert (done.exit_code, "1h at most" in done.output) == (2, True), done.output


def test_a_length_is_said_as_people_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERTIE_LANG", "en")
    assert [span(8), span(900), span(3_600)] == ["8 s", "15 min", "60 min"]


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The real program, for what happens around the commands."""
    given = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LANG": "C.UTF-8", **env}
    return subprocess.run(
        [sys.executable, "-m", "intertie.cli", *words], capture_output=True, text=True, timeout=60, check=False, env=given
    )


def test_a_script_that_is_not_there_is_no_local_job() -> None:
    done = run("local", "submit", "trian.sh")
    assert done.returncode == 2 and "no file trian.sh" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "made_by"),
    [(("drill", "verify"), "drill sign"), (("audit", "verify"), "audit export"), (("site", "receipt"), "site leave")],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else None,
)
def test_a_file_of_another_kind_is_said_to_be_one_with_what_makes_the_right_one(
    words: tuple[str, ...], made_by: str, tmp_path: Path
) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear Sir\n", encoding="utf-8")
    done = run(*words, str(file))
    assert done.returncode == 1 and "cli.not_this_file" in done.stderr and made_by in done.stderr, done.stderr


def test_a_place_that_cannot_be_written_is_one_line_and_no_traceback() -> None:
    done = run("hub", "init", "--data", "/proc/no/hub")
    assert done.returncode == 1 and "/proc/no" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the accounts of a root's hub may enter, which pytest's own is not."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # noqa: S108  # entered by others: on purpose
        Path(name).chmod(0o711)
        yield Path(name)


def test_a_second_init_changes_what_it_names_and_keeps_the_rest(open_folder: Path) -> None:
    first = ["--port", "18480", "--bus-port", "14222", "--public-url", "https://hub.example", "--bus-url", "nats://hub.example:4222"]
    folder = ["hub", "init", "--data", str(open_folder / "hub")]
    for more in (first, ["--bus-nodes", "3"], ["--title", "ours"]):
        done = CliRunner().invoke(cli, [*folder, *more])
        assert done.exit_code == 0, done.output
    settings = read_settings(open_folder / "hub")
    assert (settings.ports.gateway, settings.ports.bus, settings.ports.database) == (18480, 14222, 54329)
    assert (settings.public_url, settings.bus_public_urls) == ("https://hub.example", ("nats://hub.example:4222",))
    assert (settings.title, settings.bus_nodes) == ("ours", 3)
    wrong_hosts = CliRunner().invoke(cli, [*folder, "--bus-host", "only-one"])
    assert wrong_hosts.exit_code == 1 and read_settings(open_folder / "hub") == settings


def test_a_quickstart_keeps_the_ports_of_its_folder_and_its_site_is_not_left_dialling_the_old_ones(tmp_path: Path) -> None:
    assert ports_of(tmp_path, gateway=None, bus=None, database=None) == HubPorts()
    (tmp_path / "hub.toml").write_text("[ports]\ngateway = 18480\nbus = 14222\ndatabase = 15432\n", encoding="utf-8")
    kept = HubPorts(gateway=18480, bus=14222, database=15432)
    assert ports_of(tmp_path, gateway=None, bus=None, database=None) == kept
    assert ports_of(tmp_path, gateway=18481, bus=None, database=None).gateway == 18481
    (tmp_path / "site-a").mkdir()
    (tmp_path / "site-a/site.json").write_text("{}", encoding="ascii")
    assert ports_of(tmp_path, gateway=18480, bus=None, database=15433).database == 15433
    with pytest.raises(Refused) as refused:
        ports_of(tmp_path, gateway=8480, bus=None, database=None)
    assert refused.value.code == "quickstart.ports" and "--data" in refused.value.next_step


def test_doctor_tells_a_hub_without_its_bus_from_a_stranger() -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = encode(Health(ok=False, bus=False, version="0.1.0"))
            self.send_response(503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        done = run("doctor", INTERTIE_URL=f"http://127.0.0.1:{server.server_port}", INTERTIE_TOKEN="it-anything")
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 1 and "its message bus does not" in done.stdout and "hub status" in done.stdout, done.stdout + done.stderr
