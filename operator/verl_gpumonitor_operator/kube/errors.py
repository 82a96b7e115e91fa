# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the API server may answer instead of what was asked.

KubeError                 base; carries the HTTP status (None: no answer at all)
+-- Unreachable           no connection, a time limit, a broken stream
+-- NotFound              404
+-- Forbidden             401, 403: also writes into a terminating namespace
+-- Conflict              409, 412: another writer was first, or the name is taken
+-- Expired               410: the resource version is too old, list again
+-- Invalid               400, 413, 415, 422: the same request will never be taken
+-- TooManyRequests       429: wait `retry_after_seconds`
+-- ServerFault           5xx
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
        return isinstance(self, Unreachable | TooManyRequests | ServerFault)


class Unreachable(KubeError):
    """No answer: refused, reset, timed out, or the stream broke."""


class NotFound(KubeError):
    """The object, its namespace or its kind does not exist."""


class Forbidden(KubeError):
    """RBAC, an admission policy or a terminating namespace says no."""


class Conflict(KubeError):
    """Another writer was first, or an object of that name exists."""


class Expired(KubeError):
    """The resource version is gone from the server's history."""


class Invalid(KubeError):
    """The server will never take this request."""


class TooManyRequests(KubeError):
    """The server asks for patience."""


class ServerFault(KubeError):
    """The server itself failed."""


def classify(status: int, message: str, *, reason: str = "", retry_after_seconds: float | None = None) -> KubeError:
    """Return the error for an HTTP status (>= 400)."""
    kind = _by_status(status)
    return kind(message, status=status, reason=reason, retry_after_seconds=retry_after_seconds)


def _by_status(status: int) -> type[KubeError]:
    known: dict[int, type[KubeError]] = {
        400: Invalid,
        401: Forbidden,
        403: Forbidden,
        404: NotFound,
        408: Unreachable,
        409: Conflict,
        410: Expired,
        412: Conflict,
        413: Invalid,
        415: Invalid,
        422: Invalid,
        429: TooManyRequests,
    }
    if status in known:
        return known[status]
    return ServerFault if status >= 500 else KubeError
