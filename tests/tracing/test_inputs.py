"""Which forwards are taken for the same, and which for no larger."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from patrickstar.tracing.inputs import Signature, asks_for_gradients, can_be_traced, signature


def of(*args: Any, model: nn.Module | None = None, **kwargs: Any) -> Signature:
    model = model or nn.Linear(2, 2)
    return signature(model.modules(), model.parameters(), args, kwargs)


def test_values_of_tensors_make_no_difference_and_plain_values_do() -> None:
    model = nn.Linear(2, 2)
    assert of(torch.zeros(3, 2), model=model) == of(torch.ones(3, 2), model=model)
    assert of(torch.zeros(3, 2), model=model, use_cache=True) != of(torch.zeros(3, 2), model=model, use_cache=False)


@pytest.mark.parametrize(
    ("larger", "smaller"),
    [
        ((torch.zeros(4, 8),), (torch.zeros(4, 7),)),
        ((torch.zeros(4, 8),), (torch.zeros(1, 8),)),
        (({"x": torch.zeros(4, 8), "y": torch.zeros(4)},), ({"x": torch.zeros(2, 8), "y": torch.zeros(2)},)),
    ],
)
def test_a_forward_dominates_those_of_smaller_shapes_alone(larger: tuple[Any, ...], smaller: tuple[Any, ...]) -> None:
    model = nn.Linear(2, 2)
    assert of(*larger, model=model).dominates(of(*smaller, model=model))
    assert not of(*smaller, model=model).dominates(of(*larger, model=model))


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(2, 2, dtype=torch.long),),
        (torch.zeros(2, 2, requires_grad=True),),
        (torch.zeros(2),),
        (torch.zeros(2, 2), 1),
        ([torch.zeros(2, 2)],),
    ],
    ids=["type", "requires grad", "dimensions", "another argument", "a container"],
)
def test_no_forward_dominates_one_of_another_kind(other: tuple[Any, ...]) -> None:
    model = nn.Linear(2, 2)
    assert not of(torch.zeros(9, 9), model=model).dominates(of(*other, model=model))


def test_modes_and_what_trains_tell_forwards_apart() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), torch.zeros(2, 2)
    before = of(x, model=model)
    with torch.no_grad():
        assert not before.dominates(of(x, model=model))
    model.eval()
    assert not before.dominates(of(x, model=model))
    model.train()
    model[0].weight.requires_grad_(False)
    assert not before.dominates(of(x, model=model))


def test_objects_that_a_trial_run_could_change_are_not_traced() -> None:
    assert can_be_traced(([torch.zeros(1), None], {"a": (1, 2.0, "x")}))
    assert not can_be_traced((object(),))


def test_an_input_that_wants_a_gradient_is_found_wherever_it_is() -> None:
    x = torch.zeros(2, requires_grad=True)
    for value in (x, (1, x), [{"a": {"b": (x,)}}]):
        assert asks_for_gradients(value)
    for value in (x.detach(), (1, "x", None), {"a": torch.zeros(2)}):
        assert not asks_for_gradients(value)
