"""fp32 masters beside the 16-bit weights of a plain PyTorch model: the arithmetic of `docs/bits.md`, written out. In fp32 each weight is its own.

Nothing of the library takes part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from patrickstar.config.loss_scale import LossScale
from patrickstar.parameters.bound import names_by_id

__all__ = ["PLAIN_FP32", "PlainMasters", "PlainPrecision"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPrecision:
    """The type that weights are rounded to, and the type that they compute in.

    Attributes:
        kept: bfloat16 or float16; float32: nothing is rounded. compute: that, or float32: then a weight is the very same rounded value, in fp32.
        gradient: what one backward's gradients are rounded to; float32: not at all, because several add up.
        keep_fp32: names of modules that stay fp32 whole, beside those that the model lists. loss_scale: of losses; None: they are not scaled.
    """

    kept: torch.dtype
    compute: torch.dtype
    gradient: torch.dtype
    keep_fp32: Sequence[str] = ()
    loss_scale: LossScale | None = None


PLAIN_FP32 = PlainPrecision(kept=torch.float32, compute=torch.float32, gradient=torch.float32)


class PlainMasters:
    """Narrows a model to 16 bits, and keeps its masters and the fp32 sums of its gradients.

    Batch norm, and modules that the model itself lists in `_keep_in_fp32_modules`, stay fp32 whole: each is its own master.
    """

    def __init__(self, model: nn.Module, precision: PlainPrecision) -> None:
        self._model = model
        self._precision = precision
        whole = {id(t) for module in _whole(model, precision) for t in (*module.parameters(), *module.buffers())}
        self._whole = {name for name, parameter in model.named_parameters() if id(parameter) in whole}

        self._masters: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if name in self._whole:
                self._masters[name] = parameter.detach()
                continue
            rounded = narrow(parameter.detach(), precision.kept)
            # Of what is frozen the rounded weight is all there is.
            self._masters[name] = parameter.detach().clone() if parameter.requires_grad else rounded.float()
            # Strides stay as they are: torch may choose another kernel by them.
            strides, device = parameter.stride(), parameter.device
            weight = torch.empty_strided(parameter.shape, strides, dtype=precision.compute, device=device)
            parameter.data = weight.copy_(rounded)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                    module._buffers[name] = buffer.to(torch.float32 if id(buffer) in whole else precision.compute)

    def gather(self) -> None:
        """Adds the gradients of a backward that is over to the sums."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                kept = parameter.grad if name in self._whole else parameter.grad.to(self._precision.gradient)
                wide = kept.float()
                if name in self._gradients:
                    self._gradients[name].add_(wide)
                else:
                    self._gradients[name] = wide
                parameter.grad = None

    def take_gradients(self) -> dict[str, Tensor]:
        """The sums by name, in the order of parameters; summing begins anew."""
        sums, self._gradients = self._gradients, {}
        return {name: sums[name] for name in self._masters if name in sums}

    def __getitem__(self, name: str) -> Tensor:
        return self._masters[name]

    def write_back(self) -> None:
        """Rounds the masters into the weights."""
        for name, parameter in self._model.named_parameters():
            if name not in self._whole:
                parameter.data.copy_(narrow(self._masters[name], self._precision.kept))

    def state_dict(self) -> dict[str, Tensor]:
        """The model's, with masters for parameters."""
        names = names_by_id(dict(self._model.named_parameters()))
        state = self._model.state_dict(keep_vars=True)
        return {key: self._masters[names[id(value)]] if id(value) in names else value for key, value in state.items()}


def narrow(master: Tensor, kept: torch.dtype) -> Tensor:
    """The weight of a master: fp16 rounds ties to even, as torch does; bf16 away from zero, as a split master must.

    Half of the last place that is kept carries where it must.
    """
    if kept is torch.float16:
        return master.half()
    rounded = (master.contiguous().view(torch.int32) + 0x8000) & -0x10000
    return rounded.view(torch.float32).to(torch.bfloat16).view(master.shape)


def _whole(model: nn.Module, precision: PlainPrecision) -> Iterator[nn.Module]:
    if precision.kept is torch.float32:
        yield model
        return
    listed = (*precision.keep_fp32, *(getattr(model, "_keep_in_fp32_modules", None) or ()))
    for path, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS) or any(f".{name}." in f".{path}." for name in listed):
            yield module
