"""The API server over HTTP: `kubernetes_asyncio` brings configuration, TLS and credentials; objects come and go as JSON, parsed by `core.seen`.

A credential that is refused is read again from its file once before anything is said of it (BR-137): bound tokens rotate.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Protocol, cast
from urllib.parse import quote

import aiohttp

from intertie.agent.kubernetes.core.seen import Status, parsed
from intertie.agent.kubernetes.core.settings import KubernetesRules
from intertie.clock import Clock
from intertie.errors import Conflict, NotFound, Refused, Unavailable

# One answer: longer than a busy API server takes for a page of a list, shorter than anybody's patience.
ANSWER_S = 20.0
# A list of so many objects at a time.
PAGE = 250
# A page of the largest objects that etcd takes; whatever is larger is not ours.
LARGEST = 64 * 1024 * 1024
LINE = 4 * 1024 * 1024
"""One line of a watch; an object has 1.5 MiB at most."""
FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


class Client(Protocol):
    """What we use of `kubernetes_asyncio.client.ApiClient`."""

    async def call_api(self, resource_path: str, method: str, **how: Any) -> aiohttp.ClientResponse: ...

    async def close(self) -> None: ...


class Expired(Unavailable):
    """410: that resource version is too old, list again."""

    def __init__(self, text: str = "that resource version is gone") -> None:
        super().__init__("kubernetes.expired", text, retry_after_s=1)


class Api:
    """`Refused` (it will never be taken), `NotFound`, `Conflict` (there already, or changed), `Unavailable` (not now, or nobody knows)."""

    def __init__(self, rules: KubernetesRules, clock: Clock) -> None:
        self.rules, self.clock = rules, clock
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._heard: tuple[datetime, float] | None = None
        """The API server's wall clock at its last answer, and our monotonic one then (seconds)."""
        self.questions = 0
        """Requests so far, watches included."""

    async def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def _connected(self) -> Client:
        async with self._opening:
            if self._client is None:
                self._client = await open_client(self.rules)
            return self._client

    async def _renew(self, used: Client) -> None:
        """Read credentials and trust again; those who use the old connection end by themselves."""
        async with self._opening:
            if self._client is used:
                self._client = None
        await used.close()

    # --- verbs ---

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        return await self._ask("GET", path, query)

    async def create(self, path: str, body: Mapping[str, Any]) -> bytes:
        return await self._ask("POST", path, None, body)

    async def patch(self, path: str, body: Mapping[str, Any]) -> bytes:
        """A merge patch."""
        return await self._ask("PATCH", path, None, body, "application/merge-patch+json")

    async def delete(self, path: str, body: Mapping[str, Any]) -> bytes:
        return await self._ask("DELETE", path, None, body)

    @asynccontextmanager
    async def lines(self, path: str, query: Mapping[str, str], silent_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """A watch: its lines as they come. Ends when the server ends it; `Unavailable` if nothing is heard for `silent_s`."""
        response = await self._send(
            "GET", path, query, None, "", aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=silent_s)
        )
        try:
            yield _lines(response)
        finally:
            response.close()

    async def _ask(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Mapping[str, Any] | None = None, kind: str = "application/json"
    ) -> bytes:
        response = await self._send(method, path, query, body, kind, aiohttp.ClientTimeout(total=ANSWER_S))
        try:
            return await _whole(response)
        except FAILURES as err:
            raise _away(method, path, err) from err
        finally:
            response.release()

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        kind: str,
        limit: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        for last in (False, True):
            client = await self._connected()
            self.questions += 1
            try:
                response = await client.call_api(
                    path,
                    method,
                    query_params=list((query or {}).items()),
                    header_params={"Accept": "application/json"} | ({"Content-Type": kind} if body is not None else {}),
                    body=dict(body) if body is not None else None,
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                    _request_timeout=limit,
                )
            except FAILURES as err:
                raise _away(method, path, err) from err
            except RuntimeError as err:  # aiohttp: this session was closed, by a renewal beside us.
                raise _away(method, path, err) from err
            self._note(response)
            if response.status == HTTPStatus.UNAUTHORIZED and not last:
                response.release()
                await self._renew(client)
                continue
            if not HTTPStatus(200) <= response.status < HTTPStatus(300):
                await _refuse(response, method, path)
            return response
        raise AssertionError("unreachable")

    def _note(self, response: aiohttp.ClientResponse) -> None:
        try:
            self._heard = (parsedate_to_datetime(response.headers["Date"]).astimezone(UTC), self.clock.monotonic_s())
        except (KeyError, ValueError, TypeError, OverflowError):
            return  # A proxy that leaves it out: what was heard before goes on.

    def now(self) -> datetime:
        """The API server's wall clock, by its last answer; ours before the first. Its answers tell whole seconds."""
        if self._heard is None:
            return self.clock.now()
        told, then_s = self._heard
        return told + timedelta(seconds=self.clock.monotonic_s() - then_s)


