"""The verb `plan`: whether a model fits, how much it needs and what moves, without running or allocating anything."""

from __future__ import annotations

import gc
import json
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import click

from patrickstar.cli import flags
from patrickstar.cli.machines import MachineSource
from patrickstar.cli.models import ModelSource, check_length
from patrickstar.cli.predict import forecast_row, predict, with_precision
from patrickstar.cli.together import Together, Tried, largest, together_options
from patrickstar.core.shard_layout import RankOf
from patrickstar.errors import some
from patrickstar.units import format_budget, format_bytes

if TYPE_CHECKING:
    from patrickstar.session.forecast import Forecast

DOES_NOT_FIT = 3
# Keys of --json that need a model of time, or the search for the largest of a family; null until these are there.
_UNKNOWN_YET: Final = MappingProxyType(
    dict.fromkeys(("bound_by", "tokens_per_second", "tflops", "largest_batch", "largest_model_parameters"))
)


@click.command()
@click.option(
    "--machine",
    metavar="NAME|FILE",
    help="Plan for a machine that is not here: `patrickstar machines` lists the names, `patrickstar doctor --measure` writes the files.",
)
@flags.whole_number("--world", 1, says="Ranks that share the model, the batch, and the budgets of their machines.")
@flags.batch_options
@flags.clip_option
@flags.memory_options
@together_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@flags.debug_option
def plan(**given: Any) -> int:
    """Say whether a model fits, its peaks by tier, and the bytes transferred per step."""
    from patrickstar.step.budgets import find_resources

    arguments, world = flags.memory_of(given), given["world"]
    together = Together.of(given, ranks=None if world == 1 else world)
    world = max(world, together.size)
    flags.expect_rows(given["batch_size"], world // together.size)
    machine = None if given["machine"] is None else MachineSource.find(given["machine"])
    source = ModelSource.find(given["model"])
    config = source.config()
    check_length(config, given["seq_len"])
    has = find_resources(arguments) if machine is None else machine.resources(arguments)
    arguments, chosen = with_precision(arguments, has)
    model = source.build_on_meta()
    shape = {name: given[name] for name in ("batch_size", "seq_len")}
    gc.freeze()  # what there is by now stays, and need not be looked at each time that garbage is collected
    try:
        # As many on a machine as it has devices; all on one, where it has none or is this one.
        which = RankOf(0, world, min(world, (0 if machine is None else machine.figures.devices) or world))
        asked: dict[str, Any] = {"arguments": arguments, "has": has, "which": which, "together": together}
        ask = partial(predict, model, clip=given["clip"] is not None, **asked)
        with together.imagined(model, ranks=world):
            forecast = ask(**shape)
            sent, found = {}, {}
            if together.flag:
                sent = together.sent(model, given["batch_size"] * together.size // world, given["seq_len"])
            if together.flag and given["as_json"]:
                positions = getattr(config, "max_position_embeddings", None)
                ways = {"seq_len": (together.multiple, positions), "batch_size": (world // together.size, None)}
                for name, (of, most) in ways.items():

                    def tried(size: int, name: str = name) -> Tried:
                        is_first = size == shape[name]
                        return Tried.of(size, forecast if is_first else ask(**{**shape, name: size}, advises=False))

                    found[name] = largest(tried, shape[name], of=of, most=most)
    finally:
        gc.unfreeze()
    if machine is not None:
        machine.expect_within(forecast.budget, has)
    precision = str(arguments.precision)
    if given["as_json"]:
        row = _row(forecast, precision=precision, device=has.device)
        if together.flag:
            row |= {"sent": sent, "largest_sequence": found["seq_len"], "largest_batch": found["batch_size"]}
        click.echo(json.dumps({**row, "machine": None if machine is None else machine.name}, allow_nan=False))
    else:
        said = [*([] if machine is None else machine.lines(arguments, has, which)), *filter(None, [chosen])]
        lines = [*said, *_lines(source.name, forecast, which, precision=precision)]
        beside = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in sent.items())
        click.echo("\n".join([*lines, f"  sent in a forward and backward  {beside}"] if beside else lines))
    return 0 if forecast.fits else DOES_NOT_FIT


def _row(forecast: Forecast, *, precision: str, device: str) -> dict[str, Any]:
    return {
        **forecast_row(forecast),
        "fits": forecast.fits,
        "minimum": dict(forecast.minimum),
        "budget": dict(forecast.budget),
        "device": device,
        "precision": precision,
        "model_data_by_rank": list(forecast.by_rank) or [forecast.model_data_bytes],
        **_UNKNOWN_YET,
        **({} if forecast.fits else {"refusal": forecast.refusal}),
    }


def _lines(name: str, forecast: Forecast, which: RankOf, *, precision: str) -> list[str]:
    data = forecast.model_data_bytes
    share = f"{data / forecast.parameters:.4g} bytes per parameter" if forecast.parameters else ""
    lines = [
        f"{name}: {forecast.parameters / 1e6:.1f}M parameters, model states {format_bytes(data)} ({share}), {precision}",
        "fits" if forecast.fits else f"does not fit: {forecast.refusal}",
    ]
    for tier in ("device", "host", "disk"):
        peak, budget = forecast.peak.get(tier, 0), forecast.budget.get(tier)
        minimum = forecast.minimum.get(tier, 0)
        if peak or minimum:
            parts = [f"peak {format_bytes(peak)}"] if forecast.fits else []
            if tier == "device" and forecast.workspace_bytes:
                parts.append(f"fixed costs (workspaces of kernels) {format_bytes(forecast.workspace_bytes)}")
            parts += [f"budget {format_bytes(budget)}"] if budget is not None else []
            parts += [f"smallest that fits {format_budget(minimum)}"] if minimum else []
            lines.append(f"  {tier:6}  {', '.join(parts)}")
    names = {"ranks": "to other ranks"}
    moved = [f"{names.get(link, link)} {format_bytes(nbytes)}" for link, nbytes in forecast.moved.items() if nbytes]
    if forecast.fits:
        lines.append(f"  transferred per step  {', '.join(moved) if moved else 'nothing'}")
    if forecast.by_rank:
        shares = some([format_bytes(nbytes) for nbytes in forecast.by_rank], most=8)
        here = f"{which.size} ranks, {which.local_size} on a machine"
        lines.append(f"  {here}: peaks and transfers are one rank's, budgets those of a machine")
        lines.append(f"  model states by rank  {shares}")
    return lines
