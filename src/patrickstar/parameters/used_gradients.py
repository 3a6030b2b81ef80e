"""Gradients that were used as they came, where parameters keep their bytes: what stands in `p.grad` from then on."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from torch import Tensor

from patrickstar.core.planes import GRAD
from patrickstar.memory.leases import AssembledKey
from patrickstar.parameters.assembled import AssembledTensors
from patrickstar.parameters.bound import BoundParameter
from patrickstar.torch_private import Plain

USED = 'it was used and released (step="in_backward"; step="deferred" keeps gradients until zero_grad())'


class UsedGradients:
    """Tensors that refuse every use, one for each parameter, in the place of gradients that were used and nobody has zeroed.

    A gradient is zeroed where its tensor is in `p.grad` no more: `model.zero_grad()` and `p.grad = None` tell nobody.
    """

    def __init__(self, assembled: AssembledTensors, by_name: Mapping[str, BoundParameter]) -> None:
        self._assembled = assembled
        self._by_name = by_name
        self._tensors: dict[str, Tensor] = {}

    def put(self, names: Iterable[str]) -> None:
        """Lets gradients go, which have been used."""
        for name in names:
            bound = self._by_name[name]
            if name not in self._tensors:
                self._tensors[name] = self._assembled.gone(AssembledKey(name, GRAD), bound.shape_only, USED)
            bound.parameter.grad = self._tensors[name]

    def there(self, names: Iterable[str]) -> list[str]:
        """Names of those of these parameters whose gradients were used, and have not been zeroed since."""
        with Plain():
            return [name for name in names if self._by_name[name].parameter.grad is self._tensors.get(name, self)]

    def forget(self, names: Container[str] | None = None) -> None:
        """Zeroes these gradients: `p.grad` is None. `names`: of which parameters; None: of all."""
        with Plain():
            for name in self.there(self._tensors):
                if names is None or name in names:
                    self._by_name[name].parameter.grad = None
