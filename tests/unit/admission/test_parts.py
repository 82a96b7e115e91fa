# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The small parts below the decision: quantities, JSON Patch, versions, objects, the breaker's state, reviews."""

import base64
import json
import time
from fractions import Fraction
from typing import Any

import jsonpatch as independent_jsonpatch
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model import wiring
from verl_gpumonitor_operator import quantities
from verl_gpumonitor_operator.admission import facts, jsonpatch, objects, pods, review, sidecar
from verl_gpumonitor_operator.admission.jsonpatch import Operation, PatchError, pointer
from verl_gpumonitor_operator.admission.mutation import Patch, Skip, SkipReason, mutate
from verl_gpumonitor_operator.admission.preflight import BreakerState

from . import samples


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1", 1),
        ("1.5", Fraction(3, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("50m", Fraction(1, 20)),
        ("64Mi", 64 * 2**20),
        ("1Ei", 2**60),
        ("1k", 1000),
        ("1E", 10**18),
        ("1e3", 1000),
        ("1E3", 1000),
        ("25e-1", Fraction(5, 2)),
        ("-2", -2),
        ("100u", Fraction(1, 10**4)),
    ],
)
def test_quantities(text: str, value: Fraction | int) -> None:
    assert quantities.parse(text) == value * quantities.UNIT


def test_a_quantity_finer_than_a_billionth_is_rounded_up() -> None:
    assert quantities.parse("0.0000000001") == 1


@pytest.mark.parametrize("value", ["", "m", "1 Gi", "1ki", "0x10", "1e", "٣", "1e99999", "--1", None, [], {}, True])
def test_what_is_no_quantity(value: object) -> None:
    assert quantities.parse(value) is None


@pytest.mark.parametrize("text", ["1" * 200_000 + "x", "1" * 200_000, "1." * 100_000, "1" * 60 + "x"])
def test_a_hostile_quantity_takes_no_long_time(text: str) -> None:
    """A RayCluster's `rayStartParams` are free text, and the webhook reads them while a user's pod waits."""
    begin = time.process_time()
    assert quantities.parse(text) is None
    assert time.process_time() - begin < 1.0


@pytest.mark.parametrize(
    ("resource", "text", "shown"),
    [("cpu", "0.05", "50m"), ("limits.cpu", "2", "2"), ("memory", "67108864", "64Mi"), ("nvidia.com/gpu", "8", "8")],
)
def test_amounts_for_people(resource: str, text: str, shown: str) -> None:
    assert quantities.shown(resource, quantities.parse(text) or 0) == shown


@pytest.mark.parametrize(
    "operations",
    [
        [Operation(op="add", path="/a", value=1)],
        [Operation(op="add", path="/list/-", value=4)],
        [Operation(op="add", path="/list/0", value=4)],
        [Operation(op="replace", path="/list/1", value={"x": 1}), Operation(op="add", path="/list/1/y", value=2)],
        [Operation(op="remove", path="/list/0")],
        [Operation(op="remove", path="/deep/in"), Operation(op="add", path="/deep/in", value=None)],
        [Operation(op="add", path=pointer("deep", "a/b~c"), value="v")],
    ],
)
def test_patches_apply_as_elsewhere(operations: list[Operation]) -> None:
    document = {"list": [1, 2, 3], "deep": {"in": {"x": None}}}
    before = json.dumps(document)
    expected = independent_jsonpatch.apply_patch(document, json.loads(msgspec.json.encode(operations)))
    assert jsonpatch.applied(document, operations) == expected
    assert json.dumps(document) == before


@pytest.mark.parametrize(
    ("op", "path"),
    [
        ("add", ""),
        ("add", "/none/x"),
        ("add", "/list/4"),
        ("replace", "/list/-"),
        ("replace", "/list/3"),
        ("remove", "/none"),
        ("add", "/list/x"),
        ("add", "/text/x"),
        ("add", "/list/-/x"),
    ],
)
def test_patches_that_do_not_apply(op: Any, path: str) -> None:
    with pytest.raises(PatchError):
        jsonpatch.applied({"list": [1, 2, 3], "text": "t"}, [Operation(op=op, path=path, value=1)])


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("v1.36.0", (1, 36)),
        ("v1.29.3-eks-1a2b", (1, 29)),
        ("1.28", (1, 28)),
        ("v1", None),
        ("", None),
        ("latest", None),
    ],
)
def test_versions(text: str, version: tuple[int, int] | None) -> None:
    assert facts.version(text) == version


