"""One run of `train`, from its request to its summary."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

import patrickstar
from patrickstar.checkpoint import rng
from patrickstar.checkpoint.reader import saved_steps
from patrickstar.cli.batches import VALIDATION_BATCHES, Batch, Batches, Data, prepare_data
from patrickstar.cli.display import Display, EventLog
from patrickstar.cli.flags import MEMORY
from patrickstar.cli.loop import LOSSES, TrainingRun, validation_loss
from patrickstar.cli.models import check_length
from patrickstar.cli.plain import Comparison, ManagedRun, PlainPrecision, PlainRun, Scaling, compare_plain, digests
from patrickstar.cli.predict import forecast_row, predict, start_row, with_precision
from patrickstar.cli.request import Request
from patrickstar.cli.stop import StopSignals
from patrickstar.cli.world import World
from patrickstar.config.arguments import MemoryOptions
from patrickstar.core.shard_layout import RankOf
from patrickstar.engine import memory_for
from patrickstar.memory.disk import expect_usable
from patrickstar.session.forecast import Forecast
from patrickstar.step.budgets import find_resources
from patrickstar.step.precision import find_precision


def run(request: Request, signals: StopSignals, world: World) -> int:
    """Trains, on all ranks; gives the exit status. patrickstar.Error: whatever keeps it from training."""
    display = Display(None if world.rank == 0 else Console(quiet=True))
    if world.rank > 0:
        request = replace(request, log_json=None)
    world.join()
    with _messages_to(display), ExitStack() as end:
        with world.joined.together("to prepare"):
            if request.configuration is not None:
                request.configuration.settings.tell(logging.getLogger("patrickstar"))
            config = request.source.config()
            check_length(config, request.seq_len)
            resuming = request.resume and bool(saved_steps(request.checkpoint_dir))
            if request.resume and not resuming:
                display.note("no checkpoint to resume from yet: starting afresh")
            log = end.enter_context(EventLog(request.log_json, append=resuming))
            request, model, forecast = _foresee(request, display, world)  # what does not fit reads no text
            data = prepare_data(
                request.data, vocab_size=config.vocab_size, own_tokenizer=request.source.tokenizer, display=display
            )
            device = computing_device(request.arguments)
            rows, shard = world.rows(request.batch_size), request.together.shard
            batches = Batches(data.train, **request.shape, seed=request.seed, device=device, rows=rows, shard=shard)
            validation = batches.held_out(data.held_out, most=VALIDATION_BATCHES)
        world.expect_alike(
            {"the text, the model or the flags": batches.state_dict(), "the checkpoints": resuming},
            "all ranks are given the same ones, and on every machine they are the same",
        )
        mesh = request.together.sizes or {"dp": world.size}
        log.write({"event": "start", "mesh": mesh, "config": _config(request, data, world), **start_row(forecast)})
        beside = "" if world.size == 1 else f" a rank, {world.size} ranks"
        display.note(f"computes on {_name_of(request.arguments, device)}{beside}")
        training = TrainingRun(request, model, batches, log=log, display=display, signals=signals, world=world)
        managed = _train(training, validation, forecast, resuming=resuming)
        if training.stopped is not None:
            return training.stopped
        if not request.compare_plain:
            return 0
        del training, model
        gc.collect()  # the session and all it holds: a module and its hooks refer to each other
        verdict = _compare(request, data, display, managed, world)
        display.note(str(verdict))
        return 0 if verdict.equal else 1


def _foresee(request: Request, display: Display, world: World) -> tuple[Request, nn.Module, Forecast]:
    """Builds the model, chooses what was left open of the request, and looks at what a step takes. BudgetError: it does not fit."""
    model = build_deferred(request, display)
    arguments = replace(request.arguments, weights=request.source.weights)
    if request.configuration is not None:
        arguments = memory_for(model, arguments, request.configuration.settings)
    arguments, chosen = with_precision(arguments, find_resources(arguments))
    if chosen:
        display.note(chosen)
    if arguments.disk is not None:
        expect_usable(arguments.disk)  # or the forecast would find too little memory
    which = RankOf(world.rank, world.size, world.local_size)
    together = request.together
    together.begin(model, ranks=world.size)
    asked: dict[str, Any] = {**request.shape, "clip": request.clip is not None, "arguments": arguments}
    forecast = predict(model, **asked, which=which, together=together)
    if forecast.refused is not None:
        raise forecast.refused
    return replace(request, arguments=arguments), model, forecast


def _train(training: TrainingRun, validation: Sequence[Batch], forecast: Forecast, *, resuming: bool) -> ManagedRun:
    request, progress = training.request, training.progress
    with ExitStack() as end:
        # Nobody wants the weights as tensors any more, and they may not fit.
        end.callback(training.session.close, keep_weights=False)
        if resuming:
            training.resume()
        if progress.first_validation_loss is None:
            progress.first_validation_loss = _validate(training, validation)
        random_state = rng.capture()
        # Peaks are this rank's, and so is what they are shown beside.
        ranks = training.world.local_size
        budgets = {tier: n if tier == "device" else n // ranks for tier, n in forecast.budget.items()}
        training.run(budgets=budgets)
        if training.stopped is None:
            progress.validation_loss = _validate(training, validation)
        summary = _summary(training, forecast)
        training.log.write(summary)
        training.display.summary(summary, budgets=budgets)
        if request.log_json is not None:
            training.display.note(f"log: {request.log_json}")
        compares = request.compare_plain and training.stopped is None
        final = digests(training.session.state_dict()) if compares else {}
        scaler, skipped = training.session.scaler, len(progress.losses) - training.session.stats().steps
        scaling = Scaling(scaler.get_scale(), skipped) if scaler.is_enabled() else None
        return ManagedRun(progress.losses, final, random_state, scaling)


def _compare(request: Request, data: Data, display: Display, managed: ManagedRun, world: World) -> Comparison:
    """Runs the steps of all ranks in plain PyTorch, on each of them."""
    arguments = request.arguments
    device = computing_device(arguments)
    _seed(request.seed)
    model = request.source.build().to(device)
    kept = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[str(arguments.precision)]
    found = find_precision(arguments, model, find_resources(arguments))
    precision = PlainPrecision(
        kept=kept,
        compute=found.compute,
        gradient=kept if request.accumulate == 1 else torch.float32,
        whole=found.whole,
        loss_scale=(arguments.options.loss_scale or patrickstar.LossScale()) if found.scales else None,
    )
    alike: dict[str, Any] = {**request.shape, "seed": request.seed, "device": device}
    rows = [world.rows(request.batch_size, rank) for rank in range(world.size)]
    run = PlainRun(
        model,
        [Batches(data.train, **alike, rows=own) for own in rows],
        optimizer=request.optimizer,
        schedule=request.rates,
        clip=request.clip,
        accumulate=request.accumulate,
        precision=precision,
    )
    with display.progress("plain PyTorch", len(managed.losses)) as advance:
        return compare_plain(run, managed, advance=advance)


def computing_device(arguments: MemoryOptions) -> torch.device:
    """The device that computes, as torch names it."""
    has = find_resources(arguments)
    return torch.device(has.device if has.on_gpu else "cpu")


def _name_of(arguments: MemoryOptions, device: torch.device) -> str:
    if arguments.device == "emulated":
        return "an emulated device"
    if device.type == "cpu":
        return f"the CPU, on {torch.get_num_threads()} threads"
    return f"the GPU {device} ({torch.cuda.get_device_name(device)})"


def build_deferred(request: Request, display: Display) -> nn.Module:
    """The model as the seed makes it, without memory for its parameters where its initialisation can be recorded."""
    _seed(request.seed)
    try:
        model = request.source.build_deferred()
    except patrickstar.LayoutError as error:
        display.note(f"warning: the whole model is built in memory first: {error}")
        _seed(request.seed)
        return request.source.build()
    if request.source.weights is not None:
        _seed(request.seed)  # reading weights draws nothing
    return model


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 - models draw from the global one


def _validate(training: TrainingRun, batches: Sequence[Batch]) -> float:
    with training.display.progress("validation", len(batches)) as advance:
        own = validation_loss(training.model, batches, advance=advance)
    loss = training.world.mean(own, "the validation loss")
    training.display.note(f"validation loss {loss:.4f}")
    return loss


def _config(request: Request, data: Data, world: World) -> dict[str, Any]:
    """Entries of the log about what was asked for."""
    flags = ("steps", "batch_size", "seq_len", "accumulate", "clip", "seed", "resume")
    disk, configuration = request.arguments.disk, request.configuration
    of_config = None if configuration is None else configuration.settings.schedule
    return {
        "model": request.source.name,
        "model_config": dict(request.source.settings),
        "data": list(request.data),
        "corpus": data.source,
        "tokenizer": data.tokenizer,
        "train_tokens": len(data.train),
        "validation_tokens": len(data.held_out),
        **{name: getattr(request, name) for name in flags},
        "config": None if configuration is None else str(configuration.path),
        "optimizer": asdict(request.optimizer),
        "lr": request.optimizer.lr,
        "schedule": request.warmup.kind if of_config is None else of_config.name,
        "warmup": request.warmup.warmup if of_config is None else None,
        **{name: getattr(request.arguments, name) for name in MEMORY},
        "disk": None if disk is None else str(disk),
        "ranks": world.size,
    }


def _summary(training: TrainingRun, forecast: Forecast) -> dict[str, Any]:
    """The log's last row. `moved` is all that was moved, evaluation included; `moved_per_step` what the last step moved."""
    progress, stats = training.progress, training.session.stats()
    return {
        "event": "summary",
        "steps": progress.step,
        **{name: getattr(progress, name) for name in (*LOSSES, "validation_loss", "moved_per_step", "seconds")},
        "peak": dict(stats.peak),
        "rss_peak_growth": training.growth.peak(),
        "moved": dict(stats.moved),
        **forecast_row(forecast),
        "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else 0.0,
    }


@contextmanager
def _messages_to(display: Display) -> Iterator[None]:
    """The library's messages, said by the display."""
    logger = logging.getLogger("patrickstar")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(display)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(display)
        logger.setLevel(level)
        logger.propagate = propagate
