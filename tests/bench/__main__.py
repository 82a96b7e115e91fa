# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench`: every bench after the other, or those that are named."""

import subprocess
import sys

BENCHES = {
    "sidecar": "memory and CPU of the sidecar with 8 GPUs, beside another exporter",
    "stages": "cost and resolution of each source of stages",
    "library": "imports, samples and marks inside a training program",
    "webhook": "admission reviews per second, latency, memory",
    "ingest": "reports per second and core",
    "controller": "1,000 workloads and 10,000 pods on the local cluster's API server",
    "diagnosis": "what the diagnosis in the controller costs by report and by workload",
    "report": "a day of eight GPUs as one page",
    "scenarios": "recall and precision of the diagnosis, beside a monitor of thresholds",
}


def main(names: list[str]) -> int:
    """Run the benches; returns 1 when one of them failed, after the others had their turn."""
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"no bench is called {', '.join(unknown)}; there are: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or BENCHES:
        print(f"\n=== {name}: {BENCHES[name]}", flush=True)
        if subprocess.run([sys.executable, "-m", f"tests.bench.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
