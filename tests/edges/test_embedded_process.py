"""Children: told apart beyond pid reuse, stopped whatever they ignore, explained in one sentence when they end."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from intertie.embedded import process
from intertie.embedded.process import (
    Child,
    disk_trouble,
    explain_end,
    free_port,
    identity_of,
    is_running,
    port_holder,
    private_folder,
    read_record,
    require_free_port,
    start_child,
    wait_until,
    write_private,
)
from intertie.errors import Refused, Unavailable


def child_of(folder: Path, script: str) -> Child:
    for name in ("run", "log"):
        private_folder(folder / name)
    return start_child(
        "child", [sys.executable, "-S", "-c", script], run_dir=folder / "run", log_dir=folder / "log", env={"PATH": "/usr/bin:/bin"}
    )


def test_a_child_has_a_session_and_a_record_of_its_own_and_none_of_our_environment(tmp_path: Path) -> None:
    child = child_of(tmp_path, "import os, time; print(sorted(os.environ), flush=True); time.sleep(60)")
    try:
        assert os.getsid(child.pid) == child.pid != os.getsid(0)
        record = read_record(tmp_path / "run", "child")
        assert record is not None and is_running(record.identity) and record.ready is None
        assert wait_until(lambda: "PATH" in child.log_tail(), 10)
        assert "HOME" not in child.log_tail()
        child.mark_ready()
        marked = read_record(tmp_path / "run", "child")
        assert marked is not None and marked.ready is not None and marked.identity == record.identity
    finally:
        child.kill()
    assert read_record(tmp_path / "run", "child") is None


def test_a_child_that_ignores_the_request_is_killed_when_its_grace_is_over(tmp_path: Path) -> None:
    child = child_of(
        tmp_path, "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    assert wait_until(lambda: "deaf" in child.log_tail(), 10)
    assert child.stop(0.1) == -9
    assert identity_of(child.pid) is None


def test_a_zombie_is_gone() -> None:
    child = subprocess.Popen(["/bin/true"])
    try:
        assert wait_until(lambda: identity_of(child.pid) is None, 10)
    finally:
        child.wait()


def test_a_command_name_with_brackets_and_blanks_does_not_move_the_start_ticks(tmp_path: Path) -> None:
    odd = tmp_path / "a) 1 (b"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([odd, "60"])
    try:
        assert wait_until(lambda: Path(f"/proc/{child.pid}/comm").read_text(encoding="utf-8").startswith("a)"), 10)
        mine, found = identity_of(os.getpid()), identity_of(child.pid)
        assert mine is not None and found is not None and found.start_ticks >= mine.start_ticks > 0
    finally:
        child.kill()
        child.wait()


def test_a_log_that_grew_too_long_is_set_aside_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOG_LIMIT_BYTES", 10)
    for words in ("the first words", "the second words", "third"):
        child = child_of(tmp_path, f"print({words!r})")
        child.process.wait()
        child.kill()
    assert (tmp_path / "log" / "child.log.1").read_text(encoding="utf-8") == "the second words\n"
    assert (tmp_path / "log" / "child.log").read_text(encoding="utf-8") == "third\n"


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("raise SystemExit('FATAL: could not write: No space left on device')", "embedded.disk_full", "is full"),
        ("raise SystemExit('listen: Address already in use')", "embedded.port_in_use", "in use by"),
        ("raise SystemExit('one\\nlast words')", "embedded.ended", "ended with code 1: last words"),
        ("pass", "embedded.ended", "ended with code 0: it wrote nothing"),
    ],
)
def test_an_end_is_explained_in_one_sentence(tmp_path: Path, script: str, code: str, words: str) -> None:
    child = child_of(tmp_path, script)
    child.process.wait()
    error = explain_end(child, port=9, what="the server")
    child.kill()
    assert error.code == code and words in error.text and "\n" not in error.text


def test_a_full_disk_and_a_closed_folder_are_two_sentences(tmp_path: Path) -> None:
    full = disk_trouble(OSError(errno.ENOSPC, "No space left on device"), tmp_path / "x")
    assert isinstance(full, Unavailable) and full.code == "embedded.disk_full" and str(tmp_path) in full.text
    with pytest.raises(Refused) as error:
        write_private(tmp_path / "none" / "x", b"")
    assert error.value.code == "embedded.disk"
    (tmp_path / "file").touch()
    with pytest.raises(Refused) as error:
        private_folder(tmp_path / "file" / "folder")
    assert error.value.code == "embedded.disk" and str(tmp_path / "file" / "folder") in error.value.text


def test_a_private_file_is_replaced_whole_and_never_wider(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    before = os.umask(0)
    try:
        write_private(file, b"one")
        write_private(file, b"two")
    finally:
        os.umask(before)
    assert file.read_bytes() == b"two" and file.stat().st_mode & 0o7777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_port_is_free_until_someone_listens_and_then_its_holder_is_named() -> None:
    port = free_port()
    require_free_port("127.0.0.1", port, "the bus")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert port_holder(port).endswith(f"(pid {os.getpid()})")
        with pytest.raises(Refused) as error:
            require_free_port("127.0.0.1", port, "the bus")
    assert error.value.code == "embedded.port_in_use" and error.value.details == {"port": port}
    with pytest.raises(Refused) as error:
        require_free_port("192.0.2.1", port, "the bus")
    assert error.value.code == "embedded.address"
