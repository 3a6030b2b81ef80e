"""Updates by Triton's kernels: the definition's bits in every format, for every length, address, value and hyper-parameter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from patrickstar.optim import triton_kernels as kernels
from patrickstar.optim import triton_passes
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.masters import rest_type
from patrickstar.optim.passes import TorchPasses
from patrickstar.optim.triton_passes import TritonPasses
from tests.optim import oracle
from tests.optim.definition import Definition, exact_fma
from tests.triton.interpreted.planes import Plane, differing, numbers, of_bits

DEFINITION = TorchPasses(Definition())
ADAMW = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
VARIANTS = {
    "AdamW": ADAMW,
    "Adam": replace(ADAMW, decoupled=False),
    "no decay": replace(ADAMW, weight_decay=0.0),
    "lr 0": replace(ADAMW, lr=0.0),
    "nothing in eps": replace(ADAMW, eps=0.0),
    "subnormal": replace(ADAMW, lr=1e-39, eps=1e-41, weight_decay=1e-42, decoupled=False),
    "huge": replace(ADAMW, lr=1e39, weight_decay=1e5),
}
BLOCK = kernels.BLOCK_NUMEL
SIZES = (0, 1, 2, 15, 16, 17, 31, 997, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5)


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


TYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = [Format(*each) for each in itertools.product(TYPES, TYPES)]
QUIET_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def check(
    form: Format,
    planes: Sequence[Tensor],
    *,
    hyper: Hyper,
    step: int = 3,
    factors: Sequence[Tensor] = (),
    start: int = 0,
    passes: TritonPasses | None = None,
) -> Tensor:
    """Compares an update of (weight, grad, exp_avg, exp_avg_sq) with the definition's. Gives back the weight."""
    master, grad, exp_avg, exp_avg_sq = planes
    kept: list[Tensor] = [master]
    if form.is_split:
        kept = [torch.empty_like(master, dtype=dtype) for dtype in (form.kept, rest_type(form.kept))]
        DEFINITION.split(master, *kept)
    narrow = grad.to(form.grad)
    seen = []
    for family in (DEFINITION, passes or TritonPasses()):
        placed = [Plane.of(values, start=start) for values in (*kept, narrow, exp_avg, exp_avg_sq)]
        *weight, gradient, averages, squares = (plane.values for plane in placed)
        parts = (weight[0], weight[1] if form.is_split else None)
        family.update(*parts, gradient, averages, squares, step=step, hyper=hyper, factors=factors)
        for plane in placed:
            plane.check_neighbours()
        assert differing(gradient, narrow) == 0, "the gradient has changed"
        seen.append([*weight, averages, squares])
    for name, want, got in zip(("weight", *(["rest"] if form.is_split else []), "exp_avg", "exp_avg_sq"), *seen):
        assert differing(got, want) == 0, f"{name}: {differing(got, want)} of {want.numel()}"
    if form.is_split:  # the one NaN that has defined bits, but for the sign
        weight, rest = seen[1][:2]
        is_nan = torch.isnan(weight)
        assert bool(((weight[is_nan].view(torch.int16) & 0x7FFF) == QUIET_NAN[form.kept]).all())
        assert bool((rest[is_nan] == 0).all())
    return seen[1][0]