async def open_client(rules: KubernetesRules) -> Client:
    """From the owner's kubeconfig, or as the service account of the pod that we run in. `Refused('kubernetes.access')` if neither can be read."""
    try:
        from kubernetes_asyncio import client, config  # Half a second and 48 MiB: only where there is a cluster.
    except ImportError as err:
        raise Refused(
            "kubernetes.client", "kubernetes_asyncio is not installed", next_step="pip install 'intertie[agent-kubernetes]'"
        ) from err
    wanted = client.Configuration()
    wanted.connection_pool_maxsize = 64
    try:
        if rules.kubeconfig:
            await config.load_kube_config(rules.kubeconfig, rules.context or None, client_configuration=wanted, persist_config=False)
        else:
            config.load_incluster_config(client_configuration=wanted)  # type: ignore[no-untyped-call]
        opened = cast(Client, client.ApiClient(wanted))
    except (config.ConfigException, OSError, ValueError, TypeError, KeyError) as err:
        where = rules.kubeconfig or "the pod's service account"
        raise Refused("kubernetes.access", f"{where}: {err}"[:500], next_step="see kubeconfig in [kubernetes] of site.toml") from err
    return opened


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    told = await response.content.read(LARGEST + 1)
    parts = [told]
    size = len(told)
    while told and size <= LARGEST:
        told = await response.content.read(LARGEST + 1 - size)
        parts.append(told)
        size += len(told)
    if size > LARGEST:
        raise Refused("kubernetes.too_large", f"an answer of more than {LARGEST} bytes")
    return b"".join(parts)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    try:
        async for chunk in response.content.iter_any():
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                if line.strip():
                    yield line
            if len(rest) > LINE:
                raise Refused("kubernetes.too_large", f"a watched line of more than {LINE} bytes")
    except FAILURES as err:
        raise _away("GET", str(response.url.path), err) from err


def _away(method: str, path: str, err: BaseException) -> Unavailable:
    return Unavailable("kubernetes.away", f"{method} {path}: {type(err).__name__} {err}"[:300].strip(), retry_after_s=2)


async def _refuse(response: aiohttp.ClientResponse, method: str, path: str) -> None:
    """Raise what this answer means; its text is the API server's own."""
    try:
        told = await _whole(response)
    except FAILURES:
        told = b""
    finally:
        response.close()
    try:
        status = parsed(told, Status)
    except Refused:
        status = Status()
    text = f"{method} {path}: {status.message or told[:200].decode('utf-8', 'replace') or response.reason}"[:1000]
    match response.status:
        case 401:
            raise Unavailable(
                "kubernetes.unauthenticated",
                f"{text}; the credential was read again and is refused too",
                retry_after_s=30,
                next_step="the owner renews the agent's token or certificate; jobs keep their last known state",
            )
        case 403 if "exceeded quota" in text:
            raise Unavailable("kubernetes.quota", text, retry_after_s=30)
        case 403:
            raise Refused("kubernetes.forbidden", text, next_step="apply what `intertie-agent kubernetes manifests` prints")
        case 404:
            raise NotFound("kubernetes.not_found", text)
        case 409:
            raise Conflict("kubernetes.conflict", text, details={"reason": status.reason or ""})
        case 410:
            raise Expired(text)
        case 400 | 405 | 413 | 415 | 422:
            raise Refused("kubernetes.invalid", text)
    raise Unavailable("kubernetes.unavailable", f"{response.status} {text}", retry_after_s=_after(response))


def _after(response: aiohttp.ClientResponse) -> float:
    told = response.headers.get("Retry-After", "")
    return min(60.0, float(told)) if told.isascii() and told.isdigit() and len(told) < 6 else 2.0


# --- paths -------------------------------------------------------------------------------------------------------------------------------


def jobs(namespace: str, name: str = "") -> str:
    return f"/apis/batch/v1/namespaces/{quote(namespace, safe='')}/jobs" + (f"/{quote(name, safe='')}" if name else "")


def core(namespace: str, kind: str, name: str = "", sub: str = "") -> str:
    """`pods`, `events` of a namespace; `nodes` of the cluster where it is empty."""
    place = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"/api/v1{place}/{kind}" + (f"/{quote(name, safe='')}" if name else "") + (f"/{sub}" if sub else "")


def as_json(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)
