# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Where NVIDIA's runtime gives the sidecar nothing, Ray's own agent in the same pod still shows the job."""

import json

import pytest
import yaml

from tests.cluster import monitors
from tests.cluster.conftest import REPOSITORY
from tests.cluster.kubectl import Kubectl

pytestmark = pytest.mark.usefixtures("release")


def test_a_rayjob_is_shown_from_rays_agent(kubectl: Kubectl, namespace: str) -> None:
    """The job's containers get their GPUs by the list of mounts; the sidecar's variable is refused."""
    rendered = kubectl.run("kustomize", str(REPOSITORY / "examples" / "rayjob-grpo"))
    text = json.dumps(list(yaml.safe_load_all(rendered)))
    objects = json.loads(text.replace('"runtimeClassName": "nvidia"', '"runtimeClassName": "nvidia-refused"'))
    kubectl.apply(objects, namespace)
    now = monitors.await_gpus(kubectl, "verl-grpo", namespace, "8/8", within=300)
    assert now["dataQuality"]["source"] == "ray-agent"
    assert now["dataQuality"]["message"]
    workers = kubectl.list("pod", namespace, selector="ray.io/node-type=worker")
    named = [monitors.owned(kubectl, pod["metadata"]["name"], namespace, 4) for pod in workers]
    assert len(named) == 2
    assert not named[0] & named[1]
