# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The environment in, settings or every problem out."""

import pytest

from verl_gpumonitor.model import wiring
from verl_gpumonitor_sidecar.settings import ENV_MARKS_PORT, Address, SettingsError, load, metrics_port, parse_address

PEM = "-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----\n"
POD = {
    wiring.ENV_POD_NAMESPACE: "team",
    wiring.ENV_POD_NAME: "worker-0",
    wiring.ENV_POD_UID: "3f2a",
    wiring.ENV_GPUS_REQUESTED: "4",
}
REPORT = {
    wiring.ENV_REPORT_URL: "https://10.0.0.7:8443/v1/report",
    wiring.ENV_REPORT_SERVER_NAME: "gpumonitor-controller.gpumonitor-system.svc",
    wiring.ENV_REPORT_CA: PEM,
}


def test_pod_fields_alone_give_defaults_and_no_reports() -> None:
    settings = load(POD)
    assert (settings.namespace, settings.pod_name, settings.pod_uid) == ("team", "worker-0", "3f2a")
    assert settings.gpus_requested == 4
    assert settings.report_interval_seconds == 15.0
    assert settings.sample_interval_seconds == 1.0
    assert settings.metrics_port == 9410
    assert settings.report is None
    assert not settings.gpus_shared
    assert settings.ray_agent_url is None
    assert settings.ray_head_url is None


def test_everything_set() -> None:
    settings = load(
        POD
        | REPORT
        | {
            wiring.ENV_POD_IP: "10.1.1.1",
            wiring.ENV_NODE_NAME: "node-a",
            wiring.ENV_RAY_NODE_TYPE: "head",
            wiring.ENV_SHARED_PROCESSES: "1",
            wiring.ENV_GPUS_SHARED: "1",
            wiring.ENV_SHM_PATH: "/shm",
            wiring.ENV_REPORT_INTERVAL: "5",
            wiring.ENV_SAMPLE_INTERVAL: "0.5",
            wiring.ENV_METRICS_PORT: "0",
        }
    )
    assert settings.shared_processes
    assert settings.gpus_shared
    assert settings.metrics_port == 0
    assert settings.report is not None
    assert settings.report.address == Address(host="10.0.0.7", port=8443, path="/v1/report")
    assert settings.ray_agent_url == "http://127.0.0.1:8080/metrics"
    assert settings.ray_head_url == "http://127.0.0.1:8265"


def test_an_empty_ray_url_means_do_not_ask() -> None:
    environ = POD | {wiring.ENV_RAY_NODE_TYPE: "head", wiring.ENV_RAY_METRICS_URL: "", wiring.ENV_RAY_DASHBOARD_URL: ""}
    assert load(environ).ray_agent_url is None
    assert load(environ).ray_head_url is None


@pytest.mark.parametrize(
    ("environ", "port"),
    [
        pytest.param({}, 9411, id="the one that programs know"),
        pytest.param({ENV_MARKS_PORT: "19411"}, 19411, id="another"),
        pytest.param({ENV_MARKS_PORT: "0"}, None, id="none"),
        pytest.param({wiring.ENV_METRICS_PORT: "0"}, None, id="localhost is the node's"),
    ],
)
def test_where_marks_are_received(environ: dict[str, str], port: int | None) -> None:
    assert load(POD | environ).own_marks_port == port


def test_a_worker_asks_no_dashboard() -> None:
    assert load(POD | {wiring.ENV_RAY_NODE_TYPE: "worker"}).ray_head_url is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param({wiring.ENV_POD_UID: ""}, f"{wiring.ENV_POD_UID} is not set", id="a required variable is empty"),
        pytest.param({wiring.ENV_GPUS_REQUESTED: "-1"}, wiring.ENV_GPUS_REQUESTED, id="a negative number of GPUs"),
        pytest.param({wiring.ENV_GPUS_REQUESTED: "four"}, wiring.ENV_GPUS_REQUESTED, id="no number"),
        pytest.param({wiring.ENV_REPORT_INTERVAL: "0"}, wiring.ENV_REPORT_INTERVAL, id="an interval of zero"),
        pytest.param({wiring.ENV_REPORT_INTERVAL: "nan"}, wiring.ENV_REPORT_INTERVAL, id="an interval that is none"),
        pytest.param({wiring.ENV_SAMPLE_INTERVAL: "0.01"}, wiring.ENV_SAMPLE_INTERVAL, id="a sample every 10 ms"),
        pytest.param({wiring.ENV_METRICS_PORT: "65536"}, wiring.ENV_METRICS_PORT, id="no such port"),
        pytest.param({wiring.ENV_RAY_NODE_TYPE: "tail"}, wiring.ENV_RAY_NODE_TYPE, id="a node type that Ray has not"),
        pytest.param({wiring.ENV_REPORT_SERVER_NAME: ""}, wiring.ENV_REPORT_SERVER_NAME, id="no server name"),
        pytest.param({wiring.ENV_REPORT_CA: "none"}, wiring.ENV_REPORT_CA, id="no PEM"),
        pytest.param({wiring.ENV_REPORT_URL: "http://10.0.0.7/"}, wiring.ENV_REPORT_URL, id="no TLS"),
        pytest.param({wiring.ENV_REPORT_URL: "https://10.0.0.7:http/"}, wiring.ENV_REPORT_URL, id="no port"),
    ],
)
def test_a_problem_names_its_variable(change: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load(POD | REPORT | change)
    assert len(raised.value.problems) == 1
    assert text in raised.value.problems[0]


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(SettingsError) as raised:
        load({wiring.ENV_METRICS_PORT: "x"})
    assert len(raised.value.problems) == 5


@pytest.mark.parametrize(
    ("url", "address"),
    [
        pytest.param("https://[fd00::1]:8443/v1/report", ("fd00::1", 8443, "/v1/report"), id="IPv6 with port"),
        pytest.param("https://[fd00::1]/r", ("fd00::1", 443, "/r"), id="IPv6 without port"),
        pytest.param("https://controller", ("controller", 443, "/"), id="a name alone"),
    ],
)
def test_addresses(url: str, address: tuple[str, int, str]) -> None:
    parsed = parse_address(url)
    assert (parsed.host, parsed.port, parsed.path) == address


@pytest.mark.parametrize(
    ("environ", "port"),
    [
        pytest.param({}, 9410, id="the default"),
        pytest.param({wiring.ENV_METRICS_PORT: "9555"}, 9555, id="the one that is set"),
        pytest.param({wiring.ENV_METRICS_PORT: "many"}, 9410, id="the default when it is broken"),
    ],
)
def test_the_port_is_known_even_with_broken_settings(environ: dict[str, str], port: int) -> None:
    assert metrics_port(environ) == port
