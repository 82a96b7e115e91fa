# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Certificates, keys and kubeconfigs, made with openssl. All are made together, and anew when what they say changes."""

import base64
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from devcluster.command import run, write_aside
from devcluster.layout import API_URL, KUBERNETES_SERVICE_IP, NODE_IP, NODE_NAME, Layout

DAYS = 3650
FRONT_PROXY = "front-proxy-client"
"""As whom the API server passes requests on to APIs that others serve, such as metrics.k8s.io."""
_CA_SUBJECT = "/CN=gpumonitor-devcluster-ca"


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """One certificate: file name, subject, alternative names. `kubeconfig`: whether its holder speaks to the API."""

    name: str
    subject: str
    names: tuple[str, ...] = ("DNS:localhost",)
    kubeconfig: bool = False


_API_NAMES = (
    *(f"DNS:kubernetes{suffix}" for suffix in ("", ".default", ".default.svc", ".default.svc.cluster.local")),
    "DNS:localhost",
    "IP:127.0.0.1",
    f"IP:{KUBERNETES_SERVICE_IP}",
    f"IP:{NODE_IP}",
)
CERTIFICATES = (
    Certificate(name="apiserver", subject="/CN=kube-apiserver", names=_API_NAMES),
    Certificate(name="apiserver-kubelet-client", subject="/O=system:masters/CN=kube-apiserver-kubelet-client"),
    Certificate(name="admin", subject="/O=system:masters/CN=devcluster-admin", kubeconfig=True),
    Certificate(name="controller-manager", subject="/CN=system:kube-controller-manager", kubeconfig=True),
    Certificate(name="scheduler", subject="/CN=system:kube-scheduler", kubeconfig=True),
    Certificate(
        name="kubelet",
        subject=f"/O=system:nodes/CN=system:node:{NODE_NAME}",
        names=(f"DNS:{NODE_NAME}", f"IP:{NODE_IP}"),
        kubeconfig=True,
    ),
    Certificate(name="proxy", subject="/CN=system:kube-proxy", kubeconfig=True),
    Certificate(name=FRONT_PROXY, subject=f"/CN={FRONT_PROXY}"),
)


def kubeconfig_path(layout: Layout, name: str) -> Path:
    """Return the kubeconfig of a certificate's holder."""
    return layout.kubeconfig if name == "admin" else layout.pki / f"{name}.kubeconfig"


def ensure(layout: Layout) -> bool:
    """Make everything, unless it is there as it should be; return whether it was made."""
    stamp = hashlib.sha256(repr((DAYS, _CA_SUBJECT, CERTIFICATES, API_URL)).encode()).hexdigest()
    marker = layout.pki / "stamp"
    made = not (marker.exists() and marker.read_text() == stamp)
    if made:
        _make_all(layout, stamp)
    for certificate in CERTIFICATES:
        if certificate.kubeconfig:
            text = kubeconfig(layout.pki, certificate.name)
            write_aside(kubeconfig_path(layout, certificate.name), text, mode=0o600)
    return made


def kubeconfig(pki: Path, name: str) -> str:
    """Return a kubeconfig with everything embedded (JSON, which is YAML too)."""

    def embedded(file: str) -> str:
        return base64.b64encode((pki / file).read_bytes()).decode()

    cluster = {"server": API_URL, "certificate-authority-data": embedded("ca.crt")}
    user = {"client-certificate-data": embedded(f"{name}.crt"), "client-key-data": embedded(f"{name}.key")}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "devcluster", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "devcluster", "context": {"cluster": "devcluster", "user": name}}],
        "current-context": "devcluster",
    }
    return json.dumps(document, indent=2) + "\n"


def _make_all(layout: Layout, stamp: str) -> None:
    """Into a folder aside, which then takes the place of the old one."""
    aside = layout.pki.with_name(".pki.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True, mode=0o700)
    log = layout.logs / "pki.log"
    _make_authority(aside, log)
    for certificate in CERTIFICATES:
        _make(certificate, aside, log)
    _new_key(aside / "sa.key", log)
    run(["openssl", "pkey", "-in", aside / "sa.key", "-pubout", "-out", aside / "sa.pub"], log=log)
    (aside / "stamp").write_text(stamp)
    shutil.rmtree(layout.pki, ignore_errors=True)
    aside.rename(layout.pki)


def _make_authority(folder: Path, log: Path) -> None:
    _new_key(folder / "ca.key", log)
    command: list[str | Path] = [
        "openssl",
        "req",
        "-x509",
        "-new",
        "-key",
        folder / "ca.key",
        "-days",
        str(DAYS),
        "-subj",
        _CA_SUBJECT,
    ]
    extensions = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"]
    for extension in extensions:
        command += ["-addext", extension]
    run([*command, "-out", folder / "ca.crt"], log=log)


def _make(certificate: Certificate, folder: Path, log: Path) -> None:
    base = folder / certificate.name
    key, request, extensions = (base.with_suffix(f".{kind}") for kind in ("key", "csr", "ext"))
    _new_key(key, log)
    run(["openssl", "req", "-new", "-key", key, "-subj", certificate.subject, "-out", request], log=log)
    alternatives = ",".join(certificate.names)
    extensions.write_text(f"subjectAltName={alternatives}\nextendedKeyUsage=serverAuth,clientAuth\n")
    sign: list[str | Path] = [
        "openssl",
        "x509",
        "-req",
        "-in",
        request,
        "-CA",
        folder / "ca.crt",
        "-CAkey",
        folder / "ca.key",
    ]
    sign += ["-CAcreateserial", "-days", str(DAYS), "-extfile", extensions, "-out", base.with_suffix(".crt")]
    run(sign, log=log)
    request.unlink()
    extensions.unlink()


def _new_key(path: Path, log: Path) -> None:
    """RSA, which every client knows."""
    run(["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", path], log=log)
    path.chmod(0o600)
