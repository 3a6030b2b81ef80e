"""A model of blocks that does not fit as a whole, and its training beside its plain twin."""

import torch
from torch import nn

from tests.session.builders import WIDTH, adamw, managed, step_with_loss

MOVING = {"device": "emulated", "device_memory": "192KiB"}
"""Room for some blocks, each of which takes 17 KiB of weights; all model states take 400 KiB."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.scale * self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """Blocks in a list, between two layers that no block owns."""

    def __init__(self, block=Block, layers=6):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(block() for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def build(block=Block, model=Model, **given):
    torch.manual_seed(0)
    return model(block, **given)


def train_both(plain, model, steps=4, **machine):
    """Trains a model under management, and the same one without; fails where a bit differs. Gives the statistics at the end."""
    optimizer = adamw(plain)
    with managed(model, **{**MOVING, **machine}) as session:
        for number in range(steps):
            losses = [step_with_loss(*each, number) for each in ((plain, optimizer), (model, session.optimizer))]
            assert torch.equal(*losses), number
        stats = session.stats()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other), name
    return stats
