# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Container images without a registry: built by buildah from the distribution's packages and from programs made here.

Each image has a key, a hash of all that goes into it. Its tarball is kept under that key in the cache, and containerd
knows it by its plain tag and by a second one that is the key, which tells whether the right one is loaded.
"""

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from devcluster import build, checks, containerd, versions
from devcluster.command import output, run, succeeds
from devcluster.errors import ClusterError
from devcluster.layout import IMAGE_PREFIX, Layout
from devcluster.lock import held
from devcluster.mounts import remove_tree, unmount_below

PACKAGES = ("ca-certificates", "python3")
"""In every image, beside what the distribution calls essential."""
_OFFLINE = "Is there a network, and does `apt-get update` work?"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one image is made: from `images/NAME/`, on other images, with files that `prepare` puts into the context.

    `inputs`: what decides the content beside the recipe's own folder. `bases`: build argument to the image it names.
    `kubernetes`: whether pods use it, or only other images.
    """

    name: str
    tag: str
    estimate_seconds: float
    prepare: Callable[[Layout, Path], None]
    inputs: Callable[[Layout], Sequence[bytes]]
    bases: Mapping[str, "Recipe"]
    kubernetes: bool = True

    @property
    def reference(self) -> str:
        """The image's name for pods."""
        return f"{IMAGE_PREFIX}/{self.name}:{self.tag}"


def suite() -> str:
    """Return the code name of this machine's distribution; images are made of the same one."""
    return checks.os_release(Path("/etc/os-release").read_text())["VERSION_CODENAME"]


def mirror(index_targets: str, codename: str) -> str:
    """Return the package archive that apt is configured with.

    `index_targets`: lines of site, code name, and component, as `apt-get indextargets` gives them. The code name keeps
    archives of others (and security updates, which are no whole distribution) apart. Raises ClusterError.
    """
    for line in index_targets.splitlines():
        words = line.split()
        if len(words) == 3 and words[1] == codename and words[2] == "main":
            return words[0]
    raise ClusterError(
        f"apt knows no archive of {codename}.", "Run `apt-get update`, and look into /etc/apt/sources.list*"
    )


def _compile_pause(layout: Layout, context: Path) -> None:
    source = layout.package / "images" / "pause" / "pause.c"
    run(["gcc", "-static", "-O2", "-o", context / "pause", source], log=layout.build_logs / "image-pause.log")


def _bootstrap(layout: Layout, context: Path) -> None:
    """Make the root file system, without the archives and lists that installing left in it."""
    log = layout.build_logs / "image-base.log"
    targets = output(
        ["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME) $(COMPONENT)", "Created-By: Packages"]
    )
    root = context / "rootfs"
    command: list[str | Path] = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite(), root]
    run([*command, mirror(targets, suite())], log=log, advice=_OFFLINE)
    for leftover in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(root / leftover, ignore_errors=True)
    (root / "var/lib/apt/lists/partial").mkdir(parents=True)
    (root / "var/cache/apt/archives/partial").mkdir(parents=True)
    run(["tar", "-C", root, "--one-file-system", "-cf", context / "rootfs.tar", "."], log=log)
    remove_tree(root)


def _copy_program(tool: build.Tool, *files: str) -> Callable[[Layout, Path], None]:
    def prepare(layout: Layout, context: Path) -> None:
        for program in tool.programs:
            shutil.copy(build.folder(layout, tool) / program, context / program)
        for file in files:
            shutil.copy(layout.package / "manifests" / file, context / file)

    return prepare


def _keyed_by(tool: build.Tool, *files: str) -> Callable[[Layout], Sequence[bytes]]:
    def inputs(layout: Layout) -> Sequence[bytes]:
        contents = [(layout.package / "manifests" / file).read_bytes() for file in files]
        return [build.key(tool, package=layout.package).encode(), *contents]

    return inputs


def _simgpu(layout: Layout) -> Path:
    return layout.repository / "tests" / "fakenvml" / "simgpu.py"


def _requirements(layout: Layout) -> Path:
    return layout.package / "requirements" / "ray.txt"


def _copy_requirements(layout: Layout, context: Path) -> None:
    shutil.copy(_requirements(layout), context / "ray.txt")


def _copy_simgpu(layout: Layout, context: Path) -> None:
    (context / "simgpu").mkdir()
    if _simgpu(layout).exists():
        shutil.copy(_simgpu(layout), context / "simgpu" / "simgpu.py")


def _nothing(_: Layout, __: Path) -> None:
    """The recipe's own folder is all it needs."""


def _no_inputs(_: Layout) -> Sequence[bytes]:
    return []


