"""The two to which a script is done: plain PyTorch, and the same model under a session."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.oracle import clip_factor, global_norm
from tests.parity.tiles import tiled_products
from tests.session.builders import LAYERS, adamw, batch
from tests.session.masters import Twin, manage


class Side:
    """One of the two: what a session has a way of its own for is in its own class."""

    def __init__(self, model: nn.Module, compute: torch.dtype) -> None:
        self.model = model
        self.compute = compute
        self.parameters = list(model.parameters())
        self.updated = self.parameters  # those that the optimizer has
        self.waiting: list[Tensor] = []
        self.keywords: dict[str, Any] = {}  # of each forward
        self.batches = 0
        self.kept: dict[str, Tensor] = {}

    def hold(self, number: int) -> None:
        """Keeps a view of a weight: of a plain one that is the weight."""

    def held(self, number: int) -> Tensor:
        """The view that was kept."""
        return self.parameters[number].view(-1)

    def keep_memory(self, number: int) -> None:
        """Keeps a weight's memory."""

    def memory(self, number: int) -> Any:
        """A weight's memory, as integers: torch does not see it written."""
        weight = self.parameters[number].detach()
        return weight.view(torch.int16 if weight.itemsize == 2 else torch.int32).numpy()

    def write_unseen(self, number: int) -> None:
        three = torch.tensor(3.0, dtype=self.compute)
        self.memory(number)[4] = three.view(torch.int16 if three.itemsize == 2 else torch.int32).item()

    def free(self) -> None:
        """Lets go of what was kept."""

    def train(self, number: int, yes: bool) -> None:
        self.parameters[number].requires_grad_(yes)

    def loss(self, rows: int = 4, layers: int = LAYERS) -> Tensor:
        x = batch(self.batches, rows=rows).to(self.compute)
        self.batches += 1
        used = self.model if layers == LAYERS else self.model[: 2 * layers]  # type: ignore[index]
        found = used(x, **self.keywords)
        return found if found.ndim == 0 else found.float().square().mean()  # of a model that gives its loss

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


class Plain(Side):
    """Plain PyTorch, in 16 bits with masters kept by hand."""

    def __init__(
        self, kind: str, build: Callable[[], nn.Module], *, accumulate: int = 1, tile_rows: int | None = None
    ) -> None:
        self.twin = Twin(kind, build)
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

    def backward(self, loss: Tensor, *, keep: bool, inputs: list[Tensor] | None = None) -> None:
        self.twin.backward_of(loss, retain_graph=keep, inputs=inputs)

    def zero(self, through: str, to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)

    def write(self, number: int, value: float) -> None:
        """Sets a whole master."""
        self.updated[number].data.fill_(value)
        self.twin.narrow()

    def resume(self) -> None:
        """Goes on elsewhere, without gradients, which no checkpoint has."""
        self.save()
        self.load()

    def step(self) -> None:
        self.twin.update()

    def with_gradients(self, act: Callable[[], Any], *, changes: Sequence[int] = ()) -> Any:
        """Does what reads `.grad` of `parameters`, or changes those of some."""
        changed = [self.updated[number].grad for number in changes if self.names[number] not in self.twin.own]
        self.twin.unrounded |= any(gradient is not None for gradient in changed)
        return self.twin.change_gradients(lambda _: act())

    def assigned(self, number: int, *, is_one: bool) -> None:
        """Is told that a gradient, or None, was assigned: a session sees for itself."""
        (self.twin.own.add if is_one else self.twin.own.discard)(self.names[number])

    def with_weights(self, act: Callable[[], Any]) -> Any:
        """Does what reads or writes `parameters`."""
        result = act()
        self.twin.carry()
        return result

    def limit(self, norm: float) -> Tensor:
        """Clips the global norm as `docs/bits.md` defines it."""
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


@torch.no_grad()
def _other(model: nn.Module) -> nn.Module:
    """The same, of other values."""
    for parameter in model.parameters():
        parameter.fill_(0.5)
    return model


class Managed(Side):
    """Under a session."""

    def __init__(self, kind: str, build: Callable[[], nn.Module], **keywords: Any) -> None:
        model = build()
        self.original = adamw(model)
        self.session = manage(model, kind, optimizer=self.original, **keywords)
        super().__init__(model, next(model.parameters()).dtype)
        self._again = lambda: Managed(kind, lambda: _other(build()), **keywords)
        self._views: dict[int, Tensor] = {}
        self._memory: dict[int, Any] = {}
        self._is_scaled = False
        self._checkpoints: tempfile.TemporaryDirectory[str] | None = None

    @property
    def optimizer(self) -> Any:
        return self.session.optimizer

    def backward(self, loss: Tensor, *, keep: bool, inputs: list[Tensor] | None = None) -> None:
        self.session.scaler.scale(loss).backward(retain_graph=keep, inputs=inputs)  # type: ignore[no-untyped-call]
        self._is_scaled = self.session.scaler.is_enabled()

    def assigned(self, number: int, *, is_one: bool) -> None: ...

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

    def zero(self, through: str, to_none: bool) -> None:
        if through == "each":
            for parameter in self.parameters:
                parameter.grad = None
        else:
            {"model": self.model, "original": self.original}.get(through, self.optimizer).zero_grad(to_none)

    def write(self, number: int, value: float) -> None:
        name = [name for name, _ in self.model.named_parameters()][number]
        self.session.write(name, torch.full(self.parameters[number].shape, value))

    @torch.no_grad()
    def hold(self, number: int) -> None:
        self._views[number] = super().held(number)

    def held(self, number: int) -> Tensor:
        return self._views[number]

    def keep_memory(self, number: int) -> None:
        self._memory[number] = super().memory(number)

    def memory(self, number: int) -> Any:
        return self._memory[number] if number in self._memory else super().memory(number)

    def free(self) -> None:
        self._views.clear()
        self._memory.clear()

    def resume(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            self.session.save_checkpoint(directory)
            self.close()
            batches = self.batches
            self.__dict__.update(self._again().__dict__, batches=batches)
            self.session.load_checkpoint(directory)

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
