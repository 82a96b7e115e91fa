# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Hostile and broken reports over real TLS: the right code, counted, and the server goes on."""

import asyncio
import gzip
import json
import ssl
from collections import Counter
from dataclasses import replace
from typing import Any

import aiohttp
import psutil
import pytest

from tests.contract.ingest.conftest import HEAD, NOW, POD, SERVER_NAME, Rig, StartRig, new_certificates, trusting
from tests.unit.ingest.builders import claims, jwt, pod_record, report
from verl_gpumonitor.model.report import PodRef, RayNode, encode
from verl_gpumonitor_operator import certs
from verl_gpumonitor_operator.certificates import CertificateError
from verl_gpumonitor_operator.controller.ingest import IngestLimits
from verl_gpumonitor_operator.controller.reportserver import LiveCertificate
from verl_gpumonitor_operator.kube.errors import UnreachableError
from verl_gpumonitor_operator.listening import ServerLimits


async def still_serves(rig: Rig, sequence: int = 1000) -> bool:
    async with rig.session() as session:
        rig.clock.advance(10.0)
        code, _, _ = await rig.post(session, report(POD, sequence=sequence))
    return code == 200


async def test_reports_on_one_connection(rig: Rig) -> None:
    async with rig.session() as session:
        for sequence in range(1, 11):
            code, answer, headers = await rig.post(session, report(POD, sequence=sequence))
            assert (code, answer["accepted"]) == (200, sequence)
            assert headers["Content-Type"].startswith("application/json")
        assert rig.value("gpumonitor_report_connections") == 1
    assert len(rig.reviewer.asked) == 1
    assert rig.counted(200) == 10


def _bodies() -> list[Any]:
    good = encode(report(POD))
    other = PodRef(namespace="train", name="job-worker-1", uid="uid-1")
    nodes = [RayNode(node_ip="10.0.0.9", gpu_uuids=["GPU-9"])]
    return [
        pytest.param(b"{", 400, id="broken JSON"),
        pytest.param(b"", 400, id="no body"),
        pytest.param(good.replace(b"0.625", b"NaN"), 400, id="NaN"),
        pytest.param(b"\x00" * 1000, 400, id="zeros"),
        pytest.param(b"[" * 200_000, 400, id="deep nesting"),
        pytest.param(encode(report(POD, pod=other)), 403, id="another pod's numbers"),
        pytest.param(encode(report(POD, ray_nodes=nodes)), 403, id="a worker that names other nodes' GPUs"),
        pytest.param(b"x" * 10_000_000, 413, id="10 MB"),
        pytest.param(good, 200, id="a good one"),
    ]


@pytest.mark.parametrize(("body", "code"), _bodies())
async def test_bodies(rig: Rig, body: bytes, code: int) -> None:
    async with rig.session() as session:
        answered, answer, _ = await rig.post(session, body)
    assert answered == code
    assert ("error" in answer) == (code != 200)
    assert rig.counted(code) == 1
    assert await still_serves(rig)


async def test_10_mb_in_pieces_of_unknown_number(rig: Rig) -> None:
    async def pieces() -> Any:
        for _ in range(160):
            yield b"x" * 65536

    async with rig.session() as session:
        try:
            code, _, _ = await rig.post(session, pieces())
        except aiohttp.ClientOSError:
            code = 413  # the server closed while the rest was still being sent
    assert code == 413
    assert rig.counted(413) == 1
    assert await still_serves(rig)


async def test_a_bomb_is_not_unpacked(rig: Rig) -> None:
    async with rig.session() as session:
        bomb = gzip.compress(b"\x00" * 50_000_000)
        code, _, _ = await rig.post(session, bomb, headers={"Content-Encoding": "gzip"})
    assert code == 400


