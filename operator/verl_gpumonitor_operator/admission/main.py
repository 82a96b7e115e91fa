# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Entry point of the webhook process: `gpumon-webhook --settings FILE`."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import disable_created_metrics

from verl_gpumonitor_operator import logs
from verl_gpumonitor_operator.settings import Settings, SettingsError, load

from . import kubeapi
from .kubeapi import Address, ApiError, KubeApi
from .server import Server

log = logging.getLogger(__name__)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpumon-webhook", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="settings.json as the chart renders it")
    parser.add_argument("--host", help="address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=9443, help="port of /mutate, TLS (default: %(default)s)")
    parser.add_argument("--health-port", type=int, default=8081, help="port of /healthz, /readyz, /metrics")
    outside = parser.add_argument_group("outside of a cluster")
    outside.add_argument("--api-server", metavar="URL", help="the API server (default: that of the cluster we run in)")
    outside.add_argument("--api-ca", type=Path, metavar="FILE", help="CA of the API server")
    outside.add_argument("--api-token", type=Path, metavar="FILE", help="file with a token")
    outside.add_argument("--api-certificate", type=Path, nargs=2, metavar="FILE", help="client certificate and its key")
    return parser.parse_args(argv)


def _address(arguments: argparse.Namespace) -> Address:
    if arguments.api_server is None:
        return kubeapi.in_cluster(os.environ)
    certificate = arguments.api_certificate
    return Address(
        url=arguments.api_server,
        ca_file=arguments.api_ca,
        token_file=arguments.api_token,
        client_certificate=(certificate[0], certificate[1]) if certificate else None,
    )


async def _serve(settings: Settings, address: Address, arguments: argparse.Namespace) -> None:
    async with KubeApi(address) as api:
        server = Server(settings, api, host=arguments.host, port=arguments.port, health_port=arguments.health_port)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        await server.run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM. Returns 2 for settings that cannot be used, 1 where no server can be started."""
    arguments = _arguments(argv)
    logs.configure()
    # A timestamp series beside each counter would double what Prometheus stores, and nobody asks for it.
    disable_created_metrics()  # type: ignore[no-untyped-call] # the package types all but this one
    try:
        asyncio.run(_serve(load(arguments.settings), _address(arguments), arguments))
    except SettingsError as error:
        log.error("the settings cannot be used", extra={"error": str(error)})
        return 2
    except (ApiError, OSError) as error:
        log.error("the webhook cannot be started", extra={"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
