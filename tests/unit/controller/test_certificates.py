# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Certificates reach both Secrets, the API server and our own server, in one round or after a failed one."""

import base64
import contextlib
import random
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
import pytest

from tests.unit.admission.test_certs import QUICK, accepts
from verl_gpumonitor_operator import certs
from verl_gpumonitor_operator.controller.certificates import CaPublisher, CertificateKeeper
from verl_gpumonitor_operator.controller.documents import Deployment, SecretData, SecretDocument
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import (
    ConflictError,
    ForbiddenError,
    HeldBackError,
    KubeError,
    NotFoundError,
    ServerFaultError,
)

SECRETS = "/api/v1/namespaces/gpumonitor-system/secrets"
SERVED = f"{SECRETS}/gpumonitor-certificates"
AUTHORITY = f"{SECRETS}/gpumonitor-certificates-ca"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/gpumonitor"
NAMES = certs.server_names("gpumonitor", "gpumonitor-system")
DEPLOYMENT = "/apis/apps/v1/namespaces/gpumonitor-system/deployments/gpumonitor-controller"


def never(_path: str, _is_done: bool) -> bool:
    return False


class Server:
    """Holds Secrets, a webhook configuration and a Deployment. `fails` is asked around each write of a Secret."""

    def __init__(self, *, webhooks: bool = True) -> None:
        self.objects: dict[str, dict[str, Any]] = {DEPLOYMENT: {"metadata": {"uid": "uid-deployment"}}}
        self.patches = 0
        self.failures: dict[str, KubeError] = {}
        self.written: list[str] = []
        self.lost: KubeError = ServerFaultError("away", status=500)
        self.fails: Callable[[str, bool], bool] = never
        """By path, and whether the write was done (then it is its answer that gets lost)."""
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
        self._may_fail(key, False)
        self.objects[key] = {**body, "metadata": {**body["metadata"], "resourceVersion": version, "uid": "u"}}
        self.written.append(key)
        self._may_fail(key, True)

    def _may_fail(self, key: str, is_done: bool) -> None:
        if self.fails(key, is_done):
            raise self.lost

    def data(self, path: str) -> dict[str, bytes]:
        """What a Secret holds; nothing if it does not exist."""
        encoded = self.objects.get(path, {}).get("data", {})
        return {key: base64.b64decode(value) for key, value in encoded.items()}

    def take(self, path: str, data: Mapping[str, bytes]) -> None:
        """Let a Secret hold this, whoever wrote it."""
        version = self.objects.get(path, {}).get("metadata", {}).get("resourceVersion", "0")
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        metadata = {"name": path.rpartition("/")[2], "resourceVersion": str(int(version) + 1)}
        self.objects[path] = {"metadata": metadata, "data": encoded}