@pytest.mark.parametrize(
    ("token", "code"),
    [
        pytest.param("", 401, id="none"),
        pytest.param("nonsense", 401, id="nonsense"),
        pytest.param(jwt(claims(pod_record(uid="uid-x")), signature="foreign"), 401, id="of another cluster"),
        pytest.param(jwt(claims(POD), signature="forged"), 401, id="forged in a live pod's name"),
        pytest.param(jwt(claims(POD, audience=("https://kubernetes.default.svc",))), 401, id="for the API server"),
        pytest.param(jwt(claims(POD, expires_at=NOW - 3600)), 401, id="expired"),
        pytest.param("A" * 12_000, 401, id="of 12 KB"),
    ],
)
async def test_tokens(rig: Rig, token: str, code: int) -> None:
    async with rig.session() as session:
        answered, answer, headers = await rig.post(session, report(POD), token=token)
    assert answered == code
    assert answer["error"]
    assert headers["WWW-Authenticate"] == "Bearer"
    assert rig.counted(code) == 1
    assert rig.sink.taken == []
    assert await still_serves(rig)


async def test_a_token_that_expires_is_refused_and_its_successor_taken(rig: Rig) -> None:
    async with rig.session() as session:
        old = rig.reviewer.issue(POD, expires_at=NOW + 60)
        assert (await rig.post(session, report(POD, sequence=1), token=old))[0] == 200
        rig.clock.advance(130)
        del rig.reviewer.good[old]
        assert (await rig.post(session, report(POD, sequence=2), token=old))[0] == 401
        new = rig.reviewer.issue(POD, expires_at=NOW + 7200)
        assert (await rig.post(session, report(POD, sequence=2), token=new))[0] == 200


async def test_a_dead_pods_token(rig: Rig) -> None:
    async with rig.session() as session:
        assert (await rig.post(session, report(POD, sequence=1)))[0] == 200
        rig.pods.put(replace(POD, phase="Succeeded"))
        assert (await rig.post(session, report(POD, sequence=2)))[0] == 403
        del rig.pods.by_uid[POD.uid]
        assert (await rig.post(session, report(POD, sequence=3)))[0] == 403
    assert rig.counted(403) == 2


async def test_a_replay_and_a_restarted_sidecar(rig: Rig) -> None:
    async with rig.session() as session:
        assert (await rig.post(session, report(POD, sequence=5)))[0] == 200
        code, answer, _ = await rig.post(session, report(POD, sequence=5))
        assert (code, answer["accepted"]) == (409, 5)
        assert (await rig.post(session, report(POD, sequence=1, start_id="start-0002")))[0] == 200
    assert (rig.counted(200), rig.counted(409)) == (2, 1)


async def test_the_head_may_name_the_gpus_of_its_nodes(rig: Rig) -> None:
    nodes = [RayNode(node_ip="10.0.0.9", gpu_uuids=["GPU-9"])]
    async with rig.session() as session:
        code, _, _ = await rig.post(session, report(HEAD, gpus=0, ray_nodes=nodes), token=rig.head_token)
    assert code == 200


async def test_too_many_reports_of_one_pod(rig: Rig) -> None:
    async with rig.session() as session:
        answers = [await rig.post(session, report(POD, sequence=number + 1)) for number in range(15)]
    assert [code for code, _, _ in answers].count(429) == 5
    assert answers[-1][2]["Retry-After"] == "1"


async def test_not_ready_and_an_api_server_that_is_away(rig: Rig) -> None:
    async with rig.session() as session:
        rig.switch.ready = False
        code, _, headers = await rig.post(session, report(POD))
        assert (code, headers["Retry-After"]) == (503, "2")
        rig.switch.ready = True
        rig.reviewer.failure = UnreachableError("no route")
        code, _, headers = await rig.post(session, report(POD))
        assert code == 503
        assert int(headers["Retry-After"]) >= 1


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("GET", "/v1/report", 405), ("PUT", "/v1/report", 405), ("GET", "/", 404), ("POST", "/v1/reports", 404)],
)
async def test_other_requests(rig: Rig, method: str, path: str, code: int) -> None:
    async with (
        rig.session() as session,
        session.request(method, rig.url.replace("/v1/report", path), server_hostname=SERVER_NAME) as response,
    ):
        assert response.status == code
    assert rig.counted(code) == 1


