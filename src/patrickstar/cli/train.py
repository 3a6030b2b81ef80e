"""The verb `train`: a causal language model on text, under a memory budget."""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from patrickstar.cli import flags
from patrickstar.cli.models import ModelSource
from patrickstar.cli.request import SCHEDULES, Configuration, Request, WarmupSchedule, configure
from patrickstar.cli.together import Together, together_options
from patrickstar.config.kinds import POSITIVE, refuse
from patrickstar.errors import ConfigError

# Set in the process that follows: it must never start over again. Anybody may set it to stay with their allocator.
GUARD: Final = "PATRICKSTAR_ALLOCATOR"


@click.command(cls=flags.VariadicCommand)
@flags.batch_options
@click.option(
    "--data",
    multiple=True,
    metavar="PATH...",
    help="Text files or directories; the Python standard library's sources where left out; random: random tokens.",
)
@flags.whole_number("--steps", 100, says="Steps in all, resumed ones included.")
@click.option("--lr", type=float, metavar="X", default=3e-4, show_default=True, help="Peak learning rate of AdamW.")
@flags.whole_number("--warmup", least=0, says="Steps until the peak.  [default: a tenth of the steps, at most 100]")
@click.option(
    "--schedule",
    type=click.Choice(SCHEDULES),
    default="cosine",
    show_default=True,
    help="Learning rate after the warm-up.",
)
@flags.clip_option
@flags.whole_number("--seed", 0, least=0, most=(1 << 63) - 1, says="Of weights, dropout and data order.")
@flags.memory_options
@together_options
@flags.path("--checkpoint-dir", "DIR", says="Save here at the end, on Ctrl-C and on SIGTERM.")
@flags.whole_number("--save-every", says="And every so many steps.")
@flags.whole_number("--keep", 2, says="How many of the newest checkpoints stay.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint, where there is one.")
@click.option(
    "--compare-plain", is_flag=True, help="Run the same steps in plain PyTorch too; fail unless every bit is equal."
)
@flags.path("--log-json", "FILE", says="A JSON object a line: start, every step, summary.")
@flags.path(
    "--config",
    "FILE.json",
    says="Optimizer, scheduler, precision, clipping, batch and memory in the form of DeepSpeed and PatrickStar 0.4.6. What it does not say is as "
    "without it; flags that are given win.",
)
@click.option(
    "--elastic", metavar="MIN:MAX", help="Train on as many ranks as there are now: see `patrickstar elastic`."
)
@flags.whole_number("--parts", says="Numbered parts of a step, of which bits depend, and not on ranks.  [default: MAX]")
@flags.debug_option
@click.pass_obj
def train(invocation: flags.Invocation, **given: Any) -> int:
    """Train a causal language model on text, under a memory budget."""
    world = invocation.world
    configuration: Configuration | None = None
    if given["config"] is None:
        arguments = flags.memory_of(given)
    else:
        context = click.get_current_context()
        explicit = {name for name in given if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
        configuration = configure(given["config"], given, explicit=explicit, ranks=world.size)
        arguments = configuration.memory
        given |= configuration.flags
    steps, warmup, elastic = given["steps"], given["warmup"], given["elastic"]
    together = Together.of(given, ranks=world.size)
    world.together = together.size
    _check_together(given, ranks=world.size // together.size)
    if given["compare_plain"] and together.flag:
        raise ConfigError(
            f"--compare-plain with {together.flag}: sums of several ranks have another order, and other bits"
        )
    source = ModelSource.find(given["model"])
    if not given["resume"] and elastic is None:
        _check_unused(given["checkpoint_dir"])
    if invocation.may_reexecute and elastic is None:
        under_tcmalloc(device=arguments.device, host_memory=arguments.host_memory)

    given |= {"source": source, "arguments": arguments, "configuration": configuration, "together": together}
    warmup = min(100, steps // 10) if warmup is None else warmup
    given["warmup"] = WarmupSchedule(given["schedule"], warmup, steps)
    request = Request(**{field.name: given[field.name] for field in fields(Request)})
    if elastic is None and given["parts"] is None:
        from patrickstar.cli.run import run

        return run(request, invocation.signals, world)
    from patrickstar.cli.elastic_train import run_parts, supervise
    from patrickstar.comm.job import SIZES

    if elastic is not None and SIZES not in os.environ:  # this process is no rank of a job
        return supervise(elastic, **_of_job(given), words=sys.argv[2:])
    return run_parts(request, given["parts"] or int(elastic.partition(":")[2]))


def _of_job(given: dict[str, Any]) -> dict[str, Any]:
    """The flags that a job takes. ConfigError: those that it has not."""
    refused = {
        "--compare-plain": given["compare_plain"],
        "--accumulate": given["accumulate"] > 1,
        "--config": given["config"],
    }
    refused |= {"--resume (a job goes on by itself)": given["resume"]}
    refuse([f"{flag} with --elastic" for flag, is_given in refused.items() if is_given], of="train")
    return {"save_every": given["save_every"], "directory": given["checkpoint_dir"]}


def _check_unused(directory: Path | None) -> None:
    """ConfigError where another run's checkpoints lie, and this one would start afresh: keeping the newest would delete them."""
    from patrickstar.checkpoint.reader import saved_steps

    if found := saved_steps(directory):
        raise ConfigError(
            f"--checkpoint-dir {directory}: holds checkpoints already, the newest {found[0].name}; "
            "--resume goes on from it, another directory starts afresh"
        )


def _check_together(given: dict[str, Any], *, ranks: int) -> None:
    """Refuses flags that make no sense, by themselves or together, before anything takes time. ConfigError: naming them."""
    refuse(POSITIVE.problems("--lr", given["lr"]), of="train")
    for flag, name in (("--resume", "resume"), ("--save-every", "save_every")):
        if given[name] and given["checkpoint_dir"] is None:
            raise ConfigError(f"{flag} without --checkpoint-dir: name the directory of the checkpoints")
    flags.expect_rows(given["batch_size"], ranks)
    if given["compare_plain"] and given["resume"]:
        raise ConfigError("--compare-plain with --resume: the plain run has no checkpoint to go on from; leave one out")


def under_tcmalloc(*, device: str | None, host_memory: int | str | None) -> None:
    """Starts over under tcmalloc, once, where a budget of host memory binds and the library is installed; else returns.

    What an allocator keeps of freed activations counts against the budget, and returning them costs time: tcmalloc's less than glibc's. An allocator
    can only be chosen before a process starts, so the process replaces itself.
    """
    # Known without importing torch.
    host_computes = device == "cpu" or (device is None and not Path("/proc/driver/nvidia/version").exists())
    if GUARD in os.environ or host_memory is None or not host_computes:
        return
    from patrickstar.memory.allocator import tcmalloc_library

    library = tcmalloc_library()
    # Whoever preloads something has chosen; two allocators in one process end badly.
    if library is None or os.environ.get("LD_PRELOAD"):
        return
    if os.environ.get("LOCAL_RANK", "0") == "0":
        click.echo(
            f"starting over under tcmalloc, which returns freed memory for less time ({GUARD}=glibc stays)", err=True
        )
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, "LD_PRELOAD": str(library), GUARD: "tcmalloc"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - the same program again
