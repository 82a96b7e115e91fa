# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The compose file and what it mounts: no Docker is here, so each part is held to the others and to its own tool."""

import csv
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from compose.dashboards.__main__ import FOLDER
from compose.simulated import load
from verl_gpumonitor import __version__
from verl_gpumonitor.model.vocabulary import ROLES, STAGES

Json = dict[str, Any]

REPOSITORY = Path(__file__).parents[3]
COMPOSE = REPOSITORY / "compose"
TEXT = (COMPOSE / "compose.yaml").read_text()
VARIABLE = re.compile(r"\$\{(\w+)(:-([^}]*))?\}")
FILE: Json = yaml.safe_load(VARIABLE.sub(lambda found: found[3] or "", TEXT))
SERVICES: dict[str, Json] = FILE["services"]

# Of the compose specification; a key that is not here is a slip.
KEYS = {
    *("image", "build", "profiles", "entrypoint", "command", "environment", "volumes", "depends_on", "user", "init"),
    *("network_mode", "pid", "restart", "read_only", "cap_drop", "cap_add", "security_opt", "deploy"),
}


def mounts(service: Json) -> Iterator[tuple[str, str, bool]]:
    """Source, target and whether it is read-only."""
    for one in service.get("volumes", ()):
        if isinstance(one, dict):
            yield one["source"], one["target"], one.get("read_only", False)
        else:
            source, target, *mode = one.split(":")
            yield source, target, mode == ["ro"]


@pytest.fixture(params=SERVICES, ids=str)
def service(request: pytest.FixtureRequest) -> Json:
    found: Json = SERVICES[request.param]
    return found


def test_each_variable_has_a_default() -> None:
    assert all(found[2] for found in VARIABLE.finditer(TEXT))
    assert "$" not in VARIABLE.sub("", TEXT)


def test_keys_are_those_of_the_specification(service: Json) -> None:
    assert set(service) <= KEYS
    assert set(FILE) <= {"name", "services", "volumes", "x-hardened", "x-exporter-environment"}


def test_images_have_a_version(service: Json) -> None:
    name, _, tag = service["image"].rpartition(":")
    assert re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", name)
    assert re.match(r"v?\d+\.\d+\.\d+", tag)


def test_our_images_are_of_this_version() -> None:
    ours = {service["image"] for service in SERVICES.values() if service["image"].startswith("gpumonitor/")}
    assert {image.rpartition(":")[2] for image in ours} == {__version__}


def test_what_is_mounted_is_there(service: Json) -> None:
    for source, target, read_only in mounts(service):
        assert target.startswith("/")
        if source.startswith("."):
            assert (COMPOSE / source).exists(), source
            assert read_only, source
        elif not source.startswith("/"):
            assert source in FILE["volumes"]
        else:
            assert read_only, source


def test_nothing_is_privileged(service: Json) -> None:
    assert service["network_mode"] == "host"
    if "dcgm" not in service["image"]:
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "cap_add" not in service


def test_profiles() -> None:
    by_profile: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for profile in service.get("profiles", ["always"]):
            by_profile.setdefault(profile, set()).add(name)
    assert by_profile == {
        "always": {"prometheus", "grafana", "node-exporter"},
        "gpu": {"exporter", "dcgm-exporter"},
        "simulated": {"simulated-exporter", "simulated-job"},
    }


def test_what_a_service_waits_for_runs_with_it(service: Json) -> None:
    for other in service.get("depends_on", ()):
        assert SERVICES[other].get("profiles", []) in ([], service.get("profiles", []))


def listening(service: Json) -> set[str]:
    """Addresses that a service is told to listen on."""
    words = " ".join(service.get("command", ()))
    environment = service.get("environment", {})
    found = set(re.findall(r"127\.0\.0\.1:\d+", words))
    if "GPUMON_METRICS_PORT" in environment:
        found.add(f"127.0.0.1:{environment['GPUMON_METRICS_PORT']}")
    if "GF_SERVER_HTTP_PORT" in environment:
        found.add(f"{environment['GF_SERVER_HTTP_ADDR']}:{environment['GF_SERVER_HTTP_PORT']}")
    return found


def test_prometheus_scrapes_what_listens() -> None:
    config = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())
    targets = {
        target for job in config["scrape_configs"] for static in job["static_configs"] for target in static["targets"]
    }
    addresses = {address for service in SERVICES.values() for address in listening(service)}
    assert targets == addresses - {"127.0.0.1:3000"}


def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    rules = REPOSITORY / "charts" / "gpumonitor" / "files" / "rules.yaml"
    text = (COMPOSE / "prometheus.yaml").read_text()
    (mounted,) = [target for source, target, _ in mounts(SERVICES["prometheus"]) if source.endswith("rules.yaml")]
    assert mounted in text
    config = tmp_path / "prometheus.yaml"
    config.write_text(text.replace(mounted, str(rules)))
    promtool = shutil.which("promtool") or str(REPOSITORY / ".cache" / "tools" / "promtool")
    done = subprocess.run([promtool, "check", "config", config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout


def provisioned(kind: str) -> Json:
    (path,) = (COMPOSE / "grafana" / "provisioning" / kind).glob("*.yaml")
    found: Json = yaml.safe_load(path.read_text())
    assert found["apiVersion"] == 1
    return found


def test_grafana_gets_its_data_source() -> None:
    (source,) = provisioned("datasources")["datasources"]
    assert set(source) == {"name", "uid", "type", "access", "url", "isDefault", "editable", "jsonData"}
    assert (source["type"], source["access"], source["isDefault"]) == ("prometheus", "proxy", True)
    assert source["url"].removeprefix("http://") in listening(SERVICES["prometheus"])
    config = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


def test_grafana_gets_its_dashboards() -> None:
    (provider,) = provisioned("dashboards")["providers"]
    assert provider["type"] == "file"
    grafana = SERVICES["grafana"]
    (mounted,) = [target for source, target, _ in mounts(grafana) if (COMPOSE / source).resolve() == FOLDER]
    assert provider["options"]["path"] == mounted
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (FOLDER / Path(home).name).exists()
    assert home.startswith(mounted)


def test_dcgm_serves_what_the_dashboard_shows() -> None:
    rows = [line for line in (COMPOSE / "dcgm-counters.csv").read_text().splitlines() if not line.startswith("#")]
    counters = {name: kind for name, kind, _ in csv.reader(rows, skipinitialspace=True)}
    assert set(counters.values()) == {"gauge", "counter"}
    shown = set(re.findall(r"DCGM_FI_\w+", json.dumps(json.loads((FOLDER / "gpu.json").read_text()))))
    assert shown - {"DCGM_FI_PROF_"} <= set(counters)


def test_the_simulated_image_is_made_of_what_is_there() -> None:
    folder = COMPOSE / "simulated"
    text = (folder / "Dockerfile").read_text()
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, flags=re.MULTILINE):
        for source in sources.split():
            assert (REPOSITORY / source).exists(), source
            assert f"!{source}" in (folder / "Dockerfile.dockerignore").read_text()


def test_the_simulated_job_speaks_verls_words() -> None:
    assert sum(stage.share for stage in load.STEP) == pytest.approx(1.0)
    assert {stage.name for stage in load.STEP} <= set(STAGES)
    assert {stage.role for stage in load.STEP} <= set(ROLES)
    assert load.work_seconds(0, 8, load.STEP[0], 10.0) == pytest.approx(4.0)
    assert load.work_seconds(7, 8, load.STEP[0], 10.0) == pytest.approx(10.0)
    assert load.work_seconds(0, 8, load.STEP[1], 10.0) == 10.0
