"""The verbs `models` and `machines`: what can be named, as tables."""

from __future__ import annotations

import click

from patrickstar.cli.machines import MACHINES
from patrickstar.cli.models import MODELS
from patrickstar.units import format_bytes

Row = tuple[str, ...]


@click.command()
def models() -> None:
    """List what --model knows by name."""
    rows: list[Row] = [("name", "family", "layers", "hidden", "heads", "vocabulary", "positions", "parameters")]
    for name, shape in MODELS.items():
        numbers = (shape.layers, shape.hidden, shape.heads, shape.vocab, shape.positions)
        rows.append((name, shape.family, *map(str, numbers), _count(shape.numel())))
    _table(rows, left=2)


@click.command()
def machines() -> None:
    """Machines with known figures, each one node."""
    rows: list[Row] = [("name", "accelerators", "each", "host", "16-bit matmul", "link each way", "disk read")]
    for name, machine in MACHINES.items():
        rows.append(
            (
                name,
                f"{machine.devices} x {machine.device}" if machine.devices else "none",
                format_bytes(machine.device_bytes) if machine.devices else "-",
                format_bytes(machine.host_bytes),
                f"{machine.matmul_16bit / 1e12:.4g} TFLOP/s",
                f"{machine.link / 1e9:.4g} GB/s" if machine.link else "-",
                f"{machine.disk_read / 1e9:.4g} GB/s" if machine.disk_read else "-",
            )
        )
    _table(rows, left=2)


def _count(numel: int) -> str:
    return f"{numel / 1e9:.2f}B" if numel >= 1e9 else f"{numel / 1e6:.1f}M"


def _table(rows: list[Row], *, left: int) -> None:
    """Prints columns, the first `left` of them flush left, so that `grep` and `awk` see plain lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())
