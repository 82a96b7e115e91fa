# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which GPUs each Ray node has, as the head's dashboard lists them.

Needed where Ray's agents name their GPUs by index alone: the head's sidecar reads this, and the controller relays it
to the workers. UUIDs do not change, so that the dashboard's lag of 15 s does no harm.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from . import plausible
from .fetch import fetch_whole

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""A node takes some 15 KB in the summary; 500 nodes are 8 MB."""
MAX_NODES: Final = 4096
SUMMARY_PATH: Final = "/nodes?view=summary"


class RayNodeGpus(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of one Ray node, which under KubeRay is one pod."""

    node_ip: str
    gpu_uuids: tuple[str, ...]
    """By index within Ray's container."""


class RayHeadError(Exception):
    """The answer is none of the dashboard's."""


class _Gpu(msgspec.Struct):
    index: Annotated[int, Meta(ge=0, le=1024)] | None = None
    uuid: str | None = None


class _Raylet(msgspec.Struct):
    state: str | None = None


class _Node(msgspec.Struct):
    ip: str | None = None
    gpus: list[_Gpu] | None = None
    raylet: _Raylet | None = None


class _Data(msgspec.Struct):
    summary: list[_Node] | None = None
    detail: _Node | None = None


class _Answer(msgspec.Struct):
    data: _Data | None = None


_decoder = msgspec.json.Decoder(_Answer)


def parse_nodes(body: bytes) -> list[RayNodeGpus]:
    """Return the living nodes that have GPUs with UUIDs, from `/nodes?view=summary` or `/nodes/<id>`.

    A node whose list is not whole (a GPU without UUID) is left out. Raises RayHeadError.
    """
    try:
        data = _decoder.decode(body).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RayHeadError(str(error)) from error
    if data is None:
        raise RayHeadError("the answer has no data")
    nodes = (data.summary or []) + ([] if data.detail is None else [data.detail])
    found = (_node_gpus(node) for node in nodes[:MAX_NODES])
    return [node for node in found if node is not None]


def read_nodes(dashboard_url: str, *, limit_seconds: float = 5.0, token: str | None = None) -> list[RayNodeGpus]:
    """Ask the dashboard, `http://127.0.0.1:8265`. Raises FetchError and RayHeadError."""
    url = dashboard_url.rstrip("/") + SUMMARY_PATH
    return parse_nodes(fetch_whole(url, limit_seconds=limit_seconds, max_bytes=MAX_ANSWER_BYTES, token=token))


def _node_gpus(node: _Node) -> RayNodeGpus | None:
    if node.raylet is not None and node.raylet.state == "DEAD":
        return None
    ip = plausible.text(node.ip or "")
    gpus = sorted(node.gpus or [], key=lambda gpu: gpu.index or 0)
    uuids = [plausible.text(gpu.uuid or "") for gpu in gpus[: plausible.MAX_GPUS + 1]]
    named = tuple(uuid for uuid in uuids if uuid is not None)
    if ip is None or not named or len(named) != len(uuids) or len(named) > plausible.MAX_GPUS:
        return None
    return RayNodeGpus(node_ip=ip, gpu_uuids=named)