@pytest.mark.parametrize(
    ("group", "has_gpus"),
    [
        pytest.param({"template": {"spec": samples.ray_worker()["spec"]}}, True, id="by the template's resources"),
        pytest.param({"rayStartParams": {"num-gpus": "4"}}, True, id="by what Ray is told"),
        pytest.param({"resources": {"GPU": "4"}}, True, id="by the group's resources"),
        pytest.param({"rayStartParams": {"num-gpus": "0"}}, False, id="zero is none"),
        pytest.param({"template": {"spec": None}}, False, id="a group that says nothing"),
    ],
)
def test_gpu_groups_of_a_ray_cluster(group: dict[str, Any], has_gpus: bool) -> None:
    document = {"spec": {"headGroupSpec": {}, "workerGroupSpecs": [{}, group]}}
    cluster = msgspec.json.decode(json.dumps(document), type=objects.RayClusterObject)
    assert cluster.has_gpus((r".*/gpu$",)) is has_gpus


def test_gpus_are_summed_over_containers_that_run_together() -> None:
    pod = samples.ray_worker(gpus=4)
    pod = samples.with_container(pod, {"name": "other", "resources": {"limits": {"nvidia.com/gpu": "2"}}})
    pod = samples.with_container(pod, {"name": "prepare", "resources": {"limits": {"nvidia.com/gpu": "8"}}}, init=True)
    assert pods.gpus_requested(pod, (r".*/gpu$",)) == 6
    assert pods.gpus_requested(pod, (r"amd\.com/gpu",)) == 0


def test_a_daemon_set_takes_room_only_where_its_selector_matches() -> None:
    spec = {"nodeSelector": {"gpu": "yes"}, "containers": [{"resources": {"requests": {"cpu": "1"}}}]}
    document = {"spec": {"template": {"spec": spec}}, "status": {"desiredNumberScheduled": 3}}
    daemon = msgspec.json.decode(json.dumps(document), type=objects.DaemonSetObject)
    node = msgspec.json.decode('{"metadata":{"name":"n","labels":{"gpu":"yes"}}}', type=objects.NodeObject)
    other = msgspec.json.decode('{"metadata":{"name":"m"}}', type=objects.NodeObject)
    assert daemon.runs_on(node)
    assert not daemon.runs_on(other)
    assert daemon.requests() == samples.amounts(cpu="1")


@pytest.mark.parametrize(
    ("labels", "requested", "shared"),
    [
        pytest.param({}, 8, False, id="all that the node offers"),
        pytest.param({}, 4, True, id="half of it: two pods may have the same four"),
        pytest.param({}, 3, False, id="three do not divide eight, so no node of three looks like this"),
        pytest.param({"nvidia.com/gpu.count": "8"}, 4, False, id="it is known to have eight"),
        pytest.param({"nvidia.com/gpu.count": "4"}, 4, True, id="it is known to have four"),
        pytest.param({"nvidia.com/gpu.count": "2"}, 4, False, id="two are never taken for four"),
        pytest.param({"nvidia.com/gpu.replicas": "1"}, 4, False, id="each is offered once"),
        pytest.param({"nvidia.com/gpu.replicas": "2"}, 4, True, id="each is offered twice"),
        pytest.param({"nvidia.com/gpu.replicas": "8"}, 1, True, id="one is offered eight times"),
        pytest.param({"nvidia.com/gpu.replicas": "8"}, 8, False, id="eight replicas show one GPU"),
        pytest.param({"nvidia.com/gpu.replicas": "many"}, 4, True, id="a label that nobody understands"),
    ],
)
def test_which_nodes_may_show_a_pod_gpus_that_it_shares(labels: dict[str, str], requested: int, shared: bool) -> None:
    document = {"metadata": {"labels": labels}, "status": {"allocatable": {"cpu": "96", "nvidia.com/gpu": "8"}}}
    node = msgspec.json.decode(json.dumps(document), type=objects.NodeObject)
    layout = objects.gpu_layout(node, (r".*/gpu$",))
    assert layout is not None
    assert layout.may_show(requested) is shared


