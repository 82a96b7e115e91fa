# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The product on a cluster: our images and our chart, as the demo and the tests install them.

On the local cluster the images are built from this checkout. On an existing one they come from a registry that the
caller names, and nothing but `helm upgrade --install` is done.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster.layout import IMAGE_PREFIX, Layout
from devcluster.progress import Progress

RELEASE = "gpumonitor"
NAMESPACE = "gpumonitor-system"
IMAGE_SECONDS = 40.0
"""To build one of our images for the first time; what did not change takes a few."""
IMAGE_INPUTS = (
    *("Dockerfile", "containers", "library", "sidecar", "operator"),
    *("requirements/sidecar.txt", "requirements/operator.txt"),
)
"""What the Dockerfile copies."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """How to reach a cluster: the two programs, and a kubeconfig, or None for kubectl's own choice."""

    kubectl: str
    helm: str
    kubeconfig: Path | None

    def with_kubeconfig(self, program: str) -> list[str]:
        """Begin a command line of kubectl or helm."""
        return [program, "--kubeconfig", str(self.kubeconfig)] if self.kubeconfig else [program]


def local_access(layout: Layout) -> Access:
    """Reach the local cluster, whatever KUBECONFIG says."""
    return Access(kubectl=layout.program("kubectl"), helm=layout.program("helm"), kubeconfig=layout.kubeconfig)


def build_images(layout: Layout) -> dict[str, str]:
    """Build both images from this checkout into the local cluster. Returns the chart's values `image`."""
    registry, tag = f"{IMAGE_PREFIX}/gpumonitor", content_tag(layout.repository)
    targets = ("sidecar", "operator")
    progress = Progress(len(targets))
    for target in targets:
        reference = f"{registry}/{target}:{tag}"
        command = [sys.executable, "-m", "devcluster", "build-image", "--target", target, "--tag", reference]
        with progress.part(f"our image {target}", IMAGE_SECONDS):
            subprocess.run(command, check=True, cwd=layout.repository, stdout=subprocess.DEVNULL)
    return {"registry": registry, "tag": tag}


def content_tag(repository: Path) -> str:
    """Name what the images are made of. A tag that stayed the same would leave running pods as they are."""
    found = hashlib.sha256()
    for name in IMAGE_INPUTS:
        top = repository / name
        for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(str(file.relative_to(repository)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def install(access: Access, *, chart: Path, values: Mapping[str, Any], timeout_seconds: int = 180) -> None:
    """Install or upgrade the chart and wait until both Deployments are there. Raises CalledProcessError."""
    command = [
        *access.with_kubeconfig(access.helm),
        *("upgrade", "--install", RELEASE, str(chart), "--namespace", NAMESPACE, "--create-namespace"),
        *("--wait", "--timeout", f"{timeout_seconds}s", "--values", "-"),
    ]
    subprocess.run(command, check=True, input=json.dumps(values), text=True, stdout=subprocess.DEVNULL)


def uninstall(access: Access, *, timeout_seconds: int = 120) -> None:
    """Take the release away; it is no error when there is none."""
    command = [
        *access.with_kubeconfig(access.helm),
        *(
            "uninstall",
            RELEASE,
            "--namespace",
            NAMESPACE,
            "--ignore-not-found",
            "--wait",
            "--timeout",
            f"{timeout_seconds}s",
        ),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
