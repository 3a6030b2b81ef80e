"""`torch.autograd.grad` and `backward` with managed parameters among their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from patrickstar.errors import StateError
from patrickstar.parameters.bound import BoundParameter
from patrickstar.parameters.tiles import NOT_ONE_TENSOR
from patrickstar.torch_private import Plain


def differentiate(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    bound: Callable[[object], BoundParameter | None],
    undress: Callable[[Tensor], None],
) -> Any:
    """Gradients of parameters, for which their bytes are not needed.

    Backward may recompute, so it must run with parameters as they are. Named by their edges in the graph, they do not bring torch back to us.

    Args:
        func, args, kwargs: as torch's override protocol gives them. bound: the record of a managed parameter.
        undress: makes an alias of a slot an ordinary tensor.
    """
    outputs = args[0] if isinstance(args[0], list | tuple) else (args[0],)
    for output in outputs:
        undress(output)

    def edges(inputs: Any) -> Any:
        # Managed parameters, and views of slots that a custom Function has detached: all that would bring torch back.
        with Plain():
            return [get_gradient_edge(tensor) if hasattr(type(tensor), "managed_by") else tensor for tensor in inputs]

    if func is torch.autograd.backward:
        inputs = kwargs["inputs"]
        if inputs is not None:
            tiles = [tile.parameter for record in map(bound, inputs) if record is not None for tile in record.tiles]
            kwargs = {**kwargs, "inputs": edges([*inputs, *tiles])}
        return func(outputs, **kwargs)
    inputs = args[1]
    if any(record is not None and record.tiles for record in map(bound, inputs)):
        raise StateError(f"torch.autograd.grad() of a parameter that is used in tiles: {NOT_ONE_TENSOR}")
    materialize = kwargs["materialize_grads"]
    asked = {**kwargs, "materialize_grads": False, "allow_unused": materialize or kwargs["allow_unused"]}
    gradients = func(outputs, edges(inputs), **asked)
    if not materialize:
        return gradients
    return tuple(
        gradient
        if gradient is not None
        else torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=kwargs["create_graph"])
        for gradient, tensor in zip(gradients, inputs, strict=True)
    )
