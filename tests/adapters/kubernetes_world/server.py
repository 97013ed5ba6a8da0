"""The API over HTTP: discovery, the verbs, watches; each request authenticated, authorised and admitted before it does anything."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from aiohttp import web
from tests.adapters.kubernetes_world import admission
from tests.adapters.kubernetes_world.access import Access, Asked
from tests.adapters.kubernetes_world.kinds import ALL, BY_PATH, JOBS, NAMESPACES, PODS, VERBS, Failure, Kind, Obj, now, stamp, validate
from tests.adapters.kubernetes_world.store import Store

Logs = Callable[[Obj, "web.Request"], Awaitable[web.StreamResponse]]
BOOKMARK_S = 5.0


class Api:
    def __init__(self, store: Store, access: Access) -> None:
        self.store, self.access = store, access
        self.deaf = False
        self.swallow = 0
        """So many creates of Jobs are done, and their answer never comes."""
        self.empty = 0
        """So many lists show nothing."""
        self.watching: set[asyncio.Task[object]] = set()
        self.pages: dict[str, list[Obj]] = {}
        self.logs: Logs | None = None
        self.requests = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=4 * 1024 * 1024)
        app.router.add_get("/version", _json({"major": "1", "minor": "33", "gitVersion": "v1.33.0-lookalike", "platform": "linux/amd64"}))
        app.router.add_get("/api", _json({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}))
        app.router.add_get("/apis", _json(_groups()))
        app.router.add_get("/openapi/v2", _openapi)
        app.router.add_get("/api/v1", _json(_resources("v1")))
        for version in sorted({kind.version for kind in ALL} - {"v1"}):
            app.router.add_get(f"/apis/{version}", _json(_resources(version)))
        for base in ("/api/{v:v1}", "/apis/{g}/{v}"):
            app.router.add_route("*", f"{base}/namespaces/{{ns}}/{{plural}}", self._collection)
            app.router.add_route("*", f"{base}/namespaces/{{ns}}/{{plural}}/{{name}}", self._item)
            app.router.add_route("*", f"{base}/namespaces/{{ns}}/{{plural}}/{{name}}/{{sub}}", self._item)
            app.router.add_route("*", f"{base}/{{plural}}", self._collection)
            app.router.add_route("*", f"{base}/{{plural}}/{{name}}", self._item)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        self.requests += 1
        if self.deaf:
            _hang_up(request)
        try:
            self.access.who(request.headers.get("Authorization", ""))
            answer = await handler(request)
        except Failure as failure:
            answer = web.json_response(failure.status(), status=failure.code)
        except web.HTTPNotFound:
            answer = web.json_response(Failure(404, "NotFound", "the server could not find the requested resource").status(), status=404)
        except json.JSONDecodeError as err:
            answer = web.json_response(Failure(400, "BadRequest", str(err)).status(), status=400)
        if self.deaf:
            _hang_up(request)
        if not answer.prepared:
            answer.headers["Date"] = format_datetime(datetime.now(UTC), usegmt=True)
        return answer

    # --- collections ---

    def _kind(self, request: web.Request) -> tuple[Kind, str]:
        info = request.match_info
        version = f"{info['g']}/{info['v']}" if "g" in info else info["v"]
        kind = BY_PATH.get((version, info["plural"]))
        if kind is None:
            raise Failure(404, "NotFound", "the server could not find the requested resource")
        return kind, info.get("ns", "")

    def _may(self, request: web.Request, verb: str, kind: Kind, namespace: str, name: str = "", sub: str = "") -> None:
        resource = f"{kind.plural}/{sub}" if sub else kind.plural
        self.access.require(Asked(self.access.who(request.headers.get("Authorization", "")), verb, kind.group, resource, namespace, name))

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        kind, namespace = self._kind(request)
        if kind is NAMESPACES and namespace:
            raise Failure(404, "NotFound", "the server could not find the requested resource")
        match request.method:
            case "GET":
                if request.query.get("watch", "").lower() in ("true", "1"):
                    self._may(request, "watch", kind, namespace)
                    return await self._watch(request, kind, namespace)
                self._may(request, "list", kind, namespace)
                return web.json_response(self._list(request, kind, namespace))
            case "POST":
                self._may(request, "create", kind, namespace)
                return await self._create(request, kind, namespace)
            case "DELETE":
                self._may(request, "deletecollection", kind, namespace)
                for obj in self.store.list(kind, namespace):
                    if _matches(obj, request):
                        self.delete(kind, obj, {})
                return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        raise Failure(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _list(self, request: web.Request, kind: Kind, namespace: str) -> Obj:
        token = request.query.get("continue", "")
        if token:
            if token not in self.pages:
                raise Failure(410, "Expired", "The provided continue parameter is too old to display a consistent list result")
            items = self.pages.pop(token)
        else:
            items = [obj for obj in self.store.list(kind, namespace) if _matches(obj, request)]
        if self.empty > 0:
            self.empty, items = self.empty - 1, []
        meta: Obj = {"resourceVersion": str(self.store.version)}
        limit = int(request.query.get("limit", "0") or 0)
        if limit and len(items) > limit:
            meta |= {"continue": f"page-{self.store.version}-{len(self.pages)}-{len(items)}", "remainingItemCount": len(items) - limit}
            self.pages[meta["continue"]] = items[limit:]
            items = items[:limit]
        return {"kind": f"{kind.kind}List", "apiVersion": kind.version, "metadata": meta, "items": items}

    async def _create(self, request: web.Request, kind: Kind, namespace: str) -> web.Response:
        obj: Obj = await request.json()
        if not isinstance(obj, dict) or not isinstance(obj.get("metadata"), dict):
            raise Failure(400, "BadRequest", "the object provided is unrecognized")
        meta = obj["metadata"]
        if kind.namespaced:
            if not namespace:
                raise Failure(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
            if meta.setdefault("namespace", namespace) != namespace:
                raise Failure(400, "BadRequest", "the namespace of the provided object does not match the namespace sent on the request")
            self.store.get(NAMESPACES, "", namespace)
        if "name" not in meta:
            meta["name"] = meta.get("generateName", "") + f"{self.store.version:05x}"[-5:]
        obj.pop("status", None) if kind.status and kind.kind != "Node" else None
        validate(obj, kind)
        admission.admit(self.store, kind, obj)
        if request.query.get("dryRun"):
            return web.json_response({"apiVersion": kind.version, "kind": kind.kind, **obj}, status=201)
        made = self.store.create(kind, namespace, obj)
        if kind is JOBS and self.swallow > 0:
            self.swallow -= 1
            _hang_up(request)
        return web.json_response(made, status=201)

    # --- one object ---

    async def _item(self, request: web.Request) -> web.StreamResponse:
        kind, namespace = self._kind(request)
        name, sub = request.match_info["name"], request.match_info.get("sub", "")
        if request.method == "GET":
            self._may(request, "get", kind, namespace, name, sub)
            obj = self.store.get(kind, namespace, name)
            if kind is PODS and sub == "log":
                assert self.logs is not None
                return await self.logs(obj, request)
            return web.json_response(obj)
        if request.method == "DELETE":
            self._may(request, "delete", kind, namespace, name)
            body = await request.read()
            return web.json_response(self.delete(kind, self.store.get(kind, namespace, name), json.loads(body) if body else {}))
        verb = {"PATCH": "patch", "PUT": "update"}.get(request.method)
        if verb is None:
            raise Failure(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        self._may(request, verb, kind, namespace, name, sub)
        return web.json_response(self._change(kind, self.store.get(kind, namespace, name), await request.json(), request, sub))

    def _change(self, kind: Kind, before: Obj, told: Obj, request: web.Request, sub: str) -> Obj:
        after = copy.deepcopy(before)
        expect = (told.get("metadata") or {}).get("resourceVersion", "") if isinstance(told, dict) else ""
        if request.method == "PUT":
            kept = {
                name: before["metadata"].get(name)
                for name in ("uid", "creationTimestamp", "generation", "deletionTimestamp")
                if name in before["metadata"]
            }
            after = {**told, "metadata": {**told["metadata"], **kept}, "status": before.get("status", {})}
        else:
            style = request.content_type
            if style not in ("application/merge-patch+json", "application/strategic-merge-patch+json"):
                raise Failure(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {style}")
            if not sub:
                told.pop("status", None)
            merge(after, told, strategic=style.startswith("application/strategic"))
        after["apiVersion"], after["kind"] = kind.version, kind.kind
        for name in ("name", "namespace", "uid"):
            if after["metadata"].get(name) != before["metadata"].get(name):
                raise Failure(422, "Invalid", f"metadata.{name}: field is immutable")
        validate({key: value for key, value in after.items() if key != "status"}, kind)
        admission.changed(kind, before, after)
        return self.store.update(kind, after, expect=expect)

    def delete(self, kind: Kind, obj: Obj, options: Obj) -> Obj:
        wanted = (options.get("preconditions") or {}).get("uid")
        if wanted and wanted != obj["metadata"]["uid"]:
            raise Failure(
                409, "Conflict", f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {obj['metadata']['uid']}"
            )
        if kind is PODS:
            grace = int(options.get("gracePeriodSeconds", obj["spec"].get("terminationGracePeriodSeconds", 30)))
            return self.delete_pod(obj, grace)
        policy = options.get("propagationPolicy", "Background")
        if kind is JOBS and policy == "Foreground":

            def leave(job: Obj) -> None:
                job["metadata"].setdefault("deletionTimestamp", now())
                job["metadata"]["finalizers"] = sorted({*job["metadata"].get("finalizers", []), "foregroundDeletion"})

            return self.store.change(kind, obj, leave)
        self.store.remove(kind, obj)
        return obj

    def delete_pod(self, obj: Obj, grace: int) -> Obj:
        """Gone at once if it has no node or is over; else when its kubelet has seen it end."""
        if not obj["spec"].get("nodeName") or obj["status"].get("phase") in ("Succeeded", "Failed"):
            self.store.remove(PODS, obj)
            return obj

        def leave(pod: Obj) -> None:
            pod["metadata"].setdefault("deletionTimestamp", stamp(datetime.now(UTC) + timedelta(seconds=grace)))
            pod["metadata"]["deletionGracePeriodSeconds"] = grace

        return self.store.change(PODS, obj, leave)

    # --- watches ---

    async def _watch(self, request: web.Request, kind: Kind, namespace: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Date": format_datetime(datetime.now(UTC), usegmt=True)})
        await response.prepare(request)

        async def say(what: str, obj: Obj) -> None:
            await response.write(json.dumps({"type": what, "object": obj}).encode() + b"\n")

        since = int(request.query.get("resourceVersion", "0") or 0)
        if since and since < self.store.floor:
            await say("ERROR", Failure(410, "Expired", f"too old resource version: {since} ({self.store.floor})").status())
            return response
        if not since:
            since = self.store.version
            for obj in self.store.list(kind, namespace):
                if _matches(obj, request):
                    await say("ADDED", obj)
        woken = asyncio.Event()
        self.store.waiting.add(woken)
        task = asyncio.current_task()
        assert task is not None
        self.watching.add(task)
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "300"))):
                await self._stream(request, kind, namespace, since, woken, say)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self.store.waiting.discard(woken)
            self.watching.discard(task)
        return response

    async def _stream(
        self, request: web.Request, kind: Kind, namespace: str, since: int, woken: asyncio.Event, say: Callable[[str, Obj], Awaitable[None]]
    ) -> None:
        shown = {obj["metadata"]["uid"] for obj in self.store.list(kind, namespace) if _matches(obj, request)}
        while not self.deaf:
            woken.clear()
            if since < self.store.floor:
                await say("ERROR", Failure(410, "Expired", "too old resource version").status())
                return
            upto = self.store.version
            for _, what, obj in list(self.store.since(since, kind, namespace)):
                uid, fits = obj["metadata"]["uid"], _matches(obj, request)
                if fits:
                    await say("ADDED" if what == "MODIFIED" and uid not in shown else what, obj)
                    shown.add(uid)
                elif uid in shown:
                    await say("DELETED", obj)
                    shown.discard(uid)
            since = max(since, upto)
            try:
                async with asyncio.timeout(BOOKMARK_S):
                    await woken.wait()
            except TimeoutError:
                if request.query.get("allowWatchBookmarks"):
                    meta = {"resourceVersion": str(self.store.version), "creationTimestamp": None}
                    await say("BOOKMARK", {"kind": kind.kind, "apiVersion": kind.version, "metadata": meta})

    def cut(self) -> None:
        """Every watch ends, as when a balancer in between is changed."""
        for task in list(self.watching):
            task.cancel()


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError


def merge(into: Obj, told: Obj, *, strategic: bool = False) -> None:
    """RFC 7386; `strategic` also joins lists of conditions by type and of owners by uid, as far as anything here needs."""
    for key, value in told.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value, strategic=strategic)
        elif strategic and key in ("conditions", "ownerReferences") and isinstance(value, list):
            by = "type" if key == "conditions" else "uid"
            joined = {item[by]: item for item in into.get(key, [])}
            for item in value:
                joined[item[by]] = {**joined.get(item[by], {}), **item}
            into[key] = list(joined.values())
        else:
            into[key] = value


def _matches(obj: Obj, request: web.Request) -> bool:
    labels = obj["metadata"].get("labels") or {}
    for part in filter(None, request.query.get("labelSelector", "").split(",")):
        name, sign, value = _term(part)
        if sign == "!=" and labels.get(name) == value or sign == "=" and labels.get(name) != value or not sign and name not in labels:
            return False
    for part in filter(None, request.query.get("fieldSelector", "").split(",")):
        name, sign, value = _term(part)
        here: object = obj
        for step in name.split("."):
            here = here.get(step) if isinstance(here, dict) else None
        if (str(here or "") == value) is (sign == "!="):
            return False
    return True


def _term(part: str) -> tuple[str, str, str]:
    for sign in ("!=", "==", "="):
        if sign in part:
            name, _, value = part.partition(sign)
            return name, "!=" if sign == "!=" else "=", value
    return part, "", ""


# --- discovery ---------------------------------------------------------------------------------------------------------------------------


def _json(value: Obj) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(value)

    return answer


async def _openapi(request: web.Request) -> web.Response:
    raise Failure(404, "NotFound", "this look-alike has no OpenAPI document: use --validate=false")


def _groups() -> Obj:
    groups = []
    for version in sorted({kind.version for kind in ALL} - {"v1"}):
        one = {"groupVersion": version, "version": version.partition("/")[2]}
        groups.append({"name": version.partition("/")[0], "versions": [one], "preferredVersion": one})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _resources(version: str) -> Obj:
    told: list[Obj] = []
    for kind in ALL:
        if kind.version != version:
            continue
        row: Obj = {
            "name": kind.plural,
            "singularName": kind.kind.lower(),
            "namespaced": kind.namespaced,
            "kind": kind.kind,
            "verbs": VERBS,
        }
        told.append(row | ({"shortNames": [kind.short]} if kind.short else {}))
        if kind.status:
            told.append(
                {"name": f"{kind.plural}/status", "singularName": "", "namespaced": kind.namespaced, "kind": kind.kind, "verbs": ["get"]}
            )
        if kind is PODS:
            told.append({"name": "pods/log", "singularName": "", "namespaced": True, "kind": "Pod", "verbs": ["get"]})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": told}
