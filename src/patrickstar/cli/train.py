"""The verb `train`: a causal language model on text, under a memory budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from patrickstar.cli import reexec
from patrickstar.cli.checkpoints import CheckpointFolder
from patrickstar.cli.configuration import Configuration, configure
from patrickstar.cli.flags import (
    Invocation,
    Positive,
    Spelling,
    VariadicCommand,
    batch_options,
    debug_option,
    memory_flags,
    memory_options,
    model_option,
)
from patrickstar.cli.model_source import ModelSource
from patrickstar.cli.schedule import SCHEDULES, WarmupSchedule
from patrickstar.config.arguments import check_arguments
from patrickstar.config.options import Options
from patrickstar.errors import ConfigError


@click.command(cls=VariadicCommand)
@model_option
@click.option(
    "--data",
    multiple=True,
    metavar="PATH...",
    help="Text files or directories; the Python standard library's sources where left out; random: random tokens.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    default=100,
    show_default=True,
    help="Steps in all, resumed ones included.",
)
@batch_options(batch_size=4, seq_len=64)
@click.option(
    "--lr", type=Positive(), metavar="X", default=3e-4, show_default=True, help="Peak learning rate of AdamW."
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    metavar="N",
    help="Steps until the peak.  [default: a tenth of the steps, at most 100]",
)
@click.option(
    "--schedule",
    type=Spelling(*SCHEDULES),
    default="cosine",
    show_default=True,
    help="Learning rate after the warm-up.",
)
@click.option("--clip", type=Positive(), metavar="X", help="Largest global norm of the gradients.")
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=(1 << 63) - 1),
    metavar="N",
    default=0,
    show_default=True,
    help="Of weights, dropout and data order.",
)
@memory_options
@click.option(
    "--checkpoint-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Save here at the end, on Ctrl-C and on SIGTERM.",
)
@click.option("--save-every", type=click.IntRange(min=1), metavar="N", help="And every so many steps.")
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="N",
    default=2,
    show_default=True,
    help="How many of the newest checkpoints stay.",
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint, where there is one.")
@click.option(
    "--compare-plain", is_flag=True, help="Run the same steps in plain PyTorch too; fail unless every bit is equal."
)
@click.option(
    "--log-json",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A JSON object a line: start, every step, summary.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.json",
    help="Optimizer, scheduler, precision, clipping, batch and memory in the form of DeepSpeed and PatrickStar 0.4.6. What it does not say is as "
    "without it; flags that are given win.",
)
@debug_option
@click.pass_obj
def train(invocation: Invocation, **given: Any) -> int:
    """Train a causal language model on text, under a memory budget."""
    configuration = _configure(given)
    if configuration is None:
        arguments = check_arguments(
            **memory_flags(given), max_grad_norm=given["clip"], options=Options(accumulate=given["accumulate"])
        )
    else:
        arguments = configuration.memory
        given |= configuration.flags
    steps, warmup = given["steps"], given["warmup"]
    schedule = WarmupSchedule(given["schedule"], min(100, steps // 10) if warmup is None else warmup, steps)
    _check_together(given)
    source = ModelSource.find(given["model"])
    folder = CheckpointFolder(given["checkpoint_dir"], keep=given["keep"]) if given["checkpoint_dir"] else None
    if folder is not None and not given["resume"]:
        folder.check_unused()
    if invocation.may_reexecute:
        reexec.under_tcmalloc(device=arguments.device, host_memory=arguments.host_memory)

    from patrickstar.cli.run import Request, run

    request = Request(
        source=source,
        data=given["data"],
        batch_size=given["batch_size"],
        seq_len=given["seq_len"],
        accumulate=given["accumulate"],
        steps=steps,
        lr=given["lr"],
        schedule=schedule,
        clip=given["clip"],
        seed=given["seed"],
        arguments=arguments,
        folder=folder,
        save_every=given["save_every"],
        resume=given["resume"],
        compare_plain=given["compare_plain"],
        log_json=given["log_json"],
        configuration=configuration,
    )
    return run(request, invocation.signals)


def _configure(given: dict[str, Any]) -> Configuration | None:
    """The request of `--config`, with the flags that stand on the command line in the place of its keys."""
    if given["config"] is None:
        return None
    context = click.get_current_context()
    explicit = {name for name in given if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    return configure(given["config"], given, explicit=explicit)


def _check_together(given: dict[str, Any]) -> None:
    """Refuses flags that make no sense together, before anything takes time.

    Raises:
        ConfigError: naming both.
    """
    for flag, name in (("--resume", "resume"), ("--save-every", "save_every")):
        if given[name] and given["checkpoint_dir"] is None:
            raise ConfigError(f"{flag} without --checkpoint-dir: name the directory of the checkpoints")
    if given["compare_plain"] and given["resume"]:
        raise ConfigError("--compare-plain with --resume: the plain run has no checkpoint to go on from; leave one out")
