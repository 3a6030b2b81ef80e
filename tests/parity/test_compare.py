"""Spoiled twins: a comparison with the oracle fails when one bit, one count or one operation is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim import definition
from tests.parity import oracle
from tests.parity.compare import differences, same_bits
from tests.parity.oracle import Moments, Record, update
from tests.parity.zoo import CASES


@cache
def run(name: str, clipping: bool = False) -> Record:
    return oracle.train(CASES[name], clipping=clipping)


def flip(tensor: Tensor, at: int = 0) -> None:
    """Another last bit of one element."""
    tensor.reshape(-1)[at : at + 1].view(torch.int32).bitwise_xor_(1)


def swap(tensors: dict[str, Tensor], one: str, other: str) -> None:
    tensors[one], tensors[other] = tensors[other], tensors[one]


def through_bf16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


SPOILED: dict[str, Callable[[Record], object]] = {
    "a gradient's bit": lambda r: flip(r.gradients[2]["towers.1.3.weight"], 17),
    "a loss's bit": lambda r: flip(r.losses[4]),
    "a norm's bit": lambda r: flip(r.norms[0]),
    "a loss less": lambda r: r.losses.pop(),
    "a step of gradients less": lambda r: r.gradients.pop(),
    "an evaluation less": lambda r: r.evaluations.pop(),
    "a gradient less": lambda r: r.gradients[0].pop("towers.0.0.bias"),
    "a gradient where there is none": lambda r: r.gradients[0].update({"towers.0.9.bias": torch.zeros(44)}),
    "a negative zero": lambda r: r.gradients[1]["towers.0.1.bias"][3].fill_(-0.0),
    "moments exchanged": lambda r: vars(r).update(exp_avg=r.exp_avg_sq, exp_avg_sq=r.exp_avg),
    "an update more": lambda r: r.updates.update({"towers.0.0.weight": r.updates["towers.0.0.weight"] + 1}),
    "two weights exchanged": lambda r: swap(r.weights, "towers.0.0.weight", "towers.0.1.weight"),
    "a rounded weight": lambda r: r.weights.update({"towers.1.5.weight": through_bf16(r.weights["towers.1.5.weight"])}),
    "a buffer more": lambda r: r.buffers.update(noise=torch.zeros(1)),
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_the_comparison_fails_for_a_wrong_record(spoil: str) -> None:
    want = copy.deepcopy(run("tower", clipping=True))
    want.gradients[1]["towers.0.1.bias"][3] = 0.0
    got = copy.deepcopy(want)
    assert differences(want, got) == []
    SPOILED[spoil](got)
    assert len(differences(want, got)) >= 1


def test_the_comparison_reads_bits_and_not_values() -> None:
    nan, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert same_bits(nan, nan)
    assert not same_bits(nan, other)
    want, got = (Record(gradients=[{"a": value}]) for value in (nan, other))
    assert differences(want, got)
    assert differences(want, got, any_nan=True) == []
    assert differences(Record(norms=[nan]), Record(norms=[other])) == []
    assert differences(want, Record(gradients=[{"a": torch.zeros(2)}]), any_nan=True)
    assert not same_bits(torch.zeros(2), -torch.zeros(2))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert same_bits(torch.ones(2, 3).t(), torch.ones(3, 2))  # strides are not part of a value


Update = Callable[..., None]
Of = dict[str, Moments]


def momentum_by_two_products(p: Tensor, g: Tensor, moments: Of, name: str, group: Any, *, algorithm: str) -> None:
    """The textbook m = b1 m + (1 - b1) g: the same number on paper."""
    before = moments[name].exp_avg.clone() if name in moments else torch.zeros_like(p)
    update(p, g, moments, name, group, algorithm=algorithm)
    b1 = group["betas"][0]
    moments[name].exp_avg.copy_(before * b1 + g * (1 - b1))


def decay_after(p: Tensor, g: Tensor, moments: Of, name: str, group: Any, *, algorithm: str) -> None:
    """Decays the updated weight instead of the old one."""
    update(p, g, moments, name, {**group, "weight_decay": 0.0}, algorithm=algorithm)
    p.mul_(1 - group["lr"] * group["weight_decay"])


def twice(*arguments: Any, algorithm: str) -> None:
    """A chunk updated twice."""
    update(*arguments, algorithm=algorithm)
    update(*arguments, algorithm=algorithm)


def one_count_for_all(p: Tensor, g: Tensor, moments: Of, name: str, group: Any, *, algorithm: str) -> None:
    """The optimizer's step count where the parameter's own is meant."""
    latest = max((kept.updates for other, kept in moments.items() if other != name), default=0)
    if name in moments:
        moments[name].updates = max(moments[name].updates, latest - 1)
    update(p, g, moments, name, group, algorithm=algorithm)


def first_groups_rate(p: Tensor, g: Tensor, moments: Of, name: str, group: Any, *, algorithm: str) -> None:
    """One learning rate for all groups."""
    update(p, g, moments, name, {**group, "lr": 1e-3}, algorithm=algorithm)


def root_in_torch(p: Tensor, g: Tensor, moments: Of, name: str, group: Any, *, algorithm: str) -> None:
    """torch's own square root, which is not always the nearest."""
    exact, definition.root = definition.root, torch.sqrt
    try:
        update(p, g, moments, name, group, algorithm=algorithm)
    finally:
        definition.root = exact


@pytest.mark.parametrize(
    ("spoil", "case"),
    [
        *((spoil, "tower") for spoil in (momentum_by_two_products, decay_after, twice, first_groups_rate)),
        *((one_count_for_all, "branches"), (root_in_torch, "gpt2")),
    ],
)
def test_the_comparison_fails_for_a_wrong_update(spoil: Update, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = run(case)
    monkeypatch.setattr(oracle, "update", spoil)
    assert differences(want, oracle.train(CASES[case]))


def norm_in_fp32(gradients: dict[str, Tensor]) -> Tensor:
    """What `torch.nn.utils.get_total_norm` computes: a norm of norms, in fp32."""
    return torch.nn.utils.get_total_norm(list(gradients.values()))


def test_the_comparison_fails_for_a_norm_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    want = {name: run(name, clipping=True) for name in ("gpt2", "conv", "long-embedding")}
    monkeypatch.setattr(oracle, "global_norm", norm_in_fp32)
    assert any(differences(record, oracle.train(CASES[name], clipping=True)) for name, record in want.items())


def test_the_comparison_fails_where_a_zero_gradient_stands_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    want = run("scalars")
    case = CASES["scalars"]

    def with_zeros(model: torch.nn.Module, step: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    assert differences(want, oracle.train(replace(case, before_step=with_zeros)))
