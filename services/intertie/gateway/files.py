"""The paths that carry bytes: work packs up from users and down to sites, results up from sites and down to users."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from intertie.bus import rpc
from intertie.bus.port import Bus
from intertie.clock import Clock
from intertie.contracts import endpoints as e
from intertie.contracts.http import Stored
from intertie.contracts.job import JobQuery, ResultRef
from intertie.errors import NotFound
from intertie.gateway.http import CALL_TIMEOUT_S, Door, json_response
from intertie.gateway.objects import CHUNK_BYTES, ObjectStore
from intertie.ids import Digest, JobId
from intertie.trust import rights


class Files:
    """Handlers of `/v1/objects/{digest}` and `/v1/jobs/{job}/result`."""

    def __init__(self, bus: Bus, door: Door, objects: ObjectStore, clock: Clock) -> None:
        self._bus = bus
        self._door = door
        self._objects = objects
        self._clock = clock

    def add_to(self, app: web.Application) -> None:
        app.router.add_put("/v1/objects/{digest}", self.put)
        app.router.add_get("/v1/objects/{digest}", self.get)
        app.router.add_get("/v1/jobs/{job}/result", self.result)

    async def put(self, request: web.Request) -> web.Response:
        """Store a pack (a user) or a result (a site). `Expect: 100-continue` spares the bytes of what is already here."""
        who = await self._door.caller(request)
        site = who.claims.site
        rights.require(who.claims, "result.upload" if site else "work.upload", tenant=who.claims.tenant, site=site)
        digest = request.match_info["digest"]
        if (size := await self._objects.lasting(digest, self._clock.now())) is not None:
            await request.release()
            return json_response(Stored(digest=Digest(digest), size=size, repeated=True))
        size = await self._objects.put(digest, _chunks(request))
        return json_response(Stored(digest=Digest(digest), size=size), status=201)

    async def get(self, request: web.Request) -> web.StreamResponse:
        """A pack, to a site that was told its digest."""
        who = await self._door.caller(request)
        rights.require(who.claims, "work.download", tenant=who.claims.tenant, site=who.claims.site)
        return await self._send(request, request.match_info["digest"])

    async def result(self, request: web.Request) -> web.StreamResponse:
        """A job's outputs, to its tenant's people; those that count as its own, else of its last attempt that has any, or of `?attempt=`."""
        who = await self._door.caller(request)
        job = JobId(request.match_info["job"])
        record = await rpc.call(self._bus, e.JOB, JobQuery(job=job), claims=who.signed, timeout_s=CALL_TIMEOUT_S)
        rights.require(who.claims, "result.download", tenant=record.tenant)
        wanted = request.query.get("attempt") or record.delivered
        found: ResultRef | None = None
        for attempt in record.attempts:
            if attempt.result is not None and wanted in (None, attempt.attempt):
                found = attempt.result
        if found is None:
            declared = "the job declared no outputs" if not record.spec.outputs else f"the job is {record.state} and has stored none"
            raise NotFound("job.no_result", f"there are no results: {declared}", next_step=f"intertie job {job}")
        if await self._objects.size(found.digest) is None:
            raise NotFound(
                "job.result_elsewhere",
                "the results are packed but not here yet: they wait at the site",
                next_step="try again when it is back",
            )
        return await self._send(request, found.digest)

    async def _send(self, request: web.Request, digest: str) -> web.StreamResponse:
        size, chunks = await self._objects.get(digest)
        response = web.StreamResponse(
            headers={"Content-Type": "application/gzip", "Content-Length": str(size), "ETag": f'"{digest}"', "X-Digest": digest}
        )
        await response.prepare(request)
        async for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
        return response


async def _chunks(request: web.Request) -> AsyncIterator[bytes]:
    async for chunk in request.content.iter_chunked(CHUNK_BYTES):
        yield chunk
