"""Submits made while the hub was away: kept in the user's own folder and sent, and said, by the next call that reaches it.

Each file is whole: hub address, request, idempotency key and the pack's path. The key makes a second sending harmless.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from intertie.cli.client import Client
from intertie.cli.config import state_dir
from intertie.contracts.base import encode
from intertie.contracts.job import SubmitReply
from intertie.errors import IntertieError, Unavailable


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One submit that waits."""

    url: str
    key: str
    name: str
    body: msgspec.Raw
    pack: str = ""
    digest: str = ""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one that waited."""

    name: str
    job: str = ""
    error: str = ""


def folder() -> Path:
    return state_dir() / "outbox"


def keep(kept: Kept) -> Path:
    """Write one submit for later; 0600, as its environment may be private."""
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder() / f"{kept.key}.json"
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_bytes(msgspec.json.encode(kept))
    fresh.replace(path)
    return path


def waiting() -> list[Path]:
    """Submits that wait, oldest first."""
    return sorted(folder().glob("*.json"), key=lambda path: path.stat().st_mtime) if folder().is_dir() else []


def send(client: Client) -> Iterator[Sent]:
    """Send what waits for this hub; stops quietly when the hub is away again. A refusal is told once and put aside as `.refused`."""
    for path in waiting():
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=Kept)
        except (OSError, msgspec.MsgspecError):
            path.rename(path.with_suffix(".broken"))
            continue
        if kept.url != client.url:
            continue
        try:
            if kept.pack and Path(kept.pack).is_file():
                with Path(kept.pack).open("rb") as data:
                    client.upload(f"/v1/objects/{kept.digest}", data, Path(kept.pack).stat().st_size)
            reply = client.call("POST", "/v1/jobs", SubmitReply, body=bytes(kept.body), headers={"Idempotency-Key": kept.key})
        except Unavailable:
            return
        except IntertieError as err:
            path.rename(path.with_suffix(".refused"))
            yield Sent(name=kept.name, error=f"{err.text} [{err.code}]")
            continue
        path.unlink()
        if kept.pack:
            Path(kept.pack).unlink(missing_ok=True)
        yield Sent(name=kept.name, job=reply.job.job if reply.job else "")


def body_of(value: object) -> msgspec.Raw:
    """A request body as the exact bytes that will be sent."""
    return msgspec.Raw(encode(value))
