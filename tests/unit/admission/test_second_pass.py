# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Another webhook changes the pod after us, the API server asks again: the sidecar must suit the pod as it is now."""

import copy
import json
from typing import Any

import jsonpatch as independent_jsonpatch
import msgspec
import pytest

from verl_gpumonitor_operator.admission.facts import Cluster, Namespace, Quota
from verl_gpumonitor_operator.admission.mutation import (
    Outcome,
    Patch,
    Skip,
    SkipReason,
    mutate,
    not_ours,
    without_facts,
)

from . import samples
from .qos_oracle import qos
from .samples import amounts

BEST_EFFORT = samples.best_effort(samples.ray_worker())
EQUAL = samples.resources(cpu="8", memory="64Gi", gpus=4)
GUARANTEED_SIDECAR = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "50m", "memory": "64Mi"}}


def decided(
    pod: samples.Pod, *, namespace: Namespace = samples.NAMESPACE, cluster: Cluster = samples.CLUSTER
) -> Outcome:
    return mutate(pod, namespace=namespace, policy=samples.SETTINGS, cluster=cluster)


def patched(pod: samples.Pod, outcome: Outcome) -> Any:
    return independent_jsonpatch.apply_patch(pod, json.loads(msgspec.json.encode(outcome.operations)))


def burstable() -> samples.Pod:
    pod = copy.deepcopy(BEST_EFFORT)
    pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1", "nvidia.com/gpu": "4"}
    return pod


def made_guaranteed(pod: samples.Pod) -> samples.Pod:
    """What a webhook does that sets requests and limits of each container it finds in the job's template."""
    pod = copy.deepcopy(pod)
    for container in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]:
        if container["name"] != "gpumonitor":
            container["resources"] = EQUAL
    return pod


def own(pod: samples.Pod) -> samples.Pod:
    found: samples.Pod = next(each for each in pod["spec"]["initContainers"] if each["name"] == "gpumonitor")
    return found


BEFORE = [pytest.param(BEST_EFFORT, id="best effort before"), pytest.param(burstable(), id="burstable before")]


@pytest.mark.parametrize("before", BEFORE)
def test_a_pod_that_became_guaranteed_stays_so(before: samples.Pod) -> None:
    between = made_guaranteed(patched(before, decided(before)))
    assert qos(between) == "Burstable", "what would be wrong without a second look"
    assert not_ours(between, "team-a", samples.SETTINGS) is None
    outcome = decided(between)
    assert isinstance(outcome, Patch)
    after = patched(between, outcome)
    assert qos(after) == "Guaranteed"
    assert own(after)["resources"] == GUARANTEED_SIDECAR
    assert decided(after) == Skip(reason=SkipReason.ALREADY_INJECTED)


@pytest.mark.parametrize("before", BEFORE)
def test_what_would_no_longer_fit_is_taken_away(before: samples.Pod) -> None:
    between = made_guaranteed(patched(before, decided(before)))
    quota = Quota(name="team", hard=amounts(limits_cpu="8"), used={})
    outcome = decided(between, namespace=samples.namespace(quotas=(quota,)))
    assert isinstance(outcome, Skip)
    assert outcome.reason is SkipReason.RESOURCE_QUOTA
    after = patched(between, outcome)
    assert after["spec"] == made_guaranteed(before)["spec"]
    assert "gpumonitor.dev/skip-reason" in after["metadata"]["annotations"]
    assert "gpumonitor.dev/injected" not in after["metadata"]["annotations"]


def test_without_facts_it_is_taken_away() -> None:
    between = made_guaranteed(patched(BEST_EFFORT, decided(BEST_EFFORT)))
    after = patched(between, without_facts(between, samples.SETTINGS, "away"))
    assert after["spec"] == made_guaranteed(BEST_EFFORT)["spec"]
    assert after["metadata"]["annotations"]["gpumonitor.dev/skip-reason"] == "PreflightUnavailable: away"


def test_init_containers_behind_the_sidecar_keep_their_place() -> None:
    injected = patched(BEST_EFFORT, decided(BEST_EFFORT))
    between = made_guaranteed(samples.with_container(injected, {"name": "late", "image": "x"}, init=True))
    after = patched(between, decided(between))
    assert qos(after) == "Guaranteed"
    names = ["wait-gcs-ready", "gpumonitor", "late"]
    assert [each["name"] for each in after["spec"]["initContainers"]] == names


def test_resources_of_the_pod_that_came_later_are_not_exceeded() -> None:
    worker = samples.ray_worker()
    injected = patched(worker, decided(worker))
    between = samples.with_spec(injected, resources=samples.resources(cpu="8", memory="64Gi"))
    assert own(patched(between, decided(between)))["resources"] == {}


def test_a_volume_that_others_mount_stays() -> None:
    injected = patched(BEST_EFFORT, decided(BEST_EFFORT))
    mount = {"name": "gpumonitor-token", "mountPath": "/t"}
    between = made_guaranteed(samples.with_container(injected, {"name": "late", "volumeMounts": [mount]}))
    after = patched(between, without_facts(between, samples.SETTINGS, "away"))
    assert "gpumonitor-token" in [volume["name"] for volume in after["spec"]["volumes"]]
    assert len(after["spec"]["initContainers"]) == 1


def test_resources_that_another_webhook_gave_the_sidecar_are_kept_with_the_class() -> None:
    worker = samples.ray_worker()
    injected = copy.deepcopy(patched(worker, decided(worker)))
    own(injected)["resources"] = samples.resources(cpu="200m", memory="256Mi")
    assert decided(injected) == Skip(reason=SkipReason.ALREADY_INJECTED)


def test_a_pod_that_came_to_the_nodes_network_keeps_off_its_ports() -> None:
    """A declared port would become one of the node's, and a second such pod would find no node."""
    worker = samples.ray_worker()
    between = copy.deepcopy(patched(worker, decided(worker)))
    between["spec"]["hostNetwork"] = True
    own(between)["ports"][0]["hostPort"] = 9410
    assert not_ours(between, "team-a", samples.SETTINGS) is None
    outcome = decided(between)
    assert isinstance(outcome, Patch)
    after = patched(between, outcome)
    direct = samples.with_spec(worker, hostNetwork=True)
    assert after == patched(direct, decided(direct)), "as if it had been there from the beginning"
    assert decided(after) == Skip(reason=SkipReason.ALREADY_INJECTED)


def test_a_sidecar_that_another_webhook_made_an_ordinary_init_container_is_taken_away() -> None:
    """One with types from before 1.28 writes the pod back without `restartPolicy`, and the job would never start."""
    worker = samples.ray_worker()
    between = copy.deepcopy(patched(worker, decided(worker)))
    del own(between)["restartPolicy"]
    assert not_ours(between, "team-a", samples.SETTINGS) is None
    outcome = decided(between)
    assert isinstance(outcome, Skip)
    assert outcome.reason is SkipReason.KUBERNETES_TOO_OLD
    after = patched(between, outcome)
    assert after["spec"] == worker["spec"]
    assert "another webhook" in after["metadata"]["annotations"]["gpumonitor.dev/skip-reason"]
    unread = patched(between, without_facts(between, samples.SETTINGS, "away"))
    assert unread["spec"] == worker["spec"]
