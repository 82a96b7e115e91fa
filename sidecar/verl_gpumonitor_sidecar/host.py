# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon serve`: the sidecar's metrics on one host, without Kubernetes.

It is a subcommand of `gpumon`, which finds it by its entry point: the library does not know this package.
"""

import errno
import signal
import socket

import click

from verl_gpumonitor.model import wiring

ENDING = (signal.SIGTERM, signal.SIGINT)
EXIT_NOT_SERVED = 1


@click.command(
    "serve",
    short_help="Serve this host's GPUs to Prometheus.",
    epilog="Example: gpumon serve --address 127.0.0.1 --port 9410",
)
@click.option("--port", type=click.IntRange(0, 65535), default=wiring.METRICS_PORT, show_default=True, help="0: any.")
@click.option("--address", default="", help="Address to listen on; without it all of this host.")
@click.option(
    "--interval", type=click.FloatRange(0.1, 60.0), default=1.0, show_default=True, help="Seconds between two samples."
)
@click.option("--namespace", default="host", show_default=True, help="Value of the label `namespace`.")
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

    All GPUs of the host count as its own. Without a driver the metrics say so, and it waits for one. Exit code 1: the
    address cannot be had.
    """
    # Blocked before the first thread is there, which inherits it: signals are waited for by this thread alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    from . import lean

    lean.prepare()
    from .host_program import Host, HostSettings, listen

    try:
        listener = listen(address, port)
    except OSError as error:
        click.echo(f"gpumon: {_trouble(error, address=address, port=port)}", err=True)
        raise SystemExit(EXIT_NOT_SERVED) from error
    settings = HostSettings(
        namespace=namespace,
        name=name or socket.gethostname(),
        interval_seconds=interval,
        ask_ray=ray,
        marks_port=marks_port or None,
    )
    where = f"{address or socket.gethostname()}:{listener.getsockname()[1]}"
    click.echo(
        f"Serving http://{where}/metrics until Ctrl-C. Changes of state follow, one JSON object a line.", err=True
    )
    Host(settings).run(listener, ENDING)


def _trouble(error: OSError, *, address: str, port: int) -> str:
    where = f"port {port}" + (f" of {address}" if address else "")
    if error.errno == errno.EADDRINUSE:
        return f"{where} is taken, perhaps by another `gpumon serve`: choose another one with --port"
    return f"cannot listen on {where}: {error.strerror or error}"
