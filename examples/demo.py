# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The demo: `python -m examples.demo up|down`, which is what `make demo` and `make demo-down` run.

On the local cluster: builds and starts it, installs the chart, runs the example jobs on simulated GPUs and shows what
GPUMonitor says about them. On an existing cluster (`CLUSTER=existing IMAGE=registry/path`) it installs the chart alone,
because the example jobs need the local cluster's GPUs. It can be run again at any time, also after it was killed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from devcluster import product
from devcluster.layout import default_layout

REPOSITORY = Path(__file__).resolve().parent.parent
CHART = REPOSITORY / "charts" / "gpumonitor"
NAMESPACE = "demo"
LIVELY = {"report": {"intervalSeconds": 5}, "controller": {"statusMinIntervalSeconds": 2}}
"""Sooner than the defaults, for someone who watches."""
HOME = REPOSITORY / ".cache" / "demo"
"""Where a record of the job that goes wrong is kept, and the page that is made of it."""
JOB_LIMIT_SECONDS = 600.0
APPLY_ATTEMPTS, APPLY_PAUSE_SECONDS = 5, 10.0
ENDED = ("Succeeded", "Failed", "Stopped")
TROUBLE = "verl-grpo-hot-gpu0"
AFTERWARDS = f"""
What you saw: each job's phase, stage and step with nothing changed in it; a table of its stages; and of the job that
went wrong what is wrong, since when, on which GPU and in which stage, and which settings to change, from what to what.

  A page of that job            .cache/demo/{TROUBLE}.html, in any browser
  The same in the terminal      .venv/bin/gpumon diagnose .cache/demo/{TROUBLE}.jsonl.gz
  The cluster, which stays up   eval "$(.venv/bin/python -m devcluster env)" && kubectl get gpumonitors -A
  Take it down again            make demo-down"""


class DemoError(Exception):
    """The demo cannot go on; the text says why and what to do."""


class Demo:
    """One run against one cluster."""

    def __init__(self, access: product.Access) -> None:
        self._access = access
        self._kubectl = access.with_kubeconfig(access.kubectl)

    def say(self, *args: str) -> None:
        """Show a kubectl command and what it prints."""
        print(f"\n$ kubectl {' '.join(args)}", flush=True)
        subprocess.run([*self._kubectl, *args], check=True)

    def apply(self, folder: str) -> None:
        """Apply an example. A webhook of the cluster that has no time just now is asked again."""
        for attempt in range(APPLY_ATTEMPTS):
            try:
                self.say("apply", "-n", NAMESPACE, "-k", f"examples/{folder}")
                return
            except subprocess.CalledProcessError:
                if attempt == APPLY_ATTEMPTS - 1:
                    raise
                time.sleep(APPLY_PAUSE_SECONDS)

    def ask(self, *args: str) -> str:
        """Return what kubectl prints; empty where it fails, such as for an object that is not there yet."""
        return subprocess.run([*self._kubectl, *args], capture_output=True, text=True, check=False).stdout

    def status(self, name: str) -> dict[str, Any]:
        """Return the status of a GPUMonitor, empty while there is none."""
        text = self.ask("get", "gpumonitor", name, "-n", NAMESPACE, "-o", "json")
        found: dict[str, Any] = json.loads(text).get("status", {}) if text else {}
        return found

    def fresh_namespace(self) -> None:
        """Begin with an empty namespace, whatever an earlier run left."""
        self.ask("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s")
        subprocess.run([*self._kubectl, "create", "namespace", NAMESPACE], check=True, stdout=subprocess.DEVNULL)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let `kubectl get gpumonitors -w` print while the block runs, but for rows in which only the age is new."""
        command = ("get", "gpumonitors", "-n", NAMESPACE, "-w")
        print(f"\n$ kubectl {' '.join(command)}", flush=True)
        child = subprocess.Popen([*self._kubectl, *command], stdout=subprocess.PIPE, text=True)
        printing = threading.Thread(target=_print_news, args=(child.stdout or (),), daemon=True)
        printing.start()
        try:
            yield
        finally:
            child.terminate()
            child.wait()
            printing.join(timeout=5)

    def until(self, name: str, reached: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Wait for a state of a GPUMonitor. Raises DemoError after ten minutes."""
        end = time.monotonic() + JOB_LIMIT_SECONDS
        while not reached(self.status(name)):
            if time.monotonic() > end:
                raise DemoError(
                    f"{name} was not {what} within {JOB_LIMIT_SECONDS / 60:.0f} minutes. "
                    f"Look with: kubectl -n {NAMESPACE} get pods,rayjobs,pytorchjobs; "
                    f"kubectl -n {product.NAMESPACE} logs deployment/{product.RELEASE}-controller"
                )
            time.sleep(1)

    def run_to_the_end(self, folder: str, name: str) -> None:
        """Apply an example and follow it until its GPUMonitor says that it ended."""
        self.apply(folder)
        with self.watching():
            self.until(name, lambda status: status.get("phase") in ENDED, "at its end")

    def show_trouble(self, folder: str, name: str) -> None:
        """Run the job that goes wrong on purpose, and show what is said about it."""
        self.apply(folder)
        with self.watching():
            self.until(name, _is_diagnosed, "diagnosed")
        self.say("describe", "gpumonitor", name, "-n", NAMESPACE)
        print("\nThe same findings stand on the user's own job:")
        self.say("events", "-n", NAMESPACE, "--for", f"rayjob/{name}")
        self.take_home(name)
        self.say("delete", "-n", NAMESPACE, "-k", f"examples/{folder}", "--wait=false")

    def take_home(self, name: str) -> None:
        """Fetch what the sidecars keep of a job, and make a page of it."""
        HOME.mkdir(parents=True, exist_ok=True)
        trace, page = HOME / f"{name}.jsonl.gz", HOME / f"{name}.html"
        reach = ("--kubectl", self._access.kubectl, "--kubeconfig", str(self._access.kubeconfig))
        print("\nIts last half hour, for the desk:")
        _gpumon("bundle", f"{NAMESPACE}/{name}", "-o", _short(trace), unshown=reach)
        _gpumon("report", _short(trace), "-o", _short(page))


