"""The look-alike against a client that knows nothing of us: the real kubectl, of Debian's 1.20 and later."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.kubernetes_rig import IMAGE, rules
from tests.adapters.kubernetes_world.world import World, cluster

from intertie.agent.kubernetes.core.owner import printed

KUBECTL = shutil.which("kubectl")
pytestmark = pytest.mark.skipif(KUBECTL is None, reason="no kubectl here (Debian: kubernetes-client)")


@pytest.fixture
async def world(short_folder: Path) -> AsyncIterator[World]:
    async with cluster(short_folder) as made:
        made.kubeconfig("admin", made.admin)
        yield made


async def kubectl(world: World, *words: str, told: str = "", user: str = "admin", code: int = 0) -> str:
    assert KUBECTL is not None
    config = world.folder / f"{user}.kubeconfig"
    process = await asyncio.create_subprocess_exec(
        KUBECTL,
        f"--kubeconfig={config}",
        f"--cache-dir={world.folder / 'cache'}",
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "HOME": str(world.folder)},
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate(told.encode())
    assert process.returncode == code, f"{words}: {out.decode()} {err.decode()}"
    return out.decode() + err.decode()


async def test_kubectl_applies_what_the_owner_is_given_twice_and_reads_it_back(world: World, short_folder: Path) -> None:
    told = printed(rules(short_folder))
    first = await kubectl(world, "apply", "--validate=false", "-f", "-", told=told)
    assert "namespace/fed-acme created" in first and "role.rbac.authorization.k8s.io/intertie-agent created" in first
    second = await kubectl(world, "apply", "--validate=false", "-f", "-", told=told)
    assert "created" not in second and "namespace/fed-acme unchanged" in second
    seen = json.loads(await kubectl(world, "get", "networkpolicy,resourcequota,role", "-n", "fed-acme", "-o", "json"))
    assert {one["kind"] for one in seen["items"]} == {"NetworkPolicy", "ResourceQuota", "Role"}


def job(name: str, *words: str) -> str:
    context = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    uid = 20_001 if os.geteuid() == 0 else os.geteuid()
    container: dict[str, Any] = {"name": "c", "image": IMAGE, "command": list(words), "securityContext": {**context, "runAsUser": uid}}
    spec = {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", "containers": [container]}}}
    return json.dumps({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec})


async def test_kubectl_runs_a_job_waits_for_it_reads_its_log_and_deletes_it(world: World, short_folder: Path) -> None:
    await kubectl(world, "apply", "--validate=false", "-f", "-", told=printed(rules(short_folder)))
    create = ("create", "--validate=false", "-n", "fed-acme", "-f", "-")
    await kubectl(world, *create, told=job("one", "/bin/sh", "-c", "echo hello; echo there"))
    assert "AlreadyExists" in await kubectl(world, *create, told=job("one", "true"), code=1)
    assert "is invalid" in await kubectl(world, *create, told=job("two", "true").replace('"backoffLimit": 0', '"backofLimit": 0'), code=1)
    await kubectl(world, "wait", "--for=condition=complete", "--timeout=60s", "-n", "fed-acme", "job/one")
    assert await kubectl(world, "logs", "-n", "fed-acme", "job/one") == "hello\nthere\n"
    assert await kubectl(world, "logs", "--tail=1", "-n", "fed-acme", "job/one") == "there\n"
    await kubectl(world, "label", "-n", "fed-acme", "job/one", "seen=yes")
    assert "one" in await kubectl(world, "get", "job", "-n", "fed-acme", "-l", "seen=yes", "-o", "name")
    assert "No resources" in await kubectl(world, "get", "pods", "-n", "fed-acme", "--field-selector=status.phase=Failed")
    await kubectl(world, "delete", "-n", "fed-acme", "job/one", "--cascade=foreground", "--timeout=60s")
    assert "No resources" in await kubectl(world, "get", "jobs,pods", "-n", "fed-acme")


async def test_kubectl_as_the_agent_may_what_the_manifests_grant_and_nothing_else(world: World, short_folder: Path) -> None:
    told = rules(short_folder)
    await kubectl(world, "apply", "--validate=false", "-f", "-", told=printed(told))
    world.kubeconfig("agent", world.agent_token(told))
    await kubectl(world, "get", "nodes", user="agent")
    await kubectl(world, "get", "jobs", "-n", "fed-acme", user="agent")
    for words in (["get", "secrets", "-n", "fed-acme"], ["get", "pods", "-A"], ["get", "jobs", "-n", "default"], ["delete", "node", "n1"]):
        assert "Forbidden" in await kubectl(world, *words, user="agent", code=1), words
