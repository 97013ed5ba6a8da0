"""A whole cluster in this process: start it, break it, ask it. `async with cluster(folder, rules) as world`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ipaddress
import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.adapters.kubernetes_world.access import ADMIN, Access, service_account
from tests.adapters.kubernetes_world.controllers import ControlPlane, condition
from tests.adapters.kubernetes_world.kinds import BY_PATH, JOBS, NODES, PODS, Failure, Obj, validate
from tests.adapters.kubernetes_world.kubelet import Kubelets, node, say_ready
from tests.adapters.kubernetes_world.server import Api
from tests.adapters.kubernetes_world.store import Store

from intertie.agent.kubernetes.core.owner import manifests
from intertie.agent.kubernetes.core.settings import KubernetesRules
from intertie.ids import AttemptId

TICK_S = 0.05


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store()
        self.access = Access(self.store)
        self.api = Api(self.store, self.access)
        self.plane = ControlPlane(self.store, self.api)
        self.kubelets = Kubelets(self.store, self.plane, folder)
        self.api.logs = self._log
        self.admin = self.access.token(ADMIN)
        self.url = ""
        self.store.create(BY_PATH["v1", "namespaces"], "", {"metadata": {"name": "default"}})

    # --- what the owner does ---

    def apply(self, objects: list[Obj]) -> None:
        """As `kubectl apply` would: validated, created, or replaced."""
        for obj in objects:
            kind = next(one for one in BY_PATH.values() if (one.version, one.kind) == (obj["apiVersion"], obj["kind"]))
            validate(obj, kind)
            try:
                self.store.create(kind, obj["metadata"].get("namespace", ""), copy.deepcopy(obj))
            except Failure:
                there = self.store.get(kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
                self.store.update(kind, {**there, **copy.deepcopy(obj), "metadata": {**there["metadata"], **obj["metadata"]}})

    def add_node(self, name: str, **how: object) -> None:
        self.store.create(NODES, "", node(name, **how))  # type: ignore[arg-type]  # as `node` takes them

    def kubeconfig(self, name: str, token: str, *, token_file: bool = False) -> Path:
        user: Obj = {"token": token}
        if token_file:
            file = self.folder / f"{name}.token"
            file.write_text(token, encoding="ascii")
            user = {"tokenFile": str(file)}
        told = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url, "certificate-authority": str(self.folder / "ca.pem")}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        file = self.folder / f"{name}.kubeconfig"
        file.write_text(json.dumps(told), encoding="ascii")
        return file

    def agent_token(self, rules: KubernetesRules) -> str:
        return self.access.token(service_account(rules.agent_namespace, rules.agent_service_account))

    # --- asking ---

    def job(self, tag: AttemptId) -> Obj:
        return next(job for job in self.store.list(JOBS) if (job["metadata"].get("labels") or {}).get("intertie.io/attempt") == tag)

    def pod(self, tag: AttemptId) -> Obj:
        return next(pod for pod in self.store.list(PODS) if (pod["metadata"].get("labels") or {}).get("intertie.io/attempt") == tag)

    # --- breaking ---

    def say(self, tag: AttemptId, **status: object) -> None:
        self.store.change(PODS, self.pod(tag), lambda one: one["status"].update(status))

    def oom(self, tag: AttemptId) -> None:
        self._end(tag, "OOMKilled")

    def evict(self, tag: AttemptId) -> None:
        self._end(tag, "Evicted")

    def _end(self, tag: AttemptId, fate: str) -> None:
        import signal

        box = self.kubelets.running[self.pod(tag)["metadata"]["uid"]]
        box.fate = fate
        self.kubelets._kill(box, signal.SIGKILL)

    def preempt(self, tag: AttemptId) -> None:
        """A more important pod takes its node."""
        pod = self.pod(tag)
        self.store.change(
            PODS,
            pod,
            lambda one: condition(
                one,
                "DisruptionTarget",
                "True",
                "PreemptionByScheduler",
                "default-scheduler: preempting to accommodate a higher priority pod",
            ),
        )
        self.api.delete_pod(self.pod(tag), int(pod["spec"]["terminationGracePeriodSeconds"]))

    def lose_node(self, name: str) -> None:
        """Its kubelet is not heard; after a while its pods are deleted by taint, which only their kubelet could confirm."""
        self.kubelets.down.add(name)
        say_ready(self.store, name, "Unknown")

    def collect_lost(self, name: str) -> None:
        """The node object is removed; PodGC fails and removes what was on it."""
        for pod in self.store.list(PODS):
            if pod["spec"].get("nodeName") == name:

                def lost(one: Obj) -> None:
                    condition(one, "DisruptionTarget", "True", "DeletionByPodGC", "PodGC: node no longer exists")
                    one["status"]["phase"] = "Failed"

                self.store.change(PODS, pod, lost)
        self.store.remove(NODES, self.store.get(NODES, "", name))

    async def _log(self, pod: Obj, request: web.Request) -> web.StreamResponse:
        file = self.folder / "logs" / f"{pod['metadata']['uid']}.log"
        if not file.exists():
            raise Failure(
                400,
                "BadRequest",
                f'container "{pod["spec"]["containers"][0]["name"]}" in pod "{pod["metadata"]["name"]}" is waiting to start',
            )
        data = file.read_bytes()
        if (tail := request.query.get("tailLines")) is not None:
            data = b"".join(data.splitlines(keepends=True)[-int(tail) :]) if int(tail) else b""
        if (limit := request.query.get("limitBytes")) is not None:
            data = data[: int(limit)]
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        await response.write(data)
        at = file.stat().st_size
        while request.query.get("follow") and pod["metadata"]["uid"] in self.kubelets.running:
            await asyncio.sleep(TICK_S)
            more = file.read_bytes()[at:]
            at += len(more)
            await response.write(more)
        return response

    async def tick(self) -> None:
        while True:
            self.plane.tick()
            self.kubelets.tick()
            await asyncio.sleep(TICK_S)


@asynccontextmanager
async def cluster(folder: Path, rules: KubernetesRules | None = None, nodes: Mapping[str, Obj] | None = None) -> AsyncIterator[World]:
    """TLS on a free port. With `rules`, the manifests that the owner would apply are applied, and each claim has a folder where `local` says."""
    world = World(folder)
    context = _certificate(folder)
    runner = web.AppRunner(world.api.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    world.url = f"https://127.0.0.1:{port}"
    for name, how in (nodes or {"n1": {}}).items():
        world.add_node(name, **how)
    if rules is not None:
        world.apply(manifests(rules))
        for name, namespace in rules.namespaces.items():
            world.kubelets.claims[name, namespace.claim] = Path(namespace.local)
            os.makedirs(namespace.local, exist_ok=True)
    ticking = asyncio.create_task(world.tick())
    try:
        yield world
    finally:
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking
        world.kubelets.stop()
        world.api.cut()
        await runner.cleanup()


def _certificate(folder: Path) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "look-alike")])
    start = datetime.now(UTC) - timedelta(hours=1)
    public = key.public_key()
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]), critical=False
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=True,
                crl_sign=True,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "tls.key").write_bytes(private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.pem", folder / "tls.key")
    return context
