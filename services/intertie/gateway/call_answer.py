"""How a call's answer is handed to its caller: bytes unchanged, and one clear error where the way breaks.

Of a stream of events only whole events are handed on, so that an error can follow as an event of its own (`data: {"error": …}`), which clients of the
OpenAI protocol raise as such. What breaks before the headers is a problem document that such clients can read, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from aiohttp import web

from intertie.contracts.base import encode

STREAM = "text/event-stream"
# An event that is longer is handed on as it comes: nobody waits for its end.
EVENT_BYTES = 256 * 1024

HEADERS = frozenset({"content-type", "content-encoding", "cache-control", "retry-after", "x-request-id", "openai-processing-ms"})
"""All that a site may say in a header: it speaks from the hub's own address, and sets no cookie there."""
SAFE = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'; sandbox"}

STATUSES: Mapping[str, int] = {
    "call.no_site": 503,
    "call.not_taken": 504,
    "call.busy": 429,
    "call.rate": 429,
    "call.paused": 503,
    "call.unavailable": 503,
    "call.superseded": 503,
    "call.too_large": 413,
    "call.body_slow": 408,
    "call.not_json": 400,
    "call.model": 400,
    "call.usage_required": 400,
    "call.path": 404,
    "call.unknown_offering": 404,
    "call.tenant": 403,
    "call.grant": 502,
    "call.too_late": 504,
    "call.no_gateway_key": 502,
    "call.upstream_unreachable": 502,
    "call.upstream_broke_off": 502,
    "call.answer_too_large": 502,
    "call.upstream_stalled": 504,
    "call.timed_out": 504,
    "call.bus_lost": 503,
    "call.site_silent": 504,
    "call.parts_lost": 502,
    "call.site_wrong": 502,
    "call.gateway_full": 503,
    "call.agent_stopped": 503,
    "call.agent_failed": 502,
}
_HARMLESS = "try again if a second call does no harm"
_OTHERS = "intertie offerings shows which sites answer; nothing was called"
_OWNER = "tell the site's owner, with the call's id"
NEXT_STEPS: Mapping[str, str] = {
    "call.busy": "try again after Retry-After; the owner may raise limits.concurrency",
    "call.rate": "try again after Retry-After",
    "call.gateway_full": "try again after Retry-After; nothing was called",
    "call.body_slow": "send the whole body at once; nothing was called",
    "call.too_large": "send less: intertie offering show SITE/NAME names the limit",
    "call.not_json": "send one JSON document, Content-Type: application/json; nothing was called",
    "call.model": "name one of the models that /v1/models lists; nothing was called",
    "call.usage_required": 'add "stream_options": {"include_usage": true}',
    "call.path": "intertie offering show SITE/NAME says how it is called",
    "call.unknown_offering": "intertie offerings lists what you may call",
    "call.tenant": "ask the site's owner to admit your tenant; nothing was called",
    "call.no_site": _OTHERS,
    "call.paused": _OTHERS,
    "call.unavailable": _OTHERS,
    "call.superseded": _OTHERS,
    "call.not_taken": f"nothing is known to have been called: {_HARMLESS}",
    "call.too_late": f"nothing was called: {_HARMLESS}; if it goes on, the site's clock is wrong",
    "call.grant": "tell the hub's operator; nothing was called",
    "call.no_gateway_key": "tell the site's owner: the site joined before calls were known, and must join again",
    "call.bus_lost": f"what the site's server did is not known: {_HARMLESS}",
    "call.site_silent": f"what the site's server did is not known: {_HARMLESS}",
    "call.parts_lost": f"the answer did not arrive whole: {_HARMLESS}",
    "call.site_wrong": _OWNER,
    "call.agent_failed": _OWNER,
    "call.agent_stopped": f"the site's agent was stopped while it was called: {_HARMLESS}",
    "call.upstream_unreachable": f"the site's server was not reached: {_HARMLESS}, or tell the site's owner",
    "call.upstream_broke_off": f"the site's server broke off: {_HARMLESS}, or tell the site's owner",
    "call.upstream_stalled": f"the site's server said nothing for too long: {_HARMLESS}, or tell the site's owner",
    "call.timed_out": "ask for less at a time: intertie offering show SITE/NAME names the limit",
    "call.answer_too_large": "ask for less at a time: intertie offering show SITE/NAME names the limit",
}
"""What a caller can do, by code; whoever raises one with a step of its own is heard before."""
AGAIN = frozenset({"call.busy", "call.rate", "call.no_site", "call.paused", "call.unavailable", "call.bus_lost", "call.gateway_full"})


