# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Webhook servers that an API server must not wait for, or must not believe: silent ones, and expired ones."""

import base64
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOST = "127.0.0.1"


@contextmanager
def silent_server() -> Iterator[dict[str, Any]]:
    """Accept connections and never answer. Yields the `clientConfig` that points there."""
    with socket.create_server((HOST, 0)) as server:
        yield {"service": None, "url": f"https://{HOST}:{server.getsockname()[1]}/mutate"}


@contextmanager
def expired_server(folder: Path) -> Iterator[dict[str, Any]]:
    """Speak TLS with a certificate that ended yesterday, and that the `clientConfig` it yields trusts as its CA."""
    certificate, key = _expired()
    (folder / "tls.pem").write_bytes(key + certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.pem")
    with socket.create_server((HOST, 0)) as server:
        threading.Thread(target=_shake_hands, args=(server, context), daemon=True).start()
        url = f"https://{HOST}:{server.getsockname()[1]}/mutate"
        yield {"service": None, "url": url, "caBundle": base64.b64encode(certificate).decode()}


def _shake_hands(server: socket.socket, context: ssl.SSLContext) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # the server was closed: the test is over
            return
        try:
            context.wrap_socket(connection, server_side=True).close()
        except OSError:  # the client refused the certificate, which is the point
            connection.close()


def _expired() -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "expired")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=30))
        .not_valid_after(now - datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address(HOST))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private
