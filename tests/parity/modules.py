"""Small modules of our own, each with one habit that managed parameters must survive.

Plain PyTorch: nothing here knows the library. `checkpointing` is "none", "non-reentrant" or "reentrant" throughout.
Shapes: B batch, T tokens, C channels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.composed import Composed

WIDTH = 32
VOCABULARY = 128


class Checkpointed(nn.Module):
    """A module of blocks that are recomputed in backward where checkpointing asks for it (in training only, as models do)."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.checkpointing = checkpointing

    def run(self, block: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """The block's output."""
        if self.checkpointing == "none" or not self.training:
            return block(*inputs)
        result: Tensor = checkpoint(block, *inputs, use_reentrant=self.checkpointing == "reentrant")
        return result


class Feedforward(nn.Module):
    """Norm, two linear layers, residual."""

    def __init__(self, width: int = WIDTH, inner: int = 2 * WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class OneBlock(Checkpointed):
    """One block used four times: its accumulators fire once, or with re-entrant checkpointing four times a backward."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feedforward = Feedforward()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def block(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.feedforward(x + attended)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # [B, T, C]
        for _ in range(4):
            x = self.run(self.block, x)
        return self.head(x)


class Residual(nn.Module):
    """Two convolutions with batch norm, in-place ReLU and an in-place addition: what breaks under wrapped outputs."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += x
        return self.relu(y)


class ConvNet(Checkpointed):
    """A small residual network. Recomputed blocks update their running statistics twice, as in PyTorch."""

    def __init__(
        self, checkpointing: str, *, channels: int = 24, memory_format: torch.memory_format | None = None
    ) -> None:
        super().__init__(checkpointing)
        self.memory_format = memory_format
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(2))
        self.head = nn.Linear(channels, 5)
        if memory_format is not None:
            self.to(memory_format=memory_format)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)  # [B, C, H, W]
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x.mean((2, 3)))


class Strided(nn.Module):
    """Parameters that are dense but not row-major: channels-last filters and a linear weight stored transposed.

    torch chooses kernels by strides, the images here being row-major: row-major weights would give other bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = ConvNet("none", memory_format=torch.channels_last)
        self.weight = nn.Parameter((torch.randn(64, 5) / 8).t())  # [5, 64], strides (1, 5)
        self.lift = nn.Linear(5, 64)

    def forward(self, images: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.lift(self.net(images))), self.weight)


def recurrent() -> nn.Module:
    """A bidirectional LSTM, which hands its weights to one kernel as a flat list."""
    return Composed(
        lambda model, tokens: model.head(model.lstm(model.embedding(tokens))[0]),
        embedding=nn.Embedding(VOCABULARY, 16),
        lstm=nn.LSTM(16, WIDTH, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1),
        head=nn.Linear(2 * WIDTH, VOCABULARY),
    )


class Encoder(Checkpointed):
    """`nn.TransformerEncoder`: in evaluation without gradients torch takes its fused path, which has other bits."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, dim_feedforward=2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.run(self.encoder, self.embedding(tokens)))


class TakesWeight(nn.Module):
    """A child without a parameter of its own: its parent hands it a view."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight)


class Held(Checkpointed):
    """Parameters used away from their owner: expanded for children, indexed by expert, views held across children."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.query = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5)  # [E, C, C]
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(4))
        self.extra = nn.ParameterDict({"out": nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)})
        self.children_ = nn.ModuleList(TakesWeight() for _ in range(4))
        self.mixers = nn.ModuleList(Feedforward() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query = self.query.expand(x.shape[0], x.shape[1], -1)  # held until the last line
        views = [self.experts[index] for index in range(4)]  # all made before the first is used
        for index, child in enumerate(self.children_):
            x = self.run(child, x, views[index])
            x = x * self.scales[index]
            if index < len(self.mixers):
                x = self.run(self.mixers[index], x)
        return (x + query) @ self.extra["out"] + query


class WeightNormed(nn.Module):
    """Weights computed from parameters at each use, by a parametrization or by the older forward hook."""

    def __init__(self, *, by_hook: bool) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, WIDTH)]
        if by_hook:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still in many models
                layers = [nn.utils.weight_norm(layer) for layer in layers]
        else:
            layers = [parametrizations.weight_norm(layer) for layer in layers]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class ScaledLinear(torch.autograd.Function):
    """y = x W^T * s with a backward of its own that reads the saved weight and scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, scale)
        return x @ weight.t() * scale

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (dy,) = outputs  # [B, T, C]
        x, weight, scale = ctx.saved_tensors
        scaled = dy * scale
        flat_x, flat_dy = x.flatten(0, -2), scaled.flatten(0, -2)
        return scaled @ weight, flat_dy.t() @ flat_x, (dy * (x @ weight.t())).flatten(0, -2).sum(0)


class CustomFunction(Checkpointed):
    """Weights that only a user's own `autograd.Function` uses."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(4))

    def layer(self, x: Tensor, index: int) -> Tensor:
        return torch.tanh(ScaledLinear.apply(x, self.weights[index], self.scales[index]))

    def forward(self, x: Tensor) -> Tensor:
        for index in range(4):
            x = self.run(self.layer, x, index)
        return x