def status_of(code: str) -> int:
    return STATUSES.get(code, 502)


def problem(code: str, text: str, *, trace_id: str, status: int = 0, retry_after_s: int = 0, next_step: str = "") -> web.Response:
    """RFC 9457, with the `error` member that clients of the OpenAI protocol look for."""
    status = status or status_of(code)
    body = {
        "type": f"urn:intertie:error:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": text,
        "code": code,
        "kind": "unavailable" if status in (429, 502, 503, 504) else "refused",
        "next_step": next_step or NEXT_STEPS.get(code, ""),
        "trace_id": trace_id,
        "error": error_of(code, text),
    }
    headers = {"X-Trace-Id": trace_id}
    if status in (429, 503) and (retry_after_s or code in AGAIN):
        headers["Retry-After"] = str(max(1, retry_after_s))
    return web.Response(status=status, body=encode(body), content_type="application/problem+json", headers=headers)


def error_of(code: str, text: str) -> dict[str, str]:
    return {"message": text, "type": "intertie", "code": code}


class Answer:
    """One caller's connection, once the upstream has said a status."""

    def __init__(self, request: web.Request, status: int, headers: Mapping[str, str], call: str, trace_id: str) -> None:
        self._request = request
        self._response = web.StreamResponse(status=status)
        self.streams = headers.get("content-type", "").lower().startswith(STREAM)
        self._held = bytearray()
        self.handed = 0
        """Bytes of the answer that were given to the connection."""
        for name, value in headers.items():
            if name in HEADERS and value.isprintable():
                self._response.headers[name] = value
        self._response.headers.update(SAFE)
        length = headers.get("content-length", "")
        self.length = int(length) if length.isascii() and length.isdigit() and len(length) < 16 and not self.streams else None
        """Bytes, as the site says beforehand; None: it does not."""
        if self.length is not None:
            self._response.content_length = self.length
        self._response.headers["X-Intertie-Call"] = call
        self._response.headers["X-Trace-Id"] = trace_id

    async def begin(self) -> None:
        await self._response.prepare(self._request)

    async def hand(self, data: bytes) -> None:
        """Waits while the caller reads slowly; `ConnectionError` if he is gone."""
        if self.streams:
            self._held += data
            end = _end_of_event(self._held)
            if end == 0 and len(self._held) > EVENT_BYTES:
                end = len(self._held)
            data = bytes(self._held[:end])
            del self._held[:end]
        if data:
            await self._response.write(data)
            self.handed += len(data)

    async def end(self) -> None:
        """All of it came."""
        if self._held:
            await self._response.write(bytes(self._held))
            self.handed += len(self._held)
        await self._response.write_eof()

    async def fail(self, code: str, text: str) -> None:
        """One clear error: an event of the stream, or a connection that ends before the answer does."""
        if self.streams:
            said = json.dumps({"error": error_of(code, text)}, ensure_ascii=False)
            await self._response.write(f"data: {said}\n\n".encode())
            await self._response.write_eof()
        elif self._request.transport is not None:
            self._request.transport.abort()

    @property
    def response(self) -> web.StreamResponse:
        return self._response


def _end_of_event(data: bytearray) -> int:
    """After the last blank line; 0 if there is none."""
    ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n", b"\r\r") if (at := data.rfind(mark)) >= 0]
    return max(ends, default=0)