def _short(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def _gpumon(*args: str, unshown: Sequence[str] = ()) -> None:
    """Run gpumon, and show how one calls it; `unshown`: what a shell that reaches the cluster does not need."""
    print(f"\n$ gpumon {' '.join(args)}", flush=True)
    program = Path(sys.executable).with_name("gpumon")
    subprocess.run([program, *args, *unshown], check=True, cwd=REPOSITORY)


def _print_news(rows: Iterable[str]) -> None:
    """Print the rows of `kubectl get -w`: of each object those that differ from its last one in more than the age."""
    last: dict[str, str] = {}
    for row in rows:
        name = row.partition(" ")[0]
        shown = row.rstrip().rpartition(" ")[0]
        if last.get(name) != shown:
            last[name] = shown
            print(row, end="", flush=True)


def _is_diagnosed(status: dict[str, Any]) -> bool:
    """Say whether both findings are there, with the stage that they are in and the settings to change."""
    holding = {one["type"] for one in status.get("conditions", []) if one["status"] == "True"}
    staged = any(one.get("stage") for one in status.get("findings", []))
    settings = any(one.get("suggested") for one in status.get("recommendations", []))
    return {"OOMRisk", "Imbalanced"} <= holding and staged and settings


def _title(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def up_local() -> None:
    """Run the whole demo on the local cluster."""
    _title("1/5 The local cluster (the first time it is compiled: some 25 minutes on two cores, else a minute)")
    subprocess.run([sys.executable, "-m", "devcluster", "up"], check=True, cwd=REPOSITORY)
    layout = default_layout()
    access = product.local_access(layout)
    _title("2/5 GPUMonitor: its images, and `helm install` (a minute or two)")
    values = {"image": product.build_images(layout), **LIVELY}
    product.install(access, chart=CHART, values=values)
    demo = Demo(access)
    demo.say("get", "pods", "-n", product.NAMESPACE)
    demo.fresh_namespace()
    _title("3/5 A RayJob of verl's shape: 2 workers with 4 GPUs each, and a CPU-only head (4 minutes)")
    demo.run_to_the_end("rayjob-grpo", "verl-grpo")
    _title("4/5 The same job gone wrong: the first GPU of one worker nearly full and busy, the others idle (3 minutes)")
    demo.show_trouble("rayjob-hot-gpu0", TROUBLE)
    _title("5/5 A PyTorchJob: supervised fine-tuning with Master and Worker (2 minutes)")
    demo.run_to_the_end("pytorchjob-sft", "verl-sft")
    demo.say("get", "gpumonitors", "-n", NAMESPACE)
    print(AFTERWARDS)


def existing_access() -> product.Access:
    """Find kubectl and helm for a cluster that somebody else runs. Raises DemoError."""
    found = {name: shutil.which(name) for name in ("kubectl", "helm")}
    for name, path in found.items():
        if path is None:
            raise DemoError(f"{name} is not on PATH, and CLUSTER=existing needs it.")
    return product.Access(kubectl=str(found["kubectl"]), helm=str(found["helm"]), kubeconfig=None)


def up_existing(registry: str) -> None:
    """Install the chart on the cluster of the current kubeconfig."""
    if not registry:
        raise DemoError(
            "CLUSTER=existing needs IMAGE=registry/path, where both images are: IMAGE/sidecar and IMAGE/operator."
        )
    access = existing_access()
    demo = Demo(access)
    context = demo.ask("config", "current-context").strip()
    _title(f"Installing GPUMonitor on the cluster of context {context!r}")
    product.install(access, chart=CHART, values={"image": {"registry": registry}})
    demo.say("get", "pods", "-n", product.NAMESPACE)
    print("\nRun a job with GPUs (RayJob, RayCluster or PyTorchJob), then: kubectl get gpumonitors -A -w")


def down() -> None:
    """Take away what `up` made: the local cluster, or the release on an existing one."""
    if os.environ.get("CLUSTER", "devcluster") == "existing":
        product.uninstall(existing_access())
        print("The release is gone. The CRD and the GPUMonitors stay: kubectl delete crd gpumonitors.gpumonitor.dev")
        return
    subprocess.run([sys.executable, "-m", "devcluster", "down"], check=True, cwd=REPOSITORY)


def main(arguments: Sequence[str]) -> int:
    """Run `up` or `down`; returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children are ended, as with Ctrl-C
    try:
        if list(arguments) == ["down"]:
            down()
        elif list(arguments) != ["up"]:
            raise DemoError("Say `up` or `down`.")
        elif os.environ.get("CLUSTER", "devcluster") == "existing":
            up_existing(os.environ.get("IMAGE", ""))
        else:
            up_local()
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"demo: {' '.join(map(str, error.cmd[:6]))} … ended with {error.returncode}", file=sys.stderr)
        print("demo: what is up stays up. `make demo` tries again, `make demo-down` cleans up.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped. `make demo` starts anew, `make demo-down` cleans up.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
