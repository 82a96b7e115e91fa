# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Ray on one host, without Kubernetes: where its dashboard is, and which of its nodes are here."""

import os
import socket
from collections.abc import Sequence
from typing import Final

from verl_gpumonitor.stages.cluster import RayHost

DASHBOARD_URL: Final = "http://127.0.0.1:8265"
ENV_DASHBOARD: Final = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")


def dashboard_url(url: str | None = None) -> str:
    """Return the dashboard's address: as given, as Ray's own environment variables have it, or the usual one."""
    known = [url, *(os.environ.get(name) for name in ENV_DASHBOARD)]
    return next((found.rstrip("/") for found in known if found and found.startswith("http://")), DASHBOARD_URL)


def own_nodes(hosts: Sequence[RayHost]) -> frozenset[str]:
    """Return the ids of the Ray nodes on this host: the only one there is, or those with an address of ours."""
    if len(hosts) == 1:
        return frozenset(host.node_id for host in hosts)
    return frozenset(host.node_id for host in hosts if is_ours(host.ip))


def is_ours(address: str) -> bool:
    """Say whether an address is one of this host's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
