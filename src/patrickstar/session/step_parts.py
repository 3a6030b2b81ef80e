"""Steps of training in numbered parts, whose bits depend on the parts and not on the ranks that compute them.

Rank r of W computes parts r, r + W, ... of each step. Their gradients are added in the order of parts, in fp32, and multiplied by f(1/parts) once,
when they are first used. What torch draws in a part is keyed by (seed, step, part), and samples are taken by a number that runs on: so neither
depends on who computes what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from patrickstar.errors import LayoutError, RankLost, StateError
from patrickstar.session.parts import Parts
from patrickstar.session.sample_order import Draws
from patrickstar.step.training_deferred import DeferredTraining

_STOP: Final = b"s"


class StepParts:
    """One step: this rank's parts of it, to be iterated over, inside of a `with` block.

    Attributes:
        lost: the loss of a rank that has broken the step.
        step: its number, from 0 on. index: of the part under way; -1 before the first. seed: of that part, for random numbers that are not torch's.
    """

    def __init__(
        self,
        step: int,
        draws: Draws,
        *,
        of: Parts,
        rank: int,
        size: int,
        batches: Iterator[Any],
        is_told: Callable[[], bool],
        is_first: bool,
    ) -> None:
        self.step, self.index, self.seed = step, -1, 0
        self.completed = False
        self.lost: RankLost | None = None
        self._count = count = draws.parts(step)
        self._of, self._draws, self._batches = of, draws, batches
        self._mine = range(rank, count, size)
        self._serves = rank >= count % size > 0  # in the last round, which others have parts of
        self._done = 0
        self._backwards = 0
        self._began = False
        self._buffers = {
            name: _Buffer(name, one, one._version, one.clone() if is_first and one.is_floating_point() else None)
            for name, one in of.model.named_buffers()
        }
        self._is_told, self._outside = is_told, of.training.completing
        of.training.completing = self.complete

    def __iter__(self) -> Iterator[Any]:
        training = self._of.training
        if not self._began and (training.in_chunks.names or any(True for _ in self._of.binding.gradients.owned())):
            raise StateError(
                f"step {self.step} begins with gradients from before: call optimizer.zero_grad() after optimizer.step()"
            )
        self._began = True
        for index in self._mine[self._done :]:
            self._expect_run()
            self.index, self.seed = index, self._draws.seed_of(self.step, index)
            self._backwards = training.backwards
            batch = next(self._batches)
            torch.manual_seed(self.seed)
            if training.gathering is not None:
                training.gathering.order.heard = []
                training.gathering.says = _STOP * self._is_told()
            self._done += 1
            yield batch

    def __enter__(self) -> StepParts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if kind is None:
            self.expect_completed()
            self._of.training.completing = self._outside
        if isinstance(error, RankLost):
            self.lost = error.with_traceback(None)  # which holds what the step has made
        return self.lost is not None

    def complete(self) -> None:
        """Completes the gradients of the step, before they are first used: all parts have run on all ranks, and what is added up becomes the mean.

        Raises:
            StateError: not all of this rank's parts have run. LayoutError: a forward has changed a buffer, which would depend on the number of ranks.
        """
        self._expect_run()
        if self.completed:
            return
        if self._done < len(self._mine):
            raise StateError(
                f"step {self.step}: gradients are used before part {self._mine[self._done]} of {self._count} has run backward"
            )
        if odd := [name for name, version in self._buffers.items() if not version.is_of(self._of)]:
            raise LayoutError(
                f"the forward changes the buffer {odd[0]} ({len(odd)} in all), such as a running mean: its value would depend on the "
                "number of ranks. Use a layer without running statistics (GroupNorm, LayerNorm), or freeze them (module.eval())"
            )
        training = self._of.training
        assert isinstance(training, DeferredTraining)
        if self._serves:
            with self._of.executor.lock:
                training.gathering.serve()  # type: ignore[union-attr]  # of several ranks
        self.completed = True
        if self._count > 1:
            training.multiply(torch.tensor(1 / self._count, dtype=torch.float32))

    def end(self, *, is_told: bool) -> bool:
        """Lets go of the session's parts; tells whether a rank was told to stop before the last backward, which all ranks know alike."""
        self.expect_completed()
        gathering = self._of.training.gathering
        self._of.training.completing = self._outside
        del self._of, self._batches  # whoever iterates over steps has this one until there is the next
        return is_told if gathering is None else _STOP in gathering.heard

    def expect_completed(self) -> None:
        """Raises StateError where the step was left before its gradients were used."""
        if not self.completed:
            raise StateError(
                f"step {self.step} was left after part {self.index} of {self._count}: run all parts, and call optimizer.step()"
            )

    def _expect_run(self) -> None:
        """Raises StateError unless the part that was given out last has run one backward."""
        ran = self._of.training.backwards - self._backwards
        if self._done and ran != 1:
            raise StateError(
                f"step {self.step}, part {self.index} of {self._count} has run backward {ran} times: call backward() once for each "
                "part, on the sum of its losses"
            )


def refuse_outside_of_steps() -> None:
    """Raises StateError: gradients of several ranks are used that were not made in numbered parts, and nobody knows what they add up to."""
    raise StateError(
        "ranks of an elastic job train in session.steps() alone: gradients were used outside of it, by optimizer.step(), say"
    )


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer as it was. `value`: where it was looked at; kernels of batch norm change one without counting that."""

    name: str
    buffer: Tensor
    version: int
    value: Tensor | None

    def is_of(self, parts: Parts) -> bool:
        """Tells whether the model still has it as it was."""
        buffer = parts.model.get_buffer(self.name)
        is_same = buffer is self.buffer and buffer._version == self.version
        return is_same and (self.value is None or torch.equal(self.value, buffer))
