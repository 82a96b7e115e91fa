# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A real etcd and API server for one bench, on the loopback, with nothing else running beside them.

The devcluster's own server is left alone: 10,000 pods in it would keep its controllers busy, and other tests waiting.
"""

import asyncio
import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import ConflictError, KubeError

TOKEN = "bench"
CRD_FILE = Path(__file__).parents[2] / "crds" / "gpumonitor.dev_gpumonitors.yaml"
JOB_KINDS = (
    ("ray.io", "v1", "RayJob", "rayjobs"),
    ("ray.io", "v1", "RayCluster", "rayclusters"),
    ("kubeflow.org", "v1", "PyTorchJob", "pytorchjobs"),
)


class MissingProgramError(Exception):
    """The devcluster's programs were not built yet."""


@dataclass(frozen=True)
class Programs:
    """What is started."""

    etcd: Path
    apiserver: Path


def programs(folder: Path) -> Programs:
    """Find both in the devcluster's folder of programs, or on the PATH. Raises MissingProgramError."""
    found = {}
    for name in ("etcd", "kube-apiserver"):
        path = folder / name if (folder / name).exists() else shutil.which(name)
        if path is None:
            raise MissingProgramError(f"{name} is not in {folder}: bring up the devcluster once (`make up`)")
        found[name] = Path(path)
    return Programs(etcd=found["etcd"], apiserver=found["kube-apiserver"])


@contextmanager
def api_server(found: Programs, folder: Path) -> Iterator[Path]:
    """Run etcd and API server in this folder; yields a kubeconfig. Both are ended by their own handles."""
    etcd_port, peer_port, port = (_free_port() for _ in range(3))
    _write_keys(folder)
    (folder / "tokens.csv").write_text(f"{TOKEN},bench,bench,system:masters\n")
    with (
        _running(_etcd(found, folder, etcd_port, peer_port), folder / "etcd.log"),
        _running(_apiserver(found, folder, etcd_port, port), folder / "apiserver.log"),
    ):
        yield _kubeconfig(folder, port)


async def prepare(kubeconfig: Path) -> None:
    """Wait for the server and give it the CRDs."""
    client = await KubeClient.connect(kubeconfig)
    try:
        for _ in range(240):
            with contextlib.suppress(KubeError):
                await client.get("/readyz")
                break
            await asyncio.sleep(0.5)
        for crd in (*map(_stub_crd, JOB_KINDS), yaml.safe_load(CRD_FILE.read_text())):
            with contextlib.suppress(ConflictError):
                await client.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        await _served(client)
    finally:
        await client.close()


async def _served(client: KubeClient) -> None:
    paths = [f"/apis/{group}/{version}/{plural}" for group, version, _, plural in JOB_KINDS]
    for path in (*paths, "/apis/gpumonitor.dev/v1alpha1/gpumonitors"):
        for _ in range(120):
            with contextlib.suppress(KubeError):
                await client.get(path)
                break
            await asyncio.sleep(0.5)


def _stub_crd(kind: tuple[str, str, str, str]) -> dict[str, Any]:
    """A kind that takes anything; what KubeRay's own schema holds is no part of the figures."""
    group, version, name, plural = kind
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": name, "plural": plural, "singular": name.lower(), "listKind": f"{name}List"},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def _etcd(found: Programs, folder: Path, port: int, peer_port: int) -> list[str]:
    url, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(found.etcd),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=error",
    ]


def _apiserver(found: Programs, folder: Path, etcd_port: int, port: int) -> list[str]:
    return [
        str(found.apiserver),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        "--endpoint-reconciler-type=none",
        f"--secure-port={port}",
        f"--cert-dir={folder}",
        "--service-cluster-ip-range=10.196.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'sa.pub'}",
        f"--service-account-signing-key-file={folder / 'sa.key'}",
        "--authorization-mode=AlwaysAllow",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--disable-admission-plugins=ServiceAccount",
        "--profiling=false",
    ]


def _kubeconfig(folder: Path, port: int) -> Path:
    path = folder / "kubeconfig"
    cluster = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "bench", "cluster": cluster}],
        "users": [{"name": "bench", "user": {"token": TOKEN}}],
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        "current-context": "bench",
    }
    path.write_text(yaml.safe_dump(document))
    return path


def _write_keys(folder: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "sa.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "sa.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(argv: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
