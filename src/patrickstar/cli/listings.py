"""The verbs `models` and `machines`: the names that can be given, as tables."""

from __future__ import annotations

import click

from patrickstar.cli.machines import MACHINES
from patrickstar.cli.models import MODELS
from patrickstar.units import format_bytes


@click.command()
def models() -> None:
    """List what --model knows by name."""
    rows: list[tuple[str, ...]] = [
        ("name", "family", "layers", "hidden", "heads", "vocabulary", "positions", "parameters")
    ]
    for name, shape in MODELS.items():
        numbers = (shape.layers, shape.hidden, shape.heads, shape.vocab, shape.positions)
        numel = shape.numel()
        count = f"{numel / 1e9:.2f}B" if numel >= 1e9 else f"{numel / 1e6:.1f}M"
        rows.append((name, shape.family, *map(str, numbers), count))
    print_table(rows)


@click.command()
def machines() -> None:
    """Machines with known figures, each one node."""
    rows: list[tuple[str, ...]] = [
        ("name", "accelerators", "each", "host", "16-bit matmul", "link each way", "disk read")
    ]
    for name, machine in MACHINES.items():
        devices = f"{machine.devices} x {machine.device}" if machine.devices else "none"
        each = format_bytes(machine.device_bytes) if machine.devices else "-"
        rates = [f"{rate / 1e9:.4g} GB/s" if rate else "-" for rate in (machine.link, machine.disk_read)]
        matmul = f"{machine.matmul_16bit / 1e12:.4g} TFLOP/s"
        rows.append((name, devices, each, format_bytes(machine.host_bytes), matmul, *rates))
    print_table(rows)


def print_table(rows: list[tuple[str, ...]], *, flush_left: int = 2) -> None:
    """Prints columns, so many of them flush left, so that `grep` and `awk` see plain lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:{'<' if at < flush_left else '>'}{widths[at]}}" for at, cell in enumerate(row)]
        click.echo("  ".join(cells).rstrip())
