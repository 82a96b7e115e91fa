# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which pods get the sidecar, and that no pod is refused, or lies pending, that would have run without us."""

import base64
import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import jobs
from tests.cluster.conftest import wait_for_injection
from tests.cluster.kubectl import Kubectl, KubectlError, eventually
from tests.cluster.monitors import await_phase, await_running, sidecar
from tests.cluster.test_operator import creation_seconds, webhook_changed
from verl_gpumonitor.model import wiring

pytestmark = pytest.mark.usefixtures("release")

RESTRICTED_POD: dict[str, Any] = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
RESTRICTED_CONTAINER: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
GUARANTEED: dict[str, Any] = {"cpu": "100m", "memory": "64Mi"}


def skip_reason(pod: jobs.Object) -> str:
    """Why the webhook left a pod alone, or nothing."""
    return str(pod["metadata"].get("annotations", {}).get(wiring.ANNOTATION_SKIP_REASON, ""))


@pytest.mark.parametrize(
    ("labels", "gpus", "injected"),
    [
        pytest.param(jobs.ray_labels(), 1, True, id="a Ray worker with GPUs"),
        pytest.param(jobs.torch_labels(), 1, True, id="a PyTorchJob pod with GPUs"),
        pytest.param(jobs.torch_labels(), 0, False, id="a PyTorchJob pod without GPUs"),
        pytest.param(jobs.ray_labels(), 0, False, id="a Ray worker without GPUs"),
        pytest.param({"app": "web"}, 1, False, id="a GPU pod of no training job"),
        pytest.param(
            {"ray.io/originated-from-cr-name": "job", "ray.io/originated-from-crd": "RayJob"},
            0,
            False,
            id="a RayJob's submitter",
        ),
        pytest.param({**jobs.ray_labels(), wiring.INJECT: "disabled"}, 1, False, id="a pod opted out by label"),
    ],
)
def test_who_is_injected(kubectl: Kubectl, namespace: str, labels: dict[str, str], gpus: int, injected: bool) -> None:
    pod = kubectl.create(jobs.pod("p", labels=labels, containers=[jobs.container(gpus=gpus)]), namespace)
    assert (sidecar(pod) is not None) == injected


def test_a_namespace_can_opt_out(kubectl: Kubectl, namespace: str) -> None:
    kubectl.run("label", "namespace", namespace, f"{wiring.INJECT}=disabled")
    pod = kubectl.create(jobs.pod("p", labels=jobs.ray_labels()), namespace)
    assert sidecar(pod) is None


@pytest.mark.parametrize(
    ("resources", "qos"),
    [
        pytest.param({}, "BestEffort", id="BestEffort stays BestEffort"),
        pytest.param({"requests": {"cpu": "50m"}}, "Burstable", id="Burstable stays Burstable"),
        pytest.param({"requests": GUARANTEED, "limits": GUARANTEED}, "Guaranteed", id="Guaranteed stays Guaranteed"),
    ],
)
def test_the_qos_class_is_kept(kubectl: Kubectl, namespace: str, resources: dict[str, Any], qos: str) -> None:
    body = jobs.container(gpus=1, requests=resources.get("requests"), limits=resources.get("limits"))
    created = kubectl.create(jobs.pod("p", labels=jobs.ray_labels(), containers=[body]), namespace)
    assert sidecar(created)
    assert await_running(kubectl, "p", namespace)["status"]["qosClass"] == qos


