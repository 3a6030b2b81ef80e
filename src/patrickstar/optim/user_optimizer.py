"""The optimizer a user passes to `manage`. Parameters are known by `names`: `id(parameter)` -> name, of all parameters of the model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from patrickstar.errors import CheckpointError, ConfigError, some
from patrickstar.optim.adamw import Adam, AdamW
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.state import State

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


def read_groups(groups: Sequence[dict[str, Any]], names: Mapping[int, str]) -> dict[str, Hyper]:
    """The hyper-parameters of every parameter that is in a group, by name, as the groups stand now.

    A parameter in no group gets no update, as in torch.

    Raises:
        ConfigError: a parameter is not the model's, a flag that changes the update is set, or a value is no number.
    """
    check_parameters([parameter for group in groups for parameter in group["params"]], names)
    hypers: dict[str, Hyper] = {}
    for group in groups:
        hyper = Hyper.from_group(group)
        hypers.update([(names[id(parameter)], hyper) for parameter in group["params"]])
    return hypers


def read_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, State]:
    """State of the optimizer by name, without the parameters it never updated.

    The moments are the optimizer's own tensors: their memory is free once they are copied *and* its `state` is cleared.

    Raises:
        ConfigError: state that is not Adam's.
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
