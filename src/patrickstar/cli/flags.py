"""Flags of the command line: types that name the nearest spelling, and the options verbs share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from patrickstar.cli.stop import StopSignals
from patrickstar.config.arguments import MemoryOptions, check_arguments
from patrickstar.config.options import Options
from patrickstar.errors import ConfigError, nearest
from patrickstar.units import MIB, parse_size

Verb = TypeVar("Verb", bound=Callable[..., Any])


@dataclass(slots=True)
class Invocation:
    """One call of the command line."""

    debug: bool = False
    may_reexecute: bool = False
    """Whether this process is ours alone, so that it may be replaced by another (never in a test or an embedding)."""
    signals: StopSignals = field(default_factory=StopSignals)


class Spelling(click.ParamType):
    """One of a few words; anything else is refused with the nearest of them."""

    name = "choice"

    def __init__(self, *words: str, also: str = "") -> None:
        """`also`: a pattern of more words."""
        self.words: Final = words
        self._also = also

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.words and not re.fullmatch(self._also, str(value) or "-"):
            self.fail(f"{value!r} is none of {', '.join(self.words)}{nearest(str(value), self.words)}", param, ctx)
        return str(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002 - click's
        return "|".join(self.words)


DEVICE: Final = Spelling("cpu", "emulated", "cuda", "cuda:N", also=r"cuda:\d+")


class Size(click.ParamType):
    """Bytes: `6442450944`, `6GiB`, `1.5GB`, or `70%` of the tier. Kept as written: only its tier knows its total.

    Below 1 MiB the unit is written out: `8` was to be `8GiB`.
    """

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_size(str(value), name=param.opts[0] if param else "size", total_bytes=1 << 60, least_bare=MIB)
        except ConfigError as error:
            raise click.UsageError(str(error), ctx) from error
        return str(value)


class Positive(click.ParamType):
    """A finite number above zero."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        with suppress(ValueError):
            if math.isfinite(number := float(value)) and number > 0:
                return number
        raise click.BadParameter(f"{value!r} is not a finite number above 0", ctx, param)


def memory_of(given: Mapping[str, Any]) -> MemoryOptions:
    """The memory options among all flags of a verb, with clipping and accumulation, as `patrickstar.manage` takes them."""
    names = ("device", "precision", "device_memory", "host_memory", "disk", "disk_memory", "step")
    options = Options(accumulate=given["accumulate"])
    return check_arguments(**{name: given[name] for name in names}, max_grad_norm=given["clip"], options=options)


def _together(*decorators: Callable[[Verb], Verb]) -> Callable[[Verb], Verb]:
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


def path(flag: str, metavar: str, *, says: str) -> Callable[[Verb], Verb]:
    """An option for the path of a file, or of a directory where it stands for one (`DIR`)."""
    kind = click.Path(path_type=Path, dir_okay=metavar == "DIR", file_okay=metavar != "DIR")
    return click.option(flag, type=kind, metavar=metavar, help=says)


clip_option = click.option("--clip", type=Positive(), metavar="X", help="Largest global norm of the gradients.")

memory_options = _together(
    click.option("--device", type=DEVICE, metavar="D", help="cpu, emulated, cuda or cuda:N; CUDA where there is one."),
    click.option("--precision", type=Spelling("fp32", "bf16", "fp16"), help="The type that the model computes in."),
    click.option("--device-memory", type=Size(), metavar="B", help="Budget of the device, such as 6GiB or 70%."),
    click.option("--host-memory", type=Size(), metavar="B", help="Host memory that this process may hold."),
    click.option("--disk", type=click.Path(path_type=Path), metavar="DIR", help="Directory of the disk tier."),
    click.option("--disk-memory", type=Size(), metavar="B", help="Budget of the disk tier."),
    click.option(
        "--step",
        type=Spelling("deferred", "in_backward"),
        default="deferred",
        show_default=True,
        help="When weights are updated: after backward, or as gradients arrive.",
    ),
)

batch_options = _together(
    click.option("--model", required=True, metavar="NAME|DIR|FILE.json", help="`patrickstar models` lists the names."),
    whole_number("--batch-size", 4, says="Sequences at a time."),
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
