# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The container runtime: Debian's containerd under paths of its own, and the images in it."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from devcluster import checks
from devcluster.command import output, succeeds, write_aside
from devcluster.errors import ClusterError
from devcluster.layout import IMAGE_PREFIX, Layout
from devcluster.process import Spec

PAUSE_IMAGE = f"{IMAGE_PREFIX}/pause:1"
GPU_HANDLERS = ("nvidia", "nvidia-refused", "nvidia-no-all")
"""Names of the runtime handlers and RuntimeClasses; see `gpus`."""
_SNAPSHOTTERS = ("aufs", "btrfs", "devmapper", "zfs")
_NOT_WANTED = ["io.containerd.internal.v1.opt", *(f"io.containerd.snapshotter.v1.{name}" for name in _SNAPSHOTTERS)]
"""`opt` would make /opt/containerd; the snapshotters only warn that they cannot be used here."""
_CRI = 'plugins."io.containerd.grpc.v1.cri"'


def configuration(layout: Layout, *, restrict_oom_score: bool, default_runtime: str = "runc") -> str:
    """Return containerd's configuration (format 2, which 1.6 and 2.x read).

    `restrict_oom_score`: never ask runc to lower oom_score_adj; without CAP_SYS_RESOURCE it dies of that with «can't
    get final child's PID from pipe: EOF».
    """
    lines = [
        "version = 2",
        f'root = "{layout.containerd_root}"',
        f'state = "{layout.containerd_socket.parent}"',
        f"disabled_plugins = {json.dumps(_NOT_WANTED)}",
        "[grpc]",
        f'  address = "{layout.containerd_socket}"',
        f"[{_CRI}]",
        f"  restrict_oom_score_adj = {str(restrict_oom_score).lower()}",
        f'  sandbox_image = "{PAUSE_IMAGE}"',
        # Network namespaces under our own folder, so that `down` finds them and touches nobody else's.
        "  netns_mounts_under_state_dir = true",
        f"[{_CRI}.cni]",
        '  bin_dir = "/usr/lib/cni"',
        f'  conf_dir = "{layout.state / "cni" / "conf"}"',
        f"[{_CRI}.containerd]",
        '  snapshotter = "overlayfs"',
        f'  default_runtime_name = "{default_runtime}"',
    ]
    programs = {handler: str(layout.config / "runtimes" / handler / "runtime") for handler in GPU_HANDLERS}
    for handler, program in {"runc": shutil.which("runc") or "runc", **programs}.items():
        lines += [
            f"[{_CRI}.containerd.runtimes.{handler}]",
            '  runtime_type = "io.containerd.runc.v2"',
            f"[{_CRI}.containerd.runtimes.{handler}.options]",
            f'  BinaryName = "{program}"',
            f'  Root = "{layout.run / "runc"}"',
        ]
    return "\n".join(lines) + "\n"


def configure(layout: Layout) -> None:
    """Write containerd's configuration for this machine; the default runtime as it was last chosen."""
    chosen = layout.state / "default-runtime"
    text = configuration(
        layout,
        restrict_oom_score=not checks.may_lower_oom_score(),
        default_runtime=chosen.read_text().strip() if chosen.exists() else "runc",
    )
    write_aside(layout.config / "containerd.toml", text)


def choose_default_runtime(layout: Layout, handler: str) -> None:
    """Choose the handler of pods that name no RuntimeClass; takes effect when containerd is started anew."""
    known = ("runc", *GPU_HANDLERS)
    if handler not in known:
        raise ClusterError(f"There is no runtime handler «{handler}».", f"The handlers: {', '.join(known)}")
    write_aside(layout.state / "default-runtime", handler + "\n")
    configure(layout)


def spec(layout: Layout) -> Spec:
    """Return how containerd is started."""
    program = shutil.which("containerd") or "containerd"
    file = layout.config / "containerd.toml"
    return Spec(name="containerd", argv=(program, "--config", str(file)), files=(file,))


def ready(layout: Layout) -> bool:
    """Tell whether containerd answers, its CRI part too."""
    return succeeds([*_ctr(layout), "version"], timeout_seconds=5) and "cri" in _plugins_ok(layout)


def images(layout: Layout) -> set[str]:
    """Return the references of all images that Kubernetes sees."""
    return set(output([*_ctr(layout), "images", "list", "-q"]).split())


def forget_all_but(layout: Layout, kept: set[str]) -> bool:
    """Delete all containers (their processes must be dead) and all images but those; return whether that worked.

    Needs containerd alive. Where it is not, or refuses, its store must not be used again.
    """
    try:
        _delete_each(layout, "tasks", "delete", "--force")
        _delete_each(layout, "containers", "delete")
        foreign = sorted(images(layout) - kept)
        if foreign:
            output([*_ctr(layout), "images", "remove", "--sync", *foreign])
        return not output([*_ctr(layout), "containers", "list", "-q"]).split()
    except ClusterError:
        return False


def import_tarball(layout: Layout, tarball: Path) -> list[str]:
    """Import a docker or OCI archive, and return the references it brought, once Kubernetes sees them."""
    if not tarball.is_file():
        raise ClusterError(f"There is no file {tarball}.")
    said = output([*_ctr(layout), "images", "import", tarball])
    references = [line.split()[1] for line in said.splitlines() if line.startswith("unpacking ")]
    if not references:
        raise ClusterError(
            f"{tarball} holds no image with a name.", "Write it with a name: docker-archive:FILE:NAME:TAG"
        )
    _await_seen(layout, references)
    return references


def tag(layout: Layout, reference: str, other: str) -> None:
    """Give an image a second name."""
    output([*_ctr(layout), "images", "tag", "--force", reference, other])


def _await_seen(layout: Layout, references: Sequence[str]) -> None:
    """Wait until the CRI part has taken note: until then the kubelet would try to pull."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        managed = output([*_ctr(layout), "images", "list", "-q", 'labels."io.cri-containerd.image"==managed']).split()
        if set(references) <= set(managed):
            return
        time.sleep(0.1)
    raise ClusterError(f"containerd does not show {', '.join(references)} to Kubernetes.", "See the log of containerd.")


def _delete_each(layout: Layout, kind: str, *delete: str) -> None:
    """Delete all tasks or all containers. Some may be going by themselves; whether any is left is asked at the end."""
    found = output([*_ctr(layout), kind, "list", "-q"]).split()
    if found:
        succeeds([*_ctr(layout), kind, *delete, *found], timeout_seconds=60)


def _plugins_ok(layout: Layout) -> set[str]:
    said = output([*_ctr(layout), "plugins", "list"])
    return {words[1] for line in said.splitlines() if len(words := line.split()) >= 3 and words[-1] == "ok"}


def _ctr(layout: Layout) -> list[str]:
    return ["ctr", "--address", str(layout.containerd_socket), "--namespace", "k8s.io"]
