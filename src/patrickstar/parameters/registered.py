"""The modules of a model and the parameters that they have, remembered: whether they are still the same is asked before every forward."""

from __future__ import annotations

import torch
from torch import nn


class Registered:
    """The modules and the parameters of a model as they are now, each once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())
        self._entries = [
            (own, list(own.items()))
            for module in self.modules
            if not isinstance(module, torch.jit.ScriptModule)  # which keeps what it has
            for own in (module._parameters, module._modules)
        ]

    def are_there(self) -> bool:
        """Tells whether every module has the very same parameters and modules, under the same names. Calls no function of Python's."""
        for now, then in self._entries:
            if len(now) != len(then):
                return False
            for name, entry in then:
                if now.get(name) is not entry:
                    return False
        return True