async def _raw(rig: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(
        "127.0.0.1", rig.server.port, ssl=rig.client_context(), server_hostname=SERVER_NAME
    )


def _head(rig: Rig, length: int) -> bytes:
    return (
        f"POST /v1/report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {rig.token}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


async def _closed(reader: asyncio.StreamReader, seconds: float = 5.0) -> bytes:
    """Read until the server closes. Raises TimeoutError if it does not."""
    async with asyncio.timeout(seconds):
        try:
            return await reader.read()
        except OSError:
            return b""


async def test_a_body_that_drips(start: StartRig) -> None:
    rig = await start(limits=IngestLimits(body_seconds=0.2))
    reader, writer = await _raw(rig)
    writer.write(_head(rig, 1000) + b"{")
    answer = await _closed(reader)
    assert answer.startswith(b"HTTP/1.1 408")
    assert rig.counted(408) == 1
    writer.close()
    assert await still_serves(rig)


async def test_a_body_that_ends_early(rig: Rig) -> None:
    _, writer = await _raw(rig)
    writer.write(_head(rig, 1000) + b"{")
    await writer.drain()
    writer.close()
    assert await still_serves(rig)
    assert rig.sink.taken[0][1].sequence == 1000


@pytest.mark.parametrize("sent", [b"", b"POST /v1/report HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_connection_that_says_nothing_or_too_little(start: StartRig, sent: bytes) -> None:
    rig = await start(server_limits=ServerLimits(first_request_seconds=0.3))
    reader, writer = await _raw(rig)
    writer.write(sent)
    assert await _closed(reader) == b""
    writer.close()
    await rig.drained()


async def test_a_connection_that_goes_silent(start: StartRig) -> None:
    rig = await start(server_limits=ServerLimits(first_request_seconds=0.1, idle_seconds=0.4))
    reader, writer = await _raw(rig)
    writer.write(_request(rig.token, b"{"))
    assert await _answers(reader, 1) == {400: 1}
    assert await _closed(reader) == b""
    writer.close()
    await rig.drained()


async def test_a_peer_that_never_shakes_hands(start: StartRig) -> None:
    rig = await start(server_limits=ServerLimits(handshake_seconds=0.2))
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
    assert await _closed(reader) == b""
    writer.close()
    await rig.drained()
    assert rig.value("gpumonitor_report_connections_refused_total", reason="handshake") == 1
    assert await still_serves(rig)


async def test_connections_beyond_the_limit_are_closed_at_once(start: StartRig) -> None:
    rig = await start(server_limits=ServerLimits(connections=20, connections_of_peer=5))
    pairs = [await asyncio.open_connection("127.0.0.1", rig.server.port) for _ in range(5)]
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
    assert await _closed(reader) == b""
    assert rig.value("gpumonitor_report_connections") == 5
    assert rig.value("gpumonitor_report_connections_refused_total", reason="peer") == 1
    for _, each in [*pairs, (reader, writer)]:
        each.close()
    await rig.drained()
    assert await still_serves(rig)


def _request(token: str, body: bytes) -> bytes:
    head = f"POST /v1/report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def _answers(reader: asyncio.StreamReader, number: int) -> Counter[int]:
    """Read so many answers; returns how often each code came."""
    codes: Counter[int] = Counter()
    for _ in range(number):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        codes[int(head.split()[1])] += 1
    return codes


@pytest.mark.slow
async def test_ten_thousand_garbage_requests(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """All refused and counted, nothing logged, no memory kept. By raw streams: the client is to be cheap."""
    bodies = [*([b"{", b"\xff" * 100, encode(report(POD, gpus=1))] * 13), b"x" * 200_000]
    tokens = ["nonsense", *(jwt(claims(pod_record(uid=f"u{n}")), signature=f"f{n}") for n in range(500))]
    requests = [_request(tokens[n % len(tokens)], bodies[n % len(bodies)]) for n in range(1000)]
    process = psutil.Process()

    async def thousand() -> Counter[int]:
        reader, writer = await _raw(rig)
        codes: Counter[int] = Counter()
        for first in range(0, 1000, 10):
            writer.writelines(requests[first : first + 10])
            codes += await _answers(reader, 10)
        writer.close()
        return codes

    codes = await thousand()
    before = process.memory_info().rss
    for each in await asyncio.gather(*(thousand() for _ in range(9))):
        codes += each
    grown = process.memory_info().rss - before
    assert set(codes) == {401, 429}
    assert codes == {401: rig.counted(401), 429: rig.counted(429)}
    assert codes.total() == 10_000
    assert len(rig.reviewer.asked) <= 30, "the API server is hardly asked"
    assert grown < 20 * 2**20
    assert caplog.records == []
    assert await still_serves(rig)


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"\x16\x03\x01\x00\x05hello", id="TLS in TLS"),
        pytest.param(b"GARBAGE\r\n\r\n", id="no HTTP"),
        pytest.param(b"POST /v1/report HTTP/1.1\r\nContent-Length: -5\r\n\r\n", id="a negative length"),
        pytest.param(b"POST /v1/report HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", id="two lengths"),
        pytest.param(b"POST /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", id="an endless line"),
        pytest.param(b"POST / HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n", id="endless headers"),
    ],
)
async def test_broken_http_is_counted_and_not_logged(
    rig: Rig, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await _raw(rig)
    writer.write(garbage)
    assert (await _closed(reader)).startswith(b"HTTP/1.1 400") or rig.counted(400) == 1
    writer.close()
    assert rig.counted(400) == 1
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    assert await still_serves(rig)


async def test_plain_http_and_foreign_clients_do_no_harm(rig: Rig) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await _closed(reader)
    writer.close()
    with pytest.raises(ssl.SSLError):
        await asyncio.open_connection("127.0.0.1", rig.server.port, ssl=trusting(new_certificates()[certs.CA_BUNDLE]))
    await rig.drained()
    assert (rig.value("gpumonitor_report_connections_refused_total", reason="handshake") or 0) >= 1
    assert await still_serves(rig)


async def test_certificates_change_under_load_without_a_refused_handshake(rig: Rig) -> None:
    old, new = rig.certificates, new_certificates()
    both = trusting(old[certs.CA_BUNDLE], new[certs.CA_BUNDLE])
    tokens = [rig.reviewer.issue(pod_record(uid=f"uid-c{n}", name=f"c-{n}")) for n in range(20)]
    for number in range(20):
        rig.pods.put(pod_record(uid=f"uid-c{number}", name=f"c-{number}"))

    async def reports(number: int) -> None:
        pod = pod_record(uid=f"uid-c{number}", name=f"c-{number}")
        for sequence in range(1, 6):
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=both)) as session:
                code, _, _ = await rig.post(session, report(pod, sequence=sequence, gpus=1), token=tokens[number])
                assert code == 200

    running = asyncio.gather(*(reports(number) for number in range(20)))
    for data in (new, old, new):
        await asyncio.sleep(0.05)
        assert rig.certificate.load(data)
    await running
    assert not rig.certificate.load(new), "it is served already"
    connector = aiohttp.TCPConnector(ssl=trusting(new[certs.CA_BUNDLE]))
    async with aiohttp.ClientSession(connector=connector) as session:
        assert (await rig.post(session, report(POD)))[0] == 200


async def test_a_broken_certificate_leaves_the_old_one(rig: Rig) -> None:
    other = new_certificates()
    good = rig.certificates
    for broken in (
        good | {certs.LEAF_KEY: other[certs.LEAF_KEY]},
        good | {certs.LEAF: other[certs.LEAF]},
        good | {certs.LEAF: b"nonsense"},
        {},
    ):
        with pytest.raises(CertificateError):
            rig.certificate.load(broken)
    assert await still_serves(rig)


async def test_before_there_is_a_certificate_handshakes_fail_and_nothing_else() -> None:
    assert not LiveCertificate().loaded


async def test_the_server_ends_with_open_connections(start: StartRig) -> None:
    rig = await start()
    async with rig.session() as session:
        await rig.post(session, report(POD))
        await asyncio.wait_for(rig.server.close(0.2), timeout=5)
        with pytest.raises(aiohttp.ClientError):
            await rig.post(session, report(POD, sequence=2))


async def test_many_sidecars_at_once(rig: Rig) -> None:
    pods = [pod_record(uid=f"uid-m{n}", name=f"m-{n}") for n in range(200)]
    tokens = []
    for pod in pods:
        rig.pods.put(pod)
        tokens.append(rig.reviewer.issue(pod))

    async with rig.session() as session:
        answers = await asyncio.gather(
            *(rig.post(session, report(pod), token=token) for pod, token in zip(pods, tokens, strict=True))
        )
    assert {code for code, _, _ in answers} == {200}
    assert json.loads(json.dumps(answers[0][1]))["ca_pem"] == "PEM-1"
