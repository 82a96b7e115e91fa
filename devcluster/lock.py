# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One command at a time may change the cluster, and one build at a time may make a given program."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.errors import ClusterError


@contextmanager
def held(path: Path, *, wait: bool, busy: str = "", shared: bool = False) -> Iterator[None]:
    """Hold a lock on a file while the block runs; the kernel frees it when we die, however we die.

    `wait`: wait for the other holder; otherwise ClusterError with the text `busy`. `shared`: several may hold it so,
    but not beside one who holds it alone.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, kind | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise ClusterError(busy, "Wait for it to end, or stop it, and try again.") from error
        yield
