# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon list`: the GPUs of this host, once."""

import time

import click

from verl_gpumonitor.model.vocabulary import GpuState

from . import columns
from .gpus import sampling, unread

_FIELDS = (*columns.COLUMNS,)


@click.command("list", short_help="Show the GPUs of this host.", epilog="Example: gpumon list --json")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, with all that is known.")
def command(*, as_json: bool) -> None:
    """Show each GPU with its index, name, UUID, memory and temperature. Exit code 3: there is none."""
    with sampling(1.0) as sampler:
        node = sampler.latest()
    if (untold := unread(node)) is not None:
        click.echo(f"gpumon: {untold}", err=True)
    for gpu in node.gpus:
        if as_json:
            click.echo(columns.json_row(gpu, _FIELDS, unix=time.time()).decode(), nl=False)
            continue
        used, total = (columns.COLUMNS[name].shown(gpu) for name in ("memory.used", "memory.total"))
        load = columns.COLUMNS["utilization.gpu"].shown(gpu)
        parts = [
            f"{gpu.index if gpu.index is not None else '?':>2}  {gpu.model or 'unknown':<24} {gpu.uuid}",
            f"{_text(used)}/{_text(total)} MiB",
            f"{_text(load)}%",
            f"{_text(columns.COLUMNS['temperature.gpu'].shown(gpu))} C",
        ]
        if gpu.state is not GpuState.OK:
            parts.append(str(columns.COLUMNS["state"].shown(gpu)))
        click.echo("  ".join(parts))


def _text(value: columns.Value) -> str:
    if value is None:
        return "?"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
