"""Flags of the command line that verbs share. What `manage` takes too is checked as its arguments are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from patrickstar.cli.stop import StopSignals
from patrickstar.cli.world import World
from patrickstar.config.arguments import MemoryOptions, check_arguments
from patrickstar.config.options import Options
from patrickstar.errors import ConfigError

MEMORY: Final = ("device", "precision", "device_memory", "host_memory", "disk", "disk_memory", "step")
Verb = TypeVar("Verb", bound=Callable[..., Any])


@dataclass(slots=True)
class Invocation:
    """One call of the command line."""

    debug: bool = False
    may_reexecute: bool = False
    """Whether this process is ours alone, so that it may be replaced by another (never in a test or an embedding)."""
    signals: StopSignals = field(default_factory=StopSignals)
    world: World = field(default_factory=World)


def memory_of(given: Mapping[str, Any]) -> MemoryOptions:
    """The memory options among all flags of a verb, with clipping and accumulation, as `patrickstar.manage` takes them."""
    options = Options(accumulate=given["accumulate"])
    return check_arguments(**{name: given[name] for name in MEMORY}, max_grad_norm=given["clip"], options=options)


def expect_rows(batch_size: int, ranks: int) -> None:
    """Raises ConfigError where ranks cannot share the rows of a batch evenly."""
    if batch_size % ranks:
        raise ConfigError(
            f"--batch-size {batch_size} over {ranks} ranks: it is of all of them together; give a multiple of {ranks}"
        )


def all_of(*decorators: Callable[[Verb], Verb]) -> Callable[[Verb], Verb]:
    """One decorator in the place of several, in their order."""
    return lambda verb: reduce(lambda inner, decorator: decorator(inner), reversed(decorators), verb)


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Invocation).debug = True


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Show where an error came from."
)


def whole_number(
    flag: str, default: int | None = None, *, says: str, least: int = 1, most: int | None = None
) -> Callable[[Verb], Verb]:
    """An option for a whole number between these."""
    kind = click.IntRange(min=least, max=most)
    return click.option(flag, type=kind, metavar="N", default=default, show_default=default is not None, help=says)


def seconds(flag: str, default: float, *, says: str, above: bool = False) -> Callable[[Verb], Verb]:
    """An option for seconds from 0 on, or more than 0."""
    kind = click.FloatRange(min=0, min_open=above, max=1e9)
    return click.option(flag, type=kind, metavar="S", default=default, show_default=True, help=says)


def path(flag: str, metavar: str, *, says: str) -> Callable[[Verb], Verb]:
    """An option for the path of a file, or of a directory where it stands for one (`DIR`)."""
    kind = click.Path(path_type=Path, dir_okay=metavar == "DIR", file_okay=metavar != "DIR")
    return click.option(flag, type=kind, metavar=metavar, help=says)


clip_option = click.option(
    "--clip", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Largest global norm of the gradients."
)

memory_options = all_of(
    click.option("--device", metavar="D", help="cpu, emulated, cuda or cuda:N; CUDA where there is one."),
    click.option("--precision", metavar="fp32|bf16|fp16", help="The type that the model computes in."),
    click.option("--device-memory", metavar="B", help="Budget of the device, such as 6GiB or 70%."),
    click.option("--host-memory", metavar="B", help="Host memory that this process may hold."),
    click.option("--disk", type=click.Path(path_type=Path), metavar="DIR", help="Directory of the disk tier."),
    click.option("--disk-memory", metavar="B", help="Budget of the disk tier."),
    click.option(
        "--step",
        metavar="deferred|in_backward",
        default="deferred",
        show_default=True,
        help="When weights are updated: after backward, or as gradients arrive.",
    ),
)

batch_options = all_of(
    click.option("--model", required=True, metavar="NAME|DIR|FILE.json", help="`patrickstar models` lists the names."),
    whole_number("--batch-size", 4, says="Sequences at a time, of all ranks together."),
    whole_number("--seq-len", 64, least=2, says="Tokens of a sequence."),
    whole_number("--accumulate", 1, says="Batches of a step."),
)


class VariadicCommand(click.Command):
    """A command of which one option takes all words up to the next option: `--data a b` is `--data a --data b`."""

    variadic: Final = "--data"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        taking = False
        for word in args:
            is_option = word.startswith("-") and word != "-"
            taking = word == self.variadic if is_option else taking
            if taking and not is_option and spread[-1] != self.variadic:
                spread.append(self.variadic)
            spread.append(word)
        return super().parse_args(ctx, spread)
