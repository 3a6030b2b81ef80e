"""Nothing of a trial run shows: what a program sees of three steps is what plain PyTorch shows, though a twin ran before the first of them."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import patrickstar
from tests.session.builders import EMULATED, ROOMY, Pair, adamw, batch, finish, mlp, train_step

Seen = list[Any]
Step = Callable[[nn.Module, Any, Seen, int], Any]


class Model(nn.Module):
    """Layers, and an act of its own in each forward."""

    def __init__(self, act: Callable[[Model, Tensor], Any] = lambda model, x: None) -> None:
        super().__init__()
        self.layers = mlp(layers=3)
        self.act = act
        self.calls = 0
        self.names: list[str] = []
        self.table: dict[str, Any] = {"sizes": []}
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        self.act(self, x)
        return self.layers(x)


def under(context: Callable[[Seen], AbstractContextManager[Any]], tell: Callable[[Any], Any] = lambda it: None) -> Step:
    """A step with a context around it, of which it is told what is seen afterwards."""

    def step(model: nn.Module, optimizer: Any, seen: Seen, number: int) -> Tensor:
        with context(seen) as inside:
            loss = train_step(model, optimizer, number)
        seen.append(tell(inside))
        return loss

    return step


def state_of(model: nn.Module, optimizer: Any, seen: Seen, number: int) -> Tensor:
    loss = train_step(model, optimizer, number)
    assert isinstance(model, Model)
    seen.append((model.calls, list(model.names), repr(model.table), model.mean.tolist()))
    return loss


def keep_state(model: Model, x: Tensor) -> None:
    model.calls += 1
    model.names.append(f"call {model.calls}")
    model.table["sizes"].append(len(x))
    model.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)


def patched() -> Model:
    """A layer whose forward is a closure, as tools leave it that change models from outside."""
    model = Model()
    layer = model.layers[2]
    forward = layer.forward

    def counted(x: Tensor) -> Tensor:
        model.calls += 1
        model.table["sizes"].append(len(x))
        return forward(x) * 2

    layer.forward = counted
    return model


class Names(TorchDispatchMode):
    """Writes down the class of fake tensors that an operation is given."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.extend(kind.__name__ for kind in types if "Fake" in kind.__name__)
        return func(*args, **(kwargs or {}))


class Linears(TorchFunctionMode):
    """Counts products."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            self.seen.append("linear")
        return func(*args, **(kwargs or {}))


def packing(seen: Seen) -> AbstractContextManager[Any]:
    """Hooks that write down the class of what is saved for backward, but for the parameters themselves, which a session keeps to itself."""

    def pack(tensor: Tensor) -> Tensor:
        if "Fake" in type(tensor).__name__:
            seen.append("FakeTensor")
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def dual(model: nn.Module, optimizer: Any, seen: Seen, number: int) -> Tensor:
    with forward_ad.dual_level():
        x = batch(number)
        with torch.no_grad():
            seen.append(forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent is not None)
    return train_step(model, optimizer, number)


def recomputed(model: nn.Module, optimizer: Any, seen: Seen, number: int) -> Tensor:
    loss = checkpoint(model, batch(number), use_reentrant=False).square().mean()
    finish(loss, optimizer)
    seen.append(getattr(model, "calls", 0))
    return loss.detach()


def draws(model: nn.Module, optimizer: Any, seen: Seen, number: int) -> Tensor:
    loss = train_step(model, optimizer, number)
    seen.append((torch.rand(1).item(), random.random(), numpy.random.rand()))
    return loss


def warns(model: nn.Module, optimizer: Any, seen: Seen, number: int) -> Tensor:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        loss = train_step(model, optimizer, number)
    seen.append([str(warning.message) for warning in found])
    return loss


def counts(profile: Any) -> dict[str, int]:
    wanted = {"aten::linear", "AddmmBackward0", "TanhBackward0"}  # others a meter of live bytes calls once more
    return {event.key: event.count for event in profile.key_averages() if event.key in wanted}


PROGRAMS: Mapping[str, tuple[Callable[[], nn.Module], Step]] = {
    "operations of a dispatch mode": (Model, under(Names)),
    "functions of a function mode": (Model, under(Linears)),
    "flops": (Model, under(lambda seen: FlopCounterMode(display=False), lambda mode: mode.get_total_flops())),
    "a profile": (Model, under(lambda seen: torch.autograd.profiler.profile(), counts)),
    "saved tensors": (Model, under(packing)),
    "saved tensors, on the CPU": (Model, under(lambda seen: torch.autograd.graph.save_on_cpu())),
    "anomalies": (Model, under(lambda seen: torch.autograd.detect_anomaly())),
    "tangents": (Model, dual),
    "a recomputed model": (lambda: Model(lambda model, x: setattr(model, "calls", model.calls + 1)), recomputed),
    "state of modules": (lambda: Model(keep_state), state_of),
    "state in a closure": (patched, state_of),
    "draws": (lambda: Model(lambda model, x: (torch.rand(3), random.random(), numpy.random.rand())), draws),
    "warnings": (lambda: Model(lambda model, x: warnings.warn("of a forward", stacklevel=1)), warns),
    "old weight norm": (lambda: with_layer(torch.nn.utils.weight_norm), state_of),
    "old spectral norm": (lambda: with_layer(torch.nn.utils.spectral_norm), state_of),
    "a pruned layer": (lambda: with_layer(lambda layer: prune.l1_unstructured(layer, "weight", 0.5)), state_of),
}
PLANNED = {"saved tensors": 2, "a recomputed model": 0}
"""Planned steps of programs whose forward has no forecast: a trial run would have to call what is the user's."""


