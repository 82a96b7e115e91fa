# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Words of Kubernetes and of the operators whose jobs are followed: labels of pods, and how times are written. Pure."""

from datetime import datetime, timezone
from typing import Final

RAY_NODE: Final = "ray.io/is-ray-node"
"""Pod label of KubeRay: `yes`."""
RAY_CLUSTER: Final = "ray.io/cluster"
RAY_NODE_TYPE: Final = "ray.io/node-type"
"""`head` or `worker`."""
RAY_GROUP: Final = "ray.io/group"
JOB_NAME: Final = "training.kubeflow.org/job-name"
"""Pod label of the training-operator."""
REPLICA_TYPE: Final = "training.kubeflow.org/replica-type"
"""`master` or `worker`."""
REPLICA_INDEX: Final = "training.kubeflow.org/replica-index"


def unix_seconds(timestamp: object) -> float | None:
    """Unix seconds of a Kubernetes timestamp (RFC 3339); None if it is none."""
    if not isinstance(timestamp, str):
        return None
    try:
        # Python 3.10 does not know the letter.
        moment = datetime.fromisoformat(timestamp.replace("Z", "+00:00"))
    except ValueError:
        return None
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    # Go's zero time (year 1) stands for «not set» in some objects.
    return seconds if seconds > 0 else None
