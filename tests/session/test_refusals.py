"""What `manage` refuses: arguments, optimizers and models. Nothing has changed then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import ConfigError, DeviceError, LayoutError, StateError
from tests.composed import Composed
from tests.session.builders import EMULATED, adamw, expect_bits, is_ordinary, managed, mlp, options, train_step, values


def refused(error: type[Exception], match: str, model: nn.Module, optimizer: Any = None, **keywords: Any) -> None:
    """`manage` raises, and the model is as before, to the bit."""
    before = {name: (p, p.data_ptr(), p.dtype) for name, p in model.named_parameters() if p.device.type == "cpu"}
    state = torch.get_rng_state()
    with pytest.raises(error, match=match):
        patrickstar.manage(model, optimizer, **{**EMULATED, "options": options(), **keywords})
    after = {name: (p, p.data_ptr(), p.dtype) for name, p in model.named_parameters() if p.device.type == "cpu"}
    assert {name: (id(p), *rest) for name, (p, *rest) in before.items()} == {
        name: (id(p), *rest) for name, (p, *rest) in after.items()
    }
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"device_memroy": "1GiB"}, "device_memory"),
        ({"optoins": None}, "options"),
        ({"device": "emulted"}, "emulated"),
        ({"device": "gpu"}, "cuda"),
        ({"device": "cpu", "device_memory": "1GiB"}, "host_memory='1GiB'"),
        ({"precision": "float32"}, "fp32"),
        ({"device_memory": "6GiBB"}, "device_memory"),
        ({"device_memory": "6 gigs"}, "device_memory"),
        ({"device_memory": -1}, "device_memory"),
        ({"device_memory": 0}, "device_memory"),
        ({"device_memory": True}, "device_memory"),
        ({"device_memory": 1.5}, "device_memory"),
        ({"device_memory": "120%"}, "device_memory"),
        ({"host_memory": "NaNGiB"}, "host_memory"),
        ({"disk_memory": "1GiB"}, "disk"),
        ({"disk": 3}, "disk"),
        ({"disk": ""}, "disk"),
        ({"step": "in_backwards"}, "in_backward"),
        ({"step": "in_backward", "max_grad_norm": 1.0}, "max_grad_norm"),
        ({"precision": "fp16", "step": "in_backward"}, 'precision="fp16" with step="in_backward"'),
        ({"precision": "fp16", "options": options(compute="bf16")}, "options.compute=\"bf16\" with precision='fp16'"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
        ({"activations": "recompute"}, "activations"),
        ({"states": "compact"}, "states"),
        ({"weights": 7}, "weights"),
        ({"mesh": ("dp", 2)}, "mesh"),
        ({"options": {"chunk_size": 2048}}, "options"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_argument_that_cannot_be_meant_is_refused_by_name(keywords: dict[str, Any], says: str) -> None:
    model = mlp()
    refused(ConfigError, says, model, adamw(model), **keywords)


def test_every_problem_is_told_at_once() -> None:
    model = mlp()
    with pytest.raises(ConfigError) as refusal:
        patrickstar.manage(model, adamw(model), device="emulted", step="later", device_memroy=1)
    assert len(refusal.value.problems) == 3


@pytest.mark.parametrize(
    "given",
    [{"chunk_size": 1000}, {"chunk_size": 0}, {"eviction": "belady"}, {"poision": True}, {"stress_seed": -1}],
    ids=str,
)
def test_an_option_that_cannot_be_meant_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given)).replace("poision", "poison")):
        patrickstar.Options(**given)


def test_device_memory_without_a_device_is_refused_where_the_cpu_is_chosen() -> None:
    if torch.cuda.is_available():
        pytest.skip("the device would be CUDA")
    model = mlp()
    refused(ConfigError, "host_memory", model, adamw(model), device=None, device_memory="1GiB")


def test_a_cuda_device_that_is_not_there_is_a_device_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    model = mlp()
    refused(DeviceError, "cuda", model, adamw(model), device="cuda:1")


# optimizers


class OwnAdamW(torch.optim.AdamW):
    """May do anything in its step."""


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "maximize"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable"),
        (lambda p: torch.optim.AdamW([{"params": p, "capturable": True}]), "capturable"),
        (lambda p: torch.optim.SGD(p, lr=0.1), r"torch\.optim\.SGD.*AdamW"),
        (lambda p: torch.optim.NAdam(p), r"NAdam"),
        (OwnAdamW, "OwnAdamW"),
        (lambda p: object(), "object"),
        (lambda p: torch.optim.AdamW, "type"),
    ],
    ids=["amsgrad", "maximize", "differentiable", "capturable", "SGD", "NAdam", "subclass", "no optimizer", "a class"],
)
def test_an_optimizer_with_another_update_is_refused(make: Callable[[Any], Any], says: str) -> None:
    model = mlp()
    refused(ConfigError, says, model, make(model.parameters()))


def test_parameters_that_are_not_the_models_are_refused_by_shape() -> None:
    model, other = mlp(), nn.Linear(3, 7)
    refused(ConfigError, r"\(7, 3\)", model, torch.optim.AdamW([*model.parameters(), *other.parameters()]))


def test_a_flag_set_after_manage_is_refused_by_the_step() -> None:
    model = mlp()
    with managed(model) as session:
        train_step(model, session.optimizer)
        before = values(model)
        session.optimizer.param_groups[0]["amsgrad"] = True
        model(torch.ones(4, 32)).sum().backward()
        with pytest.raises(ConfigError, match="amsgrad"):
            session.optimizer.step()
        expect_bits(before, values(model))
        session.optimizer.param_groups[0]["amsgrad"] = False
        session.optimizer.step()


# models


class Mixed(nn.Module):
    """A model with one parameter that is of another kind than the rest."""

    def __init__(self, odd: torch.Tensor, *, requires_grad: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.odd = nn.Parameter(odd, requires_grad=requires_grad)


class OwnParameter(nn.Parameter):
    """A subclass may do anything at a use."""


def with_own_parameter() -> nn.Module:
    model = nn.Linear(8, 8)
    model.weight = OwnParameter(torch.ones(8, 8))
    return model


def quantised() -> nn.Module:
    return Mixed(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), requires_grad=False)


def with_buffer_over_weight() -> nn.Module:
    model = nn.Linear(8, 8)
    model.register_buffer("same", model.weight.data.view(-1))
    model.register_buffer("again", model.same[4:])
    return model


IMPOSSIBLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "complex": (lambda: Mixed(torch.ones(4, dtype=torch.complex64)), "odd.*complex"),
    "integer": (lambda: Mixed(torch.ones(4, dtype=torch.int64), requires_grad=False), "odd.*integer"),
    "quantised": (quantised, "odd.*quantised"),
    "sparse": (lambda: Mixed(torch.ones(4).to_sparse()), "odd.*(layout|sparse)"),
    "several devices": (lambda: Mixed(torch.ones(4, device="meta")), "odd.*meta"),
    "meta": (lambda: nn.Linear(8, 8, device="meta"), "weight.*meta"),
    "none": (nn.ReLU, "no parameters"),
    "sparse gradients": (lambda: nn.Embedding(8, 8, sparse=True), "sparse"),
    "sparse gradients inside": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.EmbeddingBag(8, 8, sparse=True)),
        "1 has sparse",
    ),
    "lazy": (lambda: nn.LazyLinear(8), "no shape"),
    "subclass": (with_own_parameter, "OwnParameter"),
    "a buffer over a weight": (with_buffer_over_weight, "same and weight share memory"),
}


@pytest.mark.parametrize(("make", "says"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_that_cannot_be_laid_out_is_refused_by_parameter(make: Callable[[], nn.Module], says: str) -> None:
    model = make()
    state = torch.get_rng_state()
    with pytest.raises(LayoutError, match=says):
        patrickstar.manage(model, None, options=options(), **EMULATED)
    assert not any(hasattr(type(p), "managed_by") for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sparse_gradient_that_nobody_announced_is_refused_when_it_arrives() -> None:
    look_up = lambda model, tokens: torch.nn.functional.embedding(tokens, model.table, sparse=True)
    model = Composed(look_up, table=nn.Parameter(torch.randn(16, 8)))
    with managed(model) as session:
        before = values(model)
        with pytest.raises((LayoutError, StateError), match="table.*sparse"):
            model(torch.tensor([1, 2])).sum().backward()
        expect_bits(before, values(session))


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="Module"):
        patrickstar.manage([torch.nn.Parameter(torch.ones(3))])


def test_a_second_manage_is_refused_and_names_the_first() -> None:
    model = mlp()
    with managed(model) as session:
        train_step(model, session.optimizer)
        before = values(model)
        for again in (model, nn.Sequential(model, nn.Linear(32, 4))):
            with pytest.raises(StateError, match="Session of Sequential"):
                patrickstar.manage(again, None, options=options(), **EMULATED)
        expect_bits(before, values(model))
        train_step(model, session.optimizer)
        assert session.stats().planned_steps == 2


def test_the_optimizer_of_a_session_is_not_taken_for_another_one() -> None:
    model, other = mlp(), mlp(1)
    with managed(model) as session:
        refused(ConfigError, "ManagedOptimizer", other, session.optimizer)


LATE = [f"manage.{name}" for name in ("fit_buffers", "Session", "ManagedOptimizer")]


@pytest.mark.parametrize("late", ["step.values.Weights.write_average", *(f"session.{name}" for name in LATE)])
def test_a_failure_late_in_manage_leaves_everything_as_it_was(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is the last that can fail before parameters change their class, after all has been taken over."""
    model = nn.Sequential(mlp(), nn.BatchNorm1d(32)).double()
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(4, 32, dtype=torch.float64)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    before, own = values(model), {name: (id(p), p.grad.clone()) for name, p in model.named_parameters()}
    state = {p: {key: value.clone() for key, value in entry.items()} for p, entry in optimizer.state.items()}
    monkeypatch.setattr(f"patrickstar.{late}", mock.Mock(side_effect=MemoryError("no")))
    with pytest.raises(MemoryError, match="no"):
        patrickstar.manage(model, optimizer, precision="fp32", options=options(), **EMULATED)
    assert is_ordinary(model)
    assert not model._forward_pre_hooks
    expect_bits(before, values(model))
    for name, p in model.named_parameters():
        assert own[name][0] == id(p)
        assert torch.equal(own[name][1], p.grad)
        expect_bits(state[p], optimizer.state[p])
    optimizer.step()
