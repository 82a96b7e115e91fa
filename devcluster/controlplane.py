# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""etcd, API server, controller-manager, scheduler: how each is started, and how one sees that it works."""

import http.client
import ssl
import urllib.request
from pathlib import Path

from devcluster import pki
from devcluster.layout import (
    API_PORT,
    API_URL,
    CLUSTER_CIDR,
    ETCD_PEER_PORT,
    ETCD_PORT,
    NODE_IP,
    SERVICE_CIDR,
    Layout,
)
from devcluster.process import Spec

_ETCD_URL = f"http://127.0.0.1:{ETCD_PORT}"
_ETCD_PEER_URL = f"http://127.0.0.1:{ETCD_PEER_PORT}"


def etcd(layout: Layout) -> Spec:
    """Return how etcd is started: for this machine only.

    Without waiting for the disk at each write: what is written survives the death of any process, and more is not
    needed of a cluster that may be thrown away.
    """
    options = {
        "name": "devcluster",
        "data-dir": layout.state / "etcd",
        "listen-client-urls": _ETCD_URL,
        "advertise-client-urls": _ETCD_URL,
        "listen-peer-urls": _ETCD_PEER_URL,
        "initial-advertise-peer-urls": _ETCD_PEER_URL,
        "initial-cluster": f"devcluster={_ETCD_PEER_URL}",
        "quota-backend-bytes": 8 * 2**30,
        "auto-compaction-retention": "5m",
        "unsafe-no-fsync": "true",
        "log-level": "warn",
    }
    return Spec(name="etcd", argv=(layout.program("etcd"), *_flags(options)))


def api_server(layout: Layout) -> Spec:
    """Return how the API server is started. It listens on the node's own address alone, never to the outside."""
    secrets = layout.pki
    options = {
        "etcd-servers": _ETCD_URL,
        "bind-address": NODE_IP,
        "advertise-address": NODE_IP,
        "secure-port": API_PORT,
        "tls-cert-file": secrets / "apiserver.crt",
        "tls-private-key-file": secrets / "apiserver.key",
        "client-ca-file": secrets / "ca.crt",
        "kubelet-client-certificate": secrets / "apiserver-kubelet-client.crt",
        "kubelet-client-key": secrets / "apiserver-kubelet-client.key",
        "kubelet-certificate-authority": secrets / "ca.crt",
        "kubelet-preferred-address-types": "InternalIP",
        "service-cluster-ip-range": SERVICE_CIDR,
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": secrets / "sa.pub",
        "service-account-signing-key-file": secrets / "sa.key",
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "allow-privileged": "true",
        "proxy-client-cert-file": secrets / f"{pki.FRONT_PROXY}.crt",
        "proxy-client-key-file": secrets / f"{pki.FRONT_PROXY}.key",
        "requestheader-client-ca-file": secrets / "ca.crt",
        "requestheader-allowed-names": pki.FRONT_PROXY,
        "requestheader-username-headers": "X-Remote-User",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "shutdown-delay-duration": "0s",
        "profiling": "false",
    }
    return Spec(
        name="kube-apiserver",
        argv=(layout.program("kube-apiserver"), *_flags(options)),
        files=(secrets / "stamp",),
        stop_seconds=5,
    )


def controller_manager(layout: Layout) -> Spec:
    """Return how the controller-manager is started."""
    secrets = layout.pki
    options = {
        "kubeconfig": pki.kubeconfig_path(layout, "controller-manager"),
        "bind-address": "127.0.0.1",
        "service-account-private-key-file": secrets / "sa.key",
        "root-ca-file": secrets / "ca.crt",
        "cluster-signing-cert-file": secrets / "ca.crt",
        "cluster-signing-key-file": secrets / "ca.key",
        "use-service-account-credentials": "true",
        "leader-elect": "false",
        "allocate-node-cidrs": "true",
        "cluster-cidr": CLUSTER_CIDR,
        "node-cidr-mask-size": 24,
        "profiling": "false",
    }
    program = layout.program("kube-controller-manager")
    return Spec(name="kube-controller-manager", argv=(program, *_flags(options)), files=(secrets / "stamp",))


def scheduler(layout: Layout) -> Spec:
    """Return how the scheduler is started."""
    options = {
        "kubeconfig": pki.kubeconfig_path(layout, "scheduler"),
        "bind-address": "127.0.0.1",
        "leader-elect": "false",
        "profiling": "false",
    }
    files = (layout.pki / "stamp",)
    return Spec(name="kube-scheduler", argv=(layout.program("kube-scheduler"), *_flags(options)), files=files)


def etcd_ready() -> bool:
    """Tell whether etcd has a leader and answers."""
    return answers(f"{_ETCD_URL}/health")


def api_server_ready(layout: Layout) -> bool:
    """Tell whether the API server says that it is ready."""
    return answers(f"{API_URL}/readyz", authority=layout.pki / "ca.crt")


def controller_manager_ready() -> bool:
    """Tell whether the controller-manager says that it is healthy."""
    return answers("https://127.0.0.1:10257/healthz")


def scheduler_ready() -> bool:
    """Tell whether the scheduler says that it is ready."""
    return answers("https://127.0.0.1:10259/readyz")


def answers(url: str, *, authority: Path | None = None) -> bool:
    """Tell whether a URL answers 200. Without `authority` a self-made certificate is accepted: it is this machine."""
    context = ssl.create_default_context(cafile=str(authority) if authority else None) if url[:5] == "https" else None
    if context is not None and authority is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    direct = urllib.request.ProxyHandler({})
    handlers = [direct, urllib.request.HTTPSHandler(context=context)] if context else [direct]
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=3) as response:
            return bool(response.status == http.client.OK)
    except (OSError, http.client.HTTPException):
        return False


def _flags(options: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]
