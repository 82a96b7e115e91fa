# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server in the place of Ray's agent and dashboard, and the page that an agent serves."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import simgpu


class Ray:
    """Answers as Ray's agent and dashboard do, or as told."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.asked: list[tuple[float, str]] = []
        ray = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                ray.asked.append((time.monotonic(), path))
                self.send_response(200 if path in ray.pages else 404)
                self.end_headers()
                self.wfile.write(ray.pages.get(path, b""))

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002, ARG002 - http.server's
                return

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """Clients that leave are part of the tests."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def wait_until_asked(self, path: str, seconds: float = 20.0) -> None:
        """Wait until somebody asks for a page once more, and so gets what it says now."""
        before, end = len(self.asked), time.monotonic() + seconds
        while not any(asked == path for _, asked in self.asked[before:]):
            assert time.monotonic() < end, f"{path}: {self.asked[-20:]}"
            time.sleep(0.05)

    def close(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()


def agent_page(indexes: list[int], *, named: bool = True) -> bytes:
    """Return the lines that matter of an agent whose container has these GPUs of the node."""
    lines = ['ray_node_mem_used{NodeAddress="10.0.0.9"} 5e+09', 'ray_node_mem_total{NodeAddress="10.0.0.9"} 6.4e+10']
    for number, index in enumerate(indexes):
        uuid = f',GpuUuid="{simgpu.uuid_of(index)}"' if named else ""
        labels = f'{{GpuIndex="{number}",GpuDeviceName="NVIDIA H100"{uuid},NodeAddress="10.0.0.9"}}'
        lines += [
            f"ray_node_gpus_available{labels} 1.0",
            f"ray_node_gpus_utilization{labels} 40.0",
            f"ray_node_gram_used{labels} 20000.0",
            f"ray_node_gram_available{labels} 61559.0",
            f"ray_node_gpu_power_milliwatts{labels} 250000.0",
            f"ray_node_gpu_temperature_celsius{labels} 51.0",
        ]
    return "\n".join([*lines, ""]).encode()
