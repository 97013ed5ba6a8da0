"""HTTP over the agent's unix socket, by the standard library alone."""

from __future__ import annotations

import http.client
import os
import socket
from pathlib import Path
from typing import TypeVar

from intertie.contracts.base import Problem, decode, encode
from intertie.errors import KINDS, Refused, Unavailable
from intertie.text import language

T = TypeVar("T")

# The agent answers from memory; one that does not within this is stopped.
TIMEOUT_S = 10.0
PLACES = ("/var/lib/intertie/agent", "~/.local/share/intertie/agent")


class _Door(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def find_socket(data: str | None) -> str:
    """The agent's socket: of --data, of INTERTIE_AGENT_SOCKET, else the first that exists in the usual places."""
    if data:
        return str(Path(data) / "agent.sock")
    if named := os.environ.get("INTERTIE_AGENT_SOCKET"):
        return named
    usual = [Path(place).expanduser() for place in PLACES]
    hubs = [
        path for parent in ("/var/lib/intertie", "~/.local/share/intertie") for path in sorted(Path(parent).expanduser().glob("site-*"))
    ]
    for folder in (*usual, *hubs):
        if (folder / "agent.sock").exists():
            return str(folder / "agent.sock")
    raise Unavailable(
        "local.no_agent",
        "there is no agent's socket on this machine" if language() == "en" else "本机没有接入端的套接字",
        next_step="start it: intertie agent run --data DIR; or name its folder: --data DIR (intertie local --data DIR …)",
    )


def call(path: str, method: str, target: str, kind: type[T], body: object | None = None) -> T:
    """One exchange with the agent; its Problem becomes the same error here."""
    door = _Door(path)
    try:
        door.request(method, target, body=encode(body) if body is not None else None, headers={"Content-Type": "application/json"})
        answer = door.getresponse()
        data = answer.read()
    except PermissionError as err:
        raise Refused("local.permission", f"you may not use {path}", next_step="ask its owner for the group intertie, or use sudo") from err
    except (OSError, http.client.HTTPException) as err:
        raise Unavailable(
            "local.no_agent",
            f"no agent answers at {path}: {getattr(err, 'strerror', None) or err}",
            next_step="intertie agent run --data DIR",
        ) from err
    finally:
        door.close()
    if answer.status < 300:
        return decode(data, kind, what="the agent's answer")
    problem = decode(data, Problem, what="the agent's answer")
    error = KINDS.get(problem.kind, Refused)(problem.code, problem.text, next_step=problem.next_step)
    error.details.update(problem.details)
    raise error
