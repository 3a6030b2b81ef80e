"""`AdamW` and `Adam`: torch's optimizers with an update whose every bit is defined (`reference.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from patrickstar.config.kinds import choice, refuse
from patrickstar.core.strides import dense_strides
from patrickstar.errors import ConfigError
from patrickstar.optim.choose import choose_kernels
from patrickstar.optim.hyper import Hyper, refuse_unsupported
from patrickstar.optim.passes import Passes

_STATES = choice("exact", to_come=["compact"])
_DTYPES = (torch.float32, torch.bfloat16)
_DEVICES = ("cpu", "cuda")


class _DefinedUpdate(torch.optim.Optimizer):
    """The step of both classes. Construction, groups, state and their format are torch's."""

    _passes: Mapping[torch.device, Passes] | None = None
    """By device, chosen at the first update there: an optimizer may be built where no tensor has values yet (meta, fake)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient; one without is left untouched, its count of steps too.

        Raises:
            ConfigError: a flag that changes the update was set in a group, or a parameter is neither fp32 nor bf16, or neither on the CPU nor on
                a CUDA device.
            DeviceError: torch fuses no multiply-adds there. RuntimeError: a sparse gradient, as in torch. Nothing of its group has been updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            hyper = Hyper.from_group(group)
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in updated:
                _check(parameter)
                self._passes_on(parameter.device)
            for parameter in updated:
                self._update(parameter, hyper)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over groups and states, as torch does; moments of bf16 parameters stay fp32.

        A state without `rest`, such as one of torch's, goes on from the bf16 weights as they are.
        """
        given: list[dict[str, Any]] = []  # what the user's hooks make of it
        last = self.register_load_state_dict_pre_hook(lambda _, found: given.append(found))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        names = chain.from_iterable(group["params"] for group in given[0]["param_groups"])
        parameters: Iterable[torch.Tensor] = chain.from_iterable(group["params"] for group in self.param_groups)
        for name, parameter in zip(names, parameters, strict=True):
            values = given[0]["state"].get(name)
            if values is None or parameter.dtype is torch.float32:
                continue
            for key, dtype in _types(parameter).items():
                if key in values:  # torch has cast it to the parameter's type
                    self.state[parameter][key] = values[key].to(parameter.device, dtype)

    def _update(self, parameter: torch.Tensor, hyper: Hyper) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        elif state["step"].device.type != "cpu":  # of torch's fused optimizer: read from a GPU in each step otherwise
            state["step"] = state["step"].cpu()
        for key, dtype in _types(parameter).items():
            if key not in state:
                state[key] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
        state["step"] += 1
        grad = parameter.grad
        assert grad is not None, "only parameters with a gradient are updated"
        stride = dense_strides(parameter.shape, parameter.stride())
        written = (parameter, *(state[key] for key in _types(parameter)))
        weight, exp_avg, exp_avg_sq, *rest = flat = [flat_or_copy(tensor, stride) for tensor in written]
        self._passes_on(parameter.device).update(
            weight,
            rest[0] if rest else None,
            flat_or_copy(grad, stride),
            exp_avg,
            exp_avg_sq,
            step=int(state["step"].item()),
            hyper=hyper,
        )
        for laid, tensor in zip(flat, written, strict=True):
            if laid.data_ptr() != tensor.data_ptr():  # a copy
                tensor.detach().copy_(laid.as_strided(tensor.shape, stride))
        # Written behind autograd's back: what it saved of the parameter is out of date.
        torch.autograd.graph.increment_version(parameter)

    def _passes_on(self, device: torch.device) -> Passes:
        if self._passes is None or device not in self._passes:
            self._passes = {**(self._passes or {}), device: choose_kernels(device)[device.type]}
        return self._passes[device]


class AdamW(_DefinedUpdate, torch.optim.AdamW):
    """Adam with decoupled weight decay, in place of `torch.optim.AdamW` on fp32 and bf16 parameters on the CPU or on CUDA devices.

    From one and the same state a step has the `exp_avg`, `exp_avg_sq` and weights of torch's fused optimizer, bit for bit (but for tails:
    see `docs/bits.md`); of its other optimizers the states, and weights within 2 ulp of max(|p|, lr). `state_dict()` has torch's
    format: either class loads the other's. `foreach` and `fused` choose among torch's implementations and are without
    effect; `amsgrad`, `maximize`, `capturable` and `differentiable` must stay False.

    A bf16 parameter has a master in fp32 of which it is the upper half: the lower one is the state's `rest`, int16. Optimizer states are fp32
    (10 bytes per parameter). Its steps are those of an fp32 parameter with the same gradients. Values written into the parameter by hand
    leave `rest` as it was.

    Args:
        states: "exact", fp32 optimizer states.
    Raises:
        ConfigError: an argument that is not supported.
        ValueError: a hyper-parameter that torch refuses too.
    """

    def __init__(  # noqa: PLR0917  torch's signature
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,  # noqa: ARG002  torch's name, without effect
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,  # noqa: ARG002  torch's name, without effect
        states: str = "exact",
    ) -> None:
        refuse(_STATES.problems("states", states), of="AdamW")
        flags = {"maximize": maximize, "capturable": capturable, "differentiable": differentiable}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **flags)
        refuse_unsupported(self.defaults)


class Adam(_DefinedUpdate, torch.optim.Adam):
    """Adam, with L2 weight decay unless `decoupled_weight_decay=True`; in all else as `AdamW`."""

    def __init__(  # noqa: PLR0917  torch's signature
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,  # noqa: ARG002  torch's name, without effect
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,  # noqa: ARG002  torch's name, without effect
        decoupled_weight_decay: bool = False,
        states: str = "exact",
    ) -> None:
        refuse(_STATES.problems("states", states), of="Adam")
        flags = {"maximize": maximize, "capturable": capturable, "differentiable": differentiable}
        flags["decoupled_weight_decay"] = decoupled_weight_decay
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **flags)
        refuse_unsupported(self.defaults)


def _check(parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise RuntimeError("Adam does not support sparse gradients, please consider SparseAdam instead")
    if parameter.dtype not in _DTYPES or parameter.device.type not in _DEVICES:
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype} on {parameter.device}: patrickstar's optimizers update "
            "torch.float32 and torch.bfloat16 parameters on the CPU and on CUDA devices; use torch's class for others"
        )


def _types(parameter: torch.Tensor) -> dict[str, torch.dtype]:
    """The types of a parameter's state, in the order of an update's arguments."""
    moments = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    return moments if parameter.dtype is torch.float32 else {**moments, "rest": torch.int16}


def flat_or_copy(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """One-dimensional, in the memory order that `stride` describes: a view where the tensor lies so, else a copy."""
    laid = tensor.detach()
    dims = zip(laid.shape, laid.stride(), stride, strict=True)
    # The stride of a dim of size 1 says nothing about where elements lie.
    if not all(size == 1 or mine == wanted for size, mine, wanted in dims):
        laid = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(laid)
    return laid.as_strided((laid.numel(),), (1,), laid.storage_offset())
