"""The contract of every family of passes: the definition's bits in every format, for every length, address, value and hyper-parameter.

A file of tests that gives a family imports these tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from patrickstar.optim.hyper import Hyper
from patrickstar.optim.masters import rest_type, split
from patrickstar.optim.passes import Passes
from tests.optim.definition import Definition
from tests.optim.oracle import different
from tests.optim.planes import Plane, of_bits, planes_of

__all__ = [
    "test_a_wrong_update_is_found",
    "test_any_bits_have_the_bits_of_the_definition",
    "test_every_address_is_as_good",
    "test_every_format_has_the_bits_of_the_definition",
    "test_every_length_is_updated_to_its_end_and_no_further",
    "test_every_short_length_has_the_bits_of_the_definition",
    "test_every_step_has_its_bias_correction",
    "test_factors_multiply_the_widened_gradient_in_their_order",
    "test_the_order_of_factors_can_be_seen",
]

DEFINITION = Passes(Definition().update)
ADAMW = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
SLOW = replace(ADAMW, beta1=0.9999999, beta2=0.99999999, weight_decay=0.0)
VARIANTS = {
    "AdamW": ADAMW,
    "Adam": replace(ADAMW, decoupled=False),
    "no decay": replace(ADAMW, weight_decay=0.0),
    "lr 0": replace(ADAMW, lr=0.0),
    "nothing in eps": replace(ADAMW, eps=0.0),
    "no momentum": replace(ADAMW, beta2=0.0),
    "subnormal": replace(ADAMW, lr=1e-39, eps=1e-41, weight_decay=1e-42, decoupled=False),
    "huge": replace(ADAMW, lr=1e39, weight_decay=1e5),
}
# At the ends of vectors, of Triton's blocks, and of those in which torch's operations update, and widen.
SIZES = (0, 1, 7, 31, 997, 1_023, 1_024, 1_025, 2_053, 8_191, 8_192, 8_193, 24_571, (1 << 16) + 48)
TYPES = (torch.float32, torch.bfloat16, torch.float16)
QUIET_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


@dataclass(frozen=True)
class Format:
    """What the weight and the gradient are kept in."""

    kept: torch.dtype
    grad: torch.dtype

    @property
    def is_split(self) -> bool:
        return self.kept is not torch.float32

    def __str__(self) -> str:
        return " from ".join(str(dtype).removeprefix("torch.") for dtype in (self.kept, self.grad))


FORMATS = [Format(*each) for each in itertools.product(TYPES, TYPES)]
PLAIN = FORMATS[0]
every_format = pytest.mark.parametrize("form", FORMATS, ids=str)


def check(
    family: Passes,
    planes: Sequence[Tensor],
    form: Format = PLAIN,
    *,
    hyper: Hyper = ADAMW,
    step: int = 3,
    factors: Sequence[Tensor] = (),
    start: int = 0,
) -> Tensor:
    """Compares an update of (weight, grad, exp_avg, exp_avg_sq) with the definition's. Gives back the weight."""
    master, grad, exp_avg, exp_avg_sq = planes
    kept: list[Tensor] = [master]
    if form.is_split:
        kept = [torch.empty_like(master, dtype=dtype) for dtype in (form.kept, rest_type(form.kept))]
        split(master, *kept)
    narrow = grad.to(form.grad)
    seen = []
    for passes in (DEFINITION, family):
        values = (*kept, narrow, exp_avg, exp_avg_sq)
        placed = [Plane.of(each, start=start and start + index) for index, each in enumerate(values)]
        *weight, gradient, averages, squares = (plane.values for plane in placed)
        parts = (weight[0], weight[1] if form.is_split else None)
        passes.update(*parts, gradient, averages, squares, step=step, hyper=hyper, factors=factors)
        for plane in placed:
            plane.check_neighbours()
        assert different(gradient, narrow) == 0, "the gradient has changed"
        seen.append([*weight, averages, squares])
    for name, want, got in zip(("weight", *(["rest"] if form.is_split else []), "exp_avg", "exp_avg_sq"), *seen):
        assert different(got, want) == 0, f"{name}: {different(got, want)} of {want.numel()}"
    if form.is_split:  # the one NaN that has defined bits, but for the sign
        weight, rest = seen[1][:2]
        is_nan = torch.isnan(weight)
        assert bool(((weight[is_nan].view(torch.int16) & 0x7FFF) == QUIET_NAN[form.kept]).all())
        assert bool((rest[is_nan] == 0).all())
    return seen[1][0]


