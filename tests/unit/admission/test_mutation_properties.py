# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What holds for every pod: it is decided on, keeps its class and all that is its own, and a second pass is idle."""

import copy
import json
from typing import Any

import jsonpatch as independent_jsonpatch
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from verl_gpumonitor_operator.admission import pods
from verl_gpumonitor_operator.admission.facts import LimitRangeItem, Namespace, Node, Quota
from verl_gpumonitor_operator.admission.mutation import Patch, SkipReason, mutate, without_facts

from . import samples
from .qos_oracle import qos

QUANTITIES = st.sampled_from(["0", "1", "50m", "100m", "2", "1Gi", "64Mi", "1.5", "3e3", "128974848", "1u"])
AMOUNTS = st.dictionaries(st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "ephemeral-storage"]), QUANTITIES)


@st.composite
def resource_sets(draw: st.DrawFn) -> dict[str, Any]:
    """Limits and requests, often equal, as people write them."""
    limits = draw(AMOUNTS)
    requests = draw(st.one_of(st.just(limits), AMOUNTS, st.none()))
    return {"limits": limits, **({"requests": requests} if requests is not None else {})}


CONTAINERS = st.builds(
    lambda name, resources, restart: {"name": name, "resources": resources, **restart},
    st.sampled_from(["a", "b", "c", "d"]),
    resource_sets(),
    st.sampled_from([{}, {"restartPolicy": "Always"}]),
)
CONTAINER_LISTS = st.lists(CONTAINERS, max_size=3, unique_by=lambda container: str(container["name"]))

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=12,
)
WORDS = st.sampled_from(
    ["metadata", "spec", "containers", "initContainers", "volumes", "labels", "annotations", "name", "resources",
     "limits", "requests", "ports", "volumeMounts", "securityContext", "nodeSelector", "overhead", "restartPolicy"]
)  # fmt: skip
POD_LIKE = st.recursive(
    st.one_of(JSON, st.sampled_from(["gpumonitor", "gpumonitor-token", "Always", "4", "-1"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=5)),
    max_leaves=20,
)

HARD = st.dictionaries(
    st.sampled_from(["limits.cpu", "requests.cpu", "limits.memory", "cpu", "memory", "pods"]),
    st.integers(min_value=0, max_value=2 * 10**14),
)
LIMITS = st.dictionaries(st.sampled_from(["cpu", "memory"]), st.integers(min_value=0, max_value=10**17))
NAMESPACES = st.builds(
    lambda limits, quotas: Namespace(name="team-a", limits=tuple(limits), quotas=tuple(quotas)),
    st.lists(
        st.builds(
            LimitRangeItem,
            type=st.sampled_from(["Container", "Pod", "Other"]),
            min=LIMITS,
            max=LIMITS,
            default=LIMITS,
            default_request=LIMITS,
            max_ratio=LIMITS,
        ),
        max_size=2,
    ),
    st.lists(st.builds(Quota, name=st.just("q"), hard=HARD, used=HARD), max_size=2),
)
RELAXED = settings(suppress_health_check=list(HealthCheck))


@st.composite
def broken_pods(draw: st.DrawFn) -> dict[str, Any]:
    """A real pod of a job in which some parts were replaced by anything."""
    pod: dict[str, Any] = copy.deepcopy(draw(st.sampled_from([samples.ray_worker(), samples.pytorch_pod()])))
    for _ in range(draw(st.integers(min_value=1, max_value=3))):
        target: Any = pod
        for _ in range(draw(st.integers(min_value=0, max_value=5))):
            inner = list(target.values()) if isinstance(target, dict) else list(target)
            nested = [value for value in inner if isinstance(value, dict | list) and value]
            if not nested:
                break
            target = draw(st.sampled_from(nested))
        if isinstance(target, dict):
            target[draw(st.sampled_from(sorted(target)))] = draw(POD_LIKE)
        else:
            target[draw(st.integers(min_value=0, max_value=len(target) - 1))] = draw(POD_LIKE)
    return pod


def decide(pod: dict[str, Any], namespace: Namespace = samples.NAMESPACE) -> Any:
    return mutate(pod, namespace=namespace, policy=samples.SETTINGS, cluster=samples.CLUSTER)


def patched(pod: dict[str, Any], outcome: Any) -> dict[str, Any]:
    result = independent_jsonpatch.apply_patch(pod, json.loads(msgspec.json.encode(outcome.operations)))
    assert isinstance(result, dict)
    return result


@RELAXED
@given(st.one_of(broken_pods(), st.dictionaries(WORDS, POD_LIKE)))
@example({"metadata": {"labels": {"ray.io/is-ray-node": "yes", "ray.io/node-type": ["worker"]}}, "spec": {}})
def test_any_json_is_decided_on_and_left_unchanged(pod: dict[str, Any]) -> None:
    before = copy.deepcopy(pod)
    outcome = decide(pod)
    without_facts(pod, samples.SETTINGS, "away")
    assert pod == before
    after = patched(pod, outcome)
    if not isinstance(outcome, Patch):
        assert after.get("spec") == before.get("spec")


@RELAXED
@given(CONTAINER_LISTS.filter(bool), CONTAINER_LISTS, NAMESPACES, st.sampled_from([None, {}, {"limits": {"cpu": "4"}}]))
def test_class_and_content_of_every_pod_are_kept(
    containers: list[Any], init: list[Any], namespace: Namespace, whole: Any
) -> None:
    init = [container for container in init if container["name"] not in {each["name"] for each in containers}]
    containers[0]["resources"]["limits"] = {**containers[0]["resources"]["limits"], "nvidia.com/gpu": "1"}
    pod = samples.with_spec(samples.pytorch_pod(), containers=containers, initContainers=init, resources=whole)
    assert pods.qos_class(pod) == qos(pod)
    outcome = decide(pod, namespace)
    after = patched(pod, outcome)
    assert qos(after) == qos(pod)
    assert after["spec"]["containers"] == containers
    assert after["spec"]["initContainers"][: len(init)] == init
    second = decide(after, namespace)
    assert patched(after, second) == after


@RELAXED
@given(resource_sets(), resource_sets(), NAMESPACES, st.sampled_from([None, {}, {"limits": {"cpu": "4"}}]))
def test_what_others_change_after_us_decides_the_class(first: Any, then: Any, namespace: Namespace, whole: Any) -> None:
    for resources in (first, then):
        resources["limits"] = {**resources["limits"], "nvidia.com/gpu": "1"}
    pod = samples.with_spec(samples.pytorch_pod(), containers=[{"name": "pytorch", "resources": first}])
    changes = {"containers": [{"name": "pytorch", "resources": then}], "resources": whole}
    between = samples.with_spec(patched(pod, decide(pod)), **changes)
    assert qos(patched(between, decide(between, namespace))) == qos(samples.with_spec(pod, **changes))


@RELAXED
@given(resource_sets(), st.integers(min_value=0, max_value=2 * 10**12))
def test_where_the_pod_fits_it_fits_with_what_was_added(resources: dict[str, Any], cpu: int) -> None:
    resources["limits"] = {**resources["limits"], "nvidia.com/gpu": "1"}
    pod = samples.with_spec(samples.pytorch_pod(), containers=[{"name": "pytorch", "resources": resources}])
    room = {**samples.amounts(memory="1Ti", gpu="8"), "cpu": cpu, "ephemeral-storage": 10**21}
    cluster = samples.cluster(nodes=(Node(name="n", capacity=room),))
    outcome = mutate(pod, namespace=samples.NAMESPACE, policy=samples.SETTINGS, cluster=cluster)
    asked, after = pods.scheduled_requests(pod), pods.scheduled_requests(patched(pod, outcome))
    if all(amount <= room.get(name, 0) for name, amount in asked.items()):
        assert all(amount <= room.get(name, 0) for name, amount in after.items())


@pytest.mark.parametrize("pod", [{}, {"metadata": None}, {"spec": []}, {"metadata": [], "spec": "x"}])
def test_what_is_no_pod_of_a_job_is_left_alone(pod: dict[str, Any]) -> None:
    outcome = decide(pod)
    assert not outcome.operations
    assert outcome.reason is SkipReason.NOT_A_JOB


def test_without_facts_the_pod_says_why() -> None:
    skip = without_facts(samples.ray_worker(), samples.SETTINGS, "the API server did not answer within 0.5 s")
    after = patched(samples.ray_worker(), skip)
    assert after["metadata"]["annotations"]["gpumonitor.dev/skip-reason"] == (
        "PreflightUnavailable: the API server did not answer within 0.5 s"
    )


def test_without_facts_an_opted_out_pod_is_still_opted_out() -> None:
    pod = samples.with_labels(samples.ray_worker(), {"gpumonitor.dev/inject": "disabled"})
    assert without_facts(pod, samples.SETTINGS, "away").reason is SkipReason.OPTED_OUT


def test_the_public_reasons() -> None:
    """A change of this list is a change for users: annotations, metric labels and status carry these words."""
    assert [str(reason) for reason in SkipReason] == [
        "NotAJob",
        "NoGpus",
        "AlreadyInjected",
        "NotChosen",
        "Malformed",
        "OptedOut",
        "InjectionPaused",
        "KubernetesTooOld",
        "PreflightUnavailable",
        "NameTaken",
        "LimitRange",
        "ResourceQuota",
        "WouldNotFit",
        "RuntimeClass",
        "QosChange",
        "PodTooLarge",
        "Refused",
    ]
