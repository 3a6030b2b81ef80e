"""What the binding hands on, and what it must pack itself: a mistake here costs memory, not bits."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.parameters.test_saved_tensors import Tower, X
from tests.parameters.toy import ToyOwner, compare


def seen_by_hooks(model: nn.Module) -> list[Tensor]:
    """Copies of what the hooks of a user are given in a forward."""
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach().clone())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(X.clone().requires_grad_())
    return seen


def test_hooks_of_the_users_are_given_what_those_of_plain_pytorch_are():
    """Checkpointing and offloading live on that: an input of a layer that is kept from them stays in memory."""
    plain = Tower()
    managed = copy.deepcopy(plain)
    ToyOwner(managed, slots=2, chunk_numel=2048)
    want, got = seen_by_hooks(plain), seen_by_hooks(managed)
    assert [tuple(tensor.shape) for tensor in want] == [tuple(tensor.shape) for tensor in got]
    assert all(map(torch.equal, want, got))


def test_a_view_is_packed_when_an_operation_saves_it_for_its_input():
    """Held by the graph, the view would keep its slot until backward: with one slot, nothing else could be used."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.randn(4, 16, 32))
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            y = torch.nn.functional.linear(x, self.experts[2])
            for layer in self.layers:
                x = layer(x)
            return x.sum() * y.sum()

    compare(Model, lambda model: model(X.clone().requires_grad_()), slots=1, chunk_numel=2048)
