"""The two to which a script is done: plain PyTorch, and the same model under a session."""

from __future__ import annotations

import copy
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.oracle import clip_factor, global_norm
from tests.parity.tiles import tiled_products
from tests.session.builders import LAYERS, batch, mlp
from tests.session.masters import Twin, manage

__all__ = ["Managed", "Plain", "Side"]


class Side(ABC):
    """One of the two: what a session has a way of its own for is abstract."""

    def __init__(self, model: nn.Module, compute: torch.dtype) -> None:
        self.model = model
        self.compute = compute
        self.parameters = list(model.parameters())
        self.updated = self.parameters  # those that the optimizer has
        self.waiting: list[Tensor] = []
        self.batches = 0
        self.kept: dict[str, Tensor] = {}

    @property
    @abstractmethod
    def optimizer(self) -> Any:
        """What `param_groups` and `zero_grad` are asked of."""

    @abstractmethod
    def backward(self, loss: Tensor, *, keep: bool) -> None: ...

    @abstractmethod
    def step(self) -> None: ...

    @abstractmethod
    def with_gradients(self, act: Callable[[], Any], *, changes: Sequence[int] = ()) -> Any:
        """Does what reads `.grad` of `parameters`, or changes those of some."""

    def assigned(self, number: int, *, is_one: bool) -> None:  # noqa: B027 - a session sees for itself
        """Is told that a gradient, or None, was assigned."""

    @abstractmethod
    def with_weights(self, act: Callable[[], Any]) -> Any:
        """Does what reads or writes `parameters`."""

    @abstractmethod
    def limit(self, norm: float) -> Tensor:
        """Clips the global norm as `docs/bits.md` defines it."""

    @abstractmethod
    def save(self) -> None: ...

    @abstractmethod
    def load(self) -> None: ...

    def train(self, number: int, yes: bool) -> None:
        self.parameters[number].requires_grad_(yes)

    def loss(self, rows: int = 4, layers: int = LAYERS) -> Tensor:
        x = batch(self.batches, rows=rows).to(self.compute)
        self.batches += 1
        used = self.model if layers == LAYERS else self.model[: 2 * layers]  # type: ignore[index]
        found: Tensor = used(x).float().square().mean()
        return found

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


class Plain(Side):
    """Plain PyTorch, in 16 bits with masters kept by hand."""

    def __init__(self, kind: str, *, accumulate: int = 1, tile_rows: int | None = None) -> None:
        self.twin = Twin(kind)
        self.twin.unrounded = accumulate > 1
        self.tile_rows = tile_rows
        super().__init__(self.twin.model, self.twin.compute)
        self.updated = list(self.twin.masters.parameters())
        self.names = [name for name, _ in self.twin.masters.named_parameters()]

    @property
    def optimizer(self) -> Any:
        return self.twin.optimizer

    def loss(self, rows: int = 4, layers: int = LAYERS) -> Tensor:
        with nullcontext() if self.tile_rows is None else tiled_products(self.model, self.tile_rows):
            return super().loss(rows, layers)

    def backward(self, loss: Tensor, *, keep: bool) -> None:
        self.twin.backward_of(loss, retain_graph=keep)

    def step(self) -> None:
        self.twin.update()

    def with_gradients(self, act: Callable[[], Any], *, changes: Sequence[int] = ()) -> Any:
        changed = [self.updated[number].grad for number in changes if self.names[number] not in self.twin.own]
        self.twin.unrounded |= any(gradient is not None for gradient in changed)
        return self.twin.change_gradients(lambda _: act())

    def assigned(self, number: int, *, is_one: bool) -> None:
        (self.twin.own.add if is_one else self.twin.own.discard)(self.names[number])

    def with_weights(self, act: Callable[[], Any]) -> Any:
        result = act()
        self.twin.carry()
        return result

    def limit(self, norm: float) -> Tensor:
        gradients = {name: p.grad for name, p in self.twin.masters.named_parameters() if p.grad is not None}
        before = global_norm(gradients)
        self.twin.multiply(clip_factor(before, norm))
        return before

    def save(self) -> None:
        self.saved = copy.deepcopy((self.twin.masters.state_dict(), self.optimizer.state_dict()))

    def load(self) -> None:
        weights, state = copy.deepcopy(self.saved)
        self.twin.masters.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        self.twin.narrow()
        for number, master in enumerate(self.updated):
            master.grad = None
            self.assigned(number, is_one=False)

    def train(self, number: int, yes: bool) -> None:
        super().train(number, yes)
        self.updated[number].requires_grad_(yes)


class Managed(Side):
    """Under a session."""

    def __init__(self, kind: str, **keywords: Any) -> None:
        model = mlp()
        self.session = manage(model, kind, **keywords)
        super().__init__(model, next(model.parameters()).dtype)
        self._is_scaled = False
        self._checkpoints: tempfile.TemporaryDirectory[str] | None = None

    @property
    def optimizer(self) -> Any:
        return self.session.optimizer

    def backward(self, loss: Tensor, *, keep: bool) -> None:
        self.session.scaler.scale(loss).backward(retain_graph=keep)  # type: ignore[no-untyped-call]
        self._is_scaled = self.session.scaler.is_enabled()

    def step(self) -> None:
        self.session.scaler.step(self.optimizer)
        self.session.scaler.update()
        self._is_scaled = False

    def with_gradients(self, act: Callable[[], Any], *, changes: Sequence[int] = ()) -> Any:
        if self._is_scaled:
            self.session.scaler.unscale_(self.optimizer)
            self._is_scaled = False
        return act()

    def with_weights(self, act: Callable[[], Any]) -> Any:
        return act()

    def limit(self, norm: float) -> Tensor:
        return self.with_gradients(lambda: self.session.clip_grad_norm_(norm))  # type: ignore[no-any-return]

    def save(self) -> None:
        self._checkpoints = self._checkpoints or tempfile.TemporaryDirectory()
        self.session.save_checkpoint(self._checkpoints.name, keep=1)

    def close(self) -> None:
        self.session.close()
        if self._checkpoints is not None:
            self._checkpoints.cleanup()

    def load(self) -> None:
        assert self._checkpoints is not None, "nothing was saved"
        self.session.load_checkpoint(self._checkpoints.name)
