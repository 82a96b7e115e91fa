# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Where the cluster keeps its things, and its names and addresses on this machine."""

import os
from dataclasses import dataclass
from pathlib import Path

NODE_NAME = "devcluster"
NODE_IP = "172.31.99.1"
"""On a bridge of its own: not every kernel has dummy devices, and it must not change with the machine's network."""
NODE_BRIDGE = "gpumon0"
POD_BRIDGE = "gpumonpods0"
CNI_NETWORK = "gpumonitor-devcluster"
CLUSTER_CIDR = "10.98.0.0/16"
POD_CIDR = "10.98.0.0/24"
"""The node's part of CLUSTER_CIDR: the first /24, which the controller-manager gives to the first node."""
SERVICE_CIDR = "10.97.0.0/16"
KUBERNETES_SERVICE_IP = "10.97.0.1"
DNS_SERVICE_IP = "10.97.0.10"
API_PORT = 16443
ETCD_PORT = 23790
ETCD_PEER_PORT = 23791
API_URL = f"https://{NODE_IP}:{API_PORT}"
IMAGE_PREFIX = "devcluster.local"
"""Registry part of the names of all images made here. It resolves nowhere, so nothing is ever pulled by mistake."""
MARK_NAMESPACE = "kube-system"
MARK_NAME = "gpumonitor-devcluster"
"""ConfigMap that tells tests that this cluster may be broken."""

KUBELET_FIXED = Path("/var/lib/kubelet")
"""The kubelet's device-plugin sockets lie here whatever its root directory is."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The folders. `cache` outlives the cluster; `state` and `run` go with it."""

    repository: Path
    cache: Path
    state: Path = Path("/var/lib/gpumonitor-devcluster")
    run: Path = Path("/run/gpumonitor-devcluster")

    @property
    def package(self) -> Path:
        """The folder of this package in the checkout."""
        return self.repository / "devcluster"

    @property
    def bin(self) -> Path:
        """Links to the programs of the present versions; goes on a person's PATH."""
        return self.cache / "bin"

    @property
    def logs(self) -> Path:
        """One log per component."""
        return self.state / "logs"

    @property
    def build_logs(self) -> Path:
        """One log per thing that was built or installed."""
        return self.cache / "logs"

    @property
    def pki(self) -> Path:
        """Certificates and keys."""
        return self.state / "pki"

    @property
    def config(self) -> Path:
        """Configuration files of the components."""
        return self.state / "config"

    @property
    def kubeconfig(self) -> Path:
        """Credentials of a cluster administrator."""
        return self.state / "admin.kubeconfig"

    @property
    def containerd_socket(self) -> Path:
        """The container runtime's socket; its own, beside whatever containerd the machine has."""
        return self.run / "containerd" / "containerd.sock"

    @property
    def containerd_root(self) -> Path:
        """Images and layers: in the cache, since importing takes a minute. Containers in it go with `down`."""
        return self.cache / "containerd"

    @property
    def build_storage(self) -> Path:
        """The image builder's storage."""
        return self.cache / "buildah"

    @property
    def build_run(self) -> Path:
        """What the image builder keeps while it runs. Not in `run`, which may go while an image is being built."""
        return Path("/run/gpumonitor-devcluster-build")

    @property
    def build_lock(self) -> Path:
        """Held by each image build (shared), and alone by who tidies up after killed ones."""
        return self.cache / "locks" / "images.lock"

    @property
    def nvml(self) -> Path:
        """The simulated NVML library, and `state.d/state`, which its users map."""
        return self.state / "nvml"

    def program(self, name: str) -> str:
        """Return the path of a program that was built here."""
        return str(self.bin / name)


def default_layout() -> Layout:
    """Return the layout of this checkout; the cache folder may be set by GPUMON_DEVCLUSTER_CACHE."""
    cache = os.environ.get("GPUMON_DEVCLUSTER_CACHE") or "/var/cache/gpumonitor-devcluster"
    return Layout(repository=Path(__file__).resolve().parent.parent, cache=Path(cache).absolute())