PAUSE = Recipe(name="pause", tag="1", estimate_seconds=3, prepare=_compile_pause, inputs=_no_inputs, bases={})
BASE = Recipe(
    name="base",
    tag="1",
    estimate_seconds=120,
    prepare=_bootstrap,
    inputs=lambda _: [suite().encode(), repr(PACKAGES).encode()],
    bases={},
)
BASE_BUILD = Recipe(
    name="base-build",
    tag="1",
    estimate_seconds=90,
    prepare=_nothing,
    inputs=_no_inputs,
    bases={"BASE_IMAGE": BASE},
    kubernetes=False,
)
COREDNS = Recipe(
    name="coredns",
    tag="1",
    estimate_seconds=10,
    prepare=_copy_program(build.COREDNS),
    inputs=_keyed_by(build.COREDNS),
    bases={"BASE_IMAGE": BASE},
)
KUBERAY = Recipe(
    name="kuberay-operator",
    tag=f"v{versions.KUBERAY}",
    estimate_seconds=10,
    prepare=_copy_program(build.KUBERAY),
    inputs=_keyed_by(build.KUBERAY),
    bases={"BASE_IMAGE": BASE},
)
TRAINING_OPERATOR = Recipe(
    name="training-operator",
    tag=f"v{versions.TRAINING_OPERATOR}",
    estimate_seconds=10,
    prepare=_copy_program(build.TRAINING_OPERATOR, "init-container.yaml"),
    inputs=_keyed_by(build.TRAINING_OPERATOR, "init-container.yaml"),
    bases={"BASE_IMAGE": BASE},
)
METRICS_SERVER = Recipe(
    name="metrics-server",
    tag=f"v{versions.METRICS_SERVER}",
    estimate_seconds=10,
    prepare=_copy_program(build.METRICS_SERVER),
    inputs=_keyed_by(build.METRICS_SERVER),
    bases={"BASE_IMAGE": BASE},
)
RAY_BASE = Recipe(
    name="ray-base",
    tag=versions.RAY,
    estimate_seconds=180,
    prepare=_copy_requirements,
    inputs=lambda layout: [_requirements(layout).read_bytes()],
    bases={"BASE_IMAGE": BASE, "BUILD_IMAGE": BASE_BUILD},
    kubernetes=False,
)
RAY = Recipe(
    name="ray",
    tag=versions.RAY,
    estimate_seconds=20,
    prepare=_copy_simgpu,
    inputs=lambda layout: [_simgpu(layout).read_bytes() if _simgpu(layout).exists() else b""],
    bases={"BASE_IMAGE": RAY_BASE},
)
ALL = (PAUSE, BASE, BASE_BUILD, COREDNS, KUBERAY, TRAINING_OPERATOR, METRICS_SERVER, RAY_BASE, RAY)


