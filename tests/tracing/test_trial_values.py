"""Which values a trial run knows of fake tensors: those of inputs and of draws, and what follows from them alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from patrickstar.tracing.trial_operations import TrialOperations
from patrickstar.tracing.trial_values import Endless

SMALL, LIKELY, LARGE = 0.0, 0.5, 1.0


@contextmanager
def trial(quantile: float = LIKELY, *inputs: Tensor) -> Iterator[Any]:
    """The mode, and then fake tensors for the inputs."""
    operations = TrialOperations(quantile)
    operations.seer = lambda func, result: None
    with operations:
        alike = [operations.fakes.from_tensor(real) for real in inputs]
        for tensor, real in zip(alike, inputs, strict=True):
            operations.values.know(tensor, real)
        yield (operations.values, *alike)


def asked(make: Callable[[], Any], quantile: float = LIKELY) -> Any:
    """What is answered where the value of a fake tensor is asked for."""
    with trial(quantile):
        found = make()
        return found.tolist() if isinstance(found, Tensor) else found


DRAWS: dict[str, tuple[Callable[[], Any], tuple[Any, Any, Any]]] = {
    "rand": (lambda: torch.rand([]), (0.0, 0.5, 1 - 2**-24)),
    "rand of bf16": (lambda: torch.rand(2, dtype=torch.bfloat16), ([0.0, 0.0], [0.5, 0.5], [1 - 2**-8, 1 - 2**-8])),
    "rand_like": (lambda: torch.rand_like(torch.zeros(1)), ([0.0], [0.5], [1 - 2**-24])),
    "uniform_": (lambda: torch.zeros(2).uniform_(-2, 2), ([-2.0, -2.0], [0.0, 0.0], [2 - 2**-22, 2 - 2**-22])),
    "randint": (lambda: torch.randint(10, []), (0, 5, 9)),
    "randint from": (lambda: torch.randint(-3, 3, (1,)), ([-3], [0], [2])),
    "randint of one": (lambda: torch.randint(4, 5, []), (4, 4, 4)),
    "randint_like": (lambda: torch.randint_like(torch.zeros(()), 2, 5), (2.0, 3.0, 4.0)),
    "random_": (lambda: torch.zeros(1, dtype=torch.long).random_(8), ([0], [4], [7])),
    "random_ from": (lambda: torch.zeros(()).random_(5, 9), (5.0, 7.0, 8.0)),
    "bernoulli": (lambda: torch.bernoulli(torch.tensor(0.3)), (1.0, 0.0, 0.0)),
    "a likely bernoulli": (lambda: torch.bernoulli(torch.tensor([0.7])), ([1.0], [1.0], [0.0])),
    "bernoulli of": (lambda: torch.bernoulli(torch.zeros(1), 0.7), ([1.0], [1.0], [0.0])),
    "bernoulli_": (lambda: torch.zeros(()).bernoulli_(0.3), (1.0, 0.0, 0.0)),
    "bernoulli_ of a tensor": (lambda: torch.zeros(2).bernoulli_(torch.tensor(0.7)), ([1.0] * 2, [1.0] * 2, [0.0] * 2)),
    "a certain bernoulli": (lambda: torch.bernoulli(torch.tensor([0.0, 1.0])), ([0.0, 1.0],) * 3),
    "bernoulli_ that is certain": (lambda: torch.zeros(1).bernoulli_(1.0), ([1.0],) * 3),
    "computed with": (lambda: (torch.rand(2) * 4 - 1).floor().long(), ([-1, -1], [1, 1], [2, 2])),
    "compared": (lambda: [bool(torch.rand([]) < 0.1), bool(torch.rand([]) > 0.1)], ([True, False], [False, True], [False, True])),
}  # fmt: skip
"""Draws, and what they are where all are small, likely and large."""


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_a_quantile_of_its_distribution(name: str) -> None:
    draw, want = DRAWS[name]
    before = torch.get_rng_state()
    assert tuple(asked(draw, quantile) for quantile in (SMALL, LIKELY, LARGE)) == want
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn([]),
        lambda: torch.zeros(2).normal_(),
        lambda: torch.zeros(2).exponential_(),
        lambda: torch.randperm(3),
        lambda: torch.multinomial(torch.ones(3), 1),
        lambda: torch.zeros(1).random_(),
        lambda: torch.rand([]) + torch.randn([]),
        lambda: torch.empty(2),
        lambda: torch.rand(2).new_empty(2),
        lambda: torch.empty_like(torch.rand(2)),
        lambda: torch.empty_strided((2,), (1,)),
        lambda: torch.rand(1 << 16) @ torch.rand(1 << 16, 2),
    ],
    ids=range(12),
)
def test_other_values_are_unknown(make: Callable[[], Tensor]) -> None:
    with pytest.raises(DataDependentOutputException):
        asked(make)


def test_whether_a_draw_was_asked_for_is_known() -> None:
    with trial(LIKELY, torch.tensor([3, 4])) as (values, x):
        assert x.sum().item() == 7
        assert torch.ones(3).sum() == 3
        mask = torch.rand(2, 1) > 0.2
        _ = x * mask
        assert not values.branches, "nothing was asked"
        assert (x * mask).sum() == 14
        assert values.branches


def test_drawn_numbers_make_what_they_are_written_to_drawn() -> None:
    with trial() as (values,):
        kept = torch.zeros(2)
        kept[1] = torch.rand([])
        assert kept[0].item() == 0.0
        assert values.branches
    with trial() as (values,):
        kept = torch.zeros(2)
        view = kept[1:]
        view.uniform_()
        assert kept.tolist() == [0.0, 0.5]
        assert values.branches


def test_views_and_what_is_written_through_them_agree() -> None:
    with trial(LIKELY, torch.arange(6.0)) as (_, x):
        view = x.view(2, 3)
        view[1].add_(10)
        assert x.tolist() == [0.0, 1.0, 2.0, 13.0, 14.0, 15.0]
        x.mul_(2)
        assert view.T.tolist() == [[0.0, 26.0], [2.0, 28.0], [4.0, 30.0]]
        assert view[:, ::2][0, 1].item() == 4.0


def test_the_callers_tensors_are_not_written_to() -> None:
    real = torch.arange(4.0)
    with trial(LIKELY, real) as (_, x):
        x.add_(1)
        assert x.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert real.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_inputs_that_share_memory_share_values() -> None:
    real = torch.arange(6.0)
    with trial(LIKELY, real[1:], real.view(3, 2).T) as (_, one, other):
        assert one.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert other.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x, unknown: x.add_(unknown),
        lambda x, unknown: x.copy_(unknown),
        lambda x, unknown: x[:1].copy_(unknown[:1]),
        lambda x, unknown: x.normal_(),
        lambda x, unknown: torch.add(unknown, 1, out=x),
        lambda x, unknown: torch._foreach_add_([x], [unknown]),
        lambda x, unknown: x.index_put_((torch.tensor([0]),), unknown[:1]),
    ],
    ids=range(7),
)
def test_what_is_written_without_a_value_has_none(spoil: Callable[[Tensor, Tensor], Any]) -> None:
    with trial(LIKELY, torch.arange(2.0)) as (_, x):
        view = x.view(1, 2)
        unknown = torch.randn(2)
        spoil(x, unknown)
        for tensor in (x, view):
            with pytest.raises(DataDependentOutputException):
                tensor.tolist()


def test_a_tensor_that_is_put_over_other_memory_has_the_values_there() -> None:
    with trial(LIKELY, torch.arange(2.0), torch.arange(2.0) + 5) as (_, x, y):
        view = x.view(1, 2)
        x.set_(y)
        assert x.tolist() == [5.0, 6.0]
        assert view.tolist() == [[0.0, 1.0]]


def test_a_part_of_something_unknown_stays_unknown() -> None:
    with trial():
        whole = torch.randn(4)
        part = whole[:2]
        part.uniform_()
        with pytest.raises(DataDependentOutputException):
            part.tolist()


def test_values_of_another_type_are_unknown() -> None:
    with trial(LIKELY, torch.arange(2.0)) as (_, x):
        with pytest.raises(DataDependentOutputException):
            x.view(torch.int32).tolist()
        assert x.tolist() == [0.0, 1.0]
    with trial(LIKELY, torch.tensor([1 + 2j])) as (_, z), pytest.raises(DataDependentOutputException):
        z.conj().tolist()


def test_values_of_large_inputs_are_unknown() -> None:
    large = torch.zeros(1 << 16 | 1)
    with trial(LIKELY, large, large[:2]) as (_, *alike):
        for tensor in alike:
            with pytest.raises(DataDependentOutputException):
                tensor[0].item()


def test_values_go_with_their_tensor() -> None:
    with trial() as (values,):
        kept = torch.rand(2)
        for _ in range(100):
            _ = torch.rand(2) + kept
        gc.collect()
        assert len(values._contents) < 10
        assert kept.tolist() == [0.5, 0.5]


def test_draws_that_are_asked_for_again_and_again_end_a_trial_run() -> None:
    with trial(SMALL), pytest.raises(Endless, match="1000"):
        while torch.rand([]) < 0.5:
            pass
    with trial(SMALL, torch.arange(1100)) as (_, x):
        assert sum(bool(number > 10) for number in x) == 1089, "inputs are asked for as often as one likes"
