"""State that Adam keeps of a tensor, and torch's format for writing that down.

torch numbers the parameters of an optimizer group by group and writes

    {"state": {number: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [{"lr", ..., "params": [number, ...]}]}

In memory the same is keyed by the parameters' names.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from patrickstar.errors import CheckpointError
from patrickstar.optim.hyper import Hyper

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
        """Reads an entry of torch's `optimizer.state`; the moments are the same tensors, not copies.

        Raises:
            CheckpointError: a field is missing, is of another shape, or the count is none.
        """
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

    Raises:
        CheckpointError: groups of other number or sizes, or a state that is not of these parameters.
        ConfigError: a group of the file asks for what is not supported (`amsgrad` and the like).
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
