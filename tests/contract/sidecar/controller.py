# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A small HTTPS server in the controller's place, and the certificates that it needs."""

import datetime
import ipaddress
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from verl_gpumonitor.model.report import Report, ReportAnswer, decode_report, encode

SERVER_NAME = "gpumonitor-controller.gpumonitor-system.svc"


class Authority:
    """A CA that signs server certificates."""

    def __init__(self, name: str = "test CA") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = _signed(self._name, self._name, self._key, self._key, ca=True, dns_name=None)
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def server_context(self, directory: Path, dns_name: str = SERVER_NAME) -> ssl.SSLContext:
        """Return a context with a certificate for this name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns_name)])
        certificate = _signed(subject, self._name, key, self._key, ca=False, dns_name=dns_name)
        both = directory / f"{x509.random_serial_number()}.pem"
        both.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(both)
        return context


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signing_key: ec.EllipticCurvePrivateKey,
    *,
    ca: bool,
    dns_name: str | None,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
    )
    if dns_name is not None:
        # No IP address among the names: the sidecar must check the name, not where it connected to.
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=False)
    return builder.sign(signing_key, hashes.SHA256())


class Controller:
    """Takes reports and answers as told."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.reports: list[Report] = []
        self.tokens: list[str] = []
        self.connections = 0
        self.status = 200
        self.headers: dict[str, str] = {}
        self.hang_seconds = 0.0
        """Time that each answer waits."""
        self.answer: Callable[[Report], ReportAnswer] = lambda report: ReportAnswer(accepted=report.sequence)
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.use(context)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where reports go."""
        return f"https://{ipaddress.ip_address('127.0.0.1')}:{self.port}/v1/report"

    def use(self, context: ssl.SSLContext) -> None:
        """Show this certificate to new connections."""
        self._server.context = context

    def drop_connections(self) -> None:
        """Close every connection, as a restarted controller does."""
        self._server.drop_connections()

    def wait_for(self, holds: Callable[[list[Report]], bool], seconds: float = 10.0) -> None:
        """Wait until the reports that came say so."""
        end = time.monotonic() + seconds
        while not holds(self.reports):
            assert time.monotonic() < end, f"not within {seconds} s; {len(self.reports)} reports"
            time.sleep(0.02)

    def close(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()
        self._server.drop_connections()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        controller = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def setup(self) -> None:
                super().setup()
                controller.connections += 1

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if controller.hang_seconds:
                    time.sleep(controller.hang_seconds)
                controller.tokens.append(self.headers["Authorization"])
                report = decode_report(body)
                controller.reports.append(report)
                content = encode(controller.answer(report)) if controller.status == 200 else b'{"error": "no"}'
                self.send_response(controller.status)
                for name, value in controller.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002, ARG002 - http.server's
                return

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    context: ssl.SSLContext

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: list[ssl.SSLSocket] = []
        super().__init__(address, handler)

    def finish_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, ssl.SSLSocket | type(self.socket))
        secured = self.context.wrap_socket(request, server_side=True)
        self._open.append(secured)
        try:
            super().finish_request(secured, client_address)
        finally:
            secured.close()

    def drop_connections(self) -> None:
        for secured in self._open:
            try:
                secured.shutdown(2)
            except OSError:
                continue
        self._open.clear()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave are part of the tests."""
