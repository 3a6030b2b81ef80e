"""fp32 masters beside the bf16 parameters of a plain PyTorch model: the arithmetic that a split master has, written out.

Nothing of the library takes part.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["PlainMasters"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class PlainMasters:
    """Narrows a model to bf16, and keeps its masters and the fp32 sums of its gradients.

    Batch norm, and modules that the model itself lists in `_keep_in_fp32_modules`, stay fp32 whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._masters: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        whole = {id(tensor) for module in _whole(model) for tensor in (*module.parameters(), *module.buffers())}
        for name, parameter in model.named_parameters():
            self._masters[name] = parameter.detach().clone()
            if id(parameter) not in whole:
                parameter.data = narrow(self._masters[name])
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) in whole or name in module._non_persistent_buffers_set:
                    continue
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(torch.bfloat16)

    def gather(self) -> None:
        """After a backward: its gradients are added to the sums."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                wide = parameter.grad.float()
                if name in self._gradients:
                    self._gradients[name].add_(wide)
                else:
                    self._gradients[name] = wide
                parameter.grad = None

    def take_gradients(self) -> dict[str, Tensor]:
        """The sums by name, in the order of parameters; they begin anew."""
        sums, self._gradients = self._gradients, {}
        return {name: sums[name] for name in self._masters if name in sums}

    def __getitem__(self, name: str) -> Tensor:
        return self._masters[name]

    def write_back(self) -> None:
        """The weights are their masters, rounded."""
        for name, parameter in self._model.named_parameters():
            narrowed = self._masters[name] if parameter.dtype is torch.float32 else narrow(self._masters[name])
            parameter.data.copy_(narrowed)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's, with masters for parameters."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        state = self._model.state_dict(keep_vars=True)
        return {key: self._masters[names[id(value)]] if id(value) in names else value for key, value in state.items()}


def narrow(master: Tensor) -> Tensor:
    """Rounded to the nearest bf16, ties away from zero: half of the last place that is kept carries where it must."""
    rounded = (master.contiguous().view(torch.int32) + 0x8000) & -0x10000
    return rounded.view(torch.float32).to(torch.bfloat16).view(master.shape)


def _whole(model: nn.Module) -> Iterator[nn.Module]:
    listed = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for path, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS) or listed & set(path.split(".")):
            yield module
