"""HTTP to the gateway with the standard library: small, quick to import, honours proxy variables.

A reply becomes a contract, a problem becomes the error it names, a dead or slow hub becomes `Unavailable`.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, TypeVar

from intertie.cli.config import Login
from intertie.contracts.base import decode, encode
from intertie.errors import KINDS, IntertieError, Refused, Unavailable

T = TypeVar("T")

# Longer than the gateway waits for its services (8 s): its answer is better than our impatience.
TIMEOUT_S = 15.0
UPLOAD_TIMEOUT_S = 600.0


class Client:
    """Calls one hub as one principal."""

    def __init__(self, login: Login) -> None:
        self.url = login.url
        self._token = login.token

    def get(self, path: str, reply: type[T], query: Mapping[str, object] | None = None) -> T:
        """GET as a contract."""
        return self.call("GET", path, reply, query=query)

    def post(self, path: str, reply: type[T], body: object, headers: Mapping[str, str] | None = None) -> T:
        """POST a contract (or JSON-like) body."""
        return self.call("POST", path, reply, body=encode(body), headers=headers)

    def put(self, path: str, reply: type[T], body: object) -> T:
        return self.call("PUT", path, reply, body=encode(body))

    def call(
        self,
        method: str,
        path: str,
        reply: type[T],
        *,
        query: Mapping[str, object] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """One request; the reply as `reply`, errors as `IntertieError`s."""
        with self.open(method, path, query=query, body=body, headers=headers) as response:
            return decode(response.read(), reply, what=f"the hub's answer to {method} {path}")

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: bytes | IO[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Iterator[http.client.HTTPResponse]:
        """The open response, for bytes."""
        asked = {k: str(v) for k, v in (query or {}).items() if v not in (None, "")}
        url = f"{self.url}{path}" + (f"?{urllib.parse.urlencode(asked)}" if asked else "")
        request = urllib.request.Request(url, data=body, method=method)  # noqa: S310  # scheme is checked below
        if not url.startswith(("http://", "https://")):
            raise Refused("cli.url", f"{self.url!r} is not an address of a hub", next_step="use http://host:port or https://host")
        if body is not None:
            request.add_header("Content-Type", "application/json")
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310
                yield response
        except urllib.error.HTTPError as err:
            raise as_error(err.code, err.read(), url) from err
        except TimeoutError as err:
            raise Unavailable(
                "cli.timeout", f"{self.url} did not answer in {timeout_s:.0f} s", next_step="try again; intertie doctor"
            ) from err
        except (urllib.error.URLError, ConnectionError, http.client.HTTPException) as err:
            reason = getattr(err, "reason", err)
            if isinstance(reason, TimeoutError):
                raise Unavailable("cli.timeout", f"{self.url} did not answer in {timeout_s:.0f} s") from err
            raise Unavailable(
                "cli.hub_unreachable",
                f"{self.url} cannot be reached: {getattr(reason, 'strerror', None) or reason}",
                next_step="check the address and the network; on a site's machine `intertie local` works without the hub",
            ) from err

    def upload(self, path: str, data: IO[bytes], size: int) -> None:
        """PUT bytes of a known size."""
        headers = {"Content-Type": "application/gzip", "Content-Length": str(size)}
        with self.open("PUT", path, body=data, headers=headers, timeout_s=UPLOAD_TIMEOUT_S) as response:
            response.read()


def as_error(status: int, body: bytes, url: str) -> IntertieError:
    """The error that a problem document names; something honest if it is none."""
    try:
        problem: dict[str, Any] = json.loads(body)
        kind = KINDS.get(str(problem["kind"]))
        code, text = str(problem["code"]), str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        return IntertieError(f"http.{status}", f"{url} answered {status} without saying why", next_step="is this an Intertie hub?")
    next_step = str(problem.get("next_step") or "")
    if kind is None:
        text = f"{text} (trace {problem.get('trace_id', '?')})"
        return IntertieError(code, text, next_step=next_step)
    if kind is Unavailable:
        return Unavailable(code, text, next_step=next_step)
    details = problem.get("details")
    return kind(code, text, next_step=next_step, details=details if isinstance(details, dict) else None)