def with_layer(change: Callable[[nn.Module], Any]) -> Model:
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change(model.layers[0])
    return model


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("machine", [ROOMY, EMULATED], ids=["roomy", "tight"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trial_run_shows_to_nobody(name: str, machine: dict[str, Any], make_pair: Callable[..., Pair]) -> None:
    make, step = PROGRAMS[name]
    pair = make_pair(make, precision="fp32", **machine)
    plain, managed = Seen(), Seen()
    for number in range(3):
        state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        want = step(pair.plain, pair.plain_optimizer, plain, number)
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        numpy.random.set_state(state[2])
        got = step(pair.model, pair.optimizer, managed, number)
        assert torch.equal(want, got)
        assert managed == plain
    stats = pair.session.stats()
    assert stats.planned_steps == PLANNED.get(name, 3), stats.reason


def test_what_was_warned_of_before_is_not_warned_of_again() -> None:
    """Python forgets what it has shown where filters are changed as is usual."""
    model = Model(lambda model, x: warnings.warn("of a forward", stacklevel=1))
    with patrickstar.manage(model, adamw(model), precision="fp32", device="cpu") as session:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("default")
            for rows in (4, 5, 6):
                train_step(model, session.optimizer, rows=rows)
        assert len(found) == 1


def test_what_torch_warns_of_once_is_left_for_the_step() -> None:
    seen: deque[bool] = deque()
    model = Model(lambda model, x: seen.append(torch.is_warn_always_enabled()))
    with patrickstar.manage(model, adamw(model), precision="fp32", device="cpu") as session:
        train_step(model, session.optimizer)
    assert list(seen) == [True, False], "in the trial run torch keeps no note of what it has warned of"
    assert not torch.is_warn_always_enabled()


def test_a_trial_run_leaves_no_copy_of_the_model_in_memory() -> None:
    called: deque[weakref.ref[Model]] = deque()
    model = Model(lambda model, x: called.append(weakref.ref(model)))
    with patrickstar.manage(model, adamw(model), precision="fp32", device="cpu") as session:
        train_step(model, session.optimizer)
        assert [reference() for reference in called] == [None, model]
        assert gc.isenabled()


def test_a_trial_run_collects_nothing_where_the_program_has_switched_that_off() -> None:
    collected: deque[Any] = deque()
    model = Model()
    gc.disable()
    gc.callbacks.append(lambda phase, info: collected.append(info))
    try:
        with patrickstar.manage(model, adamw(model), precision="fp32", device="cpu") as session:
            train_step(model, session.optimizer)
        assert not gc.isenabled()
        assert not collected
    finally:
        gc.callbacks.pop()
        gc.enable()


def test_the_default_device_holds_in_a_trial_run() -> None:
    def act(model: Model, x: Tensor) -> None:
        if torch.empty(1).is_meta:
            _ = model.layers[0](x)

    model = Model(act)
    with patrickstar.manage(model, adamw(model), precision="fp32", device="cpu") as session:
        x = batch()
        with torch.device("meta"):
            loss = model(x).square().mean()
        loss.backward()
        session.optimizer.step()
        assert session.stats().planned_steps == 1, session.stats().reason


def test_a_hook_that_changes_what_runs_departs_from_the_trace(make_pair: Callable[..., Pair]) -> None:
    def with_another(model: nn.Module, _: Any) -> None:
        model[0].register_forward_hook(lambda module, args, out: out + model[4](out))

    pair = make_pair(**EMULATED)
    pair.each(with_another)
    pair.train_same(4)
    stats = pair.session.stats()
    assert stats.reactive_steps > 0
    assert stats.planned_steps > 0
