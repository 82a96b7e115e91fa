# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The webhook's own metrics. Their names are public."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0)


class Metrics:
    """All series of this process, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.requests = Counter(
            "gpumonitor_admission_requests_total",
            "Pods that were looked at, by what became of them.",
            ["result", "reason"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "gpumonitor_admission_duration_seconds",
            "Time from a request's arrival to its answer.",
            buckets=SECONDS_BUCKETS,
            registry=self._registry,
        )
        self.certificate_loads = Counter(
            "gpumonitor_admission_certificate_loads_total",
            "Certificates taken from the Secret, by result.",
            ["result"],
            registry=self._registry,
        )
        self.connections = Gauge(
            "gpumonitor_admission_connections", "Connections that are open now.", registry=self._registry
        )
        self.connections_refused = Counter(
            "gpumonitor_admission_connections_refused",
            "Connections that were closed unserved, by the limit that was reached, in their handshake, or as no HTTP.",
            ["reason"],
            registry=self._registry,
        )
        for reason in ("total", "peer", "handshake", "http"):
            self.connections_refused.labels(reason)
        self.paused = Gauge(
            "gpumonitor_admission_injection_paused",
            "1 while nothing is injected: the circuit breaker is open, or no controller renews its Lease.",
            registry=self._registry,
        )

    def open(self, number: int) -> None:
        """Take note how many connections are open now."""
        self.connections.set(number)

    def refused(self, reason: str) -> None:
        """Count a connection that was not served."""
        self.connections_refused.labels(reason).inc()

    def broken(self) -> None:
        """Count a request that was no HTTP, or whose sender went away in the middle."""
        self.connections_refused.labels("http").inc()

    def rendered(self) -> bytes:
        """Return the exposition format."""
        return generate_latest(self._registry)
