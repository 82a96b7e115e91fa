# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated GPUs: the NVML library and its state, the device plugin, NVIDIA's container runtime in three tempers.

`nvidia` takes the list of GPUs from the environment of any container. `nvidia-refused` takes it only from mounts (as
clusters do that do not trust an unprivileged container's environment): the job gets what the device plugin gave it, a
second container that only names GPUs gets none. `nvidia-no-all` is `nvidia` on a node whose CDI spec knows no `all`.
"""

import contextlib
import hashlib
import shutil
import sys
from pathlib import Path

import yaml

from devcluster.command import output, run, write_aside
from devcluster.layout import KUBELET_FIXED, Layout
from devcluster.process import Spec

COUNT = 8
LIBRARY = "libnvidia-ml.so.1"
_CONTAINER_LIBRARY = f"/usr/lib/x86_64-linux-gnu/{LIBRARY}"
_CONTAINER_STATE = "/run/fakenvml"
_KIND = "nvidia.com/gpu"


def uuid(index: int) -> str:
    """Return the UUID of a simulated GPU; library and device plugin compute the same."""
    return f"GPU-{index:08x}-5eed-4a00-8000-{index:012x}"


def cdi_spec(layout: Layout, *, with_all: bool = True) -> dict[str, object]:
    """Return the CDI specification. Each device sets a variable, by which the library shows it to that container."""
    devices = []
    for index in range(COUNT):
        edits = {"env": [f"FAKENVML_GPU_{index}=1"]}
        devices += [{"name": name, "containerEdits": edits} for name in (str(index), uuid(index))]
    if with_all:
        every = {"env": [f"FAKENVML_GPU_{index}=1" for index in range(COUNT)]}
        devices.append({"name": "all", "containerEdits": every})
    mounts = [
        _mount(layout.nvml / LIBRARY, _CONTAINER_LIBRARY, "ro"),
        _mount(layout.nvml / "state.d", _CONTAINER_STATE, "rw"),
    ]
    common = {"env": [f"FAKENVML_STATE={_CONTAINER_STATE}/state"], "mounts": mounts}
    return {"cdiVersion": "0.5.0", "kind": _KIND, "devices": devices, "containerEdits": common}


def runtime_configuration(*, specs: Path, envvar: bool, volume_mounts: bool, runc: str) -> str:
    """Return a config.toml of NVIDIA's container runtime. `specs`: the only folder of CDI specifications it reads."""
    return "\n".join(
        [
            f"accept-nvidia-visible-devices-envvar-when-unprivileged = {str(envvar).lower()}",
            f"accept-nvidia-visible-devices-as-volume-mounts = {str(volume_mounts).lower()}",
            "[nvidia-container-runtime]",
            'mode = "cdi"',
            f'runtimes = ["{runc}"]',
            'log-level = "warn"',
            "[nvidia-container-runtime.modes.cdi]",
            f'default-kind = "{_KIND}"',
            f'spec-dirs = ["{specs}"]',
            "",
        ]
    )


def configure(layout: Layout) -> None:
    """Write CDI specifications and, for each handler, a configuration and the program that uses it."""
    specs, specs_without_all = layout.config / "cdi", layout.config / "cdi-no-all"
    for folder, with_all in ((specs, True), (specs_without_all, False)):
        write_aside(folder / "nvidia.yaml", yaml.safe_dump(cdi_spec(layout, with_all=with_all), sort_keys=False))
    runc = shutil.which("runc") or "runc"
    for handler, folder, trusting in (
        ("nvidia", specs, True),
        ("nvidia-refused", specs, False),
        ("nvidia-no-all", specs_without_all, True),
    ):
        text = runtime_configuration(specs=folder, envvar=trusting, volume_mounts=not trusting, runc=runc)
        _write_handler(layout, handler, text)


def install_library(layout: Layout) -> str:
    """Build the simulated library and put it and its state where containers get them; return a note for the person.

    State and library go together: where either the library or the program that writes the state has changed, the state
    is made anew, beside the old one, which programs that have it mapped keep.
    """
    source = layout.repository / "tests" / "fakenvml"
    program = source / "simgpu.py"
    if not (source / "Makefile").exists():
        write_aside(layout.nvml / LIBRARY, _placeholder(layout).read_bytes(), mode=0o755)
        return "a placeholder for the library: tests/fakenvml is not there"
    run(["make", "-C", source], log=layout.build_logs / "fakenvml.log")
    library = (source / "build" / LIBRARY).read_bytes()
    write_aside(layout.nvml / LIBRARY, library, mode=0o755)
    stamp = hashlib.sha256(library + program.read_bytes()).hexdigest()
    stamped = layout.nvml / "state.stamp"
    state = layout.nvml / "state.d" / "state"
    if not state.exists() or not stamped.exists() or stamped.read_text() != stamp:
        _make_state(program, state)
        write_aside(stamped, stamp)
    return ""


def device_plugin(layout: Layout) -> Spec:
    """Return how the device plugin is started."""
    return Spec(name="device-plugin", argv=(layout.program("gpumon-device-plugin"), f"--gpus={COUNT}"))


def device_plugin_ready() -> bool:
    """Tell whether the device plugin listens for the kubelet."""
    with contextlib.suppress(OSError):
        return (KUBELET_FIXED / "device-plugins" / "gpumonitor-devcluster.sock").is_socket()
    return False


def _make_state(program: Path, state: Path) -> None:
    """Make a state of GPUs at rest. Its folder is open to all: containers of any user map it."""
    state.parent.mkdir(parents=True, exist_ok=True)
    state.parent.chmod(0o777)
    aside = state.with_name(".state.new")
    aside.unlink(missing_ok=True)
    output([sys.executable, program, "init", "--state", aside, "--gpus", str(COUNT)])
    aside.chmod(0o666)
    aside.rename(state)


def _mount(host: Path, container: str, mode: str) -> dict[str, object]:
    return {"hostPath": str(host), "containerPath": container, "options": [mode, "nosuid", "nodev", "bind"]}


def _write_handler(layout: Layout, handler: str, text: str) -> None:
    """The runtime finds its configuration by XDG_CONFIG_HOME, so nothing of ours need lie in /etc."""
    folder = layout.config / "runtimes" / handler
    write_aside(folder / "nvidia-container-runtime" / "config.toml", text)
    runtime = layout.program("nvidia-container-runtime")
    write_aside(folder / "runtime", f'#!/bin/sh\nXDG_CONFIG_HOME={folder} exec {runtime} "$@"\n', mode=0o755)


def _placeholder(layout: Layout) -> Path:
    """Return a library that loads and exports nothing."""
    library = layout.cache / "placeholder" / LIBRARY
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        empty = library.with_suffix(".c")
        empty.write_text("int gpumonitor_placeholder;\n")
        command: list[str | Path] = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", library, empty]
        run(command, log=layout.build_logs / "fakenvml.log")
    return library
