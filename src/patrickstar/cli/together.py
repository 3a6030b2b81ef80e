"""Ranks that work on one batch together, as flags of the command line ask for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from patrickstar.cli.flags import all_of
from patrickstar.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from patrickstar.cli.batches import Batch
    from patrickstar.session.forecast import Forecast

METHODS: Final = ("ring", "rsa", "ulysses")
_NEAR: Final = 1 / 8


@dataclass(slots=True)
class Together:
    """A way for ranks to share one batch. The mesh is of the rest of the world, `dp`, and of these, once they have begun.

    Attributes:
        context: `--context-parallel`. method: `--sequence-method`. q: of `--tensor-2d` QxQ. sizes: of the mesh's dimensions, by name.
    """

    context: int = 1
    method: str = METHODS[0]
    q: int = 1
    mesh: DeviceMesh | None = field(default=None, init=False)
    sizes: Mapping[str, int] = field(default_factory=dict, init=False)
    shard: Callable[[Batch], Batch] = field(default=lambda batch: batch, init=False)

    @classmethod
    def of(cls, given: dict[str, Any], *, ranks: int | None) -> Together:
        """The way that flags ask for. ConfigError: it cannot be done together, or not by so many ranks; None: as many as it takes."""
        found = cls(given["context_parallel"], given["sequence_method"], given["tensor_2d"])
        if found.context > 1 and found.q > 1:
            raise ConfigError("--context-parallel and --tensor-2d in one run come later: give one of them")
        if ranks is not None and ranks % found.size:
            raise ConfigError(f"{found.flag}: {found.size} ranks work on a batch together, and there are {ranks}")
        return found

    @property
    def size(self) -> int:
        """Number of ranks that share a batch."""
        return self.context * self.q**2

    @property
    def multiple(self) -> int:
        """Number by which lengths are divisible that are not padded."""
        return self.context * (2 if self.method == METHODS[0] else 1)

    @property
    def flag(self) -> str:
        """The flag that asks for more than one, as it was given; empty where none does."""
        by_context = f"--context-parallel {self.context}" if self.context > 1 else ""
        return f"--tensor-2d {self.q}x{self.q}" if self.q > 1 else by_context

    def begin(self, model: nn.Module, *, ranks: int) -> None:
        """Makes a model this rank's part of what works together. All ranks do it, once there is a process group."""
        from torch.distributed.device_mesh import init_device_mesh

        from patrickstar.parallel import ContextParallel, Tensor2D

        if not self.flag:
            return
        inner = {"row": self.q, "col": self.q} if self.q > 1 else {"cp": self.context}
        self.sizes = {"dp": ranks // self.size, **inner}
        self.mesh = init_device_mesh("cpu", tuple(self.sizes.values()), mesh_dim_names=tuple(self.sizes))
        own = self.mesh[tuple(inner)]
        way = Tensor2D(own) if self.q > 1 else ContextParallel(own, self.method)  # type: ignore[arg-type]  # of METHODS
        way.parallelize(model)
        self.shard = way.shard

    @contextmanager
    def imagined(self, model: nn.Module, *, ranks: int) -> Iterator[None]:
        """A context in which a model works together with ranks that are not there."""
        if not self.flag:
            yield
            return
        from patrickstar.torch_private import imagined_ranks

        with imagined_ranks(ranks):
            self.begin(model, ranks=ranks)
            yield

    def sent(self, model: nn.Module, batch_size: int, seq_len: int) -> dict[str, int]:
        """Bytes that a rank sends to those it works with in a forward and backward of a batch, by mesh dimension. Nothing is computed."""
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        from patrickstar.cli.batches import as_batch
        from patrickstar.parallel.transformer_models import groups_of

        groups = groups_of(model)
        before = {name: group.sent_bytes(imagined=True) for name, group in groups.items()}
        twin = copy.deepcopy(model)
        batch = self.shard(as_batch(torch.zeros(batch_size, seq_len, dtype=torch.int64)))
        with FakeTensorMode(allow_non_fake_inputs=True):
            twin.to_empty(device="cpu")
            twin(**batch).loss.backward()
        return {name: group.sent_bytes(imagined=True) - before[name] for name, group in groups.items()}


class Tried(NamedTuple):
    """A size that has been tried. `load`: how many times the budget it needs, about: blocks that keep their bytes may need less."""

    size: int
    fits: bool
    load: float

    @classmethod
    def of(cls, size: int, forecast: Forecast) -> Tried:
        """The size with which a forecast was made."""
        loads = (forecast.minimum[tier] / budget for tier, budget in forecast.budget.items() if budget)
        return cls(size, forecast.fits, max(loads, default=0.0))


def largest(tried: Callable[[int], Tried], start: int, *, of: int, most: int | None = None) -> int:
    """The largest multiple of a number that fits, to within a sixty-fourth, and not above `most`; 0 where none does.

    Each takes a second or more to try. Two say about where it lies; from there it is looked for by steps that grow, and at last by halves.

    Args:
        start: is tried first.
    """
    low, high = 0, None if most is None else most // of * of + of
    size = max(of, min(-(-start // of) * of, most or start + of) // of * of)
    known: list[Tried] = []
    away = 0
    while high is None or high - low > max(of, low // 64 // of * of):
        known.append(found := tried(size))
        low, high = (size, high) if found.fits else (low, size)
        step, before = max(of, low // 64 // of * of), known[-2:][0]
        guess = 2.0 * low if high is None else (low + high) / 2
        if not away and abs(found.load - 1) > _NEAR and before.load != found.load:
            guess = size + (1 - found.load) * (before.size - size) / (before.load - found.load)
        elif (abs(found.load - 1) <= _NEAR and not away) or (away and before.fits == found.fits):
            away = 2 * away or step
            guess = size + (away if found.fits else -away)
        size = max(low + step, int(min(guess, 64 * low if high is None else high - step)) // of * of)
    return low


def _rows_of_square(text: str) -> int:
    """The number of rows, and of columns, of `QxQ`."""
    rows, _, columns = text.partition("x")
    if rows != columns or not rows.isdigit() or int(rows) < 1:
        raise click.BadParameter(f"{text!r} is no square, such as 2x2")
    return int(rows)


together_options = all_of(
    click.option(
        "--context-parallel", type=click.IntRange(min=1), metavar="N", default=1, help="Cut sequences over N ranks."
    ),
    click.option("--sequence-method", type=click.Choice(METHODS), default=METHODS[0], show_default=True),
    click.option(
        "--tensor-2d",
        type=_rows_of_square,
        metavar="QxQ",
        default="1x1",
        help="Cut every matrix into blocks over so many ranks.",
    ),
)
