"""Moves a model's values, gradients and optimizer state into chunks, and back where that fails."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from patrickstar.core.plane import EXP_AVG, EXP_AVG_SQ
from patrickstar.memory.allocator import release_free_memory
from patrickstar.nn.binding import Binding
from patrickstar.optim.take_over import read_state
from patrickstar.runtime.gradients import Gradients
from patrickstar.runtime.training import Training
from patrickstar.runtime.weights import Weights

__all__ = ["take_over"]


def take_over(
    named: Mapping[str, nn.Parameter],
    *,
    binding: Binding,
    weights: Weights,
    gradients: Gradients,
    training: Training | None,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Moves everything, one parameter at a time, so that no second copy of the model ever exists; then binds the parameters.

    Whatever is raised on the way, parameters, gradients and the optimizer's state are as before.
    """
    dtypes = {name: parameter.dtype for name, parameter in named.items()}
    their_gradients: dict[str, Tensor] = {}
    taken: list[str] = []
    # What fp32 cannot hold exactly is kept until nothing can fail any more.
    wider: dict[str, Tensor] = {name: p.data for name, p in named.items() if p.dtype is torch.float64}
    try:
        for bound in binding:
            weights.fill(bound, bound.parameter.data)
            taken.append(bound.name)
            gradient = bound.parameter.grad
            if training is not None and gradient is not None and not binding.gradients.stay:
                their_gradients[bound.name] = gradient
                bound.parameter.grad = None
            bound.parameter.data = bound.standin
        if training is not None:
            assert optimizer is not None
            for name, gradient in their_gradients.items():
                gradients.add(binding.by_name[name], gradient.to(torch.float32))
            names = {id(parameter): name for name, parameter in named.items()}
            for name, entry in read_state(optimizer, names).items():
                weights.write_moment(name, EXP_AVG, entry.exp_avg)
                weights.write_moment(name, EXP_AVG_SQ, entry.exp_avg_sq)
                training.steps[name] = entry.step
    except BaseException:
        for name in taken:
            named[name].data = wider[name] if name in wider else weights.read(name).to(dtypes[name])
        for name, gradient in their_gradients.items():
            named[name].grad = gradient
        raise
    if optimizer is not None:
        optimizer.state.clear()
    binding.bind()
    release_free_memory()
