# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The Secret with what is served, as its readers see it: its keys, and how a server takes its leaf from it.

Apart from `certs`, which makes what is in it, because a reader need not load a whole cryptography library.
"""

import os
import ssl
from collections.abc import Mapping
from typing import Final

CA_BUNDLE: Final = "ca.crt"
"""PEM bundle to trust: the CA that signs now first, then those trusted besides."""
LEAF: Final = "tls.crt"
LEAF_KEY: Final = "tls.key"


class CertificateError(ValueError):
    """The Secret holds no leaf that a server can use; the text says what is wrong with it."""


def server_context() -> ssl.SSLContext:
    """Return a TLS context for a server, still without a leaf."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def load_leaf(context: ssl.SSLContext, data: Mapping[str, bytes]) -> None:
    """Let a live context serve this leaf from its next handshake on. Raises CertificateError; the old one then stays.

    OpenSSL reads files only. An anonymous one in memory needs no writable directory and leaves no key on a disk.
    """
    if not data.get(LEAF) or not data.get(LEAF_KEY):
        raise CertificateError(f"{LEAF} or {LEAF_KEY} is missing")
    descriptor = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(data[LEAF] + b"\n" + data[LEAF_KEY])
        path = f"/proc/self/fd/{descriptor}"
        # A context that takes a certificate and then refuses its key would be left with a half; so try another first.
        server_context().load_cert_chain(path)
        context.load_cert_chain(path)
    except (ssl.SSLError, OSError) as error:
        raise CertificateError(str(error)) from error
    finally:
        os.close(descriptor)
