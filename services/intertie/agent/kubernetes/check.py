"""The owner's pre-flight of a Kubernetes site: is it reached, may the agent do what it must and nothing else, are the volumes here, do nodes fit.

Nothing is created: the one create is a dry run on the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from intertie.agent.adapters.port import NativeWork
from intertie.agent.check.report import Check, Line, Place, line
from intertie.agent.core.model import Attempt, State
from intertie.agent.kubernetes import api as paths
from intertie.agent.kubernetes.api import Api
from intertie.agent.kubernetes.core.manifest import job_manifest
from intertie.agent.kubernetes.core.nodes import usability
from intertie.agent.kubernetes.core.seen import Listed, Node, parsed
from intertie.agent.kubernetes.core.settings import KubernetesRules, checked
from intertie.agent.kubernetes.folders import ClaimFiles
from intertie.clock import SystemClock
from intertie.contracts.job import JobSpec
from intertie.contracts.site import DeviceKind
from intertie.errors import IntertieError, Refused
from intertie.ids import AttemptId, JobId, PoolName, TenantName

PROBE = "intertie-check"


async def kubernetes(place: Place) -> Sequence[Line]:
    """Silent where site.toml names no cluster."""
    if place.rules.kubernetes is None:
        return []
    try:
        rules = checked(place.rules.kubernetes)
    except Refused as err:
        return [line("fail", "kubernetes.bad", error=err.text, fix="rules", file=place.folder.rules_file)]
    api = Api(rules, SystemClock())
    try:
        found = await _cluster(api)
        if found[-1].level != "fail":
            for name in rules.namespaces:
                found += await _namespace(api, rules, name)
            found += await _too_much(api, rules)
    finally:
        await api.close()
    return found


async def _cluster(api: Api) -> list[Line]:
    try:
        await api.get("/version")
        told = parsed(await api.get(paths.core("", "nodes")), Listed)
    except IntertieError as err:
        return [line("fail", "kubernetes.down", error=err.text, fix="kubernetes")]
    nodes = [parsed(item, Node) for item in told.items or ()]
    usable = sum(usability(node)[0] for node in nodes)
    return [line("ok" if usable else "fail", "kubernetes.nodes", cluster=api.rules.cluster, usable=usable, count=len(nodes))]


async def _namespace(api: Api, rules: KubernetesRules, name: str) -> list[Line]:
    space = rules.namespaces[name]
    try:
        for path in (paths.jobs(name), paths.core(name, "pods"), paths.core(name, "events")):
            await api.get(path, {"limit": "1"})
        await api.create(f"{paths.jobs(name)}?dryRun=All", _probe(rules, name))
    except IntertieError as err:
        return [line("fail", "namespace.not", namespace=name, error=err.text, fix="kubernetes")]
    found = [line("ok", "namespace.ok", namespace=name, tenant=space.tenant, level=space.pod_security)]
    try:
        ClaimFiles(rules)
    except Refused as err:
        return [*found, line("fail", "namespace.not", namespace=name, error=err.text, fix="claim", local=space.local, claim=space.claim)]
    return found


async def _too_much(api: Api, rules: KubernetesRules) -> list[Line]:
    """A right that it does not need is a right that can be stolen."""
    found: list[Line] = []
    for path in ("/api/v1/secrets", "/api/v1/pods", *(paths.core(name, "secrets") for name in rules.namespaces)):
        try:
            await api.get(path, {"limit": "1"})
        except IntertieError:
            continue
        found.append(line("warn", "kubernetes.much", path=path, fix="kubernetes"))
    return found


def _probe(rules: KubernetesRules, name: str) -> dict[str, object]:
    """A Job as ours are, of nobody's."""
    space = rules.namespaces[name]
    now = SystemClock().now()
    attempt = Attempt(
        id=AttemptId(PROBE),
        job=JobId(PROBE),
        state=State.STAGING,
        pool=PoolName("check"),
        kind=DeviceKind.SLOT,
        devices=[],
        spec=JobSpec(name=PROBE, script="true", wall_s=60),
        account=name,
        tenant=TenantName(space.tenant),
        kernel_boot="",
    )
    return job_manifest(NativeWork(attempt, Path(space.local) / PROBE, now + timedelta(seconds=60)), rules, now)


CHECKS: Sequence[Check] = (kubernetes,)
