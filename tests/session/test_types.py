"""Models of other types, tied weights, buffers, inputs: managed in fp32, given back as they were."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from tests.composed import Composed
from tests.parity.compare import same_bits
from tests.session.builders import (
    EMULATED,
    ROOMY,
    Layers,
    MakePair,
    Pair,
    adamw,
    assert_same,
    batch,
    expect_bits,
    finish,
    managed,
    mlp,
    options,
    tied,
    train,
    transposed,
    values,
)


def mixed(model: nn.Module) -> nn.Module:
    model[2].to(torch.bfloat16)
    model[4].double()
    return model


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, nn.Module.double, mixed])
def test_a_model_of_other_types_is_managed_in_fp32_and_given_back_in_its_own(cast: Callable[..., nn.Module]) -> None:
    plain, model = cast(mlp()).float(), cast(mlp())
    dtypes, oracle = [p.dtype for p in model.parameters()], adamw(plain)
    with managed(model, precision="fp32", **EMULATED) as session:
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert same_bits(train(plain, oracle), train(model, session.optimizer))
        expect_bits(plain.state_dict(), dict(session.state_dict()))
    assert [p.dtype for p in model.parameters()] == dtypes
    expect_bits(values(cast(plain)), values(model))


@pytest.mark.parametrize(
    ("dtype", "is_split", "scales"),
    [(torch.float32, False, False), (torch.bfloat16, True, False), (torch.float16, False, True)],
)
def test_where_nobody_says_the_type_is_that_of_most_elements(dtype: torch.dtype, is_split: bool, scales: bool) -> None:
    model = mlp().to(dtype)
    model[0].bias.data = model[0].bias.data.to(torch.bfloat16 if dtype is torch.float32 else torch.float32)
    with patrickstar.manage(model, adamw(model)) as session:
        assert ("rest" in session.stats().model_data, session.scaler.is_enabled()) == (is_split, scales)


def test_where_nobody_says_a_type_that_is_no_precision_is_refused() -> None:
    model = mlp().double()
    with pytest.raises(patrickstar.ConfigError, match=r"6,336 of the model's 6,336 .* torch\.float64.*precision="):
        patrickstar.manage(model, adamw(model))
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


def test_state_of_another_type_is_taken_over() -> None:
    plain, model = mlp(), mlp().to(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = {n: (e["exp_avg"].float(), e["exp_avg_sq"].float()) for n, e in optimizer.state_dict()["state"].items()}
    plain.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    with patrickstar.manage(model, optimizer, precision="fp32", options=options(), **EMULATED) as session:
        found = session.optimizer.state_dict()["state"]
        assert all(same_bits(state[n][0], found[n]["exp_avg"]) for n in state)
        assert all(same_bits(state[n][1], found[n]["exp_avg_sq"]) for n in state)
        expect_bits(plain.state_dict(), dict(session.state_dict()))


def test_gradients_that_there_are_come_back_in_their_type_at_close() -> None:
    plain, model = mlp().to(torch.bfloat16).float(), mlp().to(torch.bfloat16)
    plain(batch()).square().mean().backward()
    with managed(model, **EMULATED):
        model(batch()).square().mean().backward()
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert same_bits(want.grad.to(torch.bfloat16), got.grad)


Inputs = namedtuple("Inputs", "x, scale")


class Nested(Layers):
    """Inputs in containers of every kind."""

    def forward(self, x: Any, more: Any = None, *, inputs: Any = None, flags: Any = None) -> torch.Tensor:
        assert x.dtype is torch.float32
        if more is not None:
            assert isinstance(more, dict)
            assert more["tokens"].dtype is torch.int64
            x = x + more["deep"][0][1]
        if inputs is not None:
            assert isinstance(inputs, Inputs)
            x = x * inputs.scale + inputs.x
        assert x.dtype is torch.float32
        return self.layers(x)


def test_floating_inputs_are_cast_in_nested_containers_too(make_pair: MakePair) -> None:
    def act(model: nn.Module, optimizer: Any, dtype: torch.dtype) -> torch.Tensor:
        x = batch()
        model(x.to(dtype)).sum().backward()
        more = {"tokens": torch.arange(3), "deep": [(1, batch(1).to(dtype)), None]}
        out = model(x.to(dtype), more, inputs=Inputs(batch(2).to(dtype), torch.tensor(2.0, dtype=dtype)), flags={"a"})
        finish(out.square().mean(), optimizer)
        return out.detach()

    pair = make_pair(Nested, **ROOMY)
    for _ in range(2):
        want = act(pair.plain, pair.plain_optimizer, torch.float32)
        got = act(pair.model, pair.optimizer, torch.float64)
        assert same_bits(want, got)
        assert got.dtype is torch.float32, "outputs are not cast back"
    expect_bits(pair.plain.state_dict(), dict(pair.session.state_dict()))


def test_an_input_that_needs_no_cast_is_the_very_same_object(make_pair: MakePair) -> None:
    seen: list[Any] = []

    class Looks(Layers):
        def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.append(inputs)
            return self.layers(inputs["x"])

    pair = make_pair(Looks)
    inputs = {"x": batch()}
    pair.model(inputs)
    assert seen[-1] is inputs


def test_gradients_reach_inputs_through_the_cast(pair: Pair) -> None:
    inputs = [batch().double().requires_grad_() for _ in range(2)]
    pair.plain(inputs[0].float()).sum().backward()
    pair.model(inputs[1]).sum().backward()
    assert same_bits(inputs[0].grad, inputs[1].grad)


# tied weights and buffers


def test_tied_weights_are_one_parameter(make_pair: MakePair) -> None:
    pair = make_pair(tied)
    pair.train_same(2)
    assert pair.model[8].weight is pair.model[2].weight
    assert {"2.weight", "8.weight"} < set(pair.session.state_dict())
    pair.session.close()
    assert pair.model[8].weight is pair.model[2].weight


class Buffered(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("frequencies", torch.linspace(0, 1, 32, dtype=torch.float64), persistent=False)
        self.register_buffer("offset", torch.full((32,), 0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.layers(x + self.frequencies.float() + self.offset.float()))


def test_buffers_change_as_in_pytorch_and_keep_or_get_back_their_types(make_pair: MakePair) -> None:
    pair = make_pair(Buffered)
    assert pair.model.frequencies.dtype is torch.float64, "not persistent: as it was"
    assert pair.model.offset.dtype is torch.float32
    assert pair.model.calls.dtype is torch.int64
    pair.plain.offset = pair.plain.offset.float()
    pair.train_same(3)
    assert pair.model.calls.item() == pair.plain.calls.item() == 3, "a trial run changes no buffer"
    assert same_bits(pair.plain.norm.running_var, pair.model.norm.running_var)
    pair.session.close()
    assert pair.model.offset.dtype is torch.float64
    assert pair.model.norm.running_var.dtype is torch.float32


def test_a_buffer_that_is_replaced_after_manage_is_the_one_that_is_saved(make_pair: MakePair) -> None:
    pair = make_pair(Buffered)
    for model in (pair.plain, pair.model):
        model.offset = torch.zeros(32)
    pair.train_same(1)


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_no_random_number_is_drawn(make_pair: MakePair, drop: float) -> None:
    import random

    import numpy as np

    def build() -> nn.Module:
        return nn.Sequential(mlp(), nn.Dropout(drop), nn.Linear(32, 32)) if drop else mlp()

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    plain, model = build(), build()
    model.load_state_dict(plain.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    oracle = adamw(plain)
    want = train(plain, oracle)
    after = torch.get_rng_state()
    torch.set_rng_state(states[0])
    with managed(model, **EMULATED) as session:
        assert same_bits(want, train(model, session.optimizer))
    assert torch.equal(after, torch.get_rng_state())
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


@pytest.mark.parametrize("machine", [EMULATED, {"device": "cpu"}], ids=["tight", "unbounded"])
def test_a_strided_weight_keeps_its_strides(make_pair: MakePair, machine: dict[str, Any]) -> None:
    pair = make_pair(transposed, **machine)
    assert pair.model[2].weight.stride() == (1, 32)
    pair.train(3)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)
    pair.session.close()
    assert pair.model[2].weight.stride() == (1, 32)


def test_parameters_that_share_memory_without_being_one_are_refused() -> None:
    """PyTorch updates the shared bytes twice; under management they would be two tensors."""
    weight = torch.randn(32, 32)
    model = mlp()
    model[0].weight, model[2].weight = nn.Parameter(weight), nn.Parameter(weight)
    with pytest.raises(patrickstar.LayoutError, match="share"):
        managed(model, **EMULATED)


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (5, 1, 3)])
def test_odd_shapes(make_pair: MakePair, shape: tuple[int, ...]) -> None:
    run = lambda model, x: model.layers(x) * (1 + model.odd.sum())
    pair = make_pair(lambda: Composed(run, layers=mlp(), odd=nn.Parameter(torch.ones(shape))))
    pair.train_same(2)