def test_a_node_without_gpus_has_no_layout() -> None:
    assert objects.gpu_layout(objects.NodeObject(), (r".*/gpu$",)) is None


@pytest.mark.parametrize(
    ("state", "paused"),
    [
        pytest.param(BreakerState(), False, id="closed"),
        pytest.param(BreakerState(open=True, image="a"), True, id="open for this image"),
        pytest.param(BreakerState(open=True, image="b"), False, id="open for another image"),
        pytest.param(BreakerState(open=True, image="a", until=101.0), True, id="still cooling down"),
        pytest.param(BreakerState(open=True, image="a", until=100.0), False, id="time for another try"),
    ],
)
def test_breaker(state: BreakerState, paused: bool) -> None:
    assert (state.pause("a", 100.0) is not None) is paused


@given(st.binary(max_size=200))
def test_a_uid_is_looked_for_in_any_bytes(body: bytes) -> None:
    assert isinstance(review.uid(body), str)


def test_a_uid_is_found_in_a_body_that_was_cut_off() -> None:
    assert (
        review.uid(b'{"kind":"AdmissionReview","request":{"uid":"705ab4f5-6393","object":{"spec":') == "705ab4f5-6393"
    )


def test_an_answer_carries_its_patch() -> None:
    answer = json.loads(review.allowed("u", [Operation(op="remove", path="/a")]))
    assert answer["response"]["patchType"] == "JSONPatch"
    assert json.loads(base64.b64decode(answer["response"]["patch"])) == [{"op": "remove", "path": "/a"}]
    assert json.loads(review.allowed("u"))["response"] == {"uid": "u", "allowed": True}


def test_secret_data_that_is_no_base64_is_left_out() -> None:
    secret = objects.SecretObject(data={"good": base64.b64encode(b"x").decode(), "bad": "***"})
    assert secret.decoded() == {"good": b"x"}


WORKER = samples.ray_worker()
MAIN = WORKER["spec"]["containers"][0]
MANY = {f"example.com/{number}": "1" for number in range(80_000)}


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"containers": [MAIN] * 10_000}, id="containers"),
        pytest.param({"initContainers": [{**MAIN, "restartPolicy": "Always"}] * 10_000}, id="init containers"),
        pytest.param({"containers": [{**MAIN, "resources": {"limits": MANY, "requests": MANY}}]}, id="resources"),
        pytest.param({"resources": {"limits": MANY}}, id="resources of the pod"),
        pytest.param({"overhead": MANY}, id="overhead"),
        pytest.param({"volumes": [{"name": "v"}] * 60_000}, id="volumes"),
        pytest.param({"containers": [{**MAIN, "ports": [{"containerPort": 1}] * 60_000}]}, id="ports"),
        pytest.param(
            {
                "initContainers": [
                    {"name": f"i{n}", "restartPolicy": "Always", "resources": {"limits": {f"a.b/{n}": "1", "cpu": "1"}}}
                    for n in range(4_000)
                ]
            },
            id="native sidecars with a resource of its own each",
        ),
    ],
)
def test_a_pod_with_more_parts_than_any_job_is_not_judged(spec: dict[str, Any]) -> None:
    """Some took a minute, in which no other pod of the cluster was answered."""
    pod = samples.with_spec(WORKER, **spec)
    begin = time.process_time()
    outcome = mutate(pod, namespace=samples.NAMESPACE, policy=samples.SETTINGS, cluster=samples.CLUSTER)
    assert time.process_time() - begin < 2.0
    assert isinstance(outcome, Skip)
    assert outcome.reason is SkipReason.POD_TOO_LARGE
    assert any("skip-reason" in operation.path for operation in outcome.operations)


def private_token(mode: int | None, *, source: str = "serviceAccountToken") -> dict[str, Any]:
    projected: dict[str, Any] = {"sources": [{source: {"path": "token"}}]}
    return {"name": "cloud-token", "projected": projected | ({} if mode is None else {"defaultMode": mode})}