def test_restricted_pod_security_admits_the_sidecar(kubectl: Kubectl, namespace: str) -> None:
    kubectl.run("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    body = {**jobs.container(), "securityContext": RESTRICTED_CONTAINER}
    pod = jobs.pod("p", labels=jobs.ray_labels(), containers=[body], securityContext=RESTRICTED_POD)
    assert sidecar(kubectl.create(pod, namespace))
    await_running(kubectl, "p", namespace)


LIMIT_RANGES: list[Any] = [
    pytest.param({"min": {"cpu": "90m", "memory": "60Mi"}}, id="a minimum above the sidecar"),
    pytest.param({"max": {"cpu": "100m", "memory": "70Mi"}}, id="a maximum below the sidecar's limit"),
    pytest.param(
        {"default": {"cpu": "100m", "memory": "64Mi"}, "defaultRequest": {"cpu": "100m", "memory": "64Mi"}},
        id="defaults for what says nothing",
    ),
    pytest.param(
        {"maxLimitRequestRatio": {"cpu": "2"}, "default": {"cpu": "100m"}, "defaultRequest": {"cpu": "60m"}},
        id="a ratio of limit to request",
    ),
]


@pytest.mark.parametrize("limits", LIMIT_RANGES)
@pytest.mark.parametrize("guaranteed", [True, False], ids=["Guaranteed", "BestEffort"])
def test_a_limit_range_refuses_no_pod(
    kubectl: Kubectl, namespace: str, limits: dict[str, Any], guaranteed: bool
) -> None:
    """What is admitted without us is admitted with us, in the same QoS class."""
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "limits"},
            "spec": {"limits": [{"type": "Container", **limits}]},
        },
        namespace,
    )
    size = GUARANTEED if guaranteed else None
    body = jobs.container(gpus=1, requests=size, limits=size)
    plain = jobs.pod("plain", labels={**jobs.ray_labels(), wiring.INJECT: "disabled"}, containers=[body])
    expected = kubectl.create(plain, namespace)
    watched = kubectl.create(jobs.pod("watched", labels=jobs.ray_labels(), containers=[body]), namespace)
    assert watched["status"]["qosClass"] == expected["status"]["qosClass"]
    assert sidecar(watched) or skip_reason(watched)


@pytest.mark.parametrize(
    ("hard", "injected"),
    [
        pytest.param({"limits.cpu": "100", "limits.memory": "100Gi"}, True, id="room for many sidecars"),
        pytest.param({"limits.cpu": "200m", "limits.memory": "256Mi"}, False, id="room for the job alone"),
    ],
)
def test_a_quota_on_limits_refuses_no_pod(
    kubectl: Kubectl, namespace: str, hard: dict[str, str], injected: bool
) -> None:
    kubectl.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "quota"}, "spec": {"hard": hard}}, namespace
    )
    eventually(
        lambda: (kubectl.get("resourcequota", "quota", namespace) or {}).get("status", {}).get("hard"),
        within=30,
        what="the quota counted",
    )
    body = jobs.container(gpus=1, requests=GUARANTEED, limits=GUARANTEED)
    created = kubectl.create(jobs.pod("p", labels=jobs.ray_labels(), containers=[body]), namespace)
    assert (sidecar(created) is not None) == injected
    assert injected or skip_reason(created)


def test_a_pod_that_fills_the_node_still_fits(kubectl: Kubectl, namespace: str) -> None:
    """A Guaranteed pod of the node's whole allocatable CPU would fit no node with a sidecar: it gets none."""
    whole = kubectl.list("node")[0]["status"]["allocatable"]["cpu"]
    size = {"cpu": whole, "memory": "64Mi"}
    body = jobs.container(gpus=1, requests=size, limits=size)
    created = kubectl.create(jobs.pod("p", labels=jobs.ray_labels(), containers=[body]), namespace)
    assert sidecar(created) is None
    assert skip_reason(created)


def test_two_pods_on_the_host_network(kubectl: Kubectl, namespace: str) -> None:
    for name in ("a", "b"):
        created = kubectl.create(jobs.pod(name, labels=jobs.ray_labels(), hostNetwork=True), namespace)
        ours = sidecar(created)
        assert ours is not None
        assert not ours.get("ports")
    for name in ("a", "b"):
        await_running(kubectl, name, namespace)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            {"initContainers": [{"name": "gpumonitor", "image": jobs.BASE_IMAGE, "command": ["true"]}]}, id="init"
        ),
        pytest.param({"containers": [jobs.container("gpumonitor")]}, id="container"),
        pytest.param({"volumes": [{"name": wiring.TOKEN_VOLUME, "emptyDir": {}}]}, id="volume"),
    ],
)
def test_a_pod_that_has_our_name_already_is_admitted(kubectl: Kubectl, namespace: str, change: dict[str, Any]) -> None:
    pod = jobs.pod(f"p-{uuid.uuid4().hex[:4]}", labels=jobs.ray_labels(), **change)
    created = kubectl.create(pod, namespace)
    names = [one["name"] for one in created["spec"].get("initContainers", [])]
    assert names.count(wiring.CONTAINER_NAME) <= 1
    assert wiring.ANNOTATION_INJECTED not in created["metadata"].get("annotations", {})