@every_format
@pytest.mark.parametrize("beta1", [0.9, 0.5, 0.25, 0.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_format_has_the_bits_of_the_definition(form: Format, beta1: float, variant: str, family: Passes) -> None:
    weight = check(family, planes_of(1_041, seed=1), form, hyper=replace(VARIANTS[variant], beta1=beta1))
    assert variant == "huge" or torch.isfinite(weight).sum() > 500, "a sample of NaN shows nothing"


@every_format
@pytest.mark.parametrize("numel", SIZES)
def test_every_length_is_updated_to_its_end_and_no_further(form: Format, numel: int, family: Passes) -> None:
    check(family, planes_of(numel, seed=2), form)


@pytest.mark.parametrize("variant", ["AdamW", "Adam"])
def test_every_short_length_has_the_bits_of_the_definition(variant: str, family: Passes) -> None:
    for numel, beta1 in itertools.product(range(50), (0.75, 0.25)):
        check(family, planes_of(numel, seed=numel, special=False), hyper=replace(VARIANTS[variant], beta1=beta1))


@every_format
@pytest.mark.parametrize("start", [1, 2, 3, 5, 8, 13])
def test_every_address_is_as_good(form: Format, start: int, family: Passes) -> None:
    check(family, planes_of(100, seed=3), form, hyper=VARIANTS["Adam"], start=start)


@every_format
@pytest.mark.parametrize("factors", [(0.5,), (1 / 3, 0.7), (3e-39, 1e30, -0.1), (torch.inf,), (torch.nan,)])
def test_factors_multiply_the_widened_gradient_in_their_order(
    form: Format, factors: tuple[float, ...], family: Passes
) -> None:
    check(family, planes_of(200, seed=4), form, factors=[torch.tensor(factor) for factor in factors])


def test_the_order_of_factors_can_be_seen(family: Passes) -> None:
    planes = planes_of(500, seed=5, special=False)
    factors = [torch.tensor(factor) for factor in (1 / 3, 0.7, 1e-3)]
    seen = [check(family, planes, factors=order) for order in (factors, factors[::-1])]
    assert different(*seen) > 0, "the test above would not see another order"


@every_format
@pytest.mark.parametrize("step", [1, 2, 10_000, 2**24, 2**24 + 1, 2**40])
def test_every_step_has_its_bias_correction(form: Format, step: int, family: Passes) -> None:
    check(family, planes_of(64, seed=6, special=False), form, hyper=SLOW, step=step)


BITS = st.integers(0, 2**32 - 1)
HYPERS = st.builds(
    Hyper,
    lr=st.floats(0, 10) | st.floats(0, 1e-37),
    # With 0 a moment is the gradient, and of one that is zero torch's `lerp_` has another sign in the last elements.
    beta1=st.floats(2**-20, 1, exclude_max=True),
    beta2=st.floats(0, 1, exclude_max=True),
    eps=st.floats(0, 1e-3),
    weight_decay=st.just(0.0) | st.floats(0, 2),
    decoupled=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), form=st.sampled_from(FORMATS), hyper=HYPERS, step=st.integers(1, 2**33))
def test_any_bits_have_the_bits_of_the_definition(
    family: Passes, data: st.DataObject, form: Format, hyper: Hyper, step: int
) -> None:
    numel = data.draw(st.integers(1, 24))
    planes = [of_bits(data.draw(st.lists(BITS, min_size=numel, max_size=numel))) for _ in range(4)]
    factors = [torch.tensor(factor) for factor in data.draw(st.lists(st.floats(width=32), max_size=3))]
    start = data.draw(st.integers(0, 17))
    check(family, planes, form, hyper=hyper, step=step, factors=factors, start=start)


class Spoiled:
    """Passes that take another number for a hyper-parameter."""

    def __init__(self, family: Passes, **numbers: object) -> None:
        self._family = family
        self._numbers: dict[str, Any] = numbers

    def update(self, *planes: Tensor, hyper: Hyper, **others: Any) -> None:
        self._family.update(*planes, hyper=replace(hyper, **self._numbers), **others)


@every_format
@pytest.mark.parametrize(
    ("name", "value"), [("lr", 1.001e-3), ("beta1", 0.901), ("beta2", 0.9991), ("eps", 1e-6), ("decoupled", False)]
)
def test_a_wrong_update_is_found(form: Format, name: str, value: object, family: Passes) -> None:
    spoiled: Any = Spoiled(family, **{name: value})
    with pytest.raises(AssertionError, match="weight|exp_avg"):
        check(spoiled, planes_of(300, seed=9, special=False), form)