@pytest.mark.parametrize(
    ("volume", "whole", "main", "user"),
    [
        pytest.param(private_token(0o400), {"runAsUser": 1000}, {}, 1000, id="for the pod's user alone"),
        pytest.param(private_token(0o440), {}, {"runAsUser": 1000}, 1000, id="for the user that each container names"),
        pytest.param(private_token(0o400, source="podCertificate"), {"runAsUser": 1000}, {}, 1000, id="a certificate"),
        pytest.param(private_token(0o444), {"runAsUser": 1000}, {}, 65532, id="for everybody"),
        pytest.param(private_token(None), {"runAsUser": 1000}, {}, 65532, id="for everybody, by default"),
        pytest.param(private_token(0o400, source="secret"), {"runAsUser": 1000}, {}, 65532, id="no token"),
        pytest.param(private_token(0o400), {"runAsUser": 1000, "fsGroup": 1}, {}, 65532, id="a group that may read it"),
        pytest.param(private_token(0o400), {"runAsUser": 0}, {}, 65532, id="root reads it anyway"),
        pytest.param(private_token(0o400), {}, {}, 65532, id="no user is named"),
        pytest.param(private_token(0o400), {"runAsUser": 1000}, {"runAsUser": 7}, 65532, id="users that differ"),
    ],
)
def test_a_token_that_only_the_jobs_user_may_read_stays_readable(
    volume: dict[str, Any], whole: dict[str, Any], main: dict[str, Any], user: int
) -> None:
    """The kubelet gives it to the user that all containers have in common, the sidecar among them."""
    container = {**MAIN, "securityContext": main}
    others = [{**each, "securityContext": main if whole == {} else {}} for each in WORKER["spec"]["initContainers"]]
    pod = samples.with_spec(
        WORKER, securityContext=whole, containers=[container], initContainers=others, volumes=[volume]
    )
    outcome = mutate(pod, namespace=samples.NAMESPACE, policy=samples.SETTINGS, cluster=samples.CLUSTER)
    assert isinstance(outcome, Patch)
    assert outcome.operations[0].value["securityContext"]["runAsUser"] == user


@pytest.mark.parametrize(
    ("length", "is_told"),
    [
        pytest.param(sidecar.MAX_CA_BYTES, True, id="as long as it may be"),
        pytest.param(sidecar.MAX_CA_BYTES + 1, False, id="with a longer one, a program might not be started"),
    ],
)
def test_a_bundle_of_any_length_lets_the_sidecar_start(length: int, is_told: bool) -> None:
    cluster = msgspec.structs.replace(samples.CLUSTER, ca_pem="x" * length)
    outcome = mutate(samples.ray_worker(), namespace=samples.NAMESPACE, policy=samples.SETTINGS, cluster=cluster)
    assert isinstance(outcome, Patch)
    variables = {one["name"]: one.get("value", "") for one in outcome.operations[0].value["env"]}
    assert bool(variables[wiring.ENV_REPORT_URL]) is is_told
    assert (wiring.ENV_REPORT_CA in variables) is is_told


def os_affinity(operator: str, *values: str, key: str = "kubernetes.io/os") -> dict[str, Any]:
    terms = [{"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


@pytest.mark.parametrize(
    ("spec", "is_windows"),
    [
        pytest.param({"os": {"name": "windows"}}, True, id="by its system"),
        pytest.param({"nodeSelector": {"kubernetes.io/os": "windows"}}, True, id="by node selector"),
        pytest.param({"nodeSelector": {"beta.kubernetes.io/os": "windows"}}, True, id="by the label of old"),
        pytest.param({"affinity": os_affinity("In", "windows")}, True, id="by affinity"),
        pytest.param({"affinity": os_affinity("NotIn", "windows")}, False, id="anything but that"),
        pytest.param({"affinity": os_affinity("In", "windows", key="team")}, False, id="another label"),
        pytest.param({"nodeSelector": {"kubernetes.io/os": "linux"}, "os": {"name": "linux"}}, False, id="Linux"),
        pytest.param({"affinity": {"nodeAffinity": ["x"]}, "os": "windows"}, False, id="nonsense"),
    ],
)
def test_a_pod_for_windows(spec: dict[str, Any], is_windows: bool) -> None:
    assert pods.is_windows({"spec": spec}) is is_windows
