# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What advice takes into account, as a diagnosis knows it at its present moment. Pure."""

from verl_gpumonitor.diagnosis.doctor import Diagnosis

from .context import Context, context_of


def context_at(diagnosis: Diagnosis, open_reasons: set[str]) -> Context:
    """Return what the advice takes into account, as it is known at the diagnosis's moment."""
    history = diagnosis.history
    header = history.header
    sizes = {len(pod.gpus) for pod in history.pods.values() if pod.gpus}
    totals = [gpu.total_bytes for gpu in history.gpus.values() if gpu.total_bytes]
    workload = header.workload
    return context_of(
        header.entrypoint,
        verl=header.frameworks.verl if header.frameworks else None,
        ray_names=history.names,
        kind=None if workload is None else workload.kind,
        gpus=len(history.gpus) or None,
        gpus_per_pod=sizes.pop() if len(sizes) == 1 else None,
        memory_total_bytes=round(min(totals)) if totals else None,
        host_headroom_bytes=history.host_headroom_bytes(),
        gpu_headroom_bytes=history.gpu_headroom_bytes(),
        open_reasons=open_reasons,
    )
