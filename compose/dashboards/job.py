# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The dashboard "One job": stages, where the GPU time goes, memory, heat, hosts side by side, the worst ranks.

Series of GPUs carry the pod and not the job: the variable `pod` offers those that the controller counts to the job.
Without a controller the workload stays at "All", which offers every pod that has GPUs.
"""

from typing import Final

from .panels import (
    BAD,
    GOOD,
    NAMESPACE,
    PODS_OF_WORKLOAD,
    WARN,
    Annotation,
    Board,
    Column,
    Query,
    Row,
    Variable,
    bars,
    lines,
    stage_colors,
    stage_names,
    stage_numbers,
    stat,
    states,
    table,
    text,
    value_names,
)

POD: Final = 'namespace=~"$namespace",pod=~"$pod"'
ROLE: Final = POD + ',role=~"$role"'
JOB: Final = 'namespace=~"$namespace",workload=~"$workload"'
RATE: Final = "[$__rate_interval]"
RANGE: Final = "[$__range]"
GPU: Final = "namespace, pod, gpu, uuid"


def share(metric: str, by: str, *, of: str = "gpumonitor_gpu_observed_seconds_total", window: str = RANGE) -> str:
    """Return the sums of one counter over those of another, by the same labels."""
    change = "increase" if window == RANGE else "rate"
    return (
        f"sum by ({by}) ({change}({metric}{{{ROLE}}}{window})) / (sum by ({by}) ({change}({of}{{{ROLE}}}{window})) > 0)"
    )


def memory(peak: str, by: str) -> str:
    """Return the highest share of memory. The role of a gauge is that of the moment, and is of no interest."""
    return (
        f"max by ({by}) (max without (role) ({peak}{{{POD}}})"
        f" / max without (role) (gpumonitor_gpu_memory_total_bytes{{{POD}}}))"
    )


BUSY: Final = "gpumonitor_gpu_busy_seconds_total"
OBSERVED: Final = "gpumonitor_gpu_observed_seconds_total"
ENERGY: Final = "gpumonitor_gpu_energy_joules_total"
RECENT: Final = "gpumonitor_gpu_memory_recent_peak_bytes"

NOW: Final = Row(
    title="Now",
    panels=[
        stat("GPUs that answer", "GPUs of these pods with fresh values.", f"sum(gpumonitor_gpu_up{{{POD}}})", width=3),
        stat(
            "Stage",
            "What most pods are in now, in verl's words.",
            f"topk(1, sum by (stage) (gpumonitor_stage_info{{{POD}}}))",
            name="{{stage}}",
            width=3,
        ),
        stat("Step", "Newest training step.", f"max(gpumonitor_workload_step{{{JOB}}})", width=3),
        stat(
            "Step time",
            "Mean length of the newest steps.",
            f"max(gpumonitor_workload_step_seconds{{{JOB}}})",
            unit="s",
            width=3,
        ),
        stat(
            "Utilisation",
            "Busy share of the GPU time, from counters.",
            f"sum(rate({BUSY}{{{ROLE}}}{RATE})) / (sum(rate({OBSERVED}{{{ROLE}}}{RATE})) > 0)",
            unit="percentunit",
            decimals=0,
            width=3,
        ),
        stat(
            "Fullest GPU",
            "Highest memory of the last minute, of the GPU nearest to its limit.",
            f"max(max without (role) ({RECENT}{{{POD}}}) / max without (role)"
            f" (gpumonitor_gpu_memory_total_bytes{{{POD}}}))",
            unit="percentunit",
            decimals=0,
            thresholds=[(0.92, WARN), (0.97, BAD)],
            width=3,
        ),
        stat(
            "Energy",
            "Energy of the shown span, in kilowatt-hours.",
            f"sum(increase({ENERGY}{{{ROLE}}}{RANGE})) / 3.6e6",
            unit="kwatth",
            decimals=1,
            width=3,
        ),
        stat(
            "Open findings",
            "Findings of this job that are open now.",
            f"count(max by (workload, reason) (gpumonitor_workload_finding{{{JOB}}}) == 1) or vector(0)",
            thresholds=[(0.0, GOOD), (1.0, BAD)],
            width=3,
        ),
    ],
)

STAGES: Final = Row(
    title="Stages",
    panels=[
        states(
            "Stages",
            "What each pod was in. A gap is a time of which nobody could tell.",
            Query(expr=stage_numbers(POD, "namespace, pod"), legend="{{pod}}"),
            mappings=[stage_names()],
            width=24,
            height=8,
        ),
        table(
            "Stage budget",
            "Where the GPU time of the shown span went. Share is of all GPU time; busy is the part of the stage's own"
            " time in which the GPUs worked; idle GPU hours are what is to be won.",
            {
                "A": (
                    f"sum by (stage, role) (increase({OBSERVED}{{{ROLE}}}{RANGE})) / 3600",
                    Column(title="GPU hours", unit="h"),
                ),
                "B": (
                    (
                        f"sum by (stage, role) (increase({OBSERVED}{{{ROLE}}}{RANGE})) / scalar(sum(increase("
                        f"{OBSERVED}{{{ROLE}}}{RANGE})))"
                    ),
                    Column(title="Share", unit="percentunit", gauge=True),
                ),
                "C": (share(BUSY, "stage, role"), Column(title="Busy", unit="percentunit", gauge=True)),
                "D": (
                    (
                        f"(sum by (stage, role) (increase({OBSERVED}{{{ROLE}}}{RANGE})) - sum by (stage, role)"
                        f" (increase({BUSY}{{{ROLE}}}{RANGE}))) / 3600"
                    ),
                    Column(title="Idle GPU hours", unit="h"),
                ),
                "E": (
                    f"max by (stage, role) (gpumonitor_gpu_stage_memory_peak_bytes{{{ROLE}}})",
                    Column(title="Memory peak", unit="bytes"),
                ),
                "F": (
                    f"sum by (stage, role) (increase({ENERGY}{{{ROLE}}}{RANGE})) / 3.6e6",
                    Column(title="Energy", unit="kwatth"),
                ),
            },
            labels=["stage", "role"],
            width=14,
            height=9,
        ),
        bars(
            "Share of the GPU time",
            "The stage budget as bars.",
            Query(
                expr=f"sort_desc(sum by (stage) (increase({OBSERVED}{{{ROLE}}}{RANGE})) / scalar(sum(increase("
                f"{OBSERVED}{{{ROLE}}}{RANGE}))))",
                legend="{{stage}}",
                instant=True,
            ),
            unit="percentunit",
            bounds=(0, 1),
            overrides=stage_colors(),
            width=10,
            height=9,
        ),
        lines(
            "Time of a step",
            "Mean length of the newest steps. It comes from the controller.",
            Query(
                expr=f"max by (workload) (gpumonitor_workload_step_seconds{{{JOB}}})",
                legend="{{workload}}",
            ),
            unit="s",
            bounds=(0, None),
        ),
        lines(
            "Steps",
            "Whole steps in a minute, by pod that counted them.",
            Query(expr=f"sum by (pod) (rate(gpumonitor_steps_total{{{POD}}}{RATE})) * 60", legend="{{pod}}"),
            bounds=(0, None),
        ),
    ],
)

USE: Final = Row(
    title="Utilisation and memory",
    panels=[
        lines(
            "Utilisation by role",
            "Busy share of the GPU time in each role. A colocated GPU is in one role after the other.",
            Query(expr=share(BUSY, "role", window=RATE), legend="{{role}}"),
            unit="percentunit",
            bounds=(0, 1),
        ),
        lines(
            "Memory by role",
            "Memory held by processes, of the GPUs that are in this role at the moment: the mean and the fullest.",
            Query(expr=f"avg by (role) (gpumonitor_gpu_memory_used_bytes{{{ROLE}}})", legend="{{role}} mean"),
            Query(expr=f"max by (role) (gpumonitor_gpu_memory_used_bytes{{{ROLE}}})", legend="{{role}} fullest"),
            unit="bytes",
            bounds=(0, None),
        ),
        lines(
            "Utilisation by pod",
            "Hosts that do the same work should be alike.",
            Query(expr=share(BUSY, "pod", window=RATE), legend="{{pod}}"),
            unit="percentunit",
            bounds=(0, 1),
        ),
        lines(
            "Memory peaks by pod",
            "Fullest GPU of each pod in the last minute. A line that rises from step to step is a leak.",
            Query(expr=memory(RECENT, "pod"), legend="{{pod}}"),
            unit="percentunit",
            bounds=(0, 1),
        ),
        lines(
            "Where the time goes",
            "GPUs at work and idle in each stage, stacked: the height is the number of GPUs.",
            Query(expr=f"sum by (stage) (rate({OBSERVED}{{{ROLE}}}{RATE}))", legend="{{stage}}"),
            stacked=True,
            overrides=stage_colors(),
        ),
        lines(
            "Host memory by pod",
            "Memory of the job's container and its /dev/shm, as shares of what they may have.",
            Query(
                expr=f"max by (pod) (gpumonitor_host_memory_used_bytes{{{POD}}}"
                f" / (gpumonitor_host_memory_limit_bytes{{{POD}}} > 0))",
                legend="{{pod}} memory",
            ),
            Query(
                expr=f"max by (pod) (gpumonitor_host_shm_used_bytes{{{POD}}}"
                f" / (gpumonitor_host_shm_size_bytes{{{POD}}} > 0))",
                legend="{{pod}} /dev/shm",
            ),
            unit="percentunit",
            bounds=(0, 1),
        ),
    ],
)

HEAT: Final = Row(
    title="Temperature and power",
    panels=[
        lines(
            "Temperature",
            "Hottest chip and hottest memory of each pod.",
            Query(expr=f"max by (pod) (gpumonitor_gpu_temperature_celsius{{{POD}}})", legend="{{pod}} chip"),
            Query(expr=f"max by (pod) (gpumonitor_gpu_memory_temperature_celsius{{{POD}}})", legend="{{pod}} memory"),
            unit="celsius",
        ),
        lines(
            "Power",
            "Power of the boards of each pod. Low power at full utilisation is the sign of a hanging collective.",
            Query(expr=f"sum by (pod) (gpumonitor_gpu_power_watts{{{POD}}})", legend="{{pod}}"),
            unit="watt",
            bounds=(0, None),
        ),
        states(
            "Clocks held down",
            "When a GPU's clocks were held down, and why. sw_power_cap is usual at full load; heat and power brakes are"
            " not.",
            Query(
                expr=f"max by (pod, gpu, reason) (gpumonitor_gpu_throttled{{{POD}}})",
                legend="{{pod}} GPU {{gpu}} {{reason}}",
            ),
            mappings=[value_names({1: ("held down", WARN)})],
        ),
        lines(
            "Traffic",
            "Bytes in a second over NVLink and PCIe, sent, of all GPUs of a pod.",
            Query(
                expr=f"sum by (pod) (rate(gpumonitor_gpu_nvlink_sent_bytes_total{{{POD}}}{RATE}))",
                legend="{{pod}} NVLink",
            ),
            Query(
                expr=f"sum by (pod) (rate(gpumonitor_gpu_pcie_sent_bytes_total{{{POD}}}{RATE}))", legend="{{pod}} PCIe"
            ),
            unit="Bps",
            bounds=(0, None),
        ),
    ],
)

HOSTS: Final = Row(
    title="Hosts side by side",
    panels=[
        table(
            "Hosts",
            "One line for each pod: hosts of one pool should be alike. Utilisation is of the shown span, the rest is"
            " of the present.",
            {
                "A": (f"max by (pod, node) (gpumonitor_gpu_info{{{POD}}})", Column(title="known")),
                "B": (f"sum by (pod) (gpumonitor_gpu_up{{{POD}}})", Column(title="GPUs")),
                "C": (share(BUSY, "pod"), Column(title="Utilisation", unit="percentunit", gauge=True)),
                "D": (
                    memory(RECENT, "pod"),
                    Column(title="Memory peak", unit="percentunit", gauge=True, thresholds=[(0.92, WARN), (0.97, BAD)]),
                ),
                "E": (
                    f"max by (pod) (gpumonitor_gpu_temperature_celsius{{{POD}}})",
                    Column(title="Hottest", unit="celsius"),
                ),
                "F": (f"sum by (pod) (gpumonitor_gpu_power_watts{{{POD}}})", Column(title="Power", unit="watt")),
                "G": (
                    f"count by (pod) (max by (pod, uuid) (gpumonitor_gpu_throttle_reasons{{{POD}}}) > 0)",
                    Column(title="Held down"),
                ),
                "H": (
                    (
                        f"max by (pod) (gpumonitor_host_memory_used_bytes{{{POD}}}"
                        f" / (gpumonitor_host_memory_limit_bytes{{{POD}}} > 0))"
                    ),
                    Column(title="Host memory", unit="percentunit", gauge=True),
                ),
            },
            labels=["pod", "node"],
            hidden=["Value #A"],
            width=24,
        ),
    ],
)

RANKS: Final = Row(
    title="Worst ranks",
    panels=[
        bars(
            "Fullest GPUs",
            "Ten GPUs nearest to their memory's end in the last minute.",
            Query(expr=f"sort_desc(topk(10, {memory(RECENT, GPU)}))", legend="{{pod}} GPU {{gpu}}", instant=True),
            unit="percentunit",
            bounds=(0, 1),
            thresholds=[(0.92, WARN), (0.97, BAD)],
            width=8,
            height=9,
        ),
        bars(
            "Least busy GPUs",
            "Ten GPUs with the lowest utilisation in the shown span.",
            Query(expr=f"sort(bottomk(10, {share(BUSY, GPU)}))", legend="{{pod}} GPU {{gpu}}", instant=True),
            unit="percentunit",
            bounds=(0, 1),
            width=8,
            height=9,
        ),
        bars(
            "Hottest GPUs",
            "Ten GPUs with the highest temperature now.",
            Query(
                expr=f"sort_desc(topk(10, max by ({GPU}) (gpumonitor_gpu_temperature_celsius{{{POD}}})))",
                legend="{{pod}} GPU {{gpu}}",
                instant=True,
            ),
            unit="celsius",
            bounds=(0, 100),
            width=8,
            height=9,
        ),
        lines(
            "Distance from the pool",
            "Memory of each GPU less the median of all shown GPUs, for the eight furthest above. Choose pods and role"
            " so that what is shown does the same work.",
            Query(
                expr=f"topk(8, max by ({GPU}) (gpumonitor_gpu_memory_used_bytes{{{POD}}}) - scalar(quantile(0.5, max by"
                f" ({GPU}) (gpumonitor_gpu_memory_used_bytes{{{POD}}}))))",
                legend="{{pod}} GPU {{gpu}}",
            ),
            unit="bytes",
        ),
        table(
            "Xids",
            "Xid events since the sidecar's start. The runbook of GPUFault says what a code means.",
            {
                "A": (
                    f"sum by (pod, gpu, xid) (gpumonitor_gpu_xid_errors_total{{{POD}}})",
                    Column(title="events", thresholds=[(1.0, BAD)]),
                ),
                "B": (
                    f"max by (pod, gpu, xid) (gpumonitor_gpu_xid_last_timestamp_seconds{{{POD}}}) * 1000",
                    Column(title="last", unit="dateTimeFromNow"),
                ),
            },
            labels=["pod", "gpu", "xid"],
        ),
    ],
)

FINDINGS: Final = Row(
    title="Findings and Events",
    panels=[
        states(
            "Findings",
            "When which finding of this job was open.",
            Query(
                expr=f"max by (workload, reason, severity) (gpumonitor_workload_finding{{{JOB}}})",
                legend="{{workload}} {{reason}} ({{severity}})",
            ),
            mappings=[value_names({1: ("open", BAD)})],
            width=16,
        ),
        text(
            "Events and advice",
            "Events and the advice of a finding are objects of the cluster; Prometheus has none of them.",
            "Evidence, advice and Events of the job stand in the cluster:\n\n"
            "```\nkubectl describe gpumonitor -n $namespace $workload\n"
            "kubectl events -n $namespace --for gpumonitor/$workload\n```\n\n"
            "On one host: `gpumon diagnose` and `gpumon report`, of a log by `gpumon log`.",
            width=8,
        ),
    ],
)

BOARD: Final = Board(
    uid="gpumonitor-job",
    title="GPUMonitor / One job",
    description="One job: stages, GPU time, memory, heat, its hosts side by side, its worst ranks, findings.",
    variables=[
        NAMESPACE,
        Variable(
            name="workload",
            title="Workload",
            query='label_values(gpumonitor_workload_info{namespace=~"$namespace"}, workload)',
            all_value=".*",
            multi=False,
        ),
        Variable(
            name="pod",
            title="Pod",
            query=f"label_values({PODS_OF_WORKLOAD}, pod)",
        ),
        Variable(
            name="role",
            title="Role",
            query=f"label_values({OBSERVED}{{{POD}}}, role)",
            all_value=".*",
        ),
    ],
    annotations=[
        Annotation(
            name="Findings",
            expr=f"max by (workload, reason) (gpumonitor_workload_finding{{{JOB}}}) == 1",
            title="{{reason}}",
            color=BAD,
        ),
        Annotation(
            name="Xids",
            expr=f"changes(gpumonitor_gpu_xid_last_timestamp_seconds{{{POD}}}[1m]) > 0",
            title="Xid {{xid}} on GPU {{gpu}} of {{pod}}",
            color=WARN,
        ),
    ],
    rows=[NOW, STAGES, USE, HEAT, HOSTS, RANKS, FINDINGS],
)
