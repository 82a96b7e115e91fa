# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Certificates reach the Secret, the API server and our own server, in one round or after a failed one."""

import base64
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
import pytest

from verl_gpumonitor_operator import certs
from verl_gpumonitor_operator.controller.certificates import CaPublisher, CertificateKeeper
from verl_gpumonitor_operator.controller.documents import Deployment, SecretDocument
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import ConflictError, ForbiddenError, KubeError, NotFoundError

SECRETS = "/api/v1/namespaces/gpumonitor-system/secrets"
SECRET = f"{SECRETS}/gpumonitor-certificates"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/gpumonitor"
DEPLOYMENT = "/apis/apps/v1/namespaces/gpumonitor-system/deployments/gpumonitor-controller"


class Server:
    """Holds a Secret, a webhook configuration and a Deployment."""

    def __init__(self, *, webhooks: bool = True) -> None:
        self.objects: dict[str, dict[str, Any]] = {DEPLOYMENT: {"metadata": {"uid": "uid-deployment"}}}
        self.patches = 0
        self.failures: dict[str, KubeError] = {}
        if webhooks:
            entries = [{"name": f"w{number}", "clientConfig": {"service": {}}} for number in range(2)]
            self.objects[WEBHOOKS] = {"webhooks": entries}

    async def get(self, path: str) -> bytes:
        if path not in self.objects:
            raise NotFoundError("gone", status=404)
        return msgspec.json.encode(self.objects[path])

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        key = f"{path}/{body['metadata']['name']}"
        if key in self.objects:
            raise ConflictError("exists", status=409)
        self._keep(key, body, "1")
        return b"{}"

    async def put(self, path: str, body: Mapping[str, Any]) -> bytes:
        version = self.objects[path]["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != version:
            raise ConflictError("changed", status=409)
        self._keep(path, body, str(int(version) + 1))
        return b"{}"

    async def json_patch(self, path: str, operations: list[Mapping[str, Any]]) -> bytes:
        if "patch" in self.failures:
            raise self.failures["patch"]
        self.patches += 1
        for operation in operations:
            number = int(operation["path"].split("/")[2])
            entry = self.objects[path]["webhooks"][number]
            if operation["op"] == "test":
                assert entry["name"] == operation["value"]
            else:
                entry["clientConfig"]["caBundle"] = operation["value"]
        return b"{}"

    def _keep(self, key: str, body: Mapping[str, Any], version: str) -> None:
        self.objects[key] = {**body, "metadata": {**body["metadata"], "resourceVersion": version, "uid": "u"}}


class Keeper:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.loaded: list[bytes] = []
        client = cast(KubeClient, server)
        owner = Deployment(client, namespace="gpumonitor-system", name="gpumonitor-controller")
        secret = SecretDocument(client, owner, namespace="gpumonitor-system", name="gpumonitor-certificates")
        self.keeper = CertificateKeeper(
            secret=secret,
            publisher=CaPublisher(client, name="gpumonitor"),
            names=certs.server_names("gpumonitor", "gpumonitor-system"),
            load_leaf=lambda data: self.loaded.append(data[certs.LEAF]),
            now=lambda: self.now,
        )

    @property
    def data(self) -> dict[str, bytes]:
        encoded = self.server.objects[SECRET]["data"]
        return {key: base64.b64decode(value) for key, value in encoded.items()}

    @property
    def bundles(self) -> list[bytes]:
        entries = self.server.objects[WEBHOOKS]["webhooks"]
        return [base64.b64decode(entry["clientConfig"].get("caBundle", "")) for entry in entries]


async def test_the_first_round_makes_serves_and_publishes() -> None:
    made = Keeper(Server())
    await made.keeper.round()
    assert made.bundles == [made.data[certs.CA_BUNDLE]] * 2
    assert made.loaded[-1] == made.data[certs.LEAF]
    assert made.keeper.pem == made.data[certs.CA_BUNDLE].decode()
    owner = made.server.objects[SECRET]["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["uid"]) == ("Deployment", "uid-deployment")


async def test_a_round_with_nothing_to_do_writes_nothing() -> None:
    made = Keeper(Server())
    await made.keeper.round()
    version, patches = made.server.objects[SECRET]["metadata"]["resourceVersion"], made.server.patches
    await made.keeper.round()
    assert made.server.objects[SECRET]["metadata"]["resourceVersion"] == version
    assert made.server.patches == patches


async def test_an_upgrade_that_erased_the_bundle_is_repaired() -> None:
    made = Keeper(Server())
    await made.keeper.round()
    made.server.objects[WEBHOOKS]["webhooks"][1]["clientConfig"] = {"service": {}}
    await made.keeper.round()
    assert made.bundles == [made.data[certs.CA_BUNDLE]] * 2


async def test_a_leaf_is_renewed_in_time_under_the_same_ca() -> None:
    made = Keeper(Server())
    await made.keeper.round()
    before = made.data
    made.now += timedelta(days=21)
    await made.keeper.round()
    assert made.data[certs.LEAF] != before[certs.LEAF]
    assert made.data[certs.CA_BUNDLE] == before[certs.CA_BUNDLE]
    assert made.loaded[-1] == made.data[certs.LEAF]


async def test_without_a_configuration_certificates_are_made_all_the_same() -> None:
    made = Keeper(Server(webhooks=False))
    await made.keeper.round()
    assert made.loaded


async def test_without_the_right_to_patch_our_own_server_still_serves() -> None:
    made = Keeper(Server())
    made.server.failures["patch"] = ForbiddenError("no", status=403)
    await made.keeper.round()
    assert made.loaded
    assert made.keeper.pem


async def test_another_writer_is_a_conflict_and_the_next_round_takes_what_is_there() -> None:
    one, other = Keeper(Server()), Keeper(Server())
    await one.keeper.round()
    other.server.objects = one.server.objects
    await other.keeper.round()
    assert other.keeper.pem == one.keeper.pem


async def test_damaged_data_is_replaced() -> None:
    made = Keeper(Server())
    await made.keeper.round()
    made.server.objects[SECRET]["data"] = {"ca.crt": "!!!", "tls.crt": "eA=="}
    await made.keeper.round()
    assert made.bundles == [made.data[certs.CA_BUNDLE]] * 2
    assert made.loaded[-1] == made.data[certs.LEAF]


async def test_a_conflict_is_told_to_the_caller() -> None:
    made = Keeper(Server())
    await made.keeper.round()
    with pytest.raises(ConflictError):
        await made.keeper._secret.save({"a": b"b"}, resource_version="999")
