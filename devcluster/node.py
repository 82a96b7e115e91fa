# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""kubelet and kube-proxy."""

import json

from devcluster import pki
from devcluster.command import write_aside
from devcluster.controlplane import answers
from devcluster.layout import CLUSTER_CIDR, DNS_SERVICE_IP, NODE_IP, NODE_NAME, Layout
from devcluster.process import Spec

MAX_PODS = 200
"""POD_CIDR has 253 addresses."""


def kubelet_configuration(layout: Layout) -> dict[str, object]:
    """Return the kubelet's configuration."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "address": NODE_IP,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(layout.pki / "kubelet.crt"),
        "tlsPrivateKeyFile": str(layout.pki / "kubelet.key"),
        "clusterDomain": "cluster.local",
        "clusterDNS": [DNS_SERVICE_IP],
        "failSwapOn": False,
        "podLogsDir": str(layout.state / "pod-logs"),
        "maxPods": MAX_PODS,
        # Images cannot be pulled again, so they are never removed: 100 turns the collection off, and there is no
        # threshold for the disk, under whose pressure images would be removed too.
        "imageGCHighThresholdPercent": 100,
        "imageMaximumGCAge": "0s",
        "evictionHard": {"memory.available": "100Mi"},
        "serializeImagePulls": False,
        "syncFrequency": "10s",
        "shutdownGracePeriod": "0s",
    }


def proxy_configuration(layout: Layout) -> dict[str, object]:
    """Return kube-proxy's configuration. The kernel's conntrack table is left as it is: it is not ours alone."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(pki.kubeconfig_path(layout, "proxy"))},
        "mode": "iptables",
        "clusterCIDR": CLUSTER_CIDR,
        "hostnameOverride": NODE_NAME,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"},
    }


def configure(layout: Layout) -> None:
    """Write both configurations (JSON, which is YAML too)."""
    write_aside(layout.config / "kubelet.yaml", json.dumps(kubelet_configuration(layout), indent=2) + "\n")
    write_aside(layout.config / "kube-proxy.yaml", json.dumps(proxy_configuration(layout), indent=2) + "\n")


def kubelet(layout: Layout) -> Spec:
    """Return how the kubelet is started."""
    options = (
        f"--config={layout.config / 'kubelet.yaml'}",
        f"--kubeconfig={pki.kubeconfig_path(layout, 'kubelet')}",
        f"--hostname-override={NODE_NAME}",
        f"--node-ip={NODE_IP}",
        f"--root-dir={layout.state / 'kubelet'}",
        "--v=1",
    )
    files = (layout.config / "kubelet.yaml", layout.pki / "stamp")
    return Spec(name="kubelet", argv=(layout.program("kubelet"), *options), files=files)


def kube_proxy(layout: Layout) -> Spec:
    """Return how kube-proxy is started."""
    file = layout.config / "kube-proxy.yaml"
    return Spec(
        name="kube-proxy",
        argv=(layout.program("kube-proxy"), f"--config={file}"),
        files=(file, layout.pki / "stamp"),
    )


def kubelet_ready() -> bool:
    """Tell whether the kubelet says that it is healthy."""
    return answers("http://127.0.0.1:10248/healthz")


def kube_proxy_ready() -> bool:
    """Tell whether kube-proxy has written its rules."""
    return answers("http://127.0.0.1:10256/healthz")
