"""Lines such as `forward backward grad(0)*=.5 step zero`, done to a model under a session and to its plain twin, word by word.

    forward, forward(layers=2), forward(rows=9)     a loss of the next batch, which waits for its backward
    backward, backward(keep), drop                  of the loss that has waited longest; its graph is kept, or forgotten
    differentiate(3)                                `torch.autograd.grad` of that loss in the fourth parameter
    step, zero, zero(zeros)                         zeros in place of nothing
    grad(3)*=.5, grad(3)+=.1, grad(3)=.1, grad(3)=None, grad(3)
    clip(.1), clamp(.01), norm, limit(.1)           torch's own over all gradients; the session's own
    weight(3)*=.5, weight(3)+=.1, weight(3)=.1, weight(3)
    data(3)*=.5                                     through `.data`
    average(3)*=.5, average(3)                      the first moment, in `optimizer.state`
    lr*=.5, freeze(3), thaw(3)
    keep, back, save, load                          weights kept and loaded again; a checkpoint
    evaluate, read                                  a loss without a graph; everything that is held is compared

What a word gives must have the same bits on both sides; at the end, so must everything that is held.
"""

from __future__ import annotations

import copy
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tests.parity.compare import compare_mappings, same_bits
from tests.parity.oracle import clip_factor, global_norm
from tests.parity.tiles import tiled_products
from tests.session.builders import LAYERS, batch, held_states, mlp, states
from tests.session.masters import Twin, manage

__all__ = ["Script"]

_WORD = re.compile(r"(?P<verb>\w+)(?:\((?P<args>[^)]*)\))?(?:(?P<how>\*=|\+=|=)(?P<value>.+))?")


@dataclass(frozen=True)
class Word:
    """What is between two spaces."""

    verb: str
    args: str
    how: str
    value: str

    @classmethod
    def of(cls, text: str) -> Word:
        found = _WORD.fullmatch(text)
        assert found is not None, f"not a word: {text}"
        return cls(*(part or "" for part in found.group("verb", "args", "how", "value")))

    @property
    def number(self) -> int:
        """The parameter it is about."""
        return int(self.args)

    def given(self, name: str, default: int) -> int:
        """An argument that has a name."""
        return int(dict(pair.split("=") for pair in self.args.split(",") if "=" in pair).get(name, default))

    @torch.no_grad()
    def change(self, tensor: Tensor) -> Tensor:
        """Changes a tensor in place, if it is to be changed; gives its values."""
        match self.how:
            case "*=":
                tensor.mul_(float(self.value))
            case "+=":
                tensor.add_(float(self.value))
            case "=":
                tensor.fill_(float(self.value))
        return tensor.clone()


class Side(ABC):
    """One of the two: what a session has a way of its own for is abstract."""

    def __init__(self, model: nn.Module, compute: torch.dtype) -> None:
        self.model = model
        self.compute = compute
        self.parameters = list(model.parameters())
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

    @abstractmethod
    def average(self, number: int) -> Tensor | None:
        """The first moment of a parameter, to be changed in place."""

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


def _forward(side: Side, word: Word) -> Tensor:
    side.waiting.append(side.loss(word.given("rows", 4), word.given("layers", LAYERS)))
    return side.waiting[-1].detach().clone()


@torch.no_grad()
def _evaluate(side: Side, _: Word) -> Tensor:
    return side.loss().clone()


def _backward(side: Side, word: Word) -> None:
    keep = word.args == "keep"
    side.backward(side.waiting[0] if keep else side.waiting.pop(0), keep=keep)


def _differentiate(side: Side, word: Word) -> Tensor:
    return torch.autograd.grad(side.waiting.pop(0), side.parameters[word.number])[0]


def _gradient(side: Side, word: Word) -> Tensor | None:
    parameter = side.parameters[word.number]

    def assign_or_change() -> Tensor | None:
        if word.how == "=":
            side.assigned(word.number, is_one=word.value != "None")
            parameter.grad = (
                None if word.value == "None" else torch.full(parameter.shape, float(word.value), dtype=parameter.dtype)
            )
            return None
        return None if parameter.grad is None else word.change(parameter.grad)

    return side.with_gradients(assign_or_change, changes=[word.number] if word.how in ("*=", "+=") else [])


def _clip(side: Side, word: Word) -> Tensor:
    def clip() -> Tensor:
        return nn.utils.clip_grad_norm_(side.parameters, float(word.args)).clone()

    return side.with_gradients(clip, changes=range(len(side.parameters)))


def _clamp(side: Side, word: Word) -> None:
    def clamp() -> None:
        if side.gradients():  # of none torch makes an error
            nn.utils.clip_grad_value_(side.parameters, float(word.args))

    side.with_gradients(clamp, changes=range(len(side.parameters)))


def _norm(side: Side, _: Word) -> Tensor:
    return side.with_gradients(lambda: nn.utils.get_total_norm(side.gradients()))


