# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The dashboard "Jobs": what all GPUs do, which hours are wasted, and which jobs have findings.

Rows about jobs need the controller. The others are from the sidecars alone, and so are there on one host too.
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
    stat,
    states,
    table,
    value_names,
)

NS: Final = 'namespace=~"$namespace"'
JOB: Final = 'namespace=~"$namespace",workload=~"$workload"'
RATE: Final = "[$__rate_interval]"
RANGE: Final = "[$__range]"
HOURS: Final = "/ 3600"


def busy(by: str, window: str, selector: str = NS) -> str:
    """Return busy time as a share of observed time: a true mean, from counters."""
    head = f"sum by ({by}) " if by else "sum"
    return (
        f"{head}(rate(gpumonitor_gpu_busy_seconds_total{{{selector}}}{window}))"
        f" / ({head}(rate(gpumonitor_gpu_observed_seconds_total{{{selector}}}{window})) > 0)"
    )


def idle_hours(by: str, selector: str = NS) -> str:
    """Return GPU hours of the shown time in which nothing ran."""
    head = f"sum by ({by}) " if by else "sum"
    return (
        f"({head}(increase(gpumonitor_gpu_observed_seconds_total{{{selector}}}{RANGE}))"
        f" - {head}(increase(gpumonitor_gpu_busy_seconds_total{{{selector}}}{RANGE}))) {HOURS}"
    )


FULLEST: Final = (
    f"max by (namespace, pod) (max without (role) (gpumonitor_gpu_memory_recent_peak_bytes{{{NS}}})"
    f" / max without (role) (gpumonitor_gpu_memory_total_bytes{{{NS}}}))"
)


def of_job(metric: str) -> str:
    """Return a gauge of the controller, one series a job."""
    return f"max by (namespace, workload, kind) ({metric}{{{JOB}}})"


def joined(by_pod: str) -> str:
    """Return what sidecars say, by namespace and pod, with the job of each pod; a borrowed cluster's have two.

    Jobs are on the side of the many, for that reason.
    """
    jobs = f"max by (namespace, workload, kind, pod) (gpumonitor_workload_pod_info{{{JOB}}})"
    return f"{jobs} * on (namespace, pod) group_left () ({by_pod})"


def chosen(by_pod: str) -> str:
    """Return that of it which is of the chosen jobs, also of those that ended in the shown span; of all without one."""
    return f"({by_pod}) and on (namespace, pod) last_over_time({PODS_OF_WORKLOAD}{RANGE})"


NOW: Final = Row(
    title="Now",
    panels=[
        stat(
            "GPUs that answer",
            "GPUs of all watched pods with fresh values.",
            f"sum(gpumonitor_gpu_up{{{NS}}})",
        ),
        stat(
            "GPUs nobody sees",
            "GPUs that running jobs ask for and that have no values. The jobs' GPUMonitors name the reason.",
            f"sum(gpumonitor_workload_gpus_requested{{{JOB}}}) - sum(gpumonitor_workload_gpus_reported{{{JOB}}})",
            thresholds=[(0.0, GOOD), (1.0, WARN)],
        ),
        stat(
            "Utilisation",
            "Busy share of all GPU time, from counters. It says that something ran, not how much of a GPU it used.",
            busy("", RATE),
            unit="percentunit",
            decimals=0,
            bounds=(0, 1),
        ),
        stat(
            "Idle GPU hours",
            "GPU time of the shown span in which nothing ran: what was paid for and not used.",
            idle_hours(""),
            decimals=1,
            unit="h",
            thresholds=[(0.0, WARN)],
        ),
        stat(
            "Open findings",
            "Findings of the controller that are open now, over all jobs.",
            f"count(max by (namespace, workload, reason) (gpumonitor_workload_finding{{{JOB}}}) == 1) or vector(0)",
            thresholds=[(0.0, GOOD), (1.0, BAD)],
        ),
        stat("Power", "Power of all GPUs together.", f"sum(gpumonitor_gpu_power_watts{{{NS}}})", unit="watt"),
    ],
)

JOBS: Final = Row(
    title="Jobs",
    panels=[
        table(
            "Jobs",
            "Each job that the controller knows. Utilisation is of the last minute, idle hours are of the shown span.",
            {
                "A": (
                    f"max by (namespace, workload, kind, phase) (gpumonitor_workload_info{{{JOB}}})",
                    Column(title="known"),
                ),
                "B": (of_job("gpumonitor_workload_gpus_requested"), Column(title="GPUs")),
                "C": (of_job("gpumonitor_workload_gpus_reported"), Column(title="seen")),
                "D": (
                    of_job("gpumonitor_workload_utilization_ratio"),
                    Column(title="Utilisation", unit="percentunit", gauge=True),
                ),
                "E": (
                    of_job("gpumonitor_workload_memory_peak_ratio"),
                    Column(title="Memory peak", unit="percentunit", gauge=True, thresholds=[(0.92, BAD)]),
                ),
                "F": (
                    (
                        "max by (namespace, workload, kind) ("
                        + joined(f"max by (namespace, pod) (gpumonitor_gpu_temperature_celsius{{{NS}}})")
                        + ")"
                    ),
                    Column(title="Hottest", unit="celsius", thresholds=[(83.0, WARN), (90.0, BAD)]),
                ),
                "G": (
                    (
                        "sum by (namespace, workload, kind) ("
                        + joined(f"sum by (namespace, pod) (gpumonitor_gpu_power_watts{{{NS}}})")
                        + ")"
                    ),
                    Column(title="Power", unit="watt"),
                ),
                "H": (of_job("gpumonitor_workload_step"), Column(title="Step")),
                "I": (of_job("gpumonitor_workload_step_seconds"), Column(title="Step time", unit="s")),
                "J": (
                    (
                        "sum by (namespace, workload, kind) (increase("
                        f"gpumonitor_workload_stage_seconds_total{{{JOB}}}{RANGE}) - increase("
                        f"gpumonitor_workload_stage_busy_seconds_total{{{JOB}}}{RANGE})) {HOURS}"
                    ),
                    Column(title="Idle GPU hours", unit="h"),
                ),
                "K": (
                    f"count by (namespace, workload, kind) (gpumonitor_workload_finding{{{JOB}}} == 1)",
                    Column(title="Findings", thresholds=[(1.0, BAD)]),
                ),
            },
            labels=["namespace", "workload", "kind", "phase"],
            hidden=["Value #A"],
            width=24,
            height=9,
        ),
        states(
            "Findings",
            "When which finding was open. The job's GPUMonitor has evidence and advice.",
            Query(
                expr=f"max by (namespace, workload, reason) (gpumonitor_workload_finding{{{JOB}}})",
                legend="{{namespace}}/{{workload}} {{reason}}",
            ),
            mappings=[value_names({1: ("open", BAD)})],
        ),
        bars(
            "Idle GPU hours by stage of all jobs",
            "In which stage the idle GPU time of the shown span lies. Idle in gen is mostly waiting for the longest"
            " answers of a batch.",
            Query(
                expr=f"sort_desc(sum by (stage) (increase(gpumonitor_workload_stage_seconds_total{{{JOB}}}{RANGE})"
                f" - increase(gpumonitor_workload_stage_busy_seconds_total{{{JOB}}}{RANGE}))) {HOURS}",
                legend="{{stage}}",
                instant=True,
            ),
            unit="h",
            bounds=(0, None),
            overrides=stage_colors(),
        ),
    ],
)

