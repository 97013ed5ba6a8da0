"""The gateway's own word on each call, in a file until metering holds it: metering may be away, and a killed gateway forgets nothing that it wrote.

Lines are appended when a call is opened and when it is over; what was opened and not closed when the process ended is told as interrupted by the next
one. The file lies in the page cache, not behind an fsync: the site's own record, which is, decides about money; this one is its check.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from intertie.contracts.base import decode, encode
from intertie.contracts.call_offerings import CallOutcome
from intertie.contracts.calls import CallSeen
from intertie.errors import IntertieError, Refused, Unavailable
from intertie.ids import CallId
from intertie.observe import log

LOG = log.get("gateway.spool")

# Told at once; one message of some 60 KiB.
BATCH = 200
# Copies of the gateway that share one data folder.
COPIES = 64
# Not told yet: some days of a busy gateway without metering. Beyond it no call is taken.
MOST_BYTES = 256 * 1024 * 1024
RETRY_S = 1.0

OPENED, CLOSED = b"o", b"c"

Tell = Callable[[Sequence[CallSeen]], Awaitable[None]]


class Spool:
    """Open with `Spool.open(folder)`; `opened` and `closed` write at once, `run` tells."""

    def __init__(self, file: int, path: Path) -> None:
        self._file, self._path = file, path
        self._bell = asyncio.Event()
        self._offset = 0
        self._size = os.fstat(file).st_size
        self._under_way: dict[CallId, bytes] = {}

    @classmethod
    def open(cls, folder: Path) -> Spool:
        """The first file that no other copy holds; what its last holder left open is closed as interrupted."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(COPIES):
            path = folder / f"calls-{number}.spool"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            spool = cls(file, path)
            spool._recover()
            return spool
        raise Refused("gateway.spool", f"{COPIES} gateways already share {folder}")

    def _recover(self) -> None:
        left: dict[CallId, CallSeen] = {}
        data = os.pread(self._file, self._size, 0)
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            # The last line was cut off by the end of the process.
            os.ftruncate(self._file, whole)
            self._size = whole
        for line in data[:whole].splitlines():
            seen = _read(line)
            if seen is None:
                continue
            if line[:1] == OPENED:
                left[seen.call] = seen
            else:
                left.pop(seen.call, None)
        for seen in left.values():
            self.closed(msgspec.structs.replace(seen, outcome=CallOutcome.INTERRUPTED, code="call.gateway_restarted"))
        if left:
            LOG.warning("calls were cut off by the end of the gateway", calls=len(left))

    @property
    def full(self) -> bool:
        return self._size - self._offset > MOST_BYTES

    def opened(self, seen: CallSeen) -> None:
        """`Unavailable('gateway.spool')` if the disk does not take it: then the call is not made."""
        self._write(OPENED, seen)
        self._under_way[seen.call] = encode(seen)

    def closed(self, seen: CallSeen) -> None:
        try:
            self._write(CLOSED, seen)
        except Unavailable:
            LOG.error("a call's record was not written", call=seen.call, outcome=seen.outcome)
        self._under_way.pop(seen.call, None)
        self._bell.set()

    def _write(self, kind: bytes, seen: CallSeen) -> None:
        try:
            self._append(kind + encode(seen) + b"\n")
        except OSError as err:
            raise Unavailable("gateway.spool", f"the gateway's disk takes no record of calls: {err.strerror}", retry_after_s=10) from err

    def _append(self, line: bytes) -> None:
        """Whole or not at all: half a line would spoil the one behind it."""
        done = os.write(self._file, line)
        if done < len(line):
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += done

    async def run(self, tell: Tell) -> None:
        """Tell what is closed, in order, until each is taken; for ever. Metering may be away for days."""
        while True:
            self._bell.clear()
            try:
                more = await self._tell_some(tell)
            except IntertieError as err:
                LOG.info("the calls' records wait for metering", code=err.code, bytes=self._size - self._offset)
                await asyncio.sleep(RETRY_S)
                continue
            if not more:
                await self._bell.wait()
                # Those that end together go together.
                await asyncio.sleep(0.05)

    async def _tell_some(self, tell: Tell) -> bool:
        data = os.pread(self._file, 512 * 1024, self._offset)
        whole = data.rfind(b"\n") + 1
        found: list[CallSeen] = []
        taken = 0
        for line in data[:whole].splitlines(keepends=True):
            if len(found) >= BATCH:
                break
            taken += len(line)
            if line[:1] == CLOSED and (seen := _read(line)) is not None:
                found.append(seen)
        if found:
            await tell(found)
        self._offset += taken
        if self._offset >= self._size:
            self._begin_anew()
            return False
        return taken > 0

    def _begin_anew(self) -> None:
        """All is told: only what is under way stays."""
        os.ftruncate(self._file, 0)
        self._offset = self._size = 0
        for call, body in self._under_way.items():
            try:
                self._append(OPENED + body + b"\n")
            except OSError:
                LOG.error("a call under way is not on disk", call=call)
        self._offset = self._size

    def close(self) -> None:
        os.close(self._file)


def _read(line: bytes) -> CallSeen | None:
    try:
        return decode(line[1:], CallSeen, what="a spooled call")
    except Refused as err:
        LOG.error("a spooled call cannot be read", text=err.text[:200])
        return None
