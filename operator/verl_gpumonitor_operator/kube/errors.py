# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the API server may answer instead of what was asked.

`KubeError` is the base and carries the HTTP status; below it, one class for each way to go on:

* `UnreachableError`: no answer; no connection, a time limit, a broken stream
* `NotFoundError`: 404
* `UnauthorizedError`: 401; the token ran out, or was not taken; it is read anew
* `ForbiddenError`: 403; also writes into a terminating namespace
* `ConflictError`: 409, 412; another writer was first, or the name is taken
* `ExpiredError`: 410; the resource version is too old, list again
* `InvalidError`: 400, 413, 415, 422; the same request will never be taken
* `TooManyRequestsError`: 429; wait `retry_after_seconds`
* `ServerFaultError`: 5xx
* `HeldBackError`: a write that was not sent, because another process may lead now
"""


class KubeError(Exception):
    """A request to the API server failed. The text is the server's own message, cut to 512 characters."""

    def __init__(
        self, message: str, *, status: int | None = None, reason: str = "", retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message[:512])
        self.status = status
        self.reason = reason
        """`reason` of the Status object, such as `NotFound`; empty where there was none."""
        self.retry_after_seconds = retry_after_seconds

    @property
    def transient(self) -> bool:
        """The same request may succeed later without anybody's doing."""
        passing = UnreachableError | UnauthorizedError | TooManyRequestsError | ServerFaultError | HeldBackError
        return isinstance(self, passing)


class UnreachableError(KubeError):
    """No answer: refused, reset, timed out, or the stream broke."""


class NotFoundError(KubeError):
    """The object, its namespace or its kind does not exist."""


class UnauthorizedError(KubeError):
    """The server does not know who asks. That says nothing of what this process may do."""


class ForbiddenError(KubeError):
    """RBAC, an admission policy or a terminating namespace says no."""


class ConflictError(KubeError):
    """Another writer was first, or an object of that name exists."""


class ExpiredError(KubeError):
    """The resource version is gone from the server's history."""


class InvalidError(KubeError):
    """The server will never take this request."""


class TooManyRequestsError(KubeError):
    """The server asks for patience."""


class ServerFaultError(KubeError):
    """The server itself failed."""


class HeldBackError(KubeError):
    """The write was not sent, since this process may not write now."""


def classify(status: int, message: str, *, reason: str = "", retry_after_seconds: float | None = None) -> KubeError:
    """Return the error for an HTTP status (>= 400)."""
    kind = _by_status(status)
    return kind(message, status=status, reason=reason, retry_after_seconds=retry_after_seconds)


def _by_status(status: int) -> type[KubeError]:
    known: dict[int, type[KubeError]] = {
        400: InvalidError,
        401: UnauthorizedError,
        403: ForbiddenError,
        404: NotFoundError,
        408: UnreachableError,
        409: ConflictError,
        410: ExpiredError,
        412: ConflictError,
        413: InvalidError,
        415: InvalidError,
        422: InvalidError,
        429: TooManyRequestsError,
    }
    if status in known:
        return known[status]
    return ServerFaultError if status >= 500 else KubeError