def _zero(side: Side, word: Word) -> None:
    if not word.args:
        for number in range(len(side.parameters)):
            side.assigned(number, is_one=False)
    side.optimizer.zero_grad(set_to_none=word.args != "zeros")


def _weight(side: Side, word: Word) -> Tensor:
    parameter = side.parameters[word.number]
    side.with_weights(lambda: word.change(parameter.data if word.verb == "data" else parameter))
    return parameter.detach().clone()


def _average(side: Side, word: Word) -> Tensor | None:
    found = side.average(word.number)
    return None if found is None else word.change(found)


def _lr(side: Side, word: Word) -> None:
    for group in side.optimizer.param_groups:
        group["lr"] *= float(word.value)


def _keep(side: Side, _: Word) -> None:
    with _disable_current_modes():  # copies elsewhere: they take nothing of a device's memory
        side.kept = {name: held.clone() for name, held in side.model.state_dict().items()}


_VERBS: Mapping[str, Callable[[Side, Word], Any]] = {
    "forward": _forward,
    "evaluate": _evaluate,
    "backward": _backward,
    "drop": lambda side, _: side.waiting.clear(),
    "differentiate": _differentiate,
    "step": lambda side, _: side.step(),
    "zero": _zero,
    "grad": _gradient,
    "clip": _clip,
    "clamp": _clamp,
    "norm": _norm,
    "weight": _weight,
    "data": _weight,
    "average": _average,
    "lr": _lr,
    "freeze": lambda side, word: side.train(word.number, False),
    "thaw": lambda side, word: side.train(word.number, True),
    "keep": _keep,
    "limit": lambda side, word: side.limit(float(word.args)),
    "save": lambda side, _: side.save(),
    "load": lambda side, _: side.load(),
    "back": lambda side, _: side.with_weights(lambda: str(side.model.load_state_dict(side.kept))),
}


class Plain(Side):
    """Plain PyTorch, in 16 bits with masters kept by hand."""

    def __init__(self, kind: str, *, accumulate: int = 1, tile_rows: int | None = None) -> None:
        self.twin = Twin(kind)
        self.twin.unrounded = accumulate > 1
        self.tile_rows = tile_rows
        super().__init__(self.twin.model, self.twin.compute)
        self.masters = list(self.twin.masters.parameters())
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
        changed = [self.masters[number].grad for number in changes if self.names[number] not in self.twin.own]
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
        for number, master in enumerate(self.masters):
            master.grad = None
            self.assigned(number, is_one=False)

    def average(self, number: int) -> Tensor | None:
        found: Tensor | None = self.optimizer.state.get(self.masters[number], {}).get("exp_avg")
        return found

    def train(self, number: int, yes: bool) -> None:
        super().train(number, yes)
        self.masters[number].requires_grad_(yes)


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

    def average(self, number: int) -> Tensor | None:
        found: Tensor | None = self.optimizer.state.get(self.parameters[number], {}).get("exp_avg")
        return found


class Script:
    """A model of six layers under a session, and its plain twin; `kind`: a precision, with the type that computes where it is another."""

    def __init__(self, kind: str = "fp32", *, given: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        """`given`: options that change the arithmetic; `keywords`: what else `manage` is given."""
        options = dict(given or {})
        self.plain, self.managed = Plain(kind, **options), Managed(kind, given=options, **keywords)
        self.said: list[str] = []

    def run(self, line: str) -> None:
        """Does every word of a line."""
        for word in line.split():
            self.say(word)

    def say(self, word: str) -> None:
        """Does one word to both sides."""
        self.said.append(word)
        if word == "read":
            return self.compare()
        said = Word.of(word)
        act = _VERBS[said.verb]
        with _disable_current_modes():  # what the twin makes is no matter of the session's
            want = act(self.plain, said)
        got = act(self.managed, said)
        same = same_bits(want, got) if isinstance(want, Tensor) and isinstance(got, Tensor) else want == got
        assert same, f"{' '.join(self.said)}: gives {got}, plain PyTorch {want}"
        return None

    def compare(self) -> None:
        """Weights, moments and gradients have the same bits."""
        twin, session = self.plain.twin, self.managed.session
        found = compare_mappings("weight", dict(twin.masters.state_dict()), dict(session.state_dict()))
        found += compare_mappings("state of", states(twin.optimizer), held_states(session))
        gradients = {name: p.grad for name, p in twin.masters.named_parameters() if p.grad is not None}
        found += self.managed.with_gradients(
            lambda: compare_mappings("gradient of", gradients, dict(session.gradients()))
        )
        assert not found, "\n".join([" ".join(self.said), *found])

    def close(self) -> None:
        """Compares; closes the session, and compares the weights that the model has been given back, if they fit."""
        try:
            self.compare()
        finally:
            self.managed.close()
        got = dict(self.managed.model.state_dict())
        if not any(weight.is_meta for weight in got.values()):
            found = compare_mappings("weight given back", dict(self.plain.twin.masters.state_dict()), got)
            assert not found, "\n".join([" ".join(self.said), *found])
