"""What each variant of `step.py` runs in a process of its own: a model, plain or managed, that takes a step when it is told to."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from machine import usable_cores
from torch import nn
from variants import Variant

import patrickstar
from patrickstar.cli.batches import Batch, Batches, random_tokens
from patrickstar.cli.loop import ResidentGrowth
from patrickstar.cli.models import ModelSource, check_length
from patrickstar.cli.predict import predict
from patrickstar.config.arguments import check_arguments
from patrickstar.memory.allocator import release_free_memory
from patrickstar.memory.process import reset_peak

__all__ = ["BYTES_PER_PARAMETER", "checkpointed", "model_of", "work"]

BYTES_PER_PARAMETER: Final = 16
LAYER_NAMES: Final = ("n_layer", "num_hidden_layers")


def model_of(arguments: argparse.Namespace) -> ModelSource:
    """The model by name, cut to `--layers`."""
    source = ModelSource.find(arguments.model)
    check_length(source.config(), arguments.seq_len)
    if arguments.layers is None:
        return source
    cut = {name: arguments.layers for name in LAYER_NAMES if name in source.settings}
    return replace(source, name=f"{source.name} of {arguments.layers} layers", settings={**source.settings, **cut})


def checkpointed(model: Any, checkpointing: str) -> Any:
    """The model, its blocks computed again in backward where that is asked for."""
    if checkpointing == "on":
        # The older name is deprecated in transformers 5.23; versions before 5.2x have no other.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def work(pipe: Connection, arguments: argparse.Namespace, variant: Variant) -> None:
    """One process: says that it is ready (None) or why not, then steps whenever it is sent a round's number."""
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    source = model_of(arguments)
    shape = {"batch_size": arguments.batch_size, "seq_len": arguments.seq_len}
    tokens, _ = random_tokens(source.config().vocab_size)
    batches = Batches(tokens, **shape, seed=0)
    torch.manual_seed(0)
    model = checkpointed(source.build(), variant.checkpointing)
    with torch.no_grad():
        # Two threads that call a function of MKL for the first time may get other last bits than ever after, with and without us.
        model(**Batches(tokens, **shape, seed=1).next())
    release_free_memory()
    growth = ResidentGrowth(model)
    with ExitStack() as end:
        try:
            bound = {}
            if variant.managed:
                options = memory_options(model, variant, source, arguments)
                bound = {name: options[name] for name in ("device_memory", "host_memory") if name in options}
                session = patrickstar.manage(model, torch.optim.AdamW(model.parameters(), lr=1e-4), **options)
                end.callback(session.close, keep_weights=False)
                step = managed(model, session)
            else:
                session, step = None, plain(model, variant)
            reset_peak()  # the weights that were there before are the session's now
            pipe.send(None)
            while pipe.recv() is not None:
                pipe.send({**timed(step, batches.next(), session, growth), "bound": bound})
        except patrickstar.Error as error:
            pipe.send(f"{type(error).__name__}: {error}")


def timed(step: Step, batch: Batch, session: patrickstar.Session | None, growth: ResidentGrowth) -> dict[str, Any]:
    """One step, and what it took."""
    before = dict(session.stats().moved) if session is not None else {}
    began = time.perf_counter()
    loss = step(batch)
    row: dict[str, Any] = {
        "seconds": time.perf_counter() - began,
        "loss": float(loss.detach()).hex(),
        "grew": growth.peak(),
    }
    if session is not None:
        stats = session.stats()
        row["moved"] = {link: nbytes - before[link] for link, nbytes in stats.moved.items()}
        row["device_peak"] = stats.peak["device"]
    return row


Step = Callable[[Batch], torch.Tensor]


def plain(model: nn.Module, variant: Variant) -> Step:
    """A step of an ordinary loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    narrow = partial(torch.autocast, "cpu", torch.bfloat16) if variant.precision == "bf16" else nullcontext

    def step(batch: Batch) -> torch.Tensor:
        with narrow():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def managed(model: nn.Module, session: patrickstar.Session) -> Step:
    """The same on a session; the scaler does nothing but in fp16."""
    optimizer: Any = session.optimizer
    scaler: Any = session.scaler

    def step(batch: Batch) -> torch.Tensor:
        loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


def memory_options(
    model: nn.Module, variant: Variant, source: ModelSource, arguments: argparse.Namespace
) -> dict[str, Any]:
    """What `manage` is given."""
    # A scale that stays: a step that is skipped would count as a fast one.
    options = patrickstar.Options(
        eviction=variant.eviction,
        compute=variant.compute,
        chunk_size=variant.chunk,
        tile_rows=variant.tile_rows,
        loss_scale=patrickstar.LossScale(initial=256.0, dynamic=False),
    )
    given: dict[str, Any] = {
        "device": variant.device,
        "precision": variant.precision,
        "step": variant.step,
        "options": options,
    }
    if variant.disk == "on":
        given["disk"] = arguments.disk
    bounded = "device_memory" if variant.device == "emulated" else "host_memory"
    if variant.share is not None:
        whole = BYTES_PER_PARAMETER * sum(parameter.numel() for parameter in model.parameters())
        given[bounded] = int(variant.share * whole)
    elif variant.budget == "minimum":
        forecast = predict(
            checkpointed(source.build_on_meta(), variant.checkpointing),
            batch_size=arguments.batch_size,
            seq_len=arguments.seq_len,
            clip=False,
            arguments=check_arguments(**given, **{bounded: "1KiB"}),
        )
        given[bounded] = forecast.minimum[bounded.removesuffix("_memory")]
    return given
