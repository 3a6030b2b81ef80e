"""The verb `plan`: whether a model fits, how much it needs and what moves, without running or allocating anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from patrickstar.cli.flags import batch_options, debug_option, memory_flags, memory_options, model_option
from patrickstar.cli.model_source import ModelSource, check_length
from patrickstar.cli.predict import budgets, predict, predicted
from patrickstar.config.arguments import check_arguments
from patrickstar.config.options import Options
from patrickstar.units import format_bytes

if TYPE_CHECKING:
    from patrickstar.session.forecast import Forecast

DOES_NOT_FIT = 3


@click.command()
@model_option
@batch_options(batch_size=4, seq_len=64)
@memory_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@debug_option
def plan(**given: Any) -> int:
    """Say whether a model fits, its peaks by tier, and the bytes that a step moves."""
    arguments = check_arguments(**memory_flags(given), options=Options(accumulate=given["accumulate"]))
    source = ModelSource.find(given["model"])
    check_length(source.config(), given["seq_len"])
    model = source.build_on_meta()
    forecast = predict(model, batch_size=given["batch_size"], seq_len=given["seq_len"], clip=False, arguments=arguments)
    if given["as_json"]:
        click.echo(json.dumps(_row(forecast), allow_nan=False))
    else:
        for line in _lines(source.name, forecast, budgets(model, arguments)):
            click.echo(line)
    return 0 if forecast.fits else DOES_NOT_FIT


def _row(forecast: Forecast) -> dict[str, Any]:
    return {
        "predicted": predicted(forecast).row(),
        "fits": forecast.fits,
        "minimum": dict(forecast.minimum),
        "parameters": forecast.parameters,
        "model_data_bytes": forecast.model_data_bytes,
        **({} if forecast.fits else {"refusal": forecast.refusal}),
    }


def _lines(name: str, forecast: Forecast, allowed: Mapping[str, int]) -> list[str]:
    data = forecast.model_data_bytes
    share = f"{data / forecast.parameters:.4g} bytes a parameter" if forecast.parameters else ""
    lines = [
        f"{name}: {forecast.parameters / 1e6:.1f}M parameters, model data {format_bytes(data)} ({share})",
        "fits" if forecast.fits else f"does not fit: {forecast.refusal}",
    ]
    for tier in ("device", "host", "disk"):
        peak, budget = forecast.peak.get(tier, 0), allowed.get(tier)
        minimum = forecast.minimum.get(tier, 0)
        if peak or minimum:
            parts = [f"peak {format_bytes(peak)}"] if forecast.fits else []
            parts += [f"budget {format_bytes(budget)}"] if budget is not None else []
            parts += [f"smallest that fits {format_bytes(minimum)}"] if minimum else []
            lines.append(f"  {tier:6}  {', '.join(parts)}")
    moved = [f"{link} {format_bytes(nbytes)}" for link, nbytes in forecast.moved.items() if nbytes]
    if forecast.fits:
        lines.append(f"  moved   {', '.join(moved) if moved else 'nothing'} a step")
    return lines
