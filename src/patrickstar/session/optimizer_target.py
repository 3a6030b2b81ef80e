"""A session as its optimizer sees it: steps, the state as whole tensors, and `optimizer.state`, a mapping to what lies in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from patrickstar.core.machine import Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, STEP
from patrickstar.errors import BudgetError, StateError
from patrickstar.memory.leases import AssembledKey
from patrickstar.optim.user_optimizer import State, read_groups
from patrickstar.parameters.assembled import title
from patrickstar.session.parts import Parts
from patrickstar.step.assembling import count_of
from patrickstar.units import format_bytes

FIELDS: Final = (STEP, EXP_AVG, EXP_AVG_SQ)


@dataclass(frozen=True)
class OptimizerTarget:
    """A session as its optimizer sees it: who does the work. `original`: the optimizer that was passed to `manage`."""

    parts: Parts
    original: torch.optim.Optimizer

    def step_groups(self) -> None:
        """Updates what has a gradient, with the hyper-parameters that `ManagedOptimizer.hypers()` gives now."""
        events = self.parts.events
        events.forget_abandoned_backward()
        events.check_watch()
        if self.parts.binding.is_whole:
            self.parts.binding.whole.take_back()
        self.parts.training.step()
        if self.parts.sent.groups or self.parts.sent.shared is not None:
            self.parts.sent.step_ended()
        if events.handed_out.watched:  # what is written to that memory from now on comes after this update
            self.parts.executor.settle()

    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets the gradients of the parameters in the groups, or makes them zero."""
        self.parts.events.forget_abandoned_backward()
        names = set(read_groups(self.original.param_groups, self.parts.binding.names))
        self.parts.training.zero_grad(set_to_none=set_to_none, names=names)

    @cached_property
    def optimizer_state(self) -> StateMapping:
        """The state by parameter, to be read and written."""
        return StateMapping(self.parts, self.original)

    def optimizer_states(self) -> dict[str, State]:
        """The state by name, as whole tensors, of what was ever updated."""
        self.parts.begin_access()
        parts, budget = self.parts, self.parts.host_budget_bytes
        state, stretch = parts.executor.store.state, parts.executor.pilot.stretch
        needed = sum(2 * 4 * parts.named[name].numel() for name in parts.steps)
        # Below a device it is the host that things rest on, and where the host computes, the host as well; a few slots are in use.
        at_rest = sum(state.unit_bytes(ref) for ref, tier in state.home.items() if tier is Tier.HOST)
        room_bytes = None if budget is None else budget - at_rest - 2 * max(map(state.unit_bytes, state.home))
        if room_bytes is not None and needed > room_bytes:
            raise BudgetError(
                f"the optimizer's state takes {format_bytes(needed)} as whole tensors, and {format_bytes(room_bytes)} of the host budget "
                "are free: use session.save_checkpoint(dir), which writes it a piece at a time",
                tier="host",
                needed_bytes=needed,
                available_bytes=room_bytes,
            )
        stretch.reserve(needed)  # chunks make room for the whole tensors
        try:
            return states_of(parts)
        finally:
            stretch.reserve(-needed)

    def load_optimizer_states(self, states: Mapping[str, State]) -> None:
        """Takes over states, in place of all there were."""
        self.parts.begin_access()
        for name in set(self.parts.steps) - set(states):
            self.parts.weights.clear_averages(name)
        self.parts.steps.clear()
        self.parts.take_states(states)


def states_of(parts: Parts) -> dict[str, State]:
    """Count and moments by parameter name, each a copy."""
    read = parts.weights.read
    return {name: State(count, read(name, EXP_AVG), read(name, EXP_AVG_SQ)) for name, count in parts.steps.items()}


