# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Two releases in one cluster, as Helm finds them: an API server that knows what a lookup asks for, and no more."""

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.unit.chart.rendering import CHART, NAMESPACE, REGISTRY, RELEASE, Object, helm_program

GROUP = "admissionregistration.k8s.io"
VERSIONS = [{"groupVersion": f"{GROUP}/v1", "version": "v1"}]


def kind(name: str, plural: str, *, namespaced: bool) -> Object:
    return {"name": plural, "singularName": "", "kind": name, "namespaced": namespaced, "verbs": ["get", "list"]}


def configuration(release: str, namespace: str, *, part_of: str = "gpumonitor") -> Object:
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {
            "name": f"{release}-{part_of}",
            "labels": {"app.kubernetes.io/part-of": part_of},
            "annotations": {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": namespace},
        },
    }


BARE: Object = {"apiVersion": f"{GROUP}/v1", "kind": "MutatingWebhookConfiguration", "metadata": {"name": "bare"}}


class ApiServer:
    """Answers discovery, and one list."""

    def __init__(self) -> None:
        self.configurations: list[Object] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = server.answer(self.path.partition("?")[0])
                body = json.dumps(found or {"kind": "Status", "status": "Failure", "code": 404}).encode()
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def answer(self, path: str) -> Object | None:
        webhooks = kind("MutatingWebhookConfiguration", "mutatingwebhookconfigurations", namespaced=False)
        config_maps = kind("ConfigMap", "configmaps", namespaced=True)
        lists = {"kind": "APIResourceList", "apiVersion": "v1"}
        answers: dict[str, Object] = {
            "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/api/v1": {**lists, "groupVersion": "v1", "resources": [config_maps]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [{"name": GROUP, "versions": VERSIONS}]},
            f"/apis/{GROUP}/v1": {**lists, "groupVersion": f"{GROUP}/v1", "resources": [webhooks]},
            f"/apis/{GROUP}/v1/mutatingwebhookconfigurations": {
                "apiVersion": f"{GROUP}/v1",
                "kind": "MutatingWebhookConfigurationList",
                "items": self.configurations,
            },
        }
        return answers.get(path)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    serving = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    serving.join()


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """A copy of the chart that renders its settings alone, so that the server need not know all other kinds."""
    copied = tmp_path / "gpumonitor"
    shutil.copytree(CHART, copied)
    for one in (copied / "templates").iterdir():
        if one.name not in ("_names.tpl", "settings.yaml"):
            one.unlink()
    return copied


def installed(chart: Path, api: ApiServer, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    cluster = {"server": f"http://127.0.0.1:{api.http.server_port}"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "a", "cluster": cluster}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "users": [{"name": "a", "user": {}}],
        "current-context": "a",
    }
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(config))
    command = [helm_program(), "template", RELEASE, str(chart), "--namespace", NAMESPACE, "--dry-run=server"]
    command += ["--kubeconfig", str(file), "--set", f"image.registry={REGISTRY}", "--disable-openapi-validation"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_second_release_is_refused(chart: Path, api: ApiServer, tmp_path: Path) -> None:
    api.configurations = [configuration("first", "monitoring")]
    done = installed(chart, api, tmp_path)
    assert done.returncode != 0
    assert "release first in namespace monitoring is GPUMonitor, too" in done.stderr


@pytest.mark.parametrize(
    "found",
    [
        pytest.param([], id="nobody's"),
        pytest.param([configuration(RELEASE, NAMESPACE)], id="its own, as at each upgrade"),
        pytest.param([configuration("first", "istio-system", part_of="istio"), BARE], id="of others"),
    ],
)
def test_other_webhooks_are_no_hindrance(chart: Path, api: ApiServer, tmp_path: Path, found: list[Object]) -> None:
    api.configurations = found
    done = installed(chart, api, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "settings.json" in done.stdout
