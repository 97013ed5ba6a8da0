"""What is created for a job, what the owner applies, and what of the owner's settings is refused: before any API server has a say."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml  # type: ignore[import-untyped]  # a part of kubernetes_asyncio
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.fakes.agents import attempt

from intertie.agent.adapters.port import NativeWork
from intertie.agent.core.images import ImageRules
from intertie.agent.core.rules import Rules
from intertie.agent.kubernetes.core import words
from intertie.agent.kubernetes.core.manifest import job_manifest, name_of
from intertie.agent.kubernetes.core.owner import CLUSTER_VERBS, VERBS, manifests, printed
from intertie.agent.kubernetes.core.settings import KubernetesRules, Namespace, checked
from intertie.agent.slurm.core.rules import Images, SlurmRules
from intertie.contracts.image import PoolImages
from intertie.contracts.job import JobSpec, Resources
from intertie.errors import Refused

NOW = datetime(2026, 12, 1, 8, tzinfo=UTC)
IMAGE = "registry.example/base@sha256:" + "a" * 64
OPS = Path(__file__).resolve().parents[2] / "ops/kubernetes"
VERSIONS = ["1.30", "1.33", "1.37"]


def space(**changes: object) -> Namespace:
    return msgspec.structs.replace(Namespace(tenant="acme", claim="work", local="/srv/acme", uid=20_001, gid=20_001), **changes)


def rules(**changes: object) -> KubernetesRules:
    made = KubernetesRules(cluster="lab", image=IMAGE, namespaces={"fed-acme": space()})
    return msgspec.structs.replace(made, **changes)


def work(gpus: int = 0, model: str = "", **changes: object) -> NativeWork:
    made = msgspec.structs.replace(attempt(account="fed-acme"), model=model, **changes)
    if gpus:
        made = msgspec.structs.replace(made, spec=JobSpec(name="t", script="true", resources=Resources(gpus=gpus), wall_s=600))
    return NativeWork(made, PurePosixPath("/srv/acme") / made.id, NOW + timedelta(seconds=600))


def pod(told: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = told["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_all_that_we_create_and_the_owner_applies_is_valid_by_the_published_schemas(version: str) -> None:
    baseline = space(
        queue="lent", local="/srv/b", pod_security="baseline", pod_security_by="Li", pod_security_reason="a", quota={"pods": "4"}
    )
    told = rules(namespaces={"fed-acme": space(node_selector={"zone": "a"}, runtime_class="nvidia"), "fed-b": baseline})
    made = [job_manifest(work(2, "A100"), told, NOW), *manifests(told)]
    for one in made:
        kubernetes_validate.validate(one, version, strict=True)


def test_a_job_has_all_that_restricted_asks_and_no_token() -> None:
    told = pod(job_manifest(work(), rules(), NOW))
    assert (
        told["automountServiceAccountToken"] is False and told["serviceAccountName"] == "intertie-job" and told["restartPolicy"] == "Never"
    )
    assert told["securityContext"]["runAsNonRoot"] is True and told["securityContext"]["runAsUser"] == 20_001
    main = told["containers"][0]
    assert main["securityContext"] == {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": {"drop": ["ALL"]}}
    assert main["resources"]["limits"] == main["resources"]["requests"] and main["image"] == IMAGE
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in told["volumes"]
    assert not any("hostPath" in volume for volume in told["volumes"])


def test_a_job_runs_once_under_the_name_of_its_job_and_generation() -> None:
    one = work()
    told = job_manifest(one, rules(), NOW)
    assert told["metadata"]["name"] == name_of(one.attempt) == f"{one.attempt.job}-e1g1" and len(told["metadata"]["name"]) <= 63
    assert (told["spec"]["backoffLimit"], told["spec"]["completions"], told["spec"]["podReplacementPolicy"]) == (0, 1, "Failed")
    assert (
        told["metadata"]["labels"]["intertie.io/attempt"]
        == told["spec"]["template"]["metadata"]["labels"]["intertie.io/attempt"]
        == one.attempt.id
    )
    later = msgspec.structs.replace(one.attempt, generation=2)
    assert name_of(later) != name_of(one.attempt)


def test_the_deadlines_leave_the_stub_to_end_it_first_and_are_there_if_it_does_not() -> None:
    told = job_manifest(work(), rules(), NOW)
    wall = 60
    assert wall < pod(told)["activeDeadlineSeconds"] - rules().launch_s <= wall + 120
    assert told["spec"]["activeDeadlineSeconds"] == 600 + pod(told)["activeDeadlineSeconds"]


DEVICES = [
    (0, "", {}),
    (2, "", {"nvidia.com/gpu": "2"}),
    (1, "A100-MIG-1g.10gb", {"nvidia.com/mig-1g.10gb": "1"}),
    (8, "Ascend910B", {"huawei.com/Ascend910": "8"}),
]


@pytest.mark.parametrize(("gpus", "model", "expected"), DEVICES)
def test_devices_are_asked_for_by_the_owner_s_names(gpus: int, model: str, expected: dict[str, str]) -> None:
    told = rules(devices={"A100-MIG-1g.10gb": "nvidia.com/mig-1g.10gb", "Ascend910B": "huawei.com/Ascend910"}, cpu="500m", memory="1.5Gi")
    limits = pod(job_manifest(work(gpus, model), told, NOW))["containers"][0]["resources"]["limits"]
    assert {name: amount for name, amount in limits.items() if "/" in name} == expected
    assert limits["cpu"] == {0: "500m", 1: "500m", 2: "1", 8: "4"}[gpus]


def test_a_queue_of_kueue_means_suspended_until_kueue_lets_it_go() -> None:
    told = job_manifest(work(), rules(namespaces={"fed-acme": space(queue="lent")}), NOW)
    assert told["spec"]["suspend"] is True and told["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "lent"
    assert job_manifest(work(), rules(), NOW)["spec"]["suspend"] is False


REFUSED = [
    ("a namespace that is not given", {"account": "fed-other"}, {}, "kubernetes.namespace"),
    ("the cluster's own", {"account": "kube-system"}, {}, "kubernetes.namespace"),
    ("another tenant's", {"tenant": "beta"}, {}, "kubernetes.namespace"),
    ("nobody's", {"tenant": None}, {}, "kubernetes.namespace"),
    ("no image", {}, {"image": ""}, "kubernetes.no_image"),
    ("a tag", {}, {"image": "registry.example/base:1"}, "kubernetes.image_digest"),
    ("a short digest", {}, {"image": "registry.example/base@sha256:abc"}, "kubernetes.image_digest"),
]


@pytest.mark.parametrize(("what", "fields", "changes", "code"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_the_owner_did_not_allow_is_refused_with_a_next_step(
    what: str, fields: dict[str, Any], changes: dict[str, Any], code: str
) -> None:
    with pytest.raises(Refused) as refused:
        job_manifest(work(**fields), rules(**changes), NOW)
    assert refused.value.code == code and refused.value.next_step


@pytest.mark.parametrize("folder", ["/srv/other/att-1", "/srv/acme", "/srv/acme/../other/att-1", "srv/acme/att-1", "/srv/acmes/att-1"])
def test_a_folder_outside_the_namespace_s_volume_is_refused(folder: str) -> None:
    one = work()
    with pytest.raises(Refused) as refused:
        job_manifest(NativeWork(one.attempt, PurePosixPath(folder), NOW), rules(), NOW)
    assert refused.value.code == "kubernetes.folder"


SETTINGS = [
    ("root", "uid = 0"),
    ("a namespace of the cluster", 'NAME = "kube-public"'),
    ("the agent's own namespace", 'NAME = "intertie"'),
    ("default", 'NAME = "default"'),
    ("the shared account", 'service_account = "default"'),
    ("no absolute folder", 'local = "srv"'),
    ("a folder of dots", 'local = "/srv/../etc"'),
    ("baseline without who and why", 'pod_security = "baseline"'),
    ("baseline without why", 'pod_security = "baseline"\npod_security_by = "Li"'),
    ("privileged", 'pod_security = "privileged"\npod_security_by = "Li"\npod_security_reason = "r"'),
    ("an image by tag", 'image = "a/b:latest"'),
    ("no quantity", 'quota = { pods = "many" }'),
    ("below zero", 'quota = { pods = "-1" }'),
    ("a name that nobody knows", "privileged = true"),
]


@pytest.mark.parametrize(("what", "line"), SETTINGS, ids=[row[0] for row in SETTINGS])
def test_a_setting_that_cannot_be_meant_is_refused(what: str, line: str) -> None:
    fields = {"tenant": '"acme"', "claim": '"work"', "local": '"/srv/acme"', "uid": "20001", "gid": "20001", "NAME": '"fed-acme"'}
    for one in line.splitlines():
        name, _, value = one.partition(" = ")
        fields[name] = value
    name = fields.pop("NAME").strip('"')
    text = f'[kubernetes]\ncluster = "lab"\n[kubernetes.namespaces.{name}]\n' + "\n".join(
        f"{key} = {value}" for key, value in fields.items()
    )
    with pytest.raises((Refused, msgspec.ValidationError)):
        told = msgspec.toml.decode(text.encode(), type=Rules).kubernetes
        assert told is not None
        checked(told)


def test_two_namespaces_that_share_a_folder_are_refused() -> None:
    for local in ("/srv/acme", "/srv/acme/deeper", "/srv"):
        with pytest.raises(Refused):
            checked(rules(namespaces={"fed-acme": space(), "fed-b": space(tenant="b", local=local)}))


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=10))
@examples(max_examples=300, deadline=None)
def test_no_text_as_account_or_tenant_lands_anywhere_but_where_it_is_mapped(account: str, tenant: str, image: str) -> None:
    with contextlib.suppress(Refused):
        named = work(account=account, tenant=tenant, spec=JobSpec(name="t", script="true", image=image))
        told = job_manifest(named, rules(), NOW, PoolImages(runtime="kubernetes", sources=["*"]))
        assert (told["metadata"]["namespace"], tenant, image) == ("fed-acme", "acme", "")


# --- what the owner applies --------------------------------------------------------------------------------------------------------------


def test_the_manifests_in_the_tree_are_what_the_example_prints() -> None:
    told = msgspec.toml.decode((OPS / "site.toml").read_bytes(), type=Rules).kubernetes
    assert (OPS / "manifests.yaml").read_text(encoding="utf-8") == printed(told), (
        "run: intertie-agent kubernetes manifests --data ops/kubernetes"
    )


def test_yaml_and_json_say_the_same() -> None:
    told = msgspec.toml.decode((OPS / "site.toml").read_bytes(), type=Rules).kubernetes
    assert told is not None
    as_json = msgspec.json.decode(printed(told, as_json=True))["items"]
    assert list(yaml.safe_load_all(printed(told))) == as_json == manifests(told)


def test_nothing_cluster_wide_is_granted_but_to_read_nodes_and_nothing_may_be_everything() -> None:
    roles = [one for one in manifests(rules()) if one["kind"] in ("Role", "ClusterRole")]
    wide = [rule for one in roles if one["kind"] == "ClusterRole" for rule in one["rules"]]
    assert wide == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}]
    assert "*" not in msgspec.json.encode(roles).decode() and "secrets" not in msgspec.json.encode(roles).decode()
    assert not {"update", "deletecollection", "escalate", "bind", "impersonate"} & {
        verb for verbs in {**VERBS, **CLUSTER_VERBS}.values() for verb in verbs
    }


def test_each_namespace_is_closed_and_a_baseline_one_says_who_and_why() -> None:
    chosen = space(local="/srv/b", tenant="b", pod_security="baseline", pod_security_by="Li Wei", pod_security_reason="an image")
    told = manifests(rules(namespaces={"fed-acme": space(quota={"pods": "3"}), "fed-b": chosen}))
    spaces = {one["metadata"]["name"]: one["metadata"] for one in told if one["kind"] == "Namespace"}
    assert spaces["fed-acme"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert spaces["fed-b"]["annotations"]["intertie.io/pod-security-by"] == "Li Wei"
    policies = [one for one in told if one["kind"] == "NetworkPolicy"]
    assert len(policies) == 2 and all(one["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} for one in policies)
    accounts = [one for one in told if one["kind"] == "ServiceAccount" and one["metadata"]["namespace"] != "intertie"]
    assert len(accounts) == 4 and all(one["automountServiceAccountToken"] is False for one in accounts)


def test_no_settings_print_no_manifests_but_what_to_do() -> None:
    for told in (None, KubernetesRules(cluster="lab")):
        with pytest.raises(Refused) as refused:
            printed(told)
        assert refused.value.next_step


# --- the guide ---------------------------------------------------------------------------------------------------------------------------

DOCS = OPS.parent / "docs"


def test_the_guide_s_table_has_every_word_of_ours() -> None:
    page = (DOCS / "kubernetes.md").read_text(encoding="utf-8")
    told = {*words.WAITING, *words.POD_FAILED, *words.DISRUPTION, *words.CONTAINER_ENDED, *words.JOB_FAILED}
    assert not {word for word in told if f"`{word}`" not in page}


@pytest.mark.parametrize("page", ["kubernetes.md", "kubernetes.zh.md"])
def test_the_guide_names_every_setting_and_says_that_no_real_cluster_was_used(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    shown = set(KubernetesRules.__struct_fields__) - {"namespaces", "agent_service_account", "agent_namespace"} | set(
        Namespace.__struct_fields__
    )
    assert not {name for name in shown if f"`{name}`" not in text}
    assert "No real Kubernetes" in text or "没有真实的 Kubernetes" in text
    assert (DOCS / re.findall(r"\]\((\.\./kubernetes/site\.toml)\)", text)[0]).resolve().exists()


def test_an_agent_of_a_cluster_needs_no_root_to_serve_more_than_one_tenant() -> None:
    assert Rules().single_user(root=False) and not Rules().single_user(root=True)
    assert not Rules(kubernetes=rules()).single_user(root=False)


NAMED = "registry.example.cn/team/train:1.2@sha256:" + "b" * 64


def naming(image: str) -> NativeWork:
    return work(spec=JobSpec(name="t", script="true", wall_s=600, image=image))


def test_a_job_s_own_image_goes_before_the_owner_s_by_its_digest_and_only_from_where_the_owner_takes_them() -> None:
    taken = PoolImages(runtime="kubernetes", sources=["registry.example.cn/team"])
    told = job_manifest(naming(NAMED), rules(), NOW, taken)
    assert pod(told)["containers"][0]["image"] == NAMED.replace(":1.2@", "@")
    assert pod(job_manifest(work(), rules(), NOW, taken))["containers"][0]["image"] == IMAGE
    for image, images in (
        (NAMED, None),
        (NAMED, PoolImages(runtime="kubernetes", sources=["registry.example.cn/te"])),
        ("a.io/x:1", taken),
    ):
        with pytest.raises(Refused) as refused:
            job_manifest(naming(image), rules(), NOW, images)
        assert refused.value.code == "agent.image"
    # A site whose owner names no image of their own runs jobs that name one.
    assert pod(job_manifest(naming(NAMED), rules(image=""), NOW, taken))["containers"]


def test_what_the_pools_of_a_site_tell_of_images_is_what_its_owner_declared() -> None:
    """None is told as none; what could never run a job is refused when the file is read."""
    sources = ImageRules(sources=["registry.example.cn/team"])
    by_kubernetes, by_slurm = Rules(kubernetes=rules(), images=sources), SlurmRules(folder="/shared", images=Images.PYXIS)
    for told, images in (
        (Rules(), PoolImages()),
        (Rules(kubernetes=rules()), PoolImages()),
        (by_kubernetes, PoolImages(runtime="kubernetes", sources=["registry.example.cn/team"])),
        (Rules(slurm=by_slurm, images=sources), PoolImages(runtime="pyxis", sources=["registry.example.cn/team"])),
        (Rules(slurm=by_slurm), PoolImages()),
        (Rules(images=ImageRules(sources=["*"], runtime="apptainer")), PoolImages(runtime="apptainer", sources=["*"])),
    ):
        assert told.pool_images() == images
    assert by_kubernetes.owners_image("fed-acme") == IMAGE and Rules().owners_image("fed-acme") == ""
    for wrong in (
        Rules(images=sources),
        Rules(slurm=SlurmRules(folder="/shared"), images=sources),
        Rules(kubernetes=rules(), images=ImageRules(sources=["*"], runtime="apptainer")),
        Rules(kubernetes=rules(), images=ImageRules(sources=["registry.example.cn/*"])),
    ):
        with pytest.raises(Refused) as refused:
            wrong.pool_images()
        assert refused.value.code == "agent.images" and refused.value.next_step
