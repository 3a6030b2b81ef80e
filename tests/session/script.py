"""Lines such as `forward backward grad(0)*=.5 step zero`, done to a model under a session and to its plain twin, word by word.

    forward, forward(layers=2), forward(rows=9)     a loss of the next batch, which waits for its backward
    backward, backward(keep), drop                  of the loss that has waited longest; its graph is kept, or forgotten
    backward(of=3)                                  for the fourth parameter alone
    differentiate(3)                                `torch.autograd.grad` of that loss in the fourth parameter
    train, train(2)                                 forward backward step zero, and this twice
    step, zero, zero(zeros)                         zeros in place of nothing
    zero(model), zero(original), zero(each)         through the model, the optimizer that was passed in, `p.grad = None`; also `zero(model,zeros)`
    grad(3)*=.5, grad(3)+=.1, grad(3)=.1, grad(3)=None, grad(3)
    clip(.1), clamp(.01), norm, limit(.1)           torch's own over all gradients; the session's own
    weight(3)*=.5, weight(3)+=.1, weight(3)=.1, weight(3)
    data(3)*=.5                                     through `.data`
    write(3)=.1                                     through the session
    hold(3), held(3)*=.5, held(3), free             a view that is kept, and what is done through it; it is let go
    memory(3), unseen(3)                            its memory, which is kept; written where torch does not see it, through what is kept if it is
    average(3)*=.5, average(3), square(3), count(3) the moments and the count of updates, in `optimizer.state`
    lr*=.5, freeze(3), thaw(3), forget              all of the optimizer's state is forgotten
    keep, back, save, load, resume                  weights kept and loaded again; a checkpoint; it is loaded by another session, of another model
    evaluate, infer, copy, read                     a loss without a graph; a deep copy; everything that is held is compared
    since, planned(2), planned(4,1)                 since it was last asked, as many steps were planned and none was not, or as many
    4[forward zero backward step]                   four times

What a word gives must have the same bits on both sides; at the end, so must everything that is held.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patrickstar.torch_private import unobserved
from tests.parity.compare import compare_mappings, same_bits
from tests.session.builders import LAYERS, held_states, mlp, states
from tests.session.sides import Managed, Plain, Side

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


def _forward(side: Side, word: Word) -> Tensor:
    side.waiting.append(side.loss(word.given("rows", 4), word.given("layers", LAYERS)))
    return side.waiting[-1].detach().clone()


@torch.no_grad()
def _evaluate(side: Side, _: Word) -> Tensor:
    return side.loss().clone()


@torch.inference_mode()
def _infer(side: Side, _: Word) -> Tensor:
    return side.loss().clone()


def _copy(side: Side, _: Word) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in copy.deepcopy(side.model).parameters()])


def _backward(side: Side, word: Word) -> None:
    keep = word.args == "keep"
    only = [side.parameters[word.given("of", 0)]] if "of" in word.args else None
    side.backward(side.waiting[0] if keep else side.waiting.pop(0), keep=keep, inputs=only)


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
    through, to_none = word.args.partition(",")[0], not word.args.endswith("zeros")
    if to_none:
        for number in range(len(side.parameters)):
            side.assigned(number, is_one=False)
    side.zero(through, to_none)


@torch.no_grad()
def _held(side: Side, word: Word) -> Tensor:
    return side.with_weights(lambda: word.change(side.held(word.number)))  # type: ignore[no-any-return]


def _weight(side: Side, word: Word) -> Tensor:
    parameter = side.parameters[word.number]
    side.with_weights(lambda: word.change(parameter.data if word.verb == "data" else parameter))
    return parameter.detach().clone()


def _state(side: Side, word: Word) -> Tensor | None:
    key = {"average": "exp_avg", "square": "exp_avg_sq", "count": "step"}[word.verb]
    found = side.optimizer.state.get(side.updated[word.number], {}).get(key)
    return None if found is None else word.change(found)


def _lr(side: Side, word: Word) -> None:
    for group in side.optimizer.param_groups:
        group["lr"] *= float(word.value)


def _keep(side: Side, _: Word) -> None:
    with unobserved():  # copies elsewhere: they take nothing of a device's memory
        side.kept = {name: held.clone() for name, held in side.model.state_dict().items()}


_VERBS: Mapping[str, Callable[[Side, Word], Any]] = {
    "forward": _forward,
    "evaluate": _evaluate,
    "infer": _infer,
    "copy": _copy,
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
    "write": lambda side, word: side.write(word.number, float(word.value)),
    "hold": lambda side, word: side.hold(word.number),
    "held": _held,
    "memory": lambda side, word: side.keep_memory(word.number),
    "unseen": lambda side, word: side.with_weights(lambda: side.write_unseen(word.number)),
    "free": lambda side, _: side.free(),
    "average": _state,
    "square": _state,
    "count": _state,
    "forget": lambda side, _: side.optimizer.state.clear(),
    "lr": _lr,
    "freeze": lambda side, word: side.train(word.number, False),
    "thaw": lambda side, word: side.train(word.number, True),
    "keep": _keep,
    "limit": lambda side, word: side.limit(float(word.args)),
    "save": lambda side, _: side.save(),
    "load": lambda side, _: side.load(),
    "resume": lambda side, _: side.resume(),
    "back": lambda side, _: side.with_weights(lambda: str(side.model.load_state_dict(side.kept))),
}


class Script:
    """A model of six layers under a session, and its plain twin; `kind`: a precision, with the type that computes where it is another."""

    def __init__(
        self,
        kind: str = "fp32",
        build: Callable[[], nn.Module] = mlp,
        *,
        given: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        """`given`: options that change the arithmetic; `keywords`: what else `manage` is given."""
        options = dict(given or {})
        self.plain, self.managed = Plain(kind, build, **options), Managed(kind, build, given=options, **keywords)
        self.has_gradients = keywords.get("step") != "in_backward"
        self.said: list[str] = []
        self.counted = (0, 0)

    @property
    def session(self) -> Any:
        return self.managed.session

    @property
    def model(self) -> Any:
        """The managed one."""
        return self.managed.model

    def run(self, line: str, **keywords: Any) -> None:
        """Does every word of a line; its forwards are given these keywords."""
        self.plain.keywords = self.managed.keywords = keywords
        line = re.sub(r"train(\((\d+)\))?", lambda said: "forward backward step zero " * int(said[2] or 1), line)
        while repeated := re.search(r"(\d+)\[([^][]*)\]", line):
            line = line.replace(repeated[0], f"{repeated[2]} " * int(repeated[1]))
        for word in line.split():
            self.say(word)

    def say(self, word: str) -> None:
        """Does one word to both sides."""
        self.said.append(word)
        if word == "read":
            return self.compare()
        said = Word.of(word)
        if said.verb in ("since", "planned"):
            return self.count([int(number) for number in said.args.split(",") if number])
        act = _VERBS[said.verb]
        with unobserved():  # what the twin makes is no matter of the session's
            want = act(self.plain, said)
        got = act(self.managed, said)
        same = same_bits(want, got) if isinstance(want, Tensor) and isinstance(got, Tensor) else want == got
        assert same, f"{' '.join(self.said)}: gives {got}, plain PyTorch {want}"
        return None

    def weights(self, change: Callable[[nn.Module], Any]) -> None:
        """Both models' weights are changed by hand."""
        for side in (self.plain, self.managed):
            side.with_weights(lambda: change(side.model))
        self.said.append(getattr(change, "__name__", "weights"))

    def gradients(self, act: Callable[[nn.Module], Any], *, changes: bool) -> None:
        """Both models' gradients are read or changed by hand, with the same result."""
        numbers = range(len(self.plain.parameters)) if changes else ()
        want, got = (
            side.with_gradients(lambda: act(side.model), changes=numbers) for side in (self.plain, self.managed)
        )
        self.said.append(getattr(act, "__name__", "gradients"))
        assert not isinstance(want, Tensor) or same_bits(want, got), f"{' '.join(self.said)}: gives {got}, not {want}"

    def count(self, wanted: Sequence[int]) -> None:
        """So many steps were planned since this was last called, and as many were not: none, if nothing is said."""
        stats, before = self.managed.session.stats(), self.counted
        self.counted = stats.planned_steps, stats.reactive_steps
        found = tuple(now - then for now, then in zip(self.counted, before, strict=True))
        assert not wanted or found == (*wanted, 0)[:2], (
            f"{' '.join(self.said)}: planned, reactive {found}: {stats.reason}"
        )

    def compare(self) -> None:
        """Weights, moments and gradients have the same bits."""
        twin, session = self.plain.twin, self.managed.session
        found = compare_mappings("weight", dict(twin.masters.state_dict()), dict(session.state_dict()))
        found += compare_mappings("state of", states(twin.optimizer), held_states(session))
        if self.has_gradients:
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