def key(layout: Layout, recipe: Recipe) -> str:
    """Return the hash of all that goes into an image."""
    digest = hashlib.sha256(recipe.name.encode())
    for path in sorted((layout.package / "images" / recipe.name).iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for data in recipe.inputs(layout):
        digest.update(hashlib.sha256(data).digest())
    for base in recipe.bases.values():
        digest.update(key(layout, base).encode())
    return digest.hexdigest()[:12]


def own_references(layout: Layout) -> set[str]:
    """Return the names under which containerd has the present versions of all images made here."""
    return {name for recipe in ALL for name in (recipe.reference, _keyed_reference(layout, recipe))}


def tidy_up_killed_builds(layout: Layout) -> None:
    """Unmount what killed image builds left mounted; nothing is done while one is running."""
    with contextlib.suppress(ClusterError), held(layout.build_lock, wait=False):
        unmount_below(layout.build_storage)
        unmount_below(layout.cache / "images")
        remove_tree(layout.build_run)


def tarball(layout: Layout, recipe: Recipe) -> Path:
    """Return where the image's archive is kept."""
    return layout.cache / "images" / recipe.name / f"{key(layout, recipe)}.tar"


def ensure_built(layout: Layout, recipe: Recipe) -> bool:
    """Make the image's archive unless it is there; return whether it was made."""
    own_lock = layout.cache / "locks" / f"image-{recipe.name}.lock"
    with held(layout.build_lock, wait=True, shared=True), held(own_lock, wait=True):
        archive = tarball(layout, recipe)
        if archive.exists():
            return False
        for base in recipe.bases.values():
            _ensure_in_storage(layout, base)
        _build(layout, recipe, archive)
        for old in archive.parent.glob("*.tar"):
            if old != archive:
                old.unlink()
        return True


def ensure_loaded(layout: Layout, recipe: Recipe) -> bool:
    """Make the image known to Kubernetes; return whether it was not yet."""
    ensure_built(layout, recipe)
    keyed = _keyed_reference(layout, recipe)
    if {keyed, recipe.reference} <= containerd.images(layout):
        return False
    containerd.import_tarball(layout, tarball(layout, recipe))
    containerd.tag(layout, recipe.reference, keyed)
    return True


def build_target(layout: Layout, *, target: str, reference: str) -> None:
    """Build one target of the project's own Dockerfile on our base, and make it known to Kubernetes."""
    with held(layout.build_lock, wait=True, shared=True):
        for recipe in (BASE, BASE_BUILD):
            _ensure_in_storage(layout, recipe)
        _build_dockerfile(layout, target=target, reference=reference)
        load_reference(layout, reference)


def _build_dockerfile(layout: Layout, *, target: str, reference: str) -> None:
    log = layout.build_logs / f"image-{target}.log"
    arguments = {
        "BASE_IMAGE": _keyed_reference(layout, BASE),
        "BUILD_IMAGE": _keyed_reference(layout, BASE_BUILD),
    }
    options = ["--layers", "--target", target, *_build_arguments(arguments), "--tag", reference]
    dockerfile = layout.repository / "Dockerfile"
    run([*_buildah(layout), "bud", *_BUD, *_host_mounts(), *options, "-f", dockerfile, layout.repository], log=log)


def load_reference(layout: Layout, reference: str) -> list[str]:
    """Make an image of our own build storage known to Kubernetes."""
    if not _in_storage(layout, reference):
        raise ClusterError(
            f"There is no image {reference} here.",
            "Give a tarball (docker save …), or build it: python -m devcluster build-image --target … --tag …",
        )
    with tempfile.TemporaryDirectory(dir=layout.cache) as folder:
        archive = Path(folder) / "image.tar"
        _push(layout, reference, archive, as_reference=reference, log=layout.build_logs / "load-image.log")
        return containerd.import_tarball(layout, archive)


_BUD = ("--isolation", "chroot", "--pull-never", "--format", "docker")


def _build(layout: Layout, recipe: Recipe, archive: Path) -> None:
    log = layout.build_logs / f"image-{recipe.name}.log"
    context = layout.cache / "images" / f".{recipe.name}.unfinished"
    remove_tree(context)
    context.mkdir(parents=True)
    for path in (layout.package / "images" / recipe.name).iterdir():
        shutil.copy(path, context / path.name)
    recipe.prepare(layout, context)
    arguments = {name: _keyed_reference(layout, base) for name, base in recipe.bases.items()}
    keyed = _keyed_reference(layout, recipe)
    options: list[str | Path] = [
        *_BUD,
        *_host_mounts(),
        *_build_arguments(arguments),
        "--tag",
        keyed,
        "-f",
        context / "Containerfile",
    ]
    run([*_buildah(layout), "bud", *options, context], log=log, advice=_OFFLINE)
    archive.parent.mkdir(parents=True, exist_ok=True)
    aside = archive.with_suffix(".unfinished")
    aside.unlink(missing_ok=True)
    _push(layout, keyed, aside, as_reference=recipe.reference, log=log)
    aside.rename(archive)
    remove_tree(context)


def _push(layout: Layout, reference: str, archive: Path, *, as_reference: str, log: Path) -> None:
    run([*_buildah(layout), "push", "--quiet", reference, f"docker-archive:{archive}:{as_reference}"], log=log)


def _ensure_in_storage(layout: Layout, recipe: Recipe) -> None:
    """Have buildah know an image to build on. Its storage may have been cleared while the archive was kept."""
    ensure_built(layout, recipe)
    keyed = _keyed_reference(layout, recipe)
    if not _in_storage(layout, keyed):
        log = layout.build_logs / f"image-{recipe.name}.log"
        run([*_buildah(layout), "pull", "--quiet", f"docker-archive:{tarball(layout, recipe)}"], log=log)
        run([*_buildah(layout), "tag", recipe.reference, keyed], log=log)


def _in_storage(layout: Layout, reference: str) -> bool:
    return succeeds([*_buildah(layout), "inspect", "--type", "image", reference])


def _keyed_reference(layout: Layout, recipe: Recipe) -> str:
    return f"{IMAGE_PREFIX}/{recipe.name}:key-{key(layout, recipe)}"


def _build_arguments(arguments: Mapping[str, str]) -> list[str]:
    return [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]


def _host_mounts() -> list[str]:
    """Package indexes may be reachable only with the machine's own CA certificates and pip settings."""
    paths = [path for path in ("/etc/ssl/certs", "/etc/pip.conf") if Path(path).exists()]
    return [part for path in paths for part in ("--volume", f"{path}:{path}:ro")]


def _buildah(layout: Layout) -> list[str | Path]:
    folders: list[str | Path] = ["--root", layout.build_storage, "--runroot", layout.build_run]
    return ["buildah", *folders, "--storage-driver", "overlay"]
