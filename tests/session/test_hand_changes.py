"""Weights changed by hand are carried into the master, or it is a StateError; never lost."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patrickstar import ConfigError, StateError
from tests.parity.compare import same_bits
from tests.session import changes
from tests.session.builders import (
    ROOMY,
    MakePair,
    Pair,
    adamw,
    assert_same,
    batch,
    expect_bits,
    loss_of,
    mlp,
    train_step,
    values,
)


def add(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.125)


def reset(model: nn.Module) -> None:
    torch.manual_seed(3)
    for module in model:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def by_data_and_sign(model: nn.Module) -> None:
    """`p.data += x` is an addition in place and an assignment of the result."""
    model[4].weight.data += 0.25
    model[6].weight.data -= 0.5 * model[6].weight.data
    model[8].bias.data[3:] *= 2


def foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)
        torch._foreach_add_([p.data for p in model.parameters()], 0.1)


def swap(model: nn.Module) -> None:
    """The values of two layers change places."""
    with torch.no_grad():
        held = model[0].weight.clone()
        model[0].weight.copy_(model[10].weight)
        model[10].weight.copy_(held)


def test_dlpack_shows_a_weight_as_it_is(trained: Pair) -> None:
    for export in (torch.from_dlpack, lambda tensor: torch.from_numpy(np.from_dlpack(tensor).copy())):
        assert same_bits(export(trained.plain[2].weight.detach()), export(trained.model[2].weight.detach()))


def tied_average(model: nn.Module) -> None:
    with torch.no_grad():
        model[2].weight.lerp_(model[4].weight, 0.25)
        model[4].weight.addcmul_(model[2].weight, model[6].weight, value=0.5)


def load(model: nn.Module) -> None:
    model.load_state_dict(mlp(5).state_dict())


def to_the_same(model: nn.Module) -> None:
    model.to("cpu").float().to(torch.float32).train()
    add(model)


def by_lookup(weight: Tensor) -> None:
    F.embedding(torch.tensor([3, 5, 3]), weight, max_norm=0.25)


OF_MATRICES = {**changes.CHANGES, **changes.UNSEEN, "by_lookup": by_lookup}
OF_MODELS = (add, reset, by_data_and_sign, foreach, swap, tied_average, load, to_the_same)
BY_NAME: dict[str, Callable[[nn.Module], None]] = {
    **{name: changes.everywhere(change) for name, change in OF_MATRICES.items()},
    **{change.__name__: change for change in OF_MODELS},
}


@pytest.mark.parametrize("change", BY_NAME)
def test_a_change_by_hand_reaches_the_master_or_is_refused(trained: Pair, change: str) -> None:
    BY_NAME[change](trained.plain)
    try:
        BY_NAME[change](trained.model)
    except StateError as refusal:
        assert "session.write" in str(refusal)
        if change != "by_data_and_sign":  # all or nothing
            return
    trained.train_same(2, first=1)


@pytest.mark.parametrize("change", ["add", "by_data", "by_numpy", "foreach", "by_init"])
def test_a_change_survives_on_its_own(pair: Pair, change: str) -> None:
    """No step follows that could carry it: the chunk leaves the device and comes back."""
    BY_NAME[change](pair.plain)
    BY_NAME[change](pair.model)
    for model in (pair.plain, pair.model):
        for number in range(2):
            with torch.no_grad():
                model(batch(number))
    expect_bits(pair.plain.state_dict(), dict(pair.session.state_dict()))
    assert sum(pair.session.stats().moved.values())


UNREADABLE = "placeholder|Storage that is invalid"
SHAPES: dict[str, tuple[Callable[[Any], object], str | None]] = {
    "set_": (lambda p: p.set_(torch.ones(32, 32)), UNREADABLE),
    "data.set_": (lambda p: p.data.set_(torch.ones(32, 32)), UNREADABLE),
    "detach.set_": (lambda p: p.detach().set_(torch.ones(32, 32)), UNREADABLE),
    "resize_": (lambda p: p.resize_(16, 32), None),
    "data.resize_": (lambda p: p.data.resize_(64, 32), None),
    "data.t_": (lambda p: p.data.t_(), None),
}


@pytest.mark.parametrize(("act", "says"), SHAPES.values(), ids=SHAPES)
def test_a_weight_that_is_re_pointed_or_resized_is_refused_and_keeps_its_values(
    trained: Pair, act: Callable[[Any], object], says: str | None
) -> None:
    """`set_` gives a tensor another storage, and no class gets to see it; but torch reads the placeholder for it, which it cannot."""
    with pytest.raises((StateError, RuntimeError), match=says), torch.no_grad():
        act(trained.model[0].weight)
    assert trained.model[0].weight.shape == (32, 32)
    trained.train_same(1, first=1)


# averages


@pytest.mark.parametrize("decay", ["average", "ema"])
def test_torchs_averaged_model(make_pair: MakePair, decay: str) -> None:
    from torch.optim import swa_utils

    def make(model: nn.Module) -> Any:
        if decay == "average":
            return swa_utils.AveragedModel(model)
        return swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))

    pair = make_pair()
    averages = [make(pair.plain), make(pair.model)]
    for number in range(3):
        pair.each(train_step, number)
        averages[0].update_parameters(pair.plain)
        averages[1].update_parameters(pair.model)
    assert all(type(p) is nn.Parameter for p in averages[1].parameters())
    expect_bits(values(averages[0]), values(averages[1]))
    with torch.no_grad():
        assert same_bits(averages[0](batch()), averages[1](batch()))
    pair.expect_same()


def exchanged(model: nn.Module, _: Any) -> list[Tensor]:
    """Evaluates with halves of the weights, by the lines that many programs have for averages."""
    backup = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.data * 0.5
    with torch.no_grad():
        average = model(batch())
    kept = [data.clone() for data in backup.values()]
    for name, p in model.named_parameters():
        p.data = backup[name]
    return [average, *kept]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.whole), "emulated"])
def test_what_a_parameter_had_keeps_its_values_when_it_gets_other_data(make_pair: MakePair, device: str) -> None:
    pair = make_pair(**({"device": "cpu"} if device == "cpu" else {}))
    for number in range(3):
        pair.train(1, first=number)
        pair.same(exchanged)
    for p in pair.model.parameters():
        p.data = p.data.contiguous()
    pair.train(1, first=3)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)


# write


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_write_takes_other_types_and_strides(pair: Pair, dtype: torch.dtype) -> None:
    value = torch.arange(1024).reshape(32, 32).t().to(dtype)
    pair.session.write("0.weight", value)
    assert same_bits(value.float().contiguous(), pair.session.state_dict()["0.weight"])


def test_write_refuses_what_is_not_there_or_of_another_shape(trained: Pair) -> None:
    with pytest.raises(ConfigError, match=r"3\.wieght"):
        trained.session.write("3.wieght", torch.ones(3))
    with pytest.raises(ConfigError, match=r"\(32, 32\)"):
        trained.session.write("0.weight", torch.ones(3, 3))
    trained.expect_same()


# between forward and backward


@pytest.mark.parametrize("change", ["add", "clamp", "by_init", "load"])
def test_weights_changed_between_forward_and_backward_are_an_error(change: str, disk_pair: Pair) -> None:
    disk_pair.train(1)
    for model in (disk_pair.plain, disk_pair.model):
        loss = loss_of(model, 1)
        BY_NAME[change](model)
        with pytest.raises(
            RuntimeError if model is disk_pair.plain else (StateError, RuntimeError), match="modified by an"
        ):
            loss.backward()
        del loss
        model.zero_grad()
    disk_pair.train_same(1, first=2)


@pytest.mark.parametrize("writes", [False, True], ids=["changed", "written"])
def test_the_error_for_changed_weights_is_a_state_error_that_says_what_to_do(pair: Pair, writes: bool) -> None:
    loss = loss_of(pair.model)
    pair.session.write("10.weight", torch.ones(32, 32)) if writes else add(pair.model)
    with pytest.raises(StateError, match="before the forward or after the backward"):
        loss.backward()


def two_layers() -> nn.Module:
    """Only the second weight is needed in backward."""
    return mlp(layers=2)


@pytest.mark.parametrize("build", [mlp, two_layers])
def test_a_step_between_forward_and_backward_is_an_error(make_pair: MakePair, build: Callable[[], nn.Module]) -> None:
    """Also where the step is still to be carried out when the backward begins, and one weight is all it needs."""
    pair = make_pair(build, **ROOMY)
    first, second = loss_of(pair.model, 0), loss_of(pair.model, 1)
    first.backward()
    pair.optimizer.step()
    with pytest.raises((StateError, RuntimeError), match="modified by an"):
        second.backward()


def test_the_optimizer_on_its_own_tells_autograd_of_its_update() -> None:
    model = mlp()
    optimizer = adamw(model)
    first, second = loss_of(model, 0), loss_of(model, 1)
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an"):
        second.backward()


def test_the_address_of_an_alias_stays_its_address(trained: Pair) -> None:
    """Writers of files ask for the addresses of all tensors before they read the first."""
    state = trained.model[2].state_dict()
    address = state["weight"].data_ptr()
    want = trained.plain[2].weight.detach()
    got = (ctypes.c_float * want.numel()).from_address(address)
    for number in range(1, 4):
        assert same_bits(want.flatten(), torch.tensor(list(got)))
        trained.train(1, first=number)  # other chunks come and go
        dict(trained.session.state_dict())  # the update is over
    assert state["weight"].data_ptr() == address
    del state
    trained.train_same(1, first=4)
