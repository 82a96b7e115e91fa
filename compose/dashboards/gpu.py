# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The dashboard "One GPU": all that is known of one GPU, and what the DCGM exporter adds where it runs.

DCGM's series are joined by the UUID alone: the labels of its pods depend on how it was installed.
"""

from typing import Final

from .panels import (
    BAD,
    GOOD,
    NAMESPACE,
    WARN,
    Annotation,
    Board,
    Column,
    Panel,
    Query,
    Row,
    Variable,
    lines,
    stat,
    states,
    table,
    value_names,
)

GPU: Final = 'namespace=~"$namespace",pod=~"$pod",uuid=~"$uuid"'
DCGM: Final = 'UUID=~"$uuid"'
RATE: Final = "[$__rate_interval]"
RANGE: Final = "[$__range]"
BY: Final = "pod, gpu, uuid"
LEGEND: Final = "{{pod}} GPU {{gpu}}"


def gauge(name: str, legend: str = LEGEND) -> Query:
    """Return a gauge, whatever role the GPU is in."""
    return Query(expr=f"max by ({BY}) (gpumonitor_gpu_{name}{{{GPU}}})", legend=legend)


def flow(name: str, legend: str) -> Query:
    """Return how fast a counter grows."""
    return Query(expr=f"sum by ({BY}) (rate(gpumonitor_gpu_{name}_total{{{GPU}}}{RATE}))", legend=legend)


def dcgm(name: str, legend: str = "GPU {{gpu}}", *, change: bool = False) -> Query:
    """Return a field of DCGM, or how fast it grows."""
    series = f"DCGM_FI_{name}{{{DCGM}}}"
    return Query(expr=f"max by (gpu, UUID) ({f'rate({series}{RATE})' if change else series})", legend=legend)


NOW: Final = Row(
    title="Now",
    panels=[
        table(
            "GPU",
            "What it is and where. State ok: it answers.",
            {
                "A": (
                    f"max by (namespace, pod, gpu, uuid, model, driver, node) (gpumonitor_gpu_info{{{GPU}}})",
                    Column(title="known"),
                ),
                "B": (
                    f"max by (namespace, pod, gpu, uuid, state, error) (gpumonitor_gpu_state_info{{{GPU}}})",
                    Column(title="state"),
                ),
            },
            labels=["namespace", "pod", "node", "gpu", "model", "uuid", "driver", "state", "error"],
            hidden=["Value #A", "Value #B"],
            width=24,
            height=5,
        ),
        stat(
            "Utilisation",
            "Share of the last sample period in which a kernel was resident.",
            f"avg(gpumonitor_gpu_utilization_ratio{{{GPU}}})",
            unit="percentunit",
            decimals=0,
        ),
        stat(
            "Memory",
            "Memory held by processes, as a share of all; of the fullest GPU that is shown.",
            f"max(gpumonitor_gpu_memory_used_bytes{{{GPU}}} / gpumonitor_gpu_memory_total_bytes{{{GPU}}})",
            unit="percentunit",
            decimals=0,
            thresholds=[(0.92, WARN), (0.97, BAD)],
        ),
        stat(
            "Temperature",
            "Of the chip.",
            f"max(gpumonitor_gpu_temperature_celsius{{{GPU}}})",
            unit="celsius",
            thresholds=[(83.0, WARN), (90.0, BAD)],
        ),
        stat("Power", "Power of the board.", f"sum(gpumonitor_gpu_power_watts{{{GPU}}})", unit="watt"),
        stat(
            "Energy",
            "Energy of the shown span, in kilowatt-hours.",
            f"sum(increase(gpumonitor_gpu_energy_joules_total{{{GPU}}}{RANGE})) / 3.6e6",
            unit="kwatth",
            decimals=2,
        ),
        stat(
            "Answers",
            "GPUs that are shown and answer.",
            f"sum(gpumonitor_gpu_up{{{GPU}}})",
            thresholds=[(0.0, BAD), (1.0, GOOD)],
        ),
    ],
)

LOAD: Final = Row(
    title="Load and memory",
    panels=[
        lines(
            "Utilisation",
            "Share of time in which a kernel was resident, and in which memory was read or written: neither says how"
            " much of the GPU was used.",
            gauge("utilization_ratio", f"{LEGEND} kernels"),
            gauge("memory_bandwidth_utilization_ratio", f"{LEGEND} memory"),
            unit="percentunit",
            bounds=(0, 1),
        ),
        lines(
            "Memory",
            "Memory held by processes, the highest of the last minute, and what the GPU has.",
            gauge("memory_used_bytes", f"{LEGEND} used"),
            gauge("memory_recent_peak_bytes", f"{LEGEND} peak of a minute"),
            gauge("memory_reserved_bytes", f"{LEGEND} driver's own"),
            gauge("memory_total_bytes", f"{LEGEND} total"),
            unit="bytes",
            bounds=(0, None),
        ),
        lines(
            "Busy by stage",
            "Busy share of the GPU's time in each stage, from counters.",
            Query(
                expr=f"sum by (stage) (rate(gpumonitor_gpu_busy_seconds_total{{{GPU}}}{RATE}))"
                f" / (sum by (stage) (rate(gpumonitor_gpu_observed_seconds_total{{{GPU}}}{RATE})) > 0)",
                legend="{{stage}}",
            ),
            unit="percentunit",
            bounds=(0, 1),
        ),
        lines(
            "Memory peaks by stage",
            "Highest memory in each stage since the sidecar's start, and the highest of all.",
            Query(
                expr=f"max by (stage) (gpumonitor_gpu_stage_memory_peak_bytes{{{GPU}}})",
                legend="{{stage}}",
            ),
            Query(expr=f"max(gpumonitor_gpu_memory_peak_bytes{{{GPU}}})", legend="all"),
            unit="bytes",
            bounds=(0, None),
        ),
    ],
)

HEAT: Final = Row(
    title="Temperature, power and clocks",
    panels=[
        lines(
            "Temperature",
            "Of the chip and of its memory, where the GPU has a sensor there.",
            gauge("temperature_celsius", f"{LEGEND} chip"),
            gauge("memory_temperature_celsius", f"{LEGEND} memory"),
            unit="celsius",
        ),
        lines(
            "Power",
            "Power of the board and the limit in force.",
            gauge("power_watts", f"{LEGEND} drawn"),
            gauge("power_limit_watts", f"{LEGEND} limit"),
            unit="watt",
            bounds=(0, None),
        ),
        states(
            "Clocks held down",
            "Why clocks were held down. sw_power_cap is usual at full load; heat and power brakes are not.",
            Query(
                expr=f"max by (pod, gpu, reason) (gpumonitor_gpu_throttled{{{GPU}}})", legend=f"{LEGEND} {{{{reason}}}}"
            ),
            mappings=[value_names({1: ("held down", WARN)})],
        ),
        lines(
            "Reasons for low clocks",
            "How many reasons hold the clocks down at the moment.",
            gauge("throttle_reasons"),
            bounds=(0, None),
        ),
    ],
)

LINKS: Final = Row(
    title="Links and errors",
    panels=[
        lines(
            "NVLink",
            "Bytes in a second over all links of the GPU.",
            flow("nvlink_sent_bytes", f"{LEGEND} sent"),
            flow("nvlink_received_bytes", f"{LEGEND} received"),
            unit="Bps",
            bounds=(0, None),
        ),
        lines(
            "PCIe",
            "Bytes in a second between the GPU and the host.",
            flow("pcie_sent_bytes", f"{LEGEND} sent"),
            flow("pcie_received_bytes", f"{LEGEND} received"),
            unit="Bps",
            bounds=(0, None),
        ),
        lines(
            "Uncorrected memory errors (ECC)",
            "Since the driver was loaded. Any rise wants a look at the runbook of GPUFault.",
            Query(expr=f"sum by ({BY}) (gpumonitor_gpu_ecc_uncorrected_errors_total{{{GPU}}})", legend=LEGEND),
            bounds=(0, None),
        ),
        table(
            "Xids",
            "Xid events since the sidecar's start.",
            {
                "A": (
                    f"sum by (pod, gpu, uuid, xid) (gpumonitor_gpu_xid_errors_total{{{GPU}}})",
                    Column(title="events", thresholds=[(1.0, BAD)]),
                ),
                "B": (
                    f"max by (pod, gpu, uuid, xid) (gpumonitor_gpu_xid_last_timestamp_seconds{{{GPU}}}) * 1000",
                    Column(title="last", unit="dateTimeFromNow"),
                ),
            },
            labels=["pod", "gpu", "xid"],
            hidden=["uuid"],
        ),
    ],
)


def third(title: str, description: str, *queries: Query, unit: str, high: float | None = None) -> Panel:
    """One of three panels in a line."""
    return lines(title, description, *queries, unit=unit, bounds=(0, high), width=8)


WITH_DCGM: Final = Row(
    title="From the DCGM exporter, where it runs",
    collapsed=True,
    panels=[
        third(
            "Tensor cores and SMs",
            "Share of cycles in which tensor cores, the engine and memory worked: how much of the GPU is used, which"
            " utilisation does not say.",
            dcgm("PROF_PIPE_TENSOR_ACTIVE", "GPU {{gpu}} tensor cores"),
            dcgm("PROF_GR_ENGINE_ACTIVE", "GPU {{gpu}} engine"),
            dcgm("PROF_DRAM_ACTIVE", "GPU {{gpu}} memory"),
            unit="percentunit",
            high=1,
        ),
        third(
            "Clocks",
            "Of the SMs and of the memory.",
            dcgm("DEV_SM_CLOCK", "GPU {{gpu}} SMs"),
            dcgm("DEV_MEM_CLOCK", "GPU {{gpu}} memory"),
            unit="rotmhz",
        ),
        third(
            "Utilisation",
            "As NVML tells it, with copies and video.",
            dcgm("DEV_GPU_UTIL", "GPU {{gpu}} kernels"),
            dcgm("DEV_MEM_COPY_UTIL", "GPU {{gpu}} memory"),
            dcgm("DEV_ENC_UTIL", "GPU {{gpu}} encoder"),
            dcgm("DEV_DEC_UTIL", "GPU {{gpu}} decoder"),
            unit="percent",
            high=100,
        ),
        third(
            "Temperature",
            "Of the chip and of its memory.",
            dcgm("DEV_GPU_TEMP", "GPU {{gpu}} chip"),
            dcgm("DEV_MEMORY_TEMP", "GPU {{gpu}} memory"),
            unit="celsius",
        ),
        third("Power", "Power of the board.", dcgm("DEV_POWER_USAGE"), unit="watt"),
        third(
            "Framebuffer",
            "Memory in use and free, in MiB.",
            dcgm("DEV_FB_USED", "GPU {{gpu}} used"),
            dcgm("DEV_FB_FREE", "GPU {{gpu}} free"),
            unit="mbytes",
        ),
        third(
            "NVLink and PCIe",
            "Bandwidth of all links of a GPU, and bytes over PCIe, as DCGM's profiling tells them.",
            dcgm("DEV_NVLINK_BANDWIDTH_TOTAL", "GPU {{gpu}} NVLink"),
            dcgm("PROF_PCIE_TX_BYTES", "GPU {{gpu}} PCIe sent"),
            dcgm("PROF_PCIE_RX_BYTES", "GPU {{gpu}} PCIe received"),
            unit="short",
        ),
        third(
            "Memory errors",
            "ECC errors since the driver was loaded, single and double bit, and rows that were remapped.",
            dcgm("DEV_ECC_SBE_VOL_TOTAL", "GPU {{gpu}} corrected"),
            dcgm("DEV_ECC_DBE_VOL_TOTAL", "GPU {{gpu}} uncorrected"),
            dcgm("DEV_CORRECTABLE_REMAPPED_ROWS", "GPU {{gpu}} rows remapped"),
            dcgm("DEV_UNCORRECTABLE_REMAPPED_ROWS", "GPU {{gpu}} rows remapped, uncorrectable"),
            unit="short",
        ),
        third(
            "Time held down, replays, Xid",
            "Microseconds in a second that clocks were held down by power and by heat; PCIe replays; the last Xid.",
            dcgm("DEV_POWER_VIOLATION", "GPU {{gpu}} power", change=True),
            dcgm("DEV_THERMAL_VIOLATION", "GPU {{gpu}} heat", change=True),
            dcgm("DEV_PCIE_REPLAY_COUNTER", "GPU {{gpu}} replays", change=True),
            dcgm("DEV_XID_ERRORS", "GPU {{gpu}} last Xid"),
            unit="short",
        ),
    ],
)

BOARD: Final = Board(
    uid="gpumonitor-gpu",
    title="GPUMonitor / One GPU",
    description="One GPU: load, memory, heat, power, clocks, links, errors; with DCGM's series where they are there.",
    variables=[
        NAMESPACE,
        Variable(
            name="pod",
            title="Pod",
            query='label_values(gpumonitor_gpu_info{namespace=~"$namespace"}, pod)',
            all_value=".*",
        ),
        Variable(
            name="uuid",
            title="GPU",
            query='label_values(gpumonitor_gpu_info{namespace=~"$namespace",pod=~"$pod"}, uuid)',
        ),
    ],
    annotations=[
        Annotation(
            name="Xids",
            expr=f"changes(gpumonitor_gpu_xid_last_timestamp_seconds{{{GPU}}}[1m]) > 0",
            title="Xid {{xid}} on GPU {{gpu}} of {{pod}}",
            color=WARN,
        ),
    ],
    rows=[NOW, LOAD, HEAT, LINKS, WITH_DCGM],
)