class Keeper:
    def __init__(self, server: Server, *, rotation: certs.Rotation = certs.DEFAULT_ROTATION) -> None:
        self.server = server
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.loaded: list[bytes] = []
        client = cast(KubeClient, server)
        owner = Deployment(client, namespace="gpumonitor-system", name="gpumonitor-controller")
        authority, served = (
            SecretDocument(client, owner, namespace="gpumonitor-system", name=path.rpartition("/")[2])
            for path in (AUTHORITY, SERVED)
        )
        self.keeper = CertificateKeeper(
            authority=authority,
            served=served,
            publisher=CaPublisher(client, name="gpumonitor"),
            names=NAMES,
            load_leaf=lambda data: self.loaded.append(data[certs.LEAF]),
            now=lambda: self.now,
            rotation=rotation,
        )

    @property
    def data(self) -> dict[str, bytes]:
        """What the webhook reads."""
        return self.server.data(SERVED)

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
    for path in (AUTHORITY, SERVED):
        owner = made.server.objects[path]["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["uid"]) == ("Deployment", "uid-deployment")
    assert set(made.data) == {certs.CA_BUNDLE, certs.LEAF, certs.LEAF_KEY}
    assert set(made.server.data(AUTHORITY)) == {certs.CA_BUNDLE, certs.CA_KEY}
    assert made.server.written == [AUTHORITY, SERVED]


async def test_a_round_with_nothing_to_do_writes_nothing() -> None:
    made = Keeper(Server())
    await made.keeper.round()
    written, patches = list(made.server.written), made.server.patches
    for path in (AUTHORITY, SERVED):
        made.server.take(path, {**made.server.data(path), "of-another": b"x"})
    await made.keeper.round()
    assert made.server.written == written
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
    assert made.server.written == [AUTHORITY, SERVED, SERVED]


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
    for path in (AUTHORITY, SERVED):
        made.server.objects[path]["data"] = {"ca.crt": "!!!", "tls.crt": "eA=="}
    await made.keeper.round()
    assert made.bundles == [made.data[certs.CA_BUNDLE]] * 2
    assert made.loaded[-1] == made.data[certs.LEAF]


async def test_a_conflict_is_told_to_the_caller() -> None:
    made = Keeper(Server())
    await made.keeper.round()
    with pytest.raises(ConflictError):
        await made.keeper._served.save({"a": b"b"}, resource_version="999")


OLD = timedelta(days=3000)
"""Age at which a CA's successor is announced."""


async def old_release(made: Keeper, *steps: timedelta) -> dict[str, bytes]:
    """Let the one Secret of a release before hold all, after rounds at these ages; it is published."""
    data: dict[str, bytes] = {}
    published = b""
    for age in (timedelta(), *steps):
        now = made.now + age
        data = certs.plan(data, now=now, names=NAMES, published=published) or data
        published = data[certs.CA_BUNDLE]
    made.now += steps[-1] if steps else timedelta()
    made.server.take(SERVED, data)
    await made.keeper._publisher.publish(published)
    return data


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((), id="at rest"),
        pytest.param((OLD, OLD), id="with a next CA announced"),
        pytest.param((OLD, OLD, OLD), id="with a next CA that waits"),
        pytest.param((OLD, OLD, OLD, OLD + timedelta(days=7)), id="with a CA before that is still trusted"),
    ],
)
@pytest.mark.parametrize("fails", [None, AUTHORITY, SERVED], ids=["", "the first write fails", "the second one fails"])
async def test_an_upgrade_from_one_secret_moves_the_keys(steps: tuple[timedelta, ...], fails: str | None) -> None:
    made = Keeper(Server())
    before = await old_release(made, *steps)
    if fails:
        made.server.fails = lambda path, is_done: path == fails and not is_done
        with pytest.raises(ServerFaultError):
            await made.keeper.round()
        assert made.data == before, "the old one is as it was until the keys are safe"
        made.server.fails = never
    await made.keeper.round()
    after = {**made.server.data(AUTHORITY), **made.data}
    assert set(made.data) == {certs.CA_BUNDLE, certs.LEAF, certs.LEAF_KEY}
    if certs.NEXT_CA in before and certs.NEXT_CA_SINCE not in before:
        assert after.pop(certs.NEXT_CA_SINCE), "the next step is done as well"
    assert after == before
    assert made.bundles == [before[certs.CA_BUNDLE]] * 2


async def test_a_return_to_the_release_with_one_secret_and_an_upgrade_again() -> None:
    """The old release finds no key of the CA, so it announces another; a later upgrade takes over what it did."""
    made = Keeper(Server())
    await made.keeper.round()
    data = dict(made.data)
    for age in (timedelta(), timedelta(), timedelta(days=7)):
        data = certs.plan(data, now=made.now + age, names=NAMES, published=data[certs.CA_BUNDLE]) or data
    made.server.take(SERVED, data)
    made.now += timedelta(days=7)
    await made.keeper.round()
    assert made.data == certs.served_part(data)
    assert made.server.data(AUTHORITY) == certs.authority_part(data)


