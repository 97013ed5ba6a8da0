"""Slurm by slurmrestd: the same questions, over HTTP, with a token per account that the site renews.

A token that is refused is read again from its file and tried once more; a second refusal says that nothing is known (BR-137). Answers are read by the
same types as the text listings (`core/rest.py`).
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from intertie.agent.adapters.files import Files, Owned
from intertie.agent.slurm.core import rest
from intertie.agent.slurm.core.names import ExitCode
from intertie.agent.slurm.core.records import Booked, Node, Queued, Read
from intertie.agent.slurm.core.replies import Meaning, meaning_of
from intertie.agent.slurm.core.request import Request, body
from intertie.agent.slurm.core.rules import SlurmRules
from intertie.agent.slurm.core.words import Unreadable
from intertie.agent.slurm.transport import ANSWER_BYTES, Unsure
from intertie.clock import Clock
from intertie.errors import IntertieError, Refused, Unavailable


class Restd:
    """`files`: where start stubs lie, whose text slurmrestd wants in the request itself."""

    def __init__(self, rules: SlurmRules, clock: Clock, files: Files) -> None:
        assert rules.rest is not None
        self.rules, self.rest, self.clock, self.files = rules, rules.rest, clock, files
        self.asked = 0
        self._session: aiohttp.ClientSession | None = None

    # --- the wire ---

    def _token(self, account: str) -> str:
        path = Path(self.rest.tokens) / account
        try:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise Refused("slurm.token_open", f"{path} can be read by others", next_step=f"chmod 600 {path}")
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as err:
            raise Unavailable("slurm.no_token", f"no token of {account} can be read at {path}", retry_after_s=60) from err
        return text.removeprefix("SLURM_JWT=")

    async def _ask(self, method: str, path: str, account: str, *, params: Mapping[str, str] | None = None, json: object = None) -> bytes:
        """The bytes of an answer. `Unsure` where a change was sent and nothing came back."""
        token = await asyncio.to_thread(self._token, account)
        status, told = await self._once(method, path, account, token, params, json)
        if status < 400:
            return told
        # A token that has ended is a 401, or slurmctld's refusal inside of a 500.
        renewed = await asyncio.to_thread(self._token, account)
        if renewed != token:
            status, told = await self._once(method, path, account, renewed, params, json)
        if status in (401, 403) or b"uthentication" in told[:4_096]:
            raise Unavailable(
                "slurm.token_refused",
                f"slurmrestd refuses the token of {account}, also as it lies in its file now",
                retry_after_s=60,
                next_step=f"scontrol token username={account} lifespan=… into {self.rest.tokens}/{account}",
            )
        return told

    async def _once(
        self, method: str, path: str, account: str, token: str, params: Mapping[str, str] | None, json: object
    ) -> tuple[int, bytes]:
        headers = {"X-SLURM-USER-NAME": account, "X-SLURM-USER-TOKEN": token}
        data = None
        if json is not None:
            headers["Content-Type"], data = "application/json", msgspec.json.encode(json)
        self.asked += 1
        change = method != "GET"
        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            limit = aiohttp.ClientTimeout(total=self.rules.timeout_s)
            url = f"{self.rest.url.rstrip('/')}{path}"
            async with self._session.request(method, url, headers=headers, params=params, data=data, timeout=limit) as answer:
                told = await answer.content.read(ANSWER_BYTES)
                while not answer.content.at_eof() and len(told) < ANSWER_BYTES:
                    told += await answer.content.read(ANSWER_BYTES - len(told))
                return answer.status, told
        except aiohttp.ClientConnectorError as err:
            raise Unavailable("slurm.rest_away", f"slurmrestd cannot be reached at {self.rest.url}", retry_after_s=5) from err
        except (aiohttp.ClientError, TimeoutError, OSError) as err:
            kind = Unsure if change else Unavailable
            raise kind("slurm.no_answer", f"slurmrestd had no whole answer within {self.rules.timeout_s:g} s") from err

    def _answer(self, told: bytes) -> Mapping[str, Any]:
        try:
            return rest.answer(told)
        except rest.Errors as err:
            raise Unavailable("slurm.rest_error", str(err), retry_after_s=10) from err
        except Unreadable as err:
            raise Unavailable("slurm.rest_answer", str(err), retry_after_s=10) from err

    async def _read(self, path: str, **params: str) -> Mapping[str, Any]:
        return self._answer(await self._ask("GET", path, self.rest.reader, params=params))

    # --- reading ---

    async def queue(self) -> Read[Queued]:
        return rest.jobs(await self._read(f"/slurm/{self.rest.version}/jobs"))

    async def books(self, start: datetime, end: datetime | None, *, users: Collection[str] = (), ids: Collection[int] = ()) -> Read[Booked]:
        now = self.clock.now()
        # The one form that all versions read: by Slurm's own clock, a second more.
        params = {"start_time": f"now-{max(0, int((now - start).total_seconds()) + 1)}"}
        if end is not None and end < now:
            params["end_time"] = f"now-{max(0, int((now - end).total_seconds()) - 1)}"
        # Which users may be asked for differs from version to version: all are read, and ours kept.
        read = rest.runs(await self._read(f"/slurmdb/{self.rest.version}/jobs", **params))
        rows = [row for row in read.rows if (not ids or row.number in ids) and (not users or row.user in users)]
        return Read(rows, read.bad)

    async def job(self, number: int) -> Queued | None:
        try:
            told = await self._read(f"/slurm/{self.rest.version}/job/{number}")
        except Unavailable as err:
            if meaning_of(err.text)[0] is Meaning.UNKNOWN_JOB:
                return None
            raise
        rows = rest.jobs(told).rows
        return rows[0] if rows else None

    async def codes(self, numbers: Collection[int]) -> Mapping[int, ExitCode]:
        return {}  # Every row of the queue has its own.

    async def nodes(self) -> Read[Node]:
        return rest.nodes(await self._read(f"/slurm/{self.rest.version}/nodes"))

    async def cluster(self) -> str:
        if self.rules.cluster:
            return self.rules.cluster
        read = await self.queue()
        if name := next((row.cluster for row in read.rows if row.cluster), ""):
            return name
        raise Unavailable("slurm.no_name", "slurmrestd names no cluster while its queue is empty", next_step="set cluster in [slurm]")

    # --- doing ---

    async def submit(self, request: Request) -> tuple[int, str]:
        script = await self.files.read(Owned(request.tag.attempt, request.account), "start.sh", 0, 1 << 20)
        if script is None:
            raise Unavailable("slurm.no_stub", f"the start stub of {request.tag.attempt} is not in its folder")
        key = self.rest.gres_key or ("gres" if self.rest.version <= "v0.0.38" else "tres_per_node")
        asked = body(request, script.data.decode("utf-8", errors="surrogateescape"), self.clock.now(), key)
        told = await self._ask("POST", f"/slurm/{self.rest.version}/job/submit", request.account, json=asked)
        try:
            answer = rest.answer(told)
            number = rest.number(answer.get("job_id"), "job id")
        except rest.Errors as err:
            raise _refusal(str(err)) from err
        except Unreadable as err:
            raise Unsure("slurm.rest_answer", str(err)) from err
        if not number:
            raise Unsure("slurm.no_id", "slurmrestd said that all is well, and no job id")
        return number, ""

    async def cancel(self, number: int, account: str, *, term: bool) -> None:
        # slurmrestd signals whole jobs; its own SIGTERM reaches the first process with all the others.
        params = {"signal": "TERM"} if term else None
        told = await self._ask("DELETE", f"/slurm/{self.rest.version}/job/{number}", account, params=params)
        try:
            rest.answer(told)
        except rest.Errors as err:
            if meaning_of(str(err))[0] not in (Meaning.UNKNOWN_JOB, Meaning.OVER):
                raise Unavailable("slurm.rest_error", str(err), retry_after_s=10) from err
        except Unreadable as err:
            raise Unavailable("slurm.rest_answer", str(err), retry_after_s=10) from err

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _refusal(words: str) -> IntertieError:
    meaning, code = meaning_of(words)
    if meaning is Meaning.REFUSED:
        return Refused(code, words)
    if meaning is Meaning.LATER:
        return Unavailable(code, words, retry_after_s=10)
    return Unsure(code, words, retry_after_s=5)
