# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the library costs inside a training program: `python -m tests.bench.library`.

Each figure is CPU time of a process of its own, on eight simulated GPUs; nothing is asserted here. The simulated
library answers in about a microsecond, a driver takes some 30 us a call, which is waiting for the most part.
"""

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

FAKE = Path(__file__).parents[1] / "fakenvml"
sys.path.insert(0, str(FAKE))

import simgpu  # noqa: E402 - its folder is known from here on

SECONDS = 20

PROGRAMS = {
    "import of the package (budget: 100 ms)": """
        import time
        t = time.process_time()
        import verl_gpumonitor
        print(f"{1e3 * (time.process_time() - t):.1f} ms")
    """,
    "import of ResourceMonitor, all that it needs (budget: 100 ms)": """
        import time
        t = time.process_time()
        from verl_gpumonitor import ResourceMonitor
        print(f"{1e3 * (time.process_time() - t):.1f} ms")
    """,
    "... where logging, pathlib, socket and msgspec are loaded": """
        import time, logging, pathlib, socket, msgspec
        t = time.process_time()
        from verl_gpumonitor import ResourceMonitor
        print(f"{1e3 * (time.process_time() - t):.1f} ms")
    """,
    "import of the plugin": """
        import time
        t = time.process_time()
        import verl_gpumonitor.plugin
        print(f"{1e3 * (time.process_time() - t):.1f} ms")
    """,
    "a sample of 8 GPUs, with CSV": """
        import time
        from verl_gpumonitor import ResourceMonitor
        monitor = ResourceMonitor(path="resources.csv")
        monitor.collect()
        t = time.process_time()
        for _ in range(200):
            monitor.collect()
        print(f"{5 * (time.process_time() - t):.2f} ms")
    """,
    f"in the background at 1 Hz, {SECONDS} s (budget: 0.5% of a core)": f"""
        import time
        from verl_gpumonitor import ResourceMonitor
        monitor = ResourceMonitor(interval=1, path="resources.csv")
        monitor.collect()
        t = time.process_time()
        monitor.start_background()
        time.sleep({SECONDS})
        print(f"{{100 * (time.process_time() - t) / {SECONDS}:.2f}} % of a core")
    """,
    "a mark, with a sidecar and without": """
        import time
        from verl_gpumonitor.stages.sources.marks import MarkReceiver, MarkSender
        receiver = MarkReceiver(0)
        sender = MarkSender(port=receiver.port)
        for _ in range(2):
            t, waited = time.process_time(), 0.0
            for n in range(4000):
                sender.end(sender.begin("gen", role="rollout", step=n))
                if n % 100 == 99:
                    w = time.process_time()
                    receiver.poll()
                    waited += time.process_time() - w
            print(f"{1e6 * (time.process_time() - t - waited) / 8000:.1f} us", end="  ")
            receiver.close()
        print()
    """,
    "one of verl's timers, without and with the plugin": """
        import time
        from codetiming import Timer

        def run():
            t = time.process_time()
            for _ in range(4000):
                with Timer(name="gen", logger=None):
                    pass
            return 1e6 * (time.process_time() - t) / 4000

        before = run()
        import verl_gpumonitor.plugin as plugin
        plugin._driver.one_pool = True
        print(f"{before:.1f} us  {run():.1f} us")
    """,
}


def main() -> None:
    """Print a line for each program."""
    subprocess.run(["make", "-s", "-C", str(FAKE)], check=True)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        simgpu.init(state, gpus=8)
        environment = {**os.environ, "LD_LIBRARY_PATH": str(FAKE / "build"), "FAKENVML_STATE": str(state)}
        for name, program in PROGRAMS.items():
            command = [sys.executable, "-c", textwrap.dedent(program)]
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
            print(f"{name:66} {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