class StateMapping(MutableMapping[Tensor, Any]):
    """A mapping like torch's `optimizer.state`: a parameter is in it once it has been updated; what is asked of another one is empty."""

    def __init__(self, parts: Parts, optimizer: torch.optim.Optimizer) -> None:
        self._parts = parts
        self._optimizer = optimizer

    def __getitem__(self, parameter: Tensor) -> ParameterState:
        self._parts.expect_open()
        return ParameterState(of=self, name=self._name(parameter))

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """The parameter's state, if it has one."""
        return self[parameter] if parameter in self else default  # noqa: SIM401  (this is `get`)

    def __contains__(self, parameter: object) -> bool:
        self._parts.expect_open()
        return self._parts.binding.names.get(id(parameter)) in self._parts.steps

    def __iter__(self) -> Iterator[Tensor]:
        self._parts.expect_open()
        groups = self._optimizer.param_groups
        return iter({id(each): each for group in groups for each in group["params"] if each in self}.values())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, parameter: Tensor, values: Mapping[str, Any]) -> None:
        """Writes the whole entry of a parameter, or nothing where something of it is wrong."""
        self._parts.begin_access()
        name = self._name(parameter)
        if not values:
            if name in self._parts.steps:
                del self[parameter]
            return
        if set(values) != set(FIELDS):
            raise StateError(
                f"optimizer.state[{name}] was assigned {sorted(values)}: the states of a parameter are {', '.join(FIELDS)}"
            )
        wanted = {plane: self.check(name, plane, values[plane]) for plane in FIELDS}
        if wanted[STEP] is not None:
            count_of(AssembledKey(name, STEP), wanted[STEP])
        for plane in (EXP_AVG, EXP_AVG_SQ, STEP):
            self.write(name, plane, wanted[plane])

    def __delitem__(self, parameter: Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        name = self._name(parameter)
        self._parts.begin_access()
        self._parts.weights.clear_averages(name)
        del self._parts.steps[name]

    def pop(self, parameter: Tensor, *default: Any) -> Any:
        """Takes a parameter's state out: ordinary tensors."""
        if parameter not in self and default:
            return default[0]
        entry = {plane: value.clone() for plane, value in self[parameter].items()}
        del self[parameter]
        return entry

    def clear(self) -> None:
        """Forgets all state, as before the first step."""
        for parameter in self:
            del self[parameter]

    def __repr__(self) -> str:
        return f"<state of {len(self)} parameters, in chunks>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError("optimizer.state lies in chunks and cannot be copied or pickled: use optimizer.state_dict()")

    # what entries ask for

    def has(self, name: str) -> bool:
        """Tells whether there is a state of a parameter."""
        self._parts.expect_open()
        return name in self._parts.steps

    def tensor(self, name: str, plane: str) -> Tensor:
        """One of a parameter's tensors, bound by use."""
        like = self._parts.binding.by_name[name].shape_only
        shape, stride = ((), ()) if plane == STEP else (like.shape, like.stride())
        shape_only = torch.empty_strided(shape, stride, dtype=torch.float32, device="meta")
        return self._parts.binding.assembled.tensor(AssembledKey(name, plane), shape_only)

    def check(self, name: str, plane: str, value: Any) -> Tensor | None:
        """The value as it may be written; None where it is what is there already. StateError where it cannot be written."""
        key = AssembledKey(name, plane)
        if self._parts.binding.assembled.is_of(value, key):
            return None
        other = self._parts.binding.assembled.of(value)
        if other is not None:
            what = title(other.source.key)
            raise StateError(
                f"{title(key)} was assigned {what}, which lies in chunks and cannot be another's: assign a copy, {what}.clone()"
            )
        if plane == STEP and isinstance(value, int | float):
            value = torch.tensor(float(value))
        shape = () if plane == STEP else tuple(self._parts.binding.by_name[name].shape_only.shape)
        if not isinstance(value, Tensor):
            raise StateError(
                f"{title(key)} was assigned a {type(value).__name__}: it is a tensor {shape} of torch.float32"
            )
        is_right = tuple(value.shape) == shape and value.dtype is torch.float32 and value.device.type == "cpu"
        if not is_right:
            raise StateError(
                f"{title(key)} was assigned a tensor {tuple(value.shape)} of {value.dtype} on {value.device}: it is one of shape {shape}, "
                "torch.float32, on cpu"
            )
        return value

    def write(self, name: str, plane: str, value: Tensor | None) -> None:
        """Writes a value that was checked."""
        if value is None:
            return
        self._parts.begin_access()
        if plane != STEP:
            self._parts.weights.write_average(name, plane, value.detach())
            return
        self._parts.steps[name] = count_of(AssembledKey(name, STEP), value)
        self._parts.binding.assembled.changed(AssembledKey(name, STEP))

    def _name(self, parameter: Tensor) -> str:
        name = self._parts.binding.names.get(id(parameter))
        if name is None:
            raise KeyError(
                f"{type(parameter).__name__} {tuple(parameter.shape)} is no parameter of the session's model"
            )
        return name


class ParameterState(MutableMapping[str, Any]):
    """The optimizer's state of one parameter: `step`, `exp_avg`, `exp_avg_sq`; nothing before its first update."""

    def __new__(cls, *values: Any, **of: Any) -> Any:
        # Code that maps a function over containers makes another one of the same type from the results: those are ordinary tensors.
        return super().__new__(cls) if of else dict(*values)

    def __init__(self, *, of: StateMapping, name: str) -> None:
        self._of = of
        self._name = name

    def __getitem__(self, plane: str) -> Tensor:
        if plane not in FIELDS or not self._of.has(self._name):
            raise KeyError(plane)
        return self._of.tensor(self._name, plane)

    def __setitem__(self, plane: str, value: Any) -> None:
        if plane not in FIELDS:
            raise StateError(
                f"optimizer.state[{self._name}][{plane!r}] was assigned: the states of a parameter are {', '.join(FIELDS)}"
            )
        if not self._of.has(self._name):
            raise StateError(
                f"optimizer.state[{self._name}] is empty before the first update: assign the whole of it, a mapping of {', '.join(FIELDS)}"
            )
        self._of.write(self._name, plane, self._of.check(self._name, plane, value))

    def __delitem__(self, plane: str) -> NoReturn:
        raise StateError(
            f"{plane!r} of optimizer.state[{self._name}] cannot be taken out by itself: `del optimizer.state[parameter]` lets go of all of it"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(FIELDS if self._of.has(self._name) else ())

    def __len__(self) -> int:
        return len(FIELDS) if self._of.has(self._name) else 0

    def __repr__(self) -> str:
        return f"<state of {self._name}, in chunks: {', '.join(self) or 'empty'}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError("optimizer.state lies in chunks and cannot be copied or pickled: use optimizer.state_dict()")
