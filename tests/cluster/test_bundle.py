# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A job's last half hour, fetched through a real API server: with rights, without, and after the job's end."""

import subprocess
import sys
from pathlib import Path

import pytest

from devcluster import product
from tests.cluster import jobs, monitors
from tests.cluster.kubectl import Kubectl
from verl_gpumonitor.cli.traces import open_trace
from verl_gpumonitor.model.trace import GpuLine

pytestmark = pytest.mark.usefixtures("release")


def gpumon(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `gpumon`."""
    command = [sys.executable, "-m", "verl_gpumonitor.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_a_jobs_record_reaches_the_desk(
    kubectl: Kubectl, access: product.Access, namespace: str, tmp_path: Path
) -> None:
    command = jobs.hold(300, utilization=[0.97, *[0.47] * 7], used_gib=[70.0, *[38.0] * 7])
    kubectl.apply(jobs.pytorchjob("loaded", command=command, gpus=8), namespace)
    monitors.await_gpus(kubectl, "loaded", namespace, "8/8")
    path, options = tmp_path / "run.jsonl.gz", ("--kubectl", access.kubectl, "--kubeconfig", str(access.kubeconfig))
    done = gpumon("bundle", f"{namespace}/loaded", "-o", str(path), *options)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 pods, 8 GPUs" in done.stderr
    with open_trace(str(path)) as trace:
        lines = list(trace.records())
        assert not trace.problems
    (pod,) = trace.header.pods or []
    assert (pod.name, pod.node_role, pod.gpus_requested) == ("loaded-master-0", "master", 8)
    assert len({line.uuid for line in lines if isinstance(line, GpuLine)}) == 8
    for reader in ("diagnose", "report"):
        assert gpumon(reader, str(path)).returncode == 0


def test_who_may_not_is_told_which_role_and_with_it_may(
    kubectl: Kubectl, access: product.Access, namespace: str, tmp_path: Path
) -> None:
    command = jobs.hold(300, utilization=[0.5] * 8, used_gib=[20.0] * 8)
    kubectl.apply(jobs.pytorchjob("seen", command=command, gpus=8), namespace)
    monitors.await_gpus(kubectl, "seen", namespace, "8/8")
    user = f"system:serviceaccount:{namespace}:default"
    wrapper = tmp_path / "kubectl"
    wrapper.write_text(f'#!/bin/sh\nexec {access.kubectl} --kubeconfig {access.kubeconfig} --as {user} "$@"\n')
    wrapper.chmod(0o755)
    asked = ("bundle", f"{namespace}/seen", "-o", str(tmp_path / "run.jsonl"), "--kubectl", str(wrapper))
    refused = gpumon(*asked)
    assert refused.returncode == 1
    _, _, role = refused.stderr.partition("this may, too:\n")
    kubectl.run("apply", "-f", "-", stdin=role)
    kubectl.run(
        *("create", "rolebinding", "bundle", "-n", namespace),
        *("--role=gpumonitor-bundle", f"--serviceaccount={namespace}:default"),
    )
    allowed = gpumon(*asked)
    assert allowed.returncode == 0, allowed.stderr


def test_of_an_ended_job_the_status_is_left(
    kubectl: Kubectl, access: product.Access, namespace: str, tmp_path: Path
) -> None:
    command = jobs.hold(20, utilization=[0.5] * 8, used_gib=[20.0] * 8)
    kubectl.apply(jobs.pytorchjob("over", command=command, gpus=8), namespace)
    monitors.await_phase(kubectl, "over", namespace, "Succeeded", within=120)
    options = ("--kubectl", access.kubectl, "--kubeconfig", str(access.kubeconfig))
    done = gpumon("bundle", f"{namespace}/over", "-o", str(tmp_path / "run.jsonl"), *options)
    assert done.returncode == 1
    assert "the job has ended (Succeeded)" in done.stderr
    document = kubectl.run("get", "gpumonitor", "over", "-n", namespace, "-o", "yaml")
    page = gpumon("report", "-", "--format", "markdown", stdin=document)
    assert page.returncode == 0, page.stderr
    assert page.stdout.startswith("# over")
