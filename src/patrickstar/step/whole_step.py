"""The optimizer's step where parameters keep their bytes: of all tensors at once, where they lie. See Note [Whole] in `parameters/binding.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from patrickstar.core.layout import Layout
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.errors import StateError
from patrickstar.memory.interruptions import InterruptionsPutOff
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.passes import Passes, update_all
from patrickstar.parameters.binding import Binding
from patrickstar.step.executor import Executor
from patrickstar.step.late_planes import LatePlanes

__all__ = ["WholeStep"]


@dataclass(frozen=True, slots=True)
class _Place:
    """A piece of a parameter, in one chunk: which of its elements, and where they and their averages lie, as 1-D tensors that are leased."""

    span: slice
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(kw_only=True, eq=False)
class WholeStep:
    """Updates parameters from their own gradients. `passes`: of the device where they are."""

    binding: Binding
    layout: Layout
    executor: Executor
    late_planes: LatePlanes
    passes: Passes

    _places: dict[str, list[_Place]] = field(default_factory=dict)

    def update(self, names: Iterable[str], hypers: Mapping[str, Hyper], steps: dict[str, int]) -> None:
        """Updates these parameters, and counts it in `steps`.

        Raises:
            StateError: a gradient is sparse. BudgetError: there is no room for the averages of the first update. Nothing has changed then.
        """
        alike: dict[tuple[Hyper, int], list[tuple[Tensor, ...]]] = {}
        by_name = self.binding.by_name
        with self.executor.lock, self.executor.apart():
            for name in names:
                bound = by_name[name]
                gradient = bound.tensor().grad
                if gradient is None or gradient.layout is not torch.strided:
                    raise StateError(
                        f"{name} has a gradient that is not dense: sparse gradients cannot be managed; use sparse=False"
                    )
                flat = bound.flat(gradient)
                planes = alike.setdefault((hypers[name], steps.get(name, 0) + 1), [])
                for place in self._places.get(name) or self._find(name):
                    planes.append((place.weight, flat[place.span], place.exp_avg, place.exp_avg_sq))
            with InterruptionsPutOff():  # between two tensors weights would be of no one step
                for (hyper, step), planes in alike.items():
                    update_all(self.passes, planes, step=step, hyper=hyper)
                for name in names:
                    steps[name] = steps.get(name, 0) + 1

    def _find(self, name: str) -> list[_Place]:
        """The pieces of a parameter, with averages of zero where it has had none."""
        self.late_planes.thaw(name)
        take, found = self.binding.leases.take_part, list[_Place]()
        for part in self.layout.parts(name):
            averages = [PlaneRef(part.chunk, plane) for plane in (EXP_AVG, EXP_AVG_SQ)]
            self.executor.use(Phase.STEP, name, [Touch(ref, True) for ref in averages])
            weight, start = self.layout.weight_place(part)
            numel = part.stop - part.start
            own = slice(part.start, part.stop)
            span = slice(part.tensor_start, part.tensor_start + numel)
            found.append(_Place(span, take(weight, slice(start, start + numel)), *(take(ref, own) for ref in averages)))
        self._places[name] = found
        return found

    def forget(self) -> None:
        """Lets go of what is leased: the session ends."""
        self._places.clear()
