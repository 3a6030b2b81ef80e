"""The contract of updates for Triton's kernels, and what is theirs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from patrickstar.optim import triton_passes
from patrickstar.optim.triton_passes import TritonPasses
from tests.optim import oracle
from tests.optim.contract_of_updates import *  # noqa: F403
from tests.optim.contract_of_updates import ADAMW, VARIANTS, Format, check, every_format
from tests.optim.definition import exact_fma
from tests.optim.oracle import different
from tests.optim.planes import numbers, planes_of


@pytest.fixture(scope="module")
def family() -> TritonPasses:
    return TritonPasses()


@every_format
def test_factors_of_the_host_are_numbers(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's device is the host: as if it were not."""
    monkeypatch.setattr(triton_passes, "factor_arguments", as_numbers)
    for factors in ((1 / 3, 0.7), (3e-39, 1e30, -0.1), (torch.nan,)):
        check(TritonPasses(), planes_of(200, seed=4), form, factors=[torch.tensor(factor) for factor in factors])


def as_numbers(factors: Sequence[Tensor], device: torch.device) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    return tuple(map(float, factors)), (False,) * len(factors)


def test_elements_agree_with_exact_arithmetic() -> None:
    for hyper in (ADAMW, VARIANTS["Adam"], replace(ADAMW, beta1=0.25)):
        planes = planes_of(300, seed=8)
        want = oracle.update(planes, step=3, **asdict(hyper))
        TritonPasses().update(planes[0], None, *planes[1:], step=3, hyper=hyper)
        assert [different(*pair) for pair in zip((planes[0], *planes[2:]), want)] == [0, 0, 0]


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
    assert different(out, exact_fma(a, b, c)) == 0
    assert different(out, a * b + c) > 100, "two roundings would not be seen"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"grad": torch.zeros(8, dtype=torch.float64)}, "a gradient of torch.float64"),
        ({"grad": torch.zeros(9)}, "several lengths"),
        ({"grad": torch.zeros(8, device="meta")}, "several devices"),
        ({"grad": torch.zeros(16)[::2]}, "contiguous"),
        ({"grad": torch.zeros(2, 4)}, "flat"),
        ({"exp_avg": torch.zeros(8, dtype=torch.bfloat16)}, "states of"),
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
