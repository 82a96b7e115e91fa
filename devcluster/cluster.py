# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The commands that change the cluster as a whole: the parts of `up` in their order, and `down`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from devcluster import (
    addons,
    build,
    checks,
    cleanup,
    components,
    containerd,
    gpus,
    images,
    kube,
    mounts,
    network,
    node,
    packages,
    pki,
)
from devcluster.layout import NODE_NAME, Layout
from devcluster.lock import held
from devcluster.process import Processes
from devcluster.progress import Progress

_BUSY = "Another devcluster command is at work."


@dataclass(frozen=True, kw_only=True)
class Part:
    """One numbered part of `up`. `do` returns what to say at its end; `seconds` is None where it is done already."""

    title: str
    do: Callable[[], str]
    seconds: float | None


@contextmanager
def changing(layout: Layout) -> Iterator[None]:
    """Hold the right to change the cluster. The lock lies in the cache: `down` removes the other folders."""
    checks.root()
    with held(layout.cache / "locks" / "cluster.lock", wait=False, busy=_BUSY):
        yield


def up(layout: Layout, without: frozenset[str]) -> None:
    """Bring the cluster up from whatever state; what is up already is left alone."""
    checks.machine(layout)
    with changing(layout):
        if cleanup.unfinished(layout):
            cleanup.remove_everything(layout)
        wanted = [addon for addon in addons.OPTIONAL if addon.name not in without]
        run_parts([*_preparation(layout), *_programs(layout, wanted), *_parts(layout, wanted)])


def build_all(layout: Layout, names: frozenset[str]) -> None:
    """Build the Go programs alone; `names` empty: all of them. May run beside another command."""
    tools = [tool for tool in build.ALL if not names or tool.name in names]
    run_parts([_program_part(layout, tool) for tool in tools])


def down(layout: Layout, *, purge: bool) -> None:
    """Remove the cluster and all that it put on the machine; with `purge` the cache too."""
    with changing(layout):
        cleanup.remove_everything(layout)
    if purge:
        mounts.remove_tree(layout.cache)


def restart(layout: Layout, name: str) -> None:
    """Stop and start one component."""
    stop(layout, name)
    start(layout, name)


def stop(layout: Layout, name: str) -> None:
    """Stop one component; pods go on without it."""
    with changing(layout):
        _processes(layout).stop(components.named(layout, name).spec)


def start(layout: Layout, name: str) -> None:
    """Start one component and wait until it works."""
    with changing(layout):
        components.start(_processes(layout), components.named(layout, name))


def choose_default_runtime(layout: Layout, handler: str) -> None:
    """Choose the runtime of pods that name no RuntimeClass. Pods that run go on under the one they have."""
    with changing(layout):
        containerd.choose_default_runtime(layout, handler)
        components.start(_processes(layout), components.named(layout, "containerd"))


def run_parts(parts: list[Part]) -> None:
    """Do parts one after the other, with progress."""
    progress = Progress(len(parts))
    for part in parts:
        with progress.part(part.title, part.seconds) as shown:
            shown.note = part.do()


def _preparation(layout: Layout) -> list[Part]:
    missing = packages.missing()

    def install() -> str:
        if missing:
            packages.install(layout, missing)
        return f"installed {', '.join(missing)}" if missing else "nothing missing"

    return [Part(title="Debian packages", do=install, seconds=45 if missing else None)]


def _programs(layout: Layout, wanted: list[addons.Addon]) -> list[Part]:
    return [_program_part(layout, tool) for tool in (*build.ALWAYS, *(addon.tool for addon in wanted))]


def _program_part(layout: Layout, tool: build.Tool) -> Part:
    there = build.is_built(layout, tool)

    def do() -> str:
        build.build(layout, tool)
        return "built before" if there else "built"

    return Part(title=f"{tool.title} from Go modules", do=do, seconds=None if there else tool.estimate_seconds)


def _parts(layout: Layout, wanted: list[addons.Addon]) -> list[Part]:
    recipes = [images.PAUSE, images.BASE, images.BASE_BUILD, images.COREDNS]
    recipes += [recipe for addon in wanted for recipe in (addon.image, *addon.extra_images)]
    return [
        Part(title="network, certificates, simulated GPUs", do=lambda: _configure(layout), seconds=None),
        *(_image_part(layout, recipe) for recipe in recipes),
        Part(title="control plane and node", do=lambda: _start(layout), seconds=20),
        Part(title="images into containerd", do=lambda: _load(layout, recipes), seconds=45),
        Part(title="node ready, GPUs offered", do=lambda: _await_node(layout), seconds=15),
        Part(title="name service", do=_ensured(layout, addons.COREDNS), seconds=10),
        *(Part(title=addon.name, do=_ensured(layout, addon), seconds=20) for addon in wanted),
    ]


def _image_part(layout: Layout, recipe: images.Recipe) -> Part:
    there = images.tarball(layout, recipe).exists()

    def do() -> str:
        made = images.ensure_built(layout, recipe)
        return "built" if made else "built before"

    return Part(title=f"image {recipe.name}", do=do, seconds=None if there else recipe.estimate_seconds)


def _configure(layout: Layout) -> str:
    cleanup.forget_containers_of_last_boot(layout)
    network.up(layout)
    pki.ensure(layout)
    containerd.configure(layout)
    node.configure(layout)
    gpus.configure(layout)
    return gpus.install_library(layout)


def _start(layout: Layout) -> str:
    processes = _processes(layout)
    started = []
    for component in components.all_components(layout):
        if components.start(processes, component):
            started.append(component.spec.name)
        if component.spec.name == "containerd":
            images.ensure_loaded(layout, images.PAUSE)  # the kubelet needs it for any pod
    return f"started {', '.join(started)}" if started else "all running"


def _load(layout: Layout, recipes: list[images.Recipe]) -> str:
    """Only what pods use; images for building on stay with buildah."""
    loaded = [recipe.name for recipe in recipes if recipe.kubernetes and images.ensure_loaded(layout, recipe)]
    return f"loaded {', '.join(loaded)}" if loaded else "all there"


def _await_node(layout: Layout) -> str:
    kube.wait_for("the namespace kube-system", lambda: _namespace_there(layout), seconds=30)
    kube.apply(layout, kube.manifest(layout, "cluster.yaml"))
    kube.wait_for("the node Ready", lambda: kube.node_ready(layout, NODE_NAME), seconds=60, advice=_logs("kubelet"))
    offered = lambda: kube.allocatable_gpus(layout, NODE_NAME) == gpus.COUNT  # noqa: E731
    kube.wait_for(f"{gpus.COUNT} GPUs offered by the node", offered, seconds=60, advice=_logs("device-plugin"))
    return f"Ready, {gpus.COUNT} GPUs"


def _namespace_there(layout: Layout) -> bool:
    return bool(kube.kubectl(layout, "get", "namespace", "kube-system", "-oname"))


def _logs(component: str) -> str:
    return f"See: python -m devcluster logs {component}"


def _ensured(layout: Layout, addon: addons.Addon) -> Callable[[], str]:
    return lambda: addons.ensure(layout, addon)


def _processes(layout: Layout) -> Processes:
    return Processes(run=layout.run, logs=layout.logs)