def planes_of(numel: int, *, seed: int = 0, special: bool = True) -> list[Tensor]:
    planes = [numbers(numel, seed=4 * seed + which, special=special) for which in range(4)]
    planes[3] = planes[3].abs()
    return planes


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("beta1", [0.9, 0.5, 0.25, 0.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_format_has_the_bits_of_the_definition(form: Format, beta1: float, variant: str) -> None:
    weight = check(form, planes_of(BLOCK + 17, seed=1), hyper=replace(VARIANTS[variant], beta1=beta1))
    assert variant == "huge" or torch.isfinite(weight).sum() > 500, "a sample of NaN shows nothing"


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_every_length_is_updated_to_its_end_and_no_further(form: Format, numel: int) -> None:
    check(form, planes_of(numel, seed=2), hyper=ADAMW)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("start", [1, 2, 3, 5, 8, 13])
def test_every_address_is_as_good(form: Format, start: int) -> None:
    check(form, planes_of(100, seed=3), hyper=VARIANTS["Adam"], start=start)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("factors", [(0.5,), (1 / 3, 0.7), (3e-39, 1e30, -0.1), (torch.inf,), (torch.nan,)])
@pytest.mark.parametrize("on_the_host", [False, True])
def test_factors_multiply_the_widened_gradient_in_their_order(
    form: Format, factors: tuple[float, ...], on_the_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_the_host:  # the interpreter's device is the host: as if it were not
        monkeypatch.setattr(triton_passes, "factor_arguments", as_numbers)
    check(form, planes_of(200, seed=4), hyper=ADAMW, factors=[torch.tensor(factor) for factor in factors])


def as_numbers(factors: Sequence[Tensor], device: torch.device) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    return tuple(map(float, factors)), (False,) * len(factors)


def test_the_order_of_factors_can_be_seen() -> None:
    planes = planes_of(500, seed=5, special=False)
    factors = [torch.tensor(factor) for factor in (1 / 3, 0.7, 1e-3)]
    seen = [check(FORMATS[0], planes, hyper=ADAMW, factors=order) for order in (factors, factors[::-1])]
    assert differing(*seen) > 0, "the test above would not see another order"


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("step", [1, 2, 1000, 2**24 + 1, 2**40])
def test_every_step_has_its_bias_correction(form: Format, step: int) -> None:
    check(form, planes_of(64, seed=6), hyper=ADAMW, step=step)


def test_many_updates_in_a_row_stay_equal() -> None:
    ours, want = ([plane.clone() for plane in planes_of(300, seed=7, special=False)] for _ in range(2))
    for step in range(1, 20):
        for family, planes in ((TritonPasses(), ours), (DEFINITION, want)):
            planes[1] = numbers(300, seed=step, special=False).bfloat16()
            family.update(planes[0], None, *planes[1:], step=step, hyper=ADAMW)
    assert [differing(*pair) for pair in zip(ours, want)] == [0, 0, 0, 0]


def test_elements_agree_with_exact_arithmetic() -> None:
    for hyper in (ADAMW, VARIANTS["Adam"], replace(ADAMW, beta1=0.25)):
        planes = planes_of(300, seed=8)
        fields = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled")
        want = oracle.update(planes, step=3, **{name: getattr(hyper, name) for name in fields})
        TritonPasses().update(planes[0], None, *planes[1:], step=3, hyper=hyper)
        assert [differing(*pair) for pair in zip((planes[0], *planes[2:]), want)] == [0, 0, 0]


BITS = st.integers(0, 2**32 - 1)
HYPERS = st.builds(
    Hyper,
    lr=st.floats(0, 10) | st.floats(0, 1e-37),
    beta1=st.floats(0, 1, exclude_max=True),
    beta2=st.floats(0, 1, exclude_max=True),
    eps=st.floats(0, 1e-3),
    weight_decay=st.just(0.0) | st.floats(0, 2),
    decoupled=st.booleans(),
)


@settings(max_examples=150)
@given(data=st.data(), form=st.sampled_from(FORMATS), hyper=HYPERS, step=st.integers(1, 2**33))
def test_any_bits_have_the_bits_of_the_definition(data: st.DataObject, form: Format, hyper: Hyper, step: int) -> None:
    numel = data.draw(st.integers(1, 24))
    planes = [of_bits(data.draw(st.lists(BITS, min_size=numel, max_size=numel))) for _ in range(4)]
    factors = [torch.tensor(factor) for factor in data.draw(st.lists(st.floats(width=32), max_size=3))]
    check(form, planes, hyper=hyper, step=step, factors=factors, start=data.draw(st.integers(0, 17)))


def spoiled(name: str, value: object) -> TritonPasses:
    """Passes that take another number for a hyper-parameter."""

    class Spoiled(TritonPasses):
        def update(self, *planes: Tensor, hyper: Hyper, **others: object) -> None:
            super().update(*planes, hyper=replace(hyper, **{name: value}), **others)

    return Spoiled()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("name", "value"), [("lr", 1.001e-3), ("beta1", 0.901), ("beta2", 0.9991), ("eps", 1e-6), ("decoupled", False)]
)
def test_a_wrong_update_is_found(form: Format, name: str, value: object) -> None:
    with pytest.raises(AssertionError, match="weight|exp_avg"):
        check(form, planes_of(300, seed=9, special=False), hyper=ADAMW, passes=spoiled(name, value))


@pytest.mark.parametrize("special", [False, True])
def test_the_interpreters_fma_rounds_once(special: bool) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def fma(a, b, c, out, numel: tl.constexpr):
        at = tl.arange(0, numel)
        tl.store(out + at, tl.fma(tl.load(a + at), tl.load(b + at), tl.load(c + at)))

    a, b = (numbers(4096, seed=seed, special=special) for seed in (10, 11))
    c = -(a * b) * (1 + 2.0**-20)  # so that much cancels
    out = torch.empty(4096)
    fma[(1,)](a, b, c, out, numel=4096)
    assert differing(out, exact_fma(a, b, c)) == 0
    assert differing(out, a * b + c) > 100, "two roundings would not be seen"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"grad": torch.zeros(8, dtype=torch.float64)}, "a gradient of torch.float64"),
        ({"grad": torch.zeros(9)}, "several lengths"),
        ({"grad": torch.zeros(8, device="meta")}, "several devices"),
        ({"grad": torch.zeros(16)[::2]}, "contiguous"),
        ({"grad": torch.zeros(2, 4)}, "flat"),
        ({"exp_avg": torch.zeros(8, dtype=torch.bfloat16)}, "averages of"),
        ({"weight": torch.zeros(8, dtype=torch.bfloat16)}, "a weight of"),
        ({"rest": torch.zeros(8, dtype=torch.int16)}, "a weight of"),
        ({"step": 0}, "step 0"),
        ({"factors": (torch.zeros(1),)}, "a factor of shape"),
        ({"factors": (torch.zeros((), dtype=torch.float64),)}, "a factor of torch.float64"),
        ({"factors": (torch.zeros((), device="meta"),)}, "a factor on meta"),
    ],
)
def test_a_callers_mistake_is_caught_before_memory_is_touched(spoil: dict[str, object], why: str) -> None:
    arguments = {
        **dict.fromkeys(("weight", "grad", "exp_avg", "exp_avg_sq"), torch.ones(8)),
        "rest": None,
        "step": 1,
        "hyper": ADAMW,
    }
    with pytest.raises(AssertionError, match=why):
        TritonPasses().update(**{**arguments, **spoil})