class Tied(Checkpointed):
    """Ties of three kinds: head and embedding, two modules with one weight, a weight and its transpose."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.between = Feedforward(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.squeeze = nn.Parameter(torch.randn(16, WIDTH) / WIDTH**0.5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def block(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(self.between(torch.tanh(self.first(x)))))
        return F.linear(torch.relu(F.linear(x, self.squeeze)), self.squeeze.t()) + x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.run(self.block, x)
        return self.head(x)


def long_embedding() -> nn.Module:
    """An embedding of 96,000 elements: dozens of chunks in one run, and more than one block of the global norm."""
    return Composed(
        lambda model, tokens: model.head(model.mixers(model.embedding(tokens))),
        embedding=nn.Embedding(2000, 48),
        mixers=nn.Sequential(*(Feedforward(48, 64) for _ in range(2))),
        head=nn.Linear(48, 8),
    )


class Scalars(nn.Module):
    """Scalars, a vector of three, a registered layer that no forward uses (its gradient stays `None`)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(-0.25))
        self.three = nn.Parameter(torch.randn(3))
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(5))
        self.unused = nn.Linear(48, 48)
        self.last = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * self.scale + self.shift * self.three[index % 3]
        return x * self.last


def branches() -> nn.Module:
    """The batch decides which branch runs: a parameter has gradients in some steps only, and step counts differ."""
    parts = {name: Feedforward(48, 64) for name in ("inner", "left", "right")}
    run = lambda model, x, flag: model.head((model.left if flag else model.right)(model.inner(x)))
    return Composed(run, **parts, head=nn.Linear(48, 48))


class Adapted(Checkpointed):
    """Frozen layers with small trained ones beside them, and one trained layer that no optimizer group holds."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.opening = nn.Linear(WIDTH, WIDTH)  # re-entrant checkpointing needs an input that requires gradients
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(WIDTH, 16, bias=False) for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(16, WIDTH, bias=False) for _ in range(4))
        self.loose = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def layer(self, x: Tensor, index: int) -> Tensor:
        return torch.tanh(self.layers[index](x) + self.ups[index](self.downs[index](x)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.opening(self.embedding(tokens))
        for index in range(4):
            x = self.run(self.layer, x, index)
        return self.head(torch.tanh(self.loose(x)))


def thawed() -> nn.Module:
    """Starts with its first layers frozen; the training loop lets them go later."""
    return Composed(
        lambda model, x: model.trained(torch.tanh(model.frozen(x))),
        frozen=nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48)).requires_grad_(False),
        trained=nn.Sequential(Feedforward(48, 64), nn.Linear(48, 48)),
    )


class Tower(Checkpointed):
    """Two blocks of six layers, each layer a chunk of its own: one block spans more chunks than the least slots."""

    def __init__(self, checkpointing: str, *, on_cpu: bool = False) -> None:
        super().__init__(checkpointing)
        self.on_cpu = on_cpu
        self.towers = nn.ModuleList(nn.ModuleList(nn.Linear(44, 44) for _ in range(6)) for _ in range(2))

    def block(self, x: Tensor, index: int) -> Tensor:
        for layer in self.towers[index]:
            x = torch.tanh(layer(x))
        return x

    def blocks(self, x: Tensor) -> Tensor:
        for index in range(len(self.towers)):
            x = self.run(self.block, x, index)
        return x

    def forward(self, x: Tensor) -> Tensor:
        if not self.on_cpu:
            return self.blocks(x)
        with torch.autograd.graph.save_on_cpu():  # its hooks lie on top of anybody's, and copy what they are given
            return self.blocks(x)


def penalised() -> nn.Module:
    """A loss with a gradient in it: its backward goes through the same weights twice."""

    def run(model: Any, x: Tensor) -> Any:
        for layer in model.layers:
            x = torch.tanh(layer(x))
        return model.head(x)

    return Composed(run, layers=nn.ModuleList(nn.Linear(48, 48) for _ in range(6)), head=nn.Linear(48, 1))


class Autocast(Checkpointed):
    """fp32 weights under a user's own autocast, which keeps casts of weights for as long as it lasts."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.mixers = nn.ModuleList(Feedforward(48, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            for mixer in (*self.mixers, self.mixers[0]):
                x = self.run(mixer, x)
        return x.float()
