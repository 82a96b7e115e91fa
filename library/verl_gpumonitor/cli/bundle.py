# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon bundle`: the last half hour of a job on a cluster, as a trace for the desk."""

from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from .bundles.gathering import BundleError, Gathering
from .bundles.kubectl import Kubectl, KubectlError
from .bundles.merge import Bundle
from .recording.file import Output, TraceFile, open_output
from .recording.recorder import encoded
from .times import clock

_FLUSH_BYTES: Final = 1 << 20
MAX_SHOWN: Final = 20
"""Notes that are printed; all are in the file."""


@click.command(
    "bundle",
    short_help="Fetch the last half hour of a job from its cluster.",
    epilog="Example: gpumon bundle team-a/grpo-8b -o run.jsonl.gz",
)
@click.argument("monitor", metavar="[NAMESPACE/]NAME")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    help="File to write, packed if it ends in .gz; `-` is standard output. A file that is there is kept as FILE.1."
    " [default: NAME.jsonl.gz]",
)
@click.option("-n", "--namespace", help="Namespace of the GPUMonitor; without it the context's own.")
@click.option("--kubectl", default="kubectl", show_default=True, help="Program that reads the cluster, as you.")
@click.option("--context", help="Context of the kubeconfig.")
@click.option("--kubeconfig", type=click.Path(dir_okay=False), help="Another kubeconfig.")
def command(
    *,
    monitor: str,
    output: Path | None,
    namespace: str | None,
    kubectl: str,
    context: str | None,
    kubeconfig: str | None,
) -> None:
    """Gather what the sidecars of a GPUMonitor's job keep, about half an hour, into one trace.

    It is read by `gpumon diagnose`, `report` and `replay`. The sidecars are asked through the API server, with your own
    rights: get on the GPUMonitor, list on pods, get on pods/proxy. A pod that does not answer is said, here and in the
    file. Of a job whose pods are gone there is no record. Exit code 1: there is nothing to write.
    """
    with_namespace, _, name = monitor.rpartition("/")
    if not name or "/" in with_namespace:
        raise click.BadParameter(f"{monitor!r} is no NAME and no NAMESPACE/NAME", param_hint="[NAMESPACE/]NAME")
    if namespace and with_namespace and namespace != with_namespace:
        raise click.BadParameter(f"{namespace!r} is another namespace than that of {monitor}", param_hint="--namespace")
    options = [*(["--kubeconfig", kubeconfig] if kubeconfig else []), *(["--context", context] if context else [])]
    client = Kubectl(kubectl, options)
    try:
        with ExitStack() as files:
            where = with_namespace or namespace or client.namespace()
            bundle = Gathering(client, namespace=where, name=name, files=files, tell=_say).bundle()
            _write(bundle, output if output is not None else Path(f"{name}.jsonl.gz"))
    except (BundleError, KubectlError) as error:
        raise click.ClickException(str(error)) from error
    except BrokenPipeError:
        raise SystemExit(0) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or output or 'the bundle'}: {error.strerror or error}") from error


def _write(bundle: Bundle, path: Path) -> None:
    target = None if str(path) == "-" else path
    output = open_output(target, encoded(bundle.header()))
    if isinstance(output, TraceFile) and output.kept_as is not None:
        _say(f"{target} was there and is kept as {output.kept_as}")
    try:
        seconds, lines = _write_lines(bundle, output)
    finally:
        output.close()
    notes = bundle.all_notes()
    for note in notes[:MAX_SHOWN]:
        _say(note)
    if len(notes) > MAX_SHOWN:
        _say(f"{len(notes) - MAX_SHOWN} more notes are in the file")
    gpus = sum(len(record.gpus) for record in bundle.records.values())
    _say(
        f"{len(bundle.records)} of {len(bundle.pods)} pods, {gpus} GPU{'s' * (gpus != 1)}, {clock(seconds)},"
        f" {lines} lines to {target or 'standard output'}"
    )
    if target is not None:
        _say(f"see it with: gpumon diagnose {target}")


def _write_lines(bundle: Bundle, output: Output) -> tuple[float, int]:
    """Write all lines but the first; return the time of the last and how many they are."""
    seconds, lines, waiting = 0.0, 0, 0
    for record in bundle.lines():
        line = encoded(record)
        output.write(line)
        seconds, lines, waiting = record.t, lines + 1, waiting + len(line)
        if waiting >= _FLUSH_BYTES:
            output.flush()
            waiting = 0
    output.flush()
    return seconds, lines


def _say(text: str) -> None:
    click.echo(f"gpumon: {text}", err=True)
