# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""GPUs, training stages and verl, without Kubernetes: the library that every other part stands on.

`ResourceMonitor` is loaded when it is first asked for: the sidecar, in its few MiB, does not pay for it.
"""

TYPE_CHECKING = False  # Type checkers take it for true; `typing` would be most of this package's import.
if TYPE_CHECKING:
    from .monitor import ResourceMonitor, ResourceSample

__all__ = ["ResourceMonitor", "ResourceSample", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in ("ResourceMonitor", "ResourceSample"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import monitor

    found: object = getattr(monitor, name)
    return found