FLEET: Final = Row(
    title="All GPUs",
    panels=[
        lines(
            "Utilisation by namespace",
            "Busy share of the GPU time of each namespace.",
            Query(expr=busy("namespace", RATE), legend="{{namespace}}"),
            unit="percentunit",
            bounds=(0, 1),
        ),
        lines(
            "GPUs by state",
            "Every GPU is in one state; anything but ok wants a look.",
            Query(expr=f"sum by (state) (gpumonitor_gpu_state_info{{{NS}}})", legend="{{state}}"),
            stacked=True,
        ),
        bars(
            "Idle GPU hours by pod",
            "The fifteen pods of these jobs with most idle GPU time in the shown span.",
            Query(
                expr=f"sort_desc(topk(15, {chosen(idle_hours('namespace, pod'))}))",
                legend="{{namespace}}/{{pod}}",
                instant=True,
            ),
            unit="h",
            bounds=(0, None),
        ),
        lines(
            "Power by namespace",
            "Power of the boards.",
            Query(expr=f"sum by (namespace) (gpumonitor_gpu_power_watts{{{NS}}})", legend="{{namespace}}"),
            unit="watt",
            stacked=True,
        ),
        bars(
            "Energy by namespace",
            "Energy of the shown span, in kilowatt-hours.",
            Query(
                expr=f"sum by (namespace) (increase(gpumonitor_gpu_energy_joules_total{{{NS}}}{RANGE})) / 3.6e6",
                legend="{{namespace}}",
                instant=True,
            ),
            unit="kwatth",
            bounds=(0, None),
        ),
        bars(
            "Fullest GPU of each pod",
            "Highest memory of the last minute, of the fifteen fullest pods of these jobs. Rollout engines fill memory"
            " on purpose; a GPU far above its peers is what to look at.",
            Query(
                expr=f"sort_desc(topk(15, {chosen(FULLEST)}))",
                legend="{{namespace}}/{{pod}}",
                instant=True,
            ),
            unit="percentunit",
            bounds=(0, 1),
            thresholds=[(0.92, WARN), (0.97, BAD)],
        ),
    ],
)

TROUBLE: Final = Row(
    title="Alerts and missing telemetry",
    panels=[
        table(
            "Alerts",
            "Alerts of the rules that come with GPUMonitor, pending and firing. Each links its runbook in Prometheus.",
            {
                "A": (
                    (
                        "max by (alertname, severity, alertstate, namespace, workload, pod, gpu, reason, xid)"
                        ' (ALERTS{alertname=~"GPU.+|HostMemory.+|SharedMemory.+",namespace=~"$namespace|"})'
                    ),
                    Column(title="on"),
                )
            },
            labels=["alertname", "severity", "alertstate", "namespace", "workload", "pod", "gpu", "reason", "xid"],
            hidden=["Value"],
        ),
        table(
            "Whether GPUs can be read",
            "1 while the values of a pod's GPUs are read, 0 with the reason while they are not.",
            {
                "A": (
                    f"sort(max by (namespace, pod, reason) (gpumonitor_telemetry_available{{{NS}}}))",
                    Column(title="available", thresholds=[(0.0, BAD), (1.0, GOOD)]),
                )
            },
            labels=["namespace", "pod", "reason"],
        ),
    ],
)

BOARD: Final = Board(
    uid="gpumonitor-jobs",
    title="GPUMonitor / Jobs",
    description="All jobs and their GPUs: utilisation, idle hours, findings.",
    variables=[
        NAMESPACE,
        Variable(
            name="workload",
            title="Workload",
            query='label_values(gpumonitor_workload_info{namespace=~"$namespace"}, workload)',
            all_value=".*",
        ),
    ],
    annotations=[
        Annotation(
            name="Findings",
            expr=f"max by (namespace, workload, reason) (gpumonitor_workload_finding{{{JOB}}}) == 1",
            title="{{workload}}: {{reason}}",
            color=BAD,
        )
    ],
    rows=[NOW, JOBS, FLEET, TROUBLE],
    span="now-6h",
)