@pytest.mark.parametrize("damage", [None, {}, {"ca.crt": b"no certificate"}], ids=["deleted", "empty", "damaged"])
async def test_a_lost_served_secret_comes_back_under_the_same_ca(damage: dict[str, bytes] | None) -> None:
    made = Keeper(Server())
    await made.keeper.round()
    bundle = made.data[certs.CA_BUNDLE]
    if damage is None:
        del made.server.objects[SERVED]
    else:
        made.server.take(SERVED, damage)
    await made.keeper.round()
    assert made.data[certs.CA_BUNDLE] == bundle
    assert accepts(bundle, made.data[certs.LEAF], made.now)
    assert made.bundles == [bundle] * 2


@pytest.mark.parametrize("damage", [None, {}, {"ca.crt": b"x", "ca.key": b"y"}], ids=["deleted", "empty", "damaged"])
async def test_a_lost_key_of_the_ca_costs_no_handshake(damage: dict[str, bytes] | None) -> None:
    """Another CA is announced, waits and only then signs, even if the leaf gets old meanwhile."""
    made = Keeper(Server())
    await made.keeper.round()
    made.now += timedelta(days=19)
    before = made.data
    if damage is None:
        del made.server.objects[AUTHORITY]
    else:
        made.server.take(AUTHORITY, damage)
    await made.keeper.round()
    announced = made.data[certs.CA_BUNDLE]
    assert announced.startswith(before[certs.CA_BUNDLE])
    assert len(announced) > len(before[certs.CA_BUNDLE])
    for _ in range(6):
        made.now += timedelta(days=1)
        await made.keeper.round()
        assert made.data[certs.LEAF] == before[certs.LEAF]
    made.now += timedelta(days=1)
    await made.keeper.round()
    assert not accepts(before[certs.CA_BUNDLE], made.data[certs.LEAF], made.now)
    assert accepts(announced, made.data[certs.LEAF], made.now)


async def test_a_damaged_bundle_beside_the_keys_is_taken_from_what_is_served() -> None:
    made = Keeper(Server())
    await made.keeper.round()
    authority, served = made.server.data(AUTHORITY), made.data
    made.server.take(AUTHORITY, {**authority, certs.CA_BUNDLE: b"no certificate"})
    await made.keeper.round()
    assert made.server.data(AUTHORITY) == authority
    assert made.data == served


async def test_keys_of_the_ca_are_kept_before_anything_is_served_by_it() -> None:
    made = Keeper(Server())
    made.server.fails = lambda path, is_done: path == SERVED and not is_done
    with pytest.raises(ServerFaultError):
        await made.keeper.round()
    assert made.bundles == [b"", b""]
    kept = made.server.data(AUTHORITY)
    made.server.fails = never
    other = Keeper(made.server)
    await other.keeper.round()
    assert other.server.data(AUTHORITY) == kept
    assert other.data[certs.CA_BUNDLE] == kept[certs.CA_BUNDLE]


async def test_a_next_ca_does_not_wait_before_it_is_served() -> None:
    """Nobody could have heard of it, even where no configuration has to be waited for."""
    made = Keeper(Server(webhooks=False))
    await made.keeper.round()
    made.now += OLD
    made.server.fails = lambda path, _: path == SERVED and certs.NEXT_CA in made.server.data(AUTHORITY)
    for _ in range(3):
        with pytest.raises(ServerFaultError):
            await made.keeper.round()
        assert certs.NEXT_CA_SINCE not in made.server.data(AUTHORITY)
    made.server.fails = never
    await made.keeper.round()
    assert certs.NEXT_CA_SINCE in made.server.data(AUTHORITY)


