# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sidecar's metrics on one host, without Kubernetes: `gpumon serve`, and this module as a program in a container.

`gpumon` finds its subcommand by an entry point, as the library does not know this package. It is made by a function:
the sidecar's image has this module, and has no click.
"""

import errno
import os
import signal
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from verl_gpumonitor.model import wiring

if TYPE_CHECKING:
    import click

    from .host_program import HostSettings

ENDING = (signal.SIGTERM, signal.SIGINT)
EXIT_NOT_SERVED = 1
NAMESPACE = "host"
"""Value of the label `namespace` where nobody says another."""


def make_command() -> "click.Command":
    """Return the subcommand `serve`."""
    import click

    @click.command(
        "serve",
        short_help="Serve this host's GPUs to Prometheus.",
        epilog="Example: gpumon serve --address 127.0.0.1 --port 9410",
    )
    @click.option("--port", type=click.IntRange(0, 65535), default=wiring.METRICS_PORT, show_default=True)
    @click.option("--address", default="", help="Address to listen on; without it all of this host.")
    @click.option(
        "--interval", type=click.FloatRange(0.1, 60.0), default=1.0, show_default=True, help="Seconds between samples."
    )
    @click.option("--namespace", default=NAMESPACE, show_default=True, help="Value of the label `namespace`.")
    @click.option("--name", default=None, help="Value of the label `pod`; without it the host's name.")
    @click.option("--ray/--no-ray", default=True, show_default=True, help="Ask Ray on this host which stage runs.")
    @click.option(
        "--marks-port",
        type=click.IntRange(0, 65535),
        default=wiring.MARKS_PORT,
        show_default=True,
        help="UDP port, on localhost alone, for the marks of training programs; 0: none.",
    )
    def command(
        *, port: int, address: str, interval: float, namespace: str, name: str | None, ray: bool, marks_port: int
    ) -> None:
        """Serve /metrics and /healthz until Ctrl-C or SIGTERM: names and labels are those of the sidecar.

        All GPUs of the host count as its own. Without a driver the metrics say so, and it waits for one. Exit code 1:
        the address cannot be had.
        """
        _prepare()
        from verl_gpumonitor.stages.sources.ray_host import dashboard_url

        from .host_program import HostSettings

        settings = HostSettings(
            namespace=namespace,
            name=name or socket.gethostname(),
            interval_seconds=interval,
            ask_ray=ray,
            ray_dashboard_url=dashboard_url(),
            marks_port=marks_port or None,
        )
        _serve(settings, address=address, port=port)

    return command


def main() -> NoReturn:
    """Serve by the variables that a sidecar has; none of them is needed."""
    _prepare()
    _serve(_from_environment(os.environ), address="", port=_port(os.environ))


def _prepare() -> None:
    """Do what must come before the first thread, which inherits blocked signals."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def _serve(settings: "HostSettings", *, address: str, port: int) -> NoReturn:
    from .host_program import Host, listen, say

    try:
        listener = listen(address, port)
    except OSError as error:
        say(f"gpumon: {_trouble(error, address=address, port=port)}")
        raise SystemExit(EXIT_NOT_SERVED) from error
    where = f"{address or socket.gethostname()}:{listener.getsockname()[1]}"
    say(f"Serving http://{where}/metrics until Ctrl-C. Changes of state follow, one JSON object a line.")
    Host(settings).run(listener, ENDING)


def _from_environment(environ: Mapping[str, str]) -> "HostSettings":
    from verl_gpumonitor.stages.sources.ray_host import dashboard_url

    from .host_program import HostSettings
    from .settings import ENV_MARKS_PORT

    return HostSettings(
        namespace=environ.get(wiring.ENV_POD_NAMESPACE) or NAMESPACE,
        name=environ.get(wiring.ENV_POD_NAME) or socket.gethostname(),
        interval_seconds=float(environ.get(wiring.ENV_SAMPLE_INTERVAL) or 1.0),
        ray_dashboard_url=dashboard_url(environ.get(wiring.ENV_RAY_DASHBOARD_URL)),
        marks_port=int(environ.get(ENV_MARKS_PORT) or wiring.MARKS_PORT) or None,
    )


def _port(environ: Mapping[str, str]) -> int:
    return int(environ.get(wiring.ENV_METRICS_PORT) or wiring.METRICS_PORT)


def _trouble(error: OSError, *, address: str, port: int) -> str:
    where = f"port {port}" + (f" of {address}" if address else "")
    if error.errno == errno.EADDRINUSE:
        return f"{where} is taken, perhaps by another `gpumon serve`: choose another one with --port"
    return f"cannot listen on {where}: {error.strerror or error}"


if __name__ == "__main__":
    main()
