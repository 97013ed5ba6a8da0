"""Packs and results as bytes named by their digest, through obstore: a folder here, a bucket elsewhere.

An upload lands under a name of its own and gets its digest's name only after its bytes were hashed and found right, so a digest never names
anything else. Knowing a digest is the right to read it for a site: it was told in an offer sealed for that site and cannot be guessed.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import NotFoundError
from obstore.store import LocalStore

from intertie.errors import NotFound, Refused, Unavailable
from intertie.ids import Digest, is_digest, mint

if TYPE_CHECKING:
    from obstore import ObjectMeta

CHUNK_BYTES = 1 << 20


# Longer than any site is expected to be away with work that names an object.
KEEP = timedelta(days=35)


class ObjectStore:
    """Bytes by digest. `limit_bytes` bounds one object; `keep` is how long one stays after it was last brought."""

    def __init__(self, folder: Path, *, limit_bytes: int, keep: timedelta = KEEP) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._store = LocalStore(folder, mkdir=True)
        self._limit = limit_bytes
        self._keep = keep

    @staticmethod
    def key(digest: str) -> str:
        """Where a digest lies; `Refused('object.digest')` if it is not one."""
        if not is_digest(digest):
            raise Refused("object.digest", f"{digest[:80]!r} is not a digest: sha256: and 64 hex digits")
        hexa = digest.removeprefix("sha256:")
        return f"objects/{hexa[:2]}/{hexa}"

    async def size(self, digest: str) -> int | None:
        """Bytes of a stored object; None if it is not here."""
        found = await self._head(digest)
        return found["size"] if found else None

    async def lasting(self, digest: str, now: datetime) -> int | None:
        """Bytes of an object that will stay for half of `keep` at least; None if it is not here, or had better be brought again: what is
        submitted daily has one digest, and its jobs wait."""
        found = await self._head(digest)
        return found["size"] if found and now - found["last_modified"] <= self._keep / 2 else None

    async def _head(self, digest: str) -> ObjectMeta | None:
        try:
            return await obstore.head_async(self._store, self.key(digest))
        except (NotFoundError, FileNotFoundError):
            return None

    async def put(self, digest: str, chunks: AsyncIterator[bytes]) -> int:
        """Store the bytes if they have that digest; the size. A repeat makes them stay longer.

        `Refused('object.mismatch')`, `Refused('object.too_large')`, `Unavailable('object.disk')`.
        """
        key = self.key(digest)
        incoming = f"incoming/{mint('put')}"
        hasher, size = hashlib.sha256(), 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal size
            async for chunk in chunks:
                size += len(chunk)
                if size > self._limit:
                    raise Refused(
                        "object.too_large",
                        f"the object passes {self._limit // (1024 * 1024)} MiB",
                        next_step="leave large data where it is; a work folder is for code and small inputs",
                    )
                hasher.update(chunk)
                yield chunk

        try:
            await obstore.put_async(self._store, incoming, counted())
        except Refused:
            await self._discard(incoming)
            raise
        except OSError as err:
            await self._discard(incoming)
            raise Unavailable("object.disk", f"the object could not be stored: {err.strerror or err}", retry_after_s=30) from err
        except Exception as err:
            await self._discard(incoming)
            if isinstance(err.__cause__, Refused):
                raise err.__cause__ from err
            if size > self._limit:
                raise Refused("object.too_large", f"the object passes {self._limit // (1024 * 1024)} MiB") from err
            raise Unavailable("object.upload", f"the upload did not arrive whole: {type(err).__name__}", retry_after_s=1) from err
        if f"sha256:{hasher.hexdigest()}" != digest:
            await self._discard(incoming)
            raise Refused("object.mismatch", f"the bytes received have another digest than {digest}", next_step="upload again")
        await obstore.rename_async(self._store, incoming, key)
        return size

    async def _discard(self, key: str) -> None:
        """Remove it; another copy of the gateway may have been quicker."""
        try:
            await obstore.delete_async(self._store, key)
        except (NotFoundError, FileNotFoundError):
            pass

    async def get(self, digest: str) -> tuple[int, AsyncIterator[bytes]]:
        """Size and bytes of an object; `NotFound('object.not_found')`."""
        try:
            result = await obstore.get_async(self._store, self.key(digest))
        except (NotFoundError, FileNotFoundError) as err:
            raise NotFound("object.not_found", f"no object {digest} is stored here") from err

        async def chunks() -> AsyncIterator[bytes]:
            async for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)

        return int(result.meta["size"]), chunks()

    async def sweep(self, now: datetime) -> list[Digest]:
        """Remove objects older than `keep`, and uploads that never ended; the digests removed."""
        gone: list[Digest] = []
        async for batch in obstore.list(self._store):
            for entry in batch:
                age = now - entry["last_modified"]
                stale_upload = entry["path"].startswith("incoming/") and age > timedelta(days=1)
                if age > self._keep or stale_upload:
                    await self._discard(entry["path"])
                    gone.append(Digest(f"sha256:{entry['path'].rpartition('/')[2]}"))
        return gone
