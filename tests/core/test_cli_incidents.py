"""One incident is read whole: the list has room for its title only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner

from intertie.cli.__main__ import cli
from intertie.contracts.base import encode
from intertie.contracts.incident import IncidentRecord, IncidentsReply, IncidentState, Severity
from intertie.errors import NotFound
from intertie.ids import IncidentId, SiteName

NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
OPEN = IncidentRecord(
    incident=IncidentId("inc-1"),
    key="registry.job_offering/svc",
    kind="registry.job_offering",
    severity=Severity.WARNING,
    title="1 job offerings of site svc were not taken",
    text="job offering night counts cards twice: lend less, or offer less",
    site=SiteName("svc"),
    tenant=None,
    state=IncidentState.OPEN,
    opened_at=NOW,
    last_seen_at=NOW,
    times=1,
    recovered_at=None,
    acknowledged_by=None,
    acknowledged_at=None,
    closed_by=None,
    closed_at=None,
    close_reason="",
    version=1,
)


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(encode(IncidentsReply(incidents=[OPEN])))

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def _hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("INTERTIE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("INTERTIE_TOKEN", "t")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("_hub")
def test_what_is_wrong_and_what_mends_it_is_read_at_the_terminal() -> None:
    done = CliRunner().invoke(cli, ["incident", "show", "inc-1"])
    assert done.exit_code == 0 and OPEN.title in done.output and OPEN.text in done.output


@pytest.mark.usefixtures("_hub")
def test_one_that_is_not_there_is_said_to_be_so() -> None:
    done = CliRunner().invoke(cli, ["incident", "show", "inc-2"])
    assert isinstance(done.exception, NotFound) and done.exception.next_step == "intertie incident list"
