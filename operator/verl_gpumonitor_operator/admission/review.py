# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""AdmissionReview v1 on the wire: what is asked, and the answer, which always allows. Pure."""

import base64
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from .jsonpatch import Operation

_UID: Final = re.compile(rb'"uid"\s*:\s*"([0-9A-Za-z._-]{1,128})"')
_UID_WITHIN: Final = 65_536
"""The API server writes the request's uid first, so it is near the beginning."""


class _Kind(msgspec.Struct, frozen=True):
    group: str = ""
    kind: str = ""


class Request(msgspec.Struct, frozen=True, rename="camel"):
    """`request` of a review. `object` stays undecoded, so that a strange one cannot spoil the rest."""

    uid: str = ""
    kind: _Kind = _Kind()
    operation: str = ""
    sub_resource: str | None = None
    namespace: str | None = None
    dry_run: bool | None = None
    object: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def creates_pod(self) -> bool:
        """Whether it is what we are for."""
        return self.operation == "CREATE" and self.kind.kind == "Pod" and not self.kind.group and not self.sub_resource

    def pod(self) -> dict[str, Any] | None:
        """Return the pod; None if it is no JSON object. Raises msgspec.DecodeError or RecursionError."""
        pod = msgspec.json.decode(bytes(self.object))
        return pod if isinstance(pod, dict) else None


class _Review(msgspec.Struct, frozen=True):
    request: Request = Request()


_decoder: Final = msgspec.json.Decoder(_Review)


def decode(body: bytes) -> Request:
    """Read a review. Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError."""
    return _decoder.decode(body).request


def uid(body: bytes) -> str:
    """Find the uid that has to be echoed, even in a body that is broken or cut off. Empty where there is none."""
    match = _UID.search(body[:_UID_WITHIN])
    return match[1].decode() if match else ""


def allowed(request_uid: str, operations: Sequence[Operation] = ()) -> bytes:
    """Write the answer. There is none that refuses."""
    response: dict[str, Any] = {"uid": request_uid, "allowed": True}
    if operations:
        patch = msgspec.json.encode(operations)
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch).decode()}
    return msgspec.json.encode({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})
