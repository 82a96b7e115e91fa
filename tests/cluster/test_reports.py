# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The report endpoint against tokens of the real API server: what is refused, with which code, and that it counts."""

import base64
import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from devcluster import product
from tests.cluster import jobs, monitors
from tests.cluster.kubectl import Kubectl, eventually
from verl_gpumonitor.model import report, wiring


@dataclass(frozen=True)
class Endpoint:
    """The controller's report server, and a pod that may report."""

    kubectl: Kubectl
    namespace: str
    address: str
    context: ssl.SSLContext

    tokens: dict[tuple[str, str], str] = field(default_factory=dict)
    """Kept, as a kubelet keeps them: new tokens all the time are a flood, and are refused as one."""

    def token(self, pod: str, *, audience: str = wiring.TOKEN_AUDIENCE) -> str:
        """Ask for a token bound to a pod, as the kubelet projects it."""
        key = (pod, audience)
        if key not in self.tokens:
            self.tokens[key] = self.kubectl.run(
                *("create", "token", "default", "-n", self.namespace, "--audience", audience),
                *("--bound-object-kind", "Pod", "--bound-object-name", pod),
            ).strip()
        return self.tokens[key]

    def post(self, body: bytes, token: str | None) -> tuple[int, bytes]:
        """Send a body; returns code and answer."""
        connection = http.client.HTTPSConnection(self.address, 8443, context=self.context, timeout=15)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        try:
            connection.request("POST", "/v1/report", body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def endpoint(kubectl: Kubectl, release: str) -> Iterator[Endpoint]:
    """Two live pods, each of a job of its own, whose real sidecars report as well, under start ids of their own."""
    namespace = "test-reports"
    kubectl.delete("namespace", namespace)
    kubectl.run("create", "namespace", namespace)
    for name in ("one", "two"):
        command = jobs.hold(900, utilization=[0.5], used_gib=[10.0])
        kubectl.apply(jobs.pytorchjob(name, command=command, gpus=1), namespace)
    for name in ("one", "two"):
        monitors.await_phase(kubectl, name, namespace, "Running")
    secret = kubectl.get("secret", f"{product.RELEASE}-certificates", release)
    service = kubectl.get("service", f"{product.RELEASE}-controller", release)
    assert secret
    assert set(secret["data"]) == {"ca.crt", "tls.crt", "tls.key"}, "no key of the CA where the webhook reads"
    assert service
    context = ssl.create_default_context(cadata=base64.b64decode(secret["data"]["ca.crt"]).decode())
    context.check_hostname = False  # the address is an IP; the name is checked by the sidecar's own tests
    yield Endpoint(kubectl, namespace, service["spec"]["clusterIP"], context)
    kubectl.delete("namespace", namespace, wait=False)


def body(endpoint: Endpoint, pod: str, *, sequence: int = 1, start_id: str = "test-start-0001") -> bytes:
    """Make a valid report of a pod."""
    found = endpoint.kubectl.get("pod", pod, endpoint.namespace)
    assert found
    whose = report.PodRef(namespace=endpoint.namespace, name=pod, uid=found["metadata"]["uid"])
    now = time.time()
    made = report.Report(
        format=report.REPORT_FORMAT, pod=whose, start_id=start_id, sequence=sequence, sent_at=now, started_at=now
    )
    return report.encode(made)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(lambda valid: valid[:-20], 400, id="broken JSON"),
        pytest.param(lambda _: b'{"format":"gpumonitor-report/1"}', 400, id="fields missing"),
        pytest.param(lambda valid: valid.replace(b'"sequence":1', b'"sequence":NaN'), 400, id="NaN for a number"),
        pytest.param(lambda valid: valid.replace(b'"sequence":1', b'"sequence":-1'), 400, id="out of bounds"),
        pytest.param(lambda valid: valid.replace(b"report/1", b"report/9"), 400, id="another format"),
        pytest.param(lambda valid: valid + b" " * 10_000_000, 413, id="10 MB"),
        pytest.param(lambda _: b"\xff\xfe\x00", 400, id="no text at all"),
    ],
)
def test_a_bad_body_is_refused(endpoint: Endpoint, change: Callable[[bytes], bytes], code: int) -> None:
    got, answer = endpoint.post(change(body(endpoint, "one-master-0")), endpoint.token("one-master-0"))
    assert got == code, answer
    assert json.loads(answer)["error"]


def test_tokens_of_others_are_refused(endpoint: Endpoint) -> None:
    valid = body(endpoint, "one-master-0")
    assert endpoint.post(valid, None)[0] == 401
    assert endpoint.post(valid, "no.token.at-all")[0] == 401
    assert endpoint.post(valid, endpoint.token("one-master-0", audience="https://kubernetes.default.svc"))[0] == 401
    assert endpoint.post(valid, endpoint.token("two-master-0"))[0] == 403


def test_a_dead_pods_token_is_refused(endpoint: Endpoint) -> None:
    endpoint.kubectl.create(jobs.pod("gone", labels=jobs.ray_labels()), endpoint.namespace)
    valid, token = body(endpoint, "gone"), endpoint.token("gone")
    endpoint.kubectl.delete("pod", "gone", endpoint.namespace)
    eventually(lambda: endpoint.post(valid, token)[0] in (401, 403), within=20, what="refusal of a dead pod")


def test_a_replay_is_refused_and_a_new_start_is_welcome(endpoint: Endpoint) -> None:
    token = endpoint.token("one-master-0")
    first = body(endpoint, "one-master-0", sequence=5, start_id="replayed-start-1")
    assert endpoint.post(first, token)[0] == 200
    code, answer = endpoint.post(first, token)
    assert (code, json.loads(answer)["accepted"]) == (409, 5)
    assert endpoint.post(body(endpoint, "one-master-0", sequence=1, start_id="another-start-22"), token)[0] == 200


def test_refusals_are_counted(endpoint: Endpoint) -> None:
    def refused() -> float:
        series = monitors.controller_metrics(endpoint.kubectl)
        return monitors.value(series, "gpumonitor_ingest_reports_total", code="401") or 0.0

    before = refused()
    assert endpoint.post(b"{}", "no.token.at-all")[0] == 401
    assert refused() > before
