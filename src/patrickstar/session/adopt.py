"""Moves a model's values, gradients and optimizer state into chunks, and back where that fails."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from patrickstar.deferred.deferred_init import deferred_by
from patrickstar.memory.allocator import release_free_memory
from patrickstar.optim.user_optimizer import read_state
from patrickstar.parameters.bound import BoundParameter
from patrickstar.session.loading import Loading
from patrickstar.session.parts import Parts
from patrickstar.step.values import Weights

_log = logging.getLogger("patrickstar")


def take_over(parts: Parts, source: Loading | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Moves everything, one parameter at a time, so that no second copy of the model ever exists; then binds the parameters.

    Whatever is raised on the way, parameters, gradients and the optimizer's state are as before.

    Args:
        source: asked first for the value of a parameter. optimizer: the user's, of which nothing is left but its groups.
    """
    named, binding, weights, gradients = parts.named, parts.binding, parts.weights, parts.training.in_chunks
    given = source.names if source is not None else ()
    keep = source is not None and source.keep
    dtypes = {name: parameter.dtype for name, parameter in named.items()}
    their_gradients: dict[str, Tensor] = {}
    taken: list[str] = []
    own = _kept(named, given, all_given=keep)
    try:
        for bound in binding:
            gradient = bound.parameter.grad
            goes_in_chunks = optimizer is not None and (binding.gradients.widen or not binding.gradients.stay)
            if goes_in_chunks and gradient is not None:
                their_gradients[bound.name] = gradient
                bound.parameter.grad = None
            if _fill(bound, source, weights):
                taken.append(bound.name)
                bound.parameter.data = bound.standin
        if optimizer is not None:
            for name, gradient in their_gradients.items():
                gradients.add(binding.by_name[name], gradient)
            gradients.whole |= gradients.names
            parts.take_states(read_state(optimizer, binding.names))
    except BaseException:
        for name in taken:
            named[name].data = own[name] if name in own else weights.read(name).to(dtypes[name])
        for name, gradient in their_gradients.items():
            named[name].grad = gradient
        _tell([name for name in taken if name in given and name not in own])
        raise
    if optimizer is not None:
        optimizer.state.clear()
    binding.hold() if binding.is_whole else binding.let_go()
    own.clear()
    release_free_memory()


def _kept(named: Mapping[str, nn.Parameter], given: Collection[str], *, all_given: bool) -> dict[str, Tensor]:
    """Tensors that fp32 cannot hold exactly, or that are not moved: kept until nothing can fail any more."""
    return {
        name: parameter.data
        for name, parameter in named.items()
        if deferred_by(parameter) is None and (all_given if name in given else parameter.dtype is torch.float64)
    }


def _tell(lost: list[str]) -> None:
    if lost:
        _log.error(
            "%d parameters have the values they were to get, %s first: not both fit in memory", len(lost), lost[0]
        )


def _fill(bound: BoundParameter, source: Loading | None, weights: Weights) -> bool:
    """Puts a parameter's first value into its place; gives back whether the parameter has one to let go."""
    recorder = deferred_by(bound.parameter)
    if source is not None and bound.name in source.names:
        weights.fill(bound, source.read(bound.name))
    elif recorder is not None:
        weights.fill_made(bound, recorder)
    else:
        weights.fill(bound, bound.parameter.data)
    return recorder is None
