# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The chart as Helm renders it, without a cluster."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from devcluster import build
from devcluster.layout import default_layout

Object = dict[str, Any]

REPOSITORY = Path(__file__).resolve().parents[3]
CHART = REPOSITORY / "charts" / "gpumonitor"
RELEASE, NAMESPACE = "gpumonitor", "gpumonitor-system"
REGISTRY = "registry.example/gpumonitor"


def helm_program() -> str:
    """Find Helm: HELM, PATH, or the local cluster's own, which is built (two minutes) where nothing else is there."""
    found = os.environ.get("HELM") or shutil.which("helm")
    if found:
        return found
    layout = default_layout()
    build.build(layout, build.HELM)
    return layout.program("helm")


class Rendered:
    """Objects of one rendering."""

    def __init__(self, objects: Iterable[Object]) -> None:
        self.objects = list(objects)

    def of(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        return [one for one in self.objects if one["kind"] == kind]

    def get(self, kind: str, name: str) -> Object:
        """The one object of a kind and name. Raises LookupError."""
        found = [one for one in self.of(kind) if one["metadata"]["name"] == name]
        if len(found) != 1:
            raise LookupError(f"{len(found)} objects {kind} {name}")
        return found[0]

    def pod(self, component: str) -> Object:
        """Pod spec of a Deployment of ours."""
        spec: Object = self.get("Deployment", f"{RELEASE}-{component}")["spec"]["template"]["spec"]
        return spec

    @cached_property
    def settings(self) -> bytes:
        """The settings file, as both processes read it."""
        text: str = self.get("ConfigMap", f"{RELEASE}-settings")["data"]["settings.json"]
        return text.encode()


class Chart:
    """Renders the chart. Equal renderings are made once."""

    def __init__(self, helm: str) -> None:
        self._helm = helm
        self._rendered: dict[tuple[str, tuple[str, ...]], Rendered] = {}

    def render(self, values: Mapping[str, Any] | None = None, *arguments: str, release: str = RELEASE) -> Rendered:
        """Render with these values over a registry. Raises AssertionError with what Helm said."""
        merged = {"image": {"registry": REGISTRY}, **(values or {})}
        key = (json.dumps(merged, sort_keys=True), (release, *arguments))
        if key not in self._rendered:
            done = self._run(merged, arguments, release=release)
            assert done.returncode == 0, done.stderr
            documents = yaml.load_all(done.stdout, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            self._rendered[key] = Rendered(one for one in documents if one)
        return self._rendered[key]

    def refusal(self, values: Mapping[str, Any], *, release: str = RELEASE) -> str:
        """What Helm says to values, or to a release's name, that it must refuse."""
        done = self._run(values, (), release=release)
        assert done.returncode != 0, "Helm took the values"
        return done.stderr

    def _run(
        self, values: Mapping[str, Any], arguments: Iterable[str], *, release: str = RELEASE
    ) -> subprocess.CompletedProcess[str]:
        command = [self._helm, "template", release, str(CHART), "--namespace", NAMESPACE, "--values", "-", *arguments]
        return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)
