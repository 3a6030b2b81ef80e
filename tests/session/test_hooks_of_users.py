"""Hooks of the user's, of every kind: called as often as in plain PyTorch, with the same values; a trial run calls none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.modules.module as modules
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from patrickstar import StateError
from tests.composed import Composed
from tests.parity.compare import same_bits
from tests.session.builders import EMULATED, ROOMY, adamw, expect_bits, managed, mlp, train, values

Seen = list[Any]


def shown(value: Any) -> Any:
    """What a hook has been given, in a form that can be compared and kept."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().clone().flatten().tolist()
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    return tuple(map(shown, value)) if isinstance(value, list | tuple) else value


class Hooked(nn.Module):
    """Layers whose second one is called with a keyword; hooks of tensors come from a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = mlp(layers=1), mlp(1, layers=2)
        scale = lambda model, x, *, by: x * model.weight * by
        self.scaled = Composed(scale, weight=nn.Parameter(torch.linspace(0.5, 1.5, 32)))
        self.in_forward: list[Callable[[Tensor], Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for register in self.in_forward:
            register(x)
        return self.rest(self.scaled(x, by=0.5))


def write_down(seen: Seen, given: Any) -> None:
    seen.append("a call")  # before anything can go wrong
    seen.append(shown(given))


def note(seen: Seen) -> Callable[..., None]:
    """A hook that writes down what it is given."""
    return lambda *given: write_down(seen, given)


def doubling(seen: Seen) -> Callable[..., Any]:
    """A hook that writes down, and gives twice the tensor that it was given last."""

    def hook(*given: Any) -> Any:
        write_down(seen, given)
        last = given[-1]
        return tuple(None if part is None else part * 2 for part in last) if isinstance(last, tuple) else last * 2

    return hook


def letting_go(seen: Seen) -> Callable[[Tensor], None]:
    """A hook of a parameter that writes its gradient down, and lets it go."""

    def hook(parameter: Tensor) -> None:
        write_down(seen, parameter.grad)
        parameter.grad = None

    return hook


KINDS: Mapping[str, Callable[[Hooked, Seen], Any]] = {
    "forward": lambda m, seen: m.first[0].register_forward_hook(note(seen)),
    "forward, of the model": lambda m, seen: m.register_forward_hook(note(seen)),
    "forward, with keywords": lambda m, seen: m.scaled.register_forward_hook(note(seen), with_kwargs=True),
    "forward, always called": lambda m, seen: m.rest.register_forward_hook(note(seen), always_call=True, prepend=True),
    "forward, another output": lambda m, seen: m.rest[0].register_forward_hook(doubling(seen)),
    "before forward": lambda m, seen: m.first[0].register_forward_pre_hook(note(seen)),
    "before forward, reads a weight": lambda m, seen: m.first[0].register_forward_pre_hook(
        lambda module, args: write_down(seen, module.weight)
    ),
    "forward, reads a weight of another": lambda m, seen: m.register_forward_hook(
        lambda *given: write_down(seen, m.rest[0].bias.sum())
    ),
    "before forward, of the model": lambda m, seen: m.register_forward_pre_hook(note(seen), prepend=True),
    "before forward, with keywords": lambda m, seen: m.scaled.register_forward_pre_hook(note(seen), with_kwargs=True),
    "before forward, another input": lambda m, seen: m.rest[0].register_forward_pre_hook(doubling(seen)),
    "backward": lambda m, seen: m.rest[0].register_full_backward_hook(note(seen)),
    "backward, of the model": lambda m, seen: m.register_full_backward_hook(note(seen)),
    "backward, another gradient": lambda m, seen: m.rest[0].register_full_backward_hook(
        lambda *given: doubling(seen)(*given[:2])
    ),
    "before backward": lambda m, seen: m.rest[2].register_full_backward_pre_hook(note(seen)),
    "of every module, forward": lambda m, seen: modules.register_module_forward_hook(note(seen)),
    "of every module, before forward": lambda m, seen: modules.register_module_forward_pre_hook(note(seen)),
    "of every module, backward": lambda m, seen: modules.register_module_full_backward_hook(note(seen)),
    "of every module, before backward": lambda m, seen: modules.register_module_full_backward_pre_hook(note(seen)),
    "of a parameter": lambda m, seen: m.rest[0].weight.register_hook(note(seen)),
    "of a parameter, another gradient": lambda m, seen: m.scaled.weight.register_hook(doubling(seen)),
    "of a parameter, once its gradient is there": lambda m, seen: m.rest[0].weight.register_post_accumulate_grad_hook(
        lambda p: write_down(seen, p.grad)
    ),
    "of a parameter, changes its gradient": lambda m, seen: m.rest[0].weight.register_post_accumulate_grad_hook(
        lambda p: write_down(seen, p.grad.clamp_(-1e-3, 1e-3).norm())
    ),
    "of a parameter, lets its gradient go": lambda m, seen: m.rest[0].weight.register_post_accumulate_grad_hook(
        letting_go(seen)
    ),
    "of a tensor": lambda m, seen: m.in_forward.append(lambda x: x.register_hook(note(seen))),
    "of a tensor, another gradient": lambda m, seen: m.in_forward.append(lambda x: x.register_hook(doubling(seen))),
    "of several tensors": lambda m, seen: m.in_forward.append(
        lambda x: torch.autograd.graph.register_multi_grad_hook([x, x + 1], note(seen), mode="any")
    ),
}


@contextmanager
def hooked(model: Hooked, register: Callable[[Hooked, Seen], Any]) -> Iterator[Seen]:
    seen: Seen = []
    with ExitStack() as stack:
        handle = register(model, seen)
        if isinstance(handle, RemovableHandle):  # those of every module would see the next model too
            stack.callback(handle.remove)
        yield seen


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("before", [False, True], ids=["after manage", "before manage"])
@pytest.mark.parametrize(
    "machine",
    [
        pytest.param({}, marks=pytest.mark.whole, id="whole"),
        pytest.param(EMULATED, marks=pytest.mark.blocks, id="blocks"),
        pytest.param(ROOMY, id="roomy"),
        pytest.param(EMULATED, id="tight"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_is_called_as_in_plain_pytorch(kind: str, machine: dict[str, Any], before: bool) -> None:
    plain = Hooked()
    optimizer = adamw(plain)
    with hooked(plain, KINDS[kind]) as want:
        losses = train(plain, optimizer)
    model = Hooked()
    with ExitStack() as stack:
        got = stack.enter_context(hooked(model, KINDS[kind])) if before else []
        session = stack.enter_context(managed(model, precision="fp32", **machine))
        got = got if before else stack.enter_context(hooked(model, KINDS[kind]))
        assert same_bits(losses, train(model, session.optimizer))
        assert len(got) == len(want) > 0
        assert got == want
        expect_bits(values(plain), values(session))


def test_a_hook_that_would_read_no_gradient_is_refused_while_overrides_are_off() -> None:
    class Own(Tensor):
        pass

    model = mlp()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with managed(model, **EMULATED) as session:
        loss = model(torch.ones(1, 32).as_subclass(Own)).sum()
        assert type(loss) is Own
        with pytest.raises(StateError, match=r"hook on 0\.weight .*as_subclass"):
            loss.backward()
        session.optimizer.zero_grad()
        model(torch.ones(1, 32)).sum().backward()
