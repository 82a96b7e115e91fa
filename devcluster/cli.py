# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m devcluster COMMAND`, from the top of the checkout."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from devcluster import addons, build, cluster, components, containerd, gpus, images, kube
from devcluster.errors import ClusterError
from devcluster.layout import NODE_NAME, Layout, default_layout
from devcluster.process import Processes
from devcluster.progress import clock

Command = Callable[[Layout, argparse.Namespace], int]
DOWN_EXIT_CODE = 3
"""Of `status`, if the cluster is not up."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    # `su` without a dash leaves them out, and half of what a node needs lies there.
    os.environ["PATH"] = ":".join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    command: Command = options.command
    try:
        return command(default_layout(), options)
    except ClusterError as error:
        print(f"devcluster: {error}", file=sys.stderr)
        if error.advice:
            print(f"  -> {error.advice}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("devcluster: stopped; the next command goes on from here", file=sys.stderr)
        return 130


def _up(layout: Layout, options: argparse.Namespace) -> int:
    without = _names(options.without)
    for name in without:
        addons.named(name)
    cluster.up(layout, without)
    print(f'The cluster is up. For a shell: eval "$({_python()} -m devcluster env)"\nkubeconfig: {layout.kubeconfig}')
    return 0


def _python() -> str:
    """Return how this very Python is called from here: Debian has no plain `python`."""
    program, here = Path(sys.executable), Path.cwd()
    return str(program.relative_to(here) if program.is_relative_to(here) else program)


def _down(layout: Layout, options: argparse.Namespace) -> int:
    cluster.down(layout, purge=options.purge)
    kept = f"; what was built stays in {layout.cache} (`make purge` removes it)."
    print("The cluster is gone" + (", and its cache." if options.purge else kept))
    return 0


def _build(layout: Layout, options: argparse.Namespace) -> int:
    names = frozenset(options.names)
    unknown = names - {tool.name for tool in build.ALL}
    if unknown:
        known = ", ".join(tool.name for tool in build.ALL)
        raise ClusterError(f"Nothing to build is called {', '.join(sorted(unknown))}.", f"There are: {known}")
    cluster.build_all(layout, names)
    return 0


def _status(layout: Layout, _: argparse.Namespace) -> int:
    processes = Processes(run=layout.run, logs=layout.logs)
    all_ready = True
    for component in components.all_components(layout):
        who = processes.running(component.spec.name)
        ready = who is not None and component.ready()
        all_ready &= ready
        state = "ready" if ready else "not ready" if who is not None else "not running"
        pid = f"pid {who.pid}, {clock(_age_seconds(who.start_ticks))}" if who is not None else ""
        print(f"{component.spec.name:26}{state:13}{pid}")
    if all_ready:
        print(_node_line(layout))
    return 0 if all_ready else DOWN_EXIT_CODE


def _node_line(layout: Layout) -> str:
    ready = "Ready" if kube.node_ready(layout, NODE_NAME) else "not Ready"
    pods = json.loads(kube.kubectl(layout, "get", "pods", "--all-namespaces", "-ojson"))["items"]
    running = sum(pod["status"].get("phase") == "Running" for pod in pods)
    offered = kube.allocatable_gpus(layout, NODE_NAME)
    return f"node {NODE_NAME}: {ready}, {offered} GPUs, {running} of {len(pods)} pods running"


def _age_seconds(start_ticks: int) -> float:
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - start_ticks / os.sysconf("SC_CLK_TCK")


def _load_image(layout: Layout, options: argparse.Namespace) -> int:
    path = Path(options.image)
    loaded = containerd.import_tarball(layout, path) if path.is_file() else images.load_reference(layout, options.image)
    print("\n".join(loaded))
    return 0


def _build_image(layout: Layout, options: argparse.Namespace) -> int:
    images.build_target(layout, target=options.target, reference=options.tag)
    print(options.tag)
    return 0


def _logs(layout: Layout, options: argparse.Namespace) -> int:
    names = [options.component] if options.component else [c.spec.name for c in components.all_components(layout)]
    files = [str(layout.logs / f"{name}.log") for name in names]
    present = [file for file in files if Path(file).exists()]
    if not present:
        raise ClusterError(f"There is no log {', '.join(files)}.", "The cluster was never up, or has been removed.")
    lines = "200" if options.component else "20"
    follow = ["--follow=name"] if options.follow else []
    return subprocess.run(["tail", f"--lines={lines}", *follow, *present], check=False).returncode


def _kubeconfig(layout: Layout, _: argparse.Namespace) -> int:
    print(layout.kubeconfig)
    return 0


def _env(layout: Layout, _: argparse.Namespace) -> int:
    print(f'export PATH="{layout.bin}:$PATH"\nexport KUBECONFIG="{layout.kubeconfig}"')
    return 0


def _component(action: Callable[[Layout, str], None]) -> Command:
    def command(layout: Layout, options: argparse.Namespace) -> int:
        action(layout, options.component)
        return 0

    return command


def _addons(layout: Layout, options: argparse.Namespace) -> int:
    addon = addons.named(options.name)
    if options.action == "apply":
        build.build(layout, addon.tool)
        addons.apply(layout, addon)
    else:
        addons.delete(layout, addon)
    return 0


def _default_runtime(layout: Layout, options: argparse.Namespace) -> int:
    cluster.choose_default_runtime(layout, options.handler)
    return 0


def _gpus(layout: Layout, _: argparse.Namespace) -> int:
    with cluster.changing(layout):
        note = gpus.install_library(layout)
    print(note or f"library and state are in {layout.nvml}")
    return 0


def _names(text: str) -> frozenset[str]:
    return frozenset(name for name in text.split(",") if name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m devcluster", description="A real one-node Kubernetes, as root.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Command, help_text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help_text, description=help_text)
        added.set_defaults(command=command)
        return added

    add("up", _up, "bring the cluster up, from whatever state").add_argument(
        "--without", default="", metavar="NAMES", help="add-ons to leave out: kuberay,training-operator,metrics-server"
    )
    add("down", _down, "remove the cluster and what it put on the machine").add_argument(
        "--purge", action="store_true", help="remove the cache of built programs and images too"
    )
    add("build", _build, "build the Go programs alone").add_argument("names", nargs="*", help="which; all if none")
    add("status", _status, f"show each component; exit code {DOWN_EXIT_CODE} unless all are ready")
    add("load-image", _load_image, "make an image known to the cluster").add_argument(
        "image", help="a docker or OCI archive, or the name of an image built here"
    )
    image = add("build-image", _build_image, "build a target of the project's Dockerfile, and load it")
    image.add_argument("--target", required=True)
    image.add_argument("--tag", required=True, help="full name of the image")
    logs = add("logs", _logs, "show the components' logs")
    logs.add_argument("component", nargs="?")
    logs.add_argument("-f", "--follow", action="store_true")
    for name, action in (("restart", cluster.restart), ("stop", cluster.stop), ("start", cluster.start)):
        add(name, _component(action), f"{name} one component").add_argument("component")
    add("kubeconfig", _kubeconfig, "print the path of the administrator's kubeconfig")
    add("env", _env, "print shell lines that set PATH and KUBECONFIG")
    add("gpus", _gpus, "install the simulated library anew, and its state if either has changed")
    add("default-runtime", _default_runtime, "choose the runtime of pods without RuntimeClass").add_argument(
        "handler", help="runc (which it is at first), nvidia, nvidia-refused, nvidia-no-all"
    )
    extra = add("addons", _addons, "apply or delete an add-on, with its CRDs")
    extra.add_argument("action", choices=["apply", "delete"])
    extra.add_argument("name")
    return parser
