"""The optimizer a user passes to `manage`: its groups, and the state that Adam keeps of a tensor.

torch numbers the parameters of an optimizer group by group and writes

    {"state": {number: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [{"lr", ..., "params": [number, ...]}]}

In memory the same is keyed by the parameters' `names`: `id(parameter)` -> name, of all parameters of the model.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from patrickstar.errors import CheckpointError, ConfigError, some
from patrickstar.optim.adamw import Adam, AdamW
from patrickstar.optim.hyper import Hyper

ACCEPTED: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.AdamW, torch.optim.Adam, AdamW, Adam)
"""Exactly these: a subclass may do anything in its step."""

SHOWN_SHAPES = 4
_log = logging.getLogger("patrickstar")


def check_optimizer(optimizer: object, names: Mapping[int, str]) -> None:
    """Raises ConfigError unless the optimizer can be taken over as it stands."""
    if type(optimizer) not in ACCEPTED:
        allowed = ", ".join(_qualified(accepted) for accepted in ACCEPTED)
        raise ConfigError(
            f"{_qualified(type(optimizer))} is no optimizer that can be managed: {allowed} (no subclasses)"
        )
    assert isinstance(optimizer, torch.optim.Optimizer), "what is accepted is an optimizer"
    for hyper in read_groups(optimizer.param_groups, names).values():
        hyper.check()
    read_state(optimizer, names)


def check_parameters(parameters: Iterable[torch.Tensor], names: Mapping[int, str]) -> None:
    """Raises ConfigError naming how many of the parameters are not the model's, and their shapes."""
    strangers = [parameter for parameter in parameters if id(parameter) not in names]
    if strangers:
        shapes = some([str(tuple(parameter.shape)) for parameter in strangers], most=SHOWN_SHAPES)
        raise ConfigError(
            f"{len(strangers)} of the optimizer's parameters are not the model's, of shapes {shapes}: "
            "build the optimizer from model.parameters(), or give others an optimizer of their own"
        )


def read_groups(
    groups: Sequence[dict[str, Any]], names: Mapping[int, str], *, lr_factor: float = 1.0
) -> dict[str, Hyper]:
    """The hyper-parameters of every parameter that is in a group, by name, as the groups stand now. One in no group gets no update, as in torch.

    ConfigError: a parameter is not the model's, a flag that changes the update is set, or a value is no number.
    """
    check_parameters([parameter for group in groups for parameter in group["params"]], names)
    hypers = [(group, Hyper.from_group(group)) for group in groups]
    hypers = [(group, replace(hyper, lr=hyper.lr * lr_factor)) for group, hyper in hypers]
    return {names[id(parameter)]: hyper for group, hyper in hypers for parameter in group["params"]}


def read_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, State]:
    """State of the optimizer by name, without the parameters it never updated. ConfigError: state that is not Adam's.

    The moments are the optimizer's own tensors: their memory is free once they are copied *and* its `state` is cleared.
    """
    states: dict[str, State] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = optimizer.state.get(parameter)
            if entry:
                name = names[id(parameter)]
                try:
                    states[name] = State.from_torch(entry, parameter.shape, name=name)
                except CheckpointError as damaged:
                    raise ConfigError(f"{damaged}; load or clear the optimizer's state before manage()") from None
    return states


def return_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str], states: Mapping[str, State]) -> None:
    """Makes `states` what the optimizer remembers of its parameters, so that it can go on where the session stopped."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in states:
                optimizer.state[parameter] = states[name].to_torch()
            else:
                optimizer.state.pop(parameter, None)


def begin_anew(optimizer: torch.optim.Optimizer) -> None:
    """Warns, once, when an optimizer that begins without the state of its session is used. One that nobody uses any more is no news."""
    told = False

    def tell(*_: object) -> None:
        nonlocal told
        if not told and not optimizer.state:  # it may have been given another state since
            _log.warning(
                "the optimizer passed to manage() has no state: it did not fit the host budget as whole tensors when the session was closed. "
                "Call session.save_checkpoint(dir) before close() to keep it"
            )
        told = True

    optimizer.register_step_pre_hook(tell)
    optimizer.register_state_dict_pre_hook(tell)


def _qualified(kind: type) -> str:
    if kind.__module__.startswith("torch.optim"):
        return f"torch.optim.{kind.__qualname__}"
    if kind.__module__.startswith("patrickstar.optim"):
        return f"patrickstar.{kind.__qualname__}"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


Group = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """One tensor's count of updates and its two moments, in the tensor's shape."""

    step: int
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def to_torch(self) -> dict[str, torch.Tensor]:
        """The entry of torch's `optimizer.state`; the moments are the same tensors, not copies."""
        step = torch.tensor(float(self.step), dtype=torch.float32, device="cpu")
        return {"step": step, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @classmethod
    def from_torch(cls, entry: Mapping[str, Any], shape: Sequence[int], *, name: str) -> State:
        """Reads an entry of torch's `optimizer.state`; the moments are the same tensors. CheckpointError: one is missing, or of another shape."""
        missing = [field for field in ("step", "exp_avg", "exp_avg_sq") if field not in entry]
        if missing:
            raise CheckpointError(
                f"optimizer state of {name} has no {', '.join(missing)}: not a state of Adam or AdamW"
            )
        for field in ("exp_avg", "exp_avg_sq"):
            if tuple(entry[field].shape) != tuple(shape):
                raise CheckpointError(
                    f"optimizer state of {name}: {field} has shape {tuple(entry[field].shape)}, "
                    f"the parameter has {tuple(shape)}: a state of another model"
                )
        step = float(entry["step"])
        if not (step >= 0 and step == int(step)):
            raise CheckpointError(f"optimizer state of {name}: step is {step}, not a count of updates")
        return cls(step=int(step), exp_avg=entry["exp_avg"], exp_avg_sq=entry["exp_avg_sq"])


def unpack(state_dict: Mapping[str, Any], groups: Sequence[Group], names: Mapping[int, str]) -> dict[str, State]:
    """The states in a `state_dict` of torch's Adam or AdamW, by name. Nothing is changed and nothing copied.

    CheckpointError: other groups, or a state that is not of these parameters. ConfigError: a group asks for what is not supported (`amsgrad`, say).
    """
    try:
        saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
        want, got = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved_groups]
    except (KeyError, TypeError):
        raise CheckpointError("an optimizer's state dict has `state` and `param_groups` with their `params`") from None
    if want != got:
        raise CheckpointError(
            f"loaded state dict has parameter groups of {got} parameters, the optimizer's have {want}: "
            "build the groups as they were when it was saved"
        )
    for group, saved in zip(groups, saved_groups, strict=True):
        Hyper.from_group({**group, **saved}).check()
    numbers = [number for saved in saved_groups for number in saved["params"]]
    states = {}
    parameters = [parameter for group in groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if saved_state.get(number):
            name = names[id(parameter)]
            states[name] = State.from_torch(saved_state[number], parameter.shape, name=name)
    return states


def restore_groups(groups: Sequence[Group], state_dict: Mapping[str, Any], *, keep: Collection[str] = ()) -> None:
    """Writes the saved hyper-parameters into the very same group dicts, which schedulers and the original share."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        fields = {key: value for key, value in saved.items() if key != "params" and key not in keep}
        group.update(copy.deepcopy(fields))
