"""Parameters that keep their bytes: ordinary ones over slots of their own, and what is noticed of them. See Note [Whole] in `binding.py`."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from patrickstar.errors import StateError
from patrickstar.parameters.attributes import not_its_own
from patrickstar.parameters.bound import BoundParameter, Owner
from patrickstar.parameters.changes import Changes
from patrickstar.parameters.gradient_access import GradientAccess
from patrickstar.parameters.weight_access import WeightAccess
from patrickstar.torch_private import Plain, backward_id


def manager_of(parameter: Tensor) -> Owner | None:
    """The owner of a parameter's bytes; None where nobody manages it."""
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
        binding: Any = getattr(type(parameter), "managed_by", None)
        return None if binding is None else binding.owner
    storage: Any = parameter.untyped_storage()
    return storage.managed_by() if hasattr(storage, "managed_by") else None


@dataclass(kw_only=True, eq=False)
class WholeParameters:
    """The parameters of a binding, while they keep their bytes.

    `by_use`: the records of those that are bound by use, by `id()`. `parameter_class`: of these.
    """

    access: WeightAccess
    gradients: GradientAccess
    changes: Changes
    by_use: dict[int, BoundParameter]
    parameter_class: type[Any]
    device: torch.device

    _addresses: list[tuple[BoundParameter, int, tuple[int, ...]]] = field(default_factory=list, init=False)
    _memory: dict[BoundParameter, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict, init=False)
    _trained: set[str] = field(default_factory=set, init=False)

    def take(self) -> None:
        """Gives parameters, which are of the ordinary class, their bytes for good. Their gradients stay where autograd makes them."""
        records = list(self.access.records.values())
        for bound in records:
            self._hold(bound)
        self._addresses = [(bound, bound.tensor().data_ptr(), bound.tensor().stride()) for bound in records]
        trained = [bound for bound in records if bound.tensor().requires_grad]
        self._trained = {bound.name for bound in trained}
        self.gradients.stay_put()
        tell_of_all = self.gradients.are_used or self.gradients.widen
        for bound in trained if tell_of_all else trained[:1]:  # one tells of a backward
            self.gradients.watch(bound)
        if self.gradients.widen:
            self.gradients.show(trained)
        self.changes.follow(records)

    def _hold(self, bound: BoundParameter) -> None:
        parameter, place = bound.parameter, bound.shape_only
        if not place.numel():
            parameter.data = torch.empty_like(place, device=self.device)
            return
        self.access.owner.use(bound.name, bound.touches)
        if bound.is_copied:
            part = self.access.leases.take_copy(bound.name, self.access.owner.make_copy)
        else:
            part = self.access.leases.take_part(bound.ref, slice(bound.offset, bound.offset + place.numel()))
        storage: Any = part.untyped_storage()  # which the parameter has for good, and with it leads to its owner
        storage.managed_by = weakref.ref(self.access.owner)
        self._memory[bound] = weakref.ref(storage)
        gradient, parameter.grad = parameter.grad, None
        parameter.data = torch.as_strided(part, place.shape, place.stride())
        parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype)

    def withhold(self, name: str) -> None:
        """Takes the bytes of a parameter away until its backward has ended: that has updated it, and is to see no value of after the update."""
        bound = self.access.records[name]
        self.access.updated[name] = bound.parameter.data
        self.by_use[id(bound.parameter)] = bound
        bound.parameter.data = bound.standin
        bound.parameter.__class__ = self.parameter_class

    def give_back(self) -> None:
        """Gives parameters their bytes again."""
        with Plain():
            while self.access.updated:
                name, data = self.access.updated.popitem()
                bound = self.access.records[name]
                del self.by_use[id(bound.parameter)]
                bound.parameter.__class__ = nn.Parameter
                bound.parameter.data = data

    def take_back(self, *, for_forward: bool = False) -> None:
        """Takes over what was done by hand: other memory (`p.data = value`), whose values are copied, an end of being frozen.

        Where somebody still has the memory of before (`backup = p.data; p.data = average`), an evaluation runs with the other.

        Raises:
            StateError: the memory is of another shape, type or device, or shared, or that of before is still somebody's.
            BudgetError: there is no room for training what was frozen.
        """
        if backward_id() != -1:
            return
        self.give_back()
        with Plain():
            for bound, address, stride in self._addresses:
                parameter = bound.tensor()
                is_there = parameter.data_ptr() == address and parameter.stride() == stride
                if not is_there or parameter.shape != bound.shape_only.shape:
                    self._take_value(bound, evaluates=for_forward and not torch.is_grad_enabled())
                if parameter.requires_grad and bound.name not in self._trained:
                    self.access.owner.thawed(bound.name)
                    self._trained.add(bound.name)
                    self.gradients.watch(bound)
                    self.changes.follow([bound])
                if for_forward and bound.is_copied:
                    self.changes.look(bound)  # it shows what was written to it, and is to compute with what is kept

    def _take_value(self, bound: BoundParameter, *, evaluates: bool) -> None:
        value, place = bound.parameter.data, bound.shape_only
        if (value.shape, value.dtype, value.device) != (place.shape, place.dtype, self.device):
            what = f"{bound.name}.data was assigned a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
            raise StateError(not_its_own(bound, what))
        if value.device.type == "cpu" and value.is_shared():
            raise StateError(
                f"{bound.name} is in memory that processes share now (share_memory_(), a multiprocessing queue), and its bytes belong to a session. "
                "Share a copy, copy.deepcopy(model); `parameter.data = parameter.data.clone()` ends it"
            )
        if hasattr(value.untyped_storage(), "managed_by"):
            raise StateError(not_its_own(bound, f"{bound.name}.data was assigned a view of managed memory"))
        if bound in self._memory and self._memory[bound]() is not None:  # one without elements has none
            if evaluates:
                return
            what = f"{bound.name}.data was assigned other memory, and something still has what it had (`backup = parameter.data`)"
            raise StateError(not_its_own(bound, what))
        self._hold(bound)
        with torch.no_grad():
            bound.parameter.data.copy_(value)

    def forget(self) -> None:
        """Notices nothing any more: parameters are bound by use from now on, or nobody's."""
        self._addresses.clear()
        self.changes.followed.clear()
