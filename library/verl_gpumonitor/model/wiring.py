# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""How an injected container is wired: names that the admission writes and the sidecar reads, kept in one place.

Nothing here depends on Kubernetes; these are the words of an agreement between two processes that never import
each other.
"""

from typing import Final

CONTAINER_NAME: Final = "gpumonitor"
TOKEN_VOLUME: Final = "gpumonitor-token"  # noqa: S105 - a name, not a secret
TOKEN_DIRECTORY: Final = "/var/run/secrets/gpumonitor.dev"  # noqa: S105
TOKEN_FILE: Final = TOKEN_DIRECTORY + "/token"
TOKEN_AUDIENCE: Final = "gpumonitor.dev"  # noqa: S105

ANNOTATION_INJECTED: Final = "gpumonitor.dev/injected"
"""Pod annotation: version of the sidecar that was injected."""
ANNOTATION_SKIP_REASON: Final = "gpumonitor.dev/skip-reason"
"""Pod annotation: why nothing was injected, as `Reason: sentence`."""
INJECT: Final = "gpumonitor.dev/inject"
"""Namespace label, pod label or pod annotation: `enabled` or `disabled`."""

SIDECAR_PROGRAM: Final = "/opt/gpumonitor/bin/gpumon-sidecar"
"""The program inside our images."""

METRICS_PORT: Final = 9410
METRICS_PORT_NAME: Final = "gpumon-metrics"
TRACE_PATH: Final = "/trace"
"""On the port of the metrics: the last half hour of the pod as a trace."""
MARKS_PORT: Final = 9411
"""UDP, on localhost alone."""

ENV_POD_NAMESPACE: Final = "GPUMON_POD_NAMESPACE"
ENV_POD_NAME: Final = "GPUMON_POD_NAME"
ENV_POD_UID: Final = "GPUMON_POD_UID"
ENV_POD_IP: Final = "GPUMON_POD_IP"
ENV_NODE_NAME: Final = "GPUMON_NODE_NAME"
ENV_GPUS_REQUESTED: Final = "GPUMON_GPUS_REQUESTED"
"""Sum over the pod's containers; 0 on a CPU-only Ray head."""
ENV_GPUS_SHARED: Final = "GPUMON_GPUS_SHARED"
"""`1` when other pods may have the same GPUs (time slicing, MPS): then seeing as many as were asked for makes none of
them the pod's own. Absent: no node is known on which that could be."""
ENV_RAY_NODE_TYPE: Final = "GPUMON_RAY_NODE_TYPE"
"""`head`, `worker`, or empty for a pod that is no Ray node."""
ENV_SHARED_PROCESSES: Final = "GPUMON_SHARED_PROCESSES"
"""`1` when the pod shares its process namespace."""
ENV_SHM_PATH: Final = "GPUMON_SHM_PATH"
"""Where the pod's /dev/shm volume is mounted read-only in the sidecar; empty if it has none."""
SHM_PATH: Final = "/var/run/gpumonitor/shm"
ENV_REPORT_URL: Final = "GPUMON_REPORT_URL"
"""`https://<ClusterIP>:8443/v1/report`; empty: no reports, metrics alone."""
ENV_REPORT_SERVER_NAME: Final = "GPUMON_REPORT_SERVER_NAME"
"""DNS name in the controller's certificate; the address is an IP, so that no DNS is needed."""
ENV_REPORT_CA: Final = "GPUMON_REPORT_CA"
"""CA certificates, PEM."""
ENV_REPORT_INTERVAL: Final = "GPUMON_REPORT_INTERVAL_SECONDS"
ENV_SAMPLE_INTERVAL: Final = "GPUMON_SAMPLE_INTERVAL_SECONDS"
ENV_METRICS_PORT: Final = "GPUMON_METRICS_PORT"
"""Port of /metrics and /healthz; `0` takes a free one (hostNetwork pods)."""
ENV_RAY_METRICS_URL: Final = "GPUMON_RAY_METRICS_URL"
"""Ray's metrics agent, default `http://127.0.0.1:8080/metrics`; empty: not asked."""
ENV_RAY_DASHBOARD_URL: Final = "GPUMON_RAY_DASHBOARD_URL"
"""Ray's dashboard on the head, default `http://127.0.0.1:8265`; empty: not asked."""
