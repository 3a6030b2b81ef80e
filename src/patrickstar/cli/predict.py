"""The needs of a step, known before it runs: the forecast of a causal language model on one batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from patrickstar.cli.flags import MEMORY
from patrickstar.cli.together import Together
from patrickstar.config.arguments import MemoryOptions
from patrickstar.core.shard_layout import RankOf

if TYPE_CHECKING:
    from torch import nn

    from patrickstar.session.forecast import Forecast
    from patrickstar.step.resources import Resources


def predict(
    model: nn.Module,
    *,
    batch_size: int,
    seq_len: int,
    clip: bool,
    arguments: MemoryOptions,
    has: Resources | None = None,
    which: RankOf | None = None,
    together: Together | None = None,
    advises: bool = True,
) -> Forecast:
    """The forecast of a step on batches of a shape; the model may be on the meta device.

    `has`: what another machine has. `which`: the rank whose part of the batch it is; None: all of it is one process's. `together`: how it is shared.
    `advises`: as `forecast` has it.
    """
    import torch

    from patrickstar.cli.batches import as_batch
    from patrickstar.session.forecast import forecast

    which = None if which is None or which.size == 1 else which
    together = together or Together()
    rows = batch_size if which is None else batch_size * together.size // which.size
    batch = together.shard(as_batch(torch.zeros(rows, seq_len, dtype=torch.int64)))
    grid = together.q**2  # whose ranks have blocks of their own, and the machine together
    shares = which and RankOf(which.rank // grid, which.size // grid, which.local_size)
    return forecast(model, batch, clip=clip, has=has, which=shares, advises=advises, **manage_arguments(arguments))


def with_precision(arguments: MemoryOptions, has: Resources) -> tuple[MemoryOptions, str]:
    """The arguments with the precision that what computes is fast in, where none is given; and what to say of that.

    bf16 first, then fp16 on a GPU where the step allows it, else fp32.
    """
    if arguments.precision is not None:
        return arguments, ""
    chosen = "bf16" if "bf16" in has.fast_types else "fp32"
    if chosen == "fp32" and has.on_gpu and "fp16" in has.fast_types and arguments.step != "in_backward":
        chosen = "fp16"
    why = f"the compute device is fast in {chosen}: weights are {chosen}, with fp32 masters; --precision fp32 keeps all in fp32"
    return replace(arguments, precision=chosen), "" if chosen == "fp32" else why


def manage_arguments(arguments: MemoryOptions) -> dict[str, Any]:
    """Checked arguments as `manage` takes them: the loop clips by itself, those of later versions stay as they are."""
    return {name: getattr(arguments, name) for name in (*MEMORY, "weights", "options")}


def forecast_row(forecast: Forecast) -> dict[str, Any]:
    """The entries that every report has about a forecast; what is predicted of one step: peak by tier, bytes by link and (later) seconds."""
    peak = dict(forecast.peak)
    if forecast.fits:
        peak["host"] += forecast.beside_bytes
    predicted = {"peak": peak, "moved": dict(forecast.moved), "step_seconds": None}
    numbers = {"parameters": forecast.parameters, "model_data_bytes": forecast.model_data_bytes}
    return {**numbers, "predicted": predicted}


def start_row(forecast: Forecast) -> dict[str, Any]:
    """Entries of the log's first row about a forecast."""
    layout = forecast.layout
    plan = {
        "fits": forecast.fits,
        "minimum": dict(forecast.minimum),
        "chunks": layout.n_chunks,
        "chunk_numel": layout.chunk_numel,
        "padding": layout.padding,
        "layout": layout.digest(),
        "digests": [plan.digest() for plan in forecast.plans],
    }
    return {**forecast_row(forecast), "plan": plan}