async def test_of_two_that_begin_at_once_one_makes_the_ca() -> None:
    server = Server()
    slow, other = Keeper(server), Keeper(server)
    load = slow.keeper._authority.load

    async def late() -> SecretData | None:
        slow.keeper._authority.load = load  # type: ignore[method-assign] # once
        found = await load()
        await other.keeper.round()
        return found

    slow.keeper._authority.load = late  # type: ignore[method-assign] # a slow answer
    with pytest.raises(ConflictError):
        await slow.keeper.round()
    held = other.data
    await slow.keeper.round()
    assert slow.data == held
    assert server.written == [AUTHORITY, SERVED]


async def test_a_lease_that_is_lost_between_the_two_writes_holds_the_second_back() -> None:
    """The next one to lead goes on with the same keys."""
    server = Server()
    made = Keeper(server)
    server.lost = HeldBackError("not leading")
    server.fails = lambda path, is_done: path == SERVED and not is_done
    with pytest.raises(HeldBackError):
        await made.keeper.round()
    assert made.loaded == []
    kept, server.fails = server.data(AUTHORITY), never
    other = Keeper(server)
    await other.keeper.round()
    assert server.data(AUTHORITY) == kept


async def test_a_writer_that_is_behind_takes_nothing_back() -> None:
    """It has read what is served; then another one announces a CA; then it reads the keys, and goes on to write."""
    server = Server()
    slow, other = Keeper(server), Keeper(server)
    await slow.keeper.round()
    slow.now += timedelta(days=19)
    other.now = slow.now
    load = slow.keeper._authority.load

    async def late() -> SecretData | None:
        slow.keeper._authority.load = load  # type: ignore[method-assign] # once
        server.take(AUTHORITY, {certs.CA_BUNDLE: server.data(AUTHORITY)[certs.CA_BUNDLE]})
        await other.keeper.round()
        return await load()

    slow.keeper._authority.load = late  # type: ignore[method-assign] # a slow answer
    with pytest.raises(ConflictError):
        await slow.keeper.round()
    assert other.bundles == [other.data[certs.CA_BUNDLE]] * 2
    held = other.data
    await slow.keeper.round()
    assert slow.data == held


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_through_crashes_and_lost_secrets_no_handshake_is_refused(seed: int) -> None:
    """A year of rotations in which writes fail or lose their answer, leaders change, and one of the Secrets is lost."""
    draw = random.Random(seed)  # noqa: S311 - a walk through time, no secret
    made = Keeper(Server(), rotation=QUICK)
    await made.keeper.round()
    server, serving = made.server, made.data[certs.LEAF]
    heard: deque[tuple[datetime, bytes]] = deque([(made.now, made.bundles[0])])
    authorities: set[bytes] = set()
    server.fails = lambda *_: draw.random() < 0.15
    for _ in range(2000):
        now = made.now + timedelta(minutes=draw.randint(1, 500))
        if draw.random() < 0.2:
            made = Keeper(server, rotation=QUICK)
        made.now = now
        # One of both, and not again before the loss is made good.
        if certs.CA_KEY in server.data(AUTHORITY) and server.data(SERVED) and draw.random() < 0.02:
            del server.objects[draw.choice((AUTHORITY, SERVED))]
        server.failures = {"patch": ServerFaultError("away", status=500)} if draw.random() < 0.1 else {}
        with contextlib.suppress(ServerFaultError):
            await made.keeper.round()
        served = server.data(SERVED)
        assert not set(served) - {certs.CA_BUNDLE, certs.LEAF, certs.LEAF_KEY}
        while heard[0][0] < now - QUICK.bundle_wait:
            heard.popleft()
        bundles = {*made.bundles, *(bundle for _, bundle in heard)}
        for leaf in {serving, served.get(certs.LEAF, serving)}:
            assert all(accepts(bundle, leaf, now) for bundle in bundles)
        serving = served.get(certs.LEAF, serving)
        heard.extend((now, bundle) for bundle in {made.bundles[0], served.get(certs.CA_BUNDLE, made.bundles[0])})
        authorities.add(made.bundles[0].split(b"-----END")[0])
    assert len(authorities) > 4