REFUSES_US = "has(object.spec.initContainers) && object.spec.initContainers.exists(one, one.name == 'gpumonitor')"


@pytest.fixture
def foreign_policy(kubectl: Kubectl, namespace: str) -> Iterator[None]:
    """An admission policy of the cluster's own that refuses each pod with our container."""
    name = f"no-sidecars-{namespace}"
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]
    where = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    api = "admissionregistration.k8s.io/v1"
    policy = {
        "apiVersion": api,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": rules, **where},
            "validations": [{"expression": f"!({REFUSES_US})", "message": "no sidecars here"}],
        },
    }
    binding = {
        "apiVersion": api,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    kubectl.apply([policy, binding])
    probe = jobs.pod("probe", labels=jobs.torch_labels(), containers=[jobs.container(gpus=1)])

    def refuses() -> bool:
        try:
            kubectl.run("create", "-n", namespace, "--dry-run=server", "-f", "-", stdin=json.dumps(probe))
        except KubectlError as error:
            return "no sidecars here" in str(error)
        return False

    eventually(refuses, within=60, what="the policy holds")
    yield
    for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
        kubectl.delete(kind, name)


@pytest.mark.usefixtures("foreign_policy")
def test_a_job_starts_where_another_policy_refuses_the_sidecar(kubectl: Kubectl, namespace: str) -> None:
    command = jobs.hold(20, utilization=[0.6], used_gib=[30.0])
    began = time.monotonic()
    kubectl.apply(jobs.pytorchjob("ruled", command=command, gpus=1), namespace)
    pod = eventually(lambda: kubectl.get("pod", "ruled-master-0", namespace), within=60, what="the pod is there")
    assert time.monotonic() - began < 30
    assert sidecar(pod) is None
    assert skip_reason(pod).startswith("Refused: ")
    status = await_phase(kubectl, "ruled", namespace, "Succeeded", within=120)
    assert [one["reason"] for one in status["unmonitoredPods"]] == ["Refused"]


def test_the_sidecar_runs_and_a_pod_with_it_ends_as_soon(kubectl: Kubectl, namespace: str) -> None:
    """The end of a pod, from its deletion to its disappearance, takes at most 2 s longer with the sidecar."""
    took = {}
    for name, labels in (("plain", {wiring.INJECT: "disabled"}), ("watched", {})):
        kubectl.create(jobs.pod(name, labels={**jobs.ray_labels(), **labels}), namespace)
        await_running(kubectl, name, namespace)
        begin = time.monotonic()
        kubectl.delete("pod", name, namespace)
        took[name] = time.monotonic() - begin
    assert took["watched"] <= took["plain"] + 2.0, took


WAIT_SECONDS = 3.0
"""The webhook's time limit: no fault of it may hold a pod's creation up for longer."""
KUBECTL_SECONDS = 3.0
"""What kubectl, and a busy machine, take beside that."""

Answer = Callable[[ssl.SSLSocket], None]
"""What a server does with a connection on which a review arrives."""


def read_rest(connection: ssl.SSLSocket) -> None:
    """Read what is left of the request, else the kernel would reset the connection and lose the answer."""
    connection.settimeout(0.5)
    with suppress(OSError):
        while connection.recv(65_536):
            pass


def reset(connection: ssl.SSLSocket) -> None:
    """End as a process does that is killed: whatever was on its way is gone."""
    connection.recv(1024)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def half_an_answer(connection: ssl.SSLSocket) -> None:
    """Die while the answer is being written."""
    connection.recv(1024)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    connection.sendall(head + b'{"kind": "AdmissionRev')
    read_rest(connection)


def whole(status: bytes, body: bytes) -> Answer:
    """Answer with something else than a review."""

    def answer(connection: ssl.SSLSocket) -> None:
        connection.recv(1024)
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % (status, len(body))
        connection.sendall(head + b"Connection: close\r\n\r\n" + body)
        read_rest(connection)

    return answer


def trickle(connection: ssl.SSLSocket) -> None:
    """Answer without end, a byte at a time."""
    connection.recv(1024)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(200):
        connection.sendall(b"1\r\n \r\n")
        time.sleep(0.1)


def nothing(_: ssl.SSLSocket) -> None:
    """End right after the handshake."""


FAULTS: dict[str, Answer | None] = {
    "closes each connection": None,
    "closes after the handshake": nothing,
    "is killed in the middle of a request": reset,
    "dies in the middle of its answer": half_an_answer,
    "answers 500": whole(b"500 Internal Server Error", b"{}"),
    "answers with something else": whole(b"200 OK", b"<html></html>"),
    "answers with an empty object": whole(b"200 OK", b"{}"),
    "answers without end": trickle,
}
"""None: before TLS is spoken."""


class DyingServer:
    """A webhook that is trusted, and fails each review in the way that it is told."""

    def __init__(self, folder: Path) -> None:
        self.answer: Answer | None = None
        self.asked = 0
        """Connections so far."""
        certificate, key = folder / "cert.pem", folder / "key.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=dying"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, capture_output=True, check=True)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._bundle = base64.b64encode(certificate.read_bytes()).decode()

    @contextmanager
    def serving(self) -> Iterator[dict[str, Any]]:
        """Serve for a while; yields the `clientConfig` that points here."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            threading.Thread(target=self._accept, args=(server,), daemon=True).start()
            url = f"https://127.0.0.1:{server.getsockname()[1]}/mutate"
            yield {"service": None, "url": url, "caBundle": self._bundle}

    def _accept(self, server: socket.socket) -> None:
        # Until the server is closed, which ends the test.
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                self.asked += 1
                threading.Thread(target=self._serve, args=(connection, self.answer), daemon=True).start()

    def _serve(self, raw: socket.socket, answer: Answer | None) -> None:
        with raw, suppress(OSError):
            if answer is not None:
                raw.settimeout(30.0)
                with self._context.wrap_socket(raw, server_side=True) as connection:
                    answer(connection)


@pytest.mark.disturbing
def test_pods_start_while_the_webhook_dies_between_request_and_answer(
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    server, harmed = DyingServer(tmp_path), {}
    with server.serving() as client, webhook_changed(kubectl, client):
        for number, (fault, answer) in enumerate(FAULTS.items()):
            server.answer, before = answer, server.asked
            pod, seconds = creation_seconds(kubectl, namespace, f"p-{number}")
            assert server.asked > before, f"it {fault}: the API server did not ask"
            if sidecar(pod) or skip_reason(pod) or seconds > WAIT_SECONDS + KUBECTL_SECONDS:
                harmed[fault] = (seconds, skip_reason(pod))
    assert not harmed


def webhook_processes() -> list[int]:
    """Processes of the webhook's pods, which on the local cluster are processes of this machine."""
    program, found = b"/opt/gpumonitor/bin/gpumon-webhook", []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if program in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def send(processes: list[int], number: signal.Signals) -> None:
    """Send a signal to each that is still there."""
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.disturbing
def test_a_pod_starts_whose_request_was_with_the_webhook_when_it_was_killed(kubectl: Kubectl, namespace: str) -> None:
    """Not a stand-in but our own processes, stopped so that the request is with them, and then killed."""
    wait_for_injection(kubectl)
    processes = webhook_processes()
    assert processes, "the local cluster's pods are processes of this machine"
    send(processes, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            creating = pool.submit(creation_seconds, kubectl, namespace, "p")
            time.sleep(1.0)
            send(processes, signal.SIGKILL)
            pod, seconds = creating.result(timeout=60)
    finally:
        send(processes, signal.SIGKILL)
    assert not sidecar(pod)
    assert seconds < WAIT_SECONDS + KUBECTL_SECONDS
    await_running(kubectl, "p", namespace)

    def injected() -> bool:
        text = json.dumps(jobs.pod("q", labels=jobs.ray_labels()))
        tried = kubectl.run("create", "-f", "-", "-o", "json", "--dry-run=server", "-n", namespace, stdin=text)
        return sidecar(json.loads(tried)) is not None

    # The kubelet starts them again, and until then pods go on without: that is what this test is about.
    eventually(injected, within=120, every=2.0, what="a pod with the sidecar once the webhook is back")
    wait_for_injection(kubectl)
