"""A small model server that speaks the OpenAI protocol: its answers are computed from the question, so that a lost or doubled byte shows.

`python -m tests.fakes.model_server PORT` prints a line when it listens. Words in the last message steer it: `words=N`, `pause_ms=N` between events,
`stall` (says its headers and nothing more), `break` (ends in the middle), `status=N`, `no-usage`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


def reply_of(question: str, words: int) -> list[str]:
    """What it says to a question: words that only this question has."""
    seed = hashlib.sha256(question.encode()).hexdigest()
    return [f"{seed[n % 60 : n % 60 + 4]}-{n} " for n in range(words)]


@dataclass
class ModelServer:
    """`calls` counts requests that reached it, `aborted` those whose caller hung up."""

    calls: int = 0
    aborted: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/embeddings", self.embed)
        app.router.add_post("/predict", self.predict)
        app.router.add_get("/counts", self.counts)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "test"}]})

    async def counts(self, request: web.Request) -> web.Response:
        return web.json_response({"calls": self.calls, "aborted": self.aborted})

    async def predict(self, request: web.Request) -> web.Response:
        self.calls += 1
        return web.json_response({"echo": await request.json()})

    async def embed(self, request: web.Request) -> web.Response:
        self.calls += 1
        asked = await request.json()
        texts = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
        data = [{"object": "embedding", "index": n, "embedding": [float(len(text)), 0.5]} for n, text in enumerate(texts)]
        used = sum(len(str(text).split()) for text in texts)
        usage = {"prompt_tokens": used, "total_tokens": used}
        return web.json_response({"object": "list", "data": data, "model": asked["model"], "usage": usage})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        asked = await request.json()
        self.seen.append({"headers": dict(request.headers)})
        question = str(asked["messages"][-1]["content"])
        orders = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", question[:200])}
        words = reply_of(question, orders.get("words", 8))
        usage = {
            "prompt_tokens": len(question.split()),
            "completion_tokens": len(words),
            "total_tokens": len(question.split()) + len(words),
        }
        if "status" in orders:
            return web.json_response({"error": {"message": "as you asked", "type": "test"}}, status=orders["status"])
        try:
            if asked.get("stream"):
                return await self._stream(request, asked, words, usage, question, orders.get("pause_ms", 0))
        except (ConnectionError, asyncio.CancelledError):
            self.aborted += 1
            raise
        if "stall" in question:
            await asyncio.sleep(600)
        body: dict[str, Any] = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": asked["model"],
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "".join(words)}, "finish_reason": "stop"}],
        }
        return web.json_response(body if "no-usage" in question else {**body, "usage": usage})

    async def _stream(
        self, request: web.Request, asked: dict[str, Any], words: list[str], usage: dict[str, int], question: str, pause_ms: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def event(choices: list[Any], **more: Any) -> None:
            said = {
                "id": "chatcmpl-1",
                "object": "chat.completion.chunk",
                "created": 1,
                "model": asked["model"],
                "choices": choices,
                **more,
            }
            await response.write(f"data: {json.dumps(said)}\n\n".encode())

        for number, word in enumerate(words):
            await event([{"index": 0, "delta": {"content": word}, "finish_reason": None}])
            if pause_ms:
                await asyncio.sleep(pause_ms / 1_000)
            if "stall" in question and number == 2:
                await asyncio.sleep(600)
            if "break" in question and number == 2:
                assert request.transport is not None
                request.transport.abort()
                return response
        await event([{"index": 0, "delta": {}, "finish_reason": "stop"}])
        if (asked.get("stream_options") or {}).get("include_usage") and "no-usage" not in question:
            await event([], usage=usage)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def serve(port: int) -> None:
    runner = web.AppRunner(ModelServer().application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
