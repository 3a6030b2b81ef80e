"""Every kernel as it is compiled for a GPU: as many fused operations as the definition has, all rounded to nearest, none approximate.

Counting: a program of 128 threads does its elements without a loop, so that an instruction stands in the PTX once for each element of a thread. An
element of the update has, by `optim/reference.py`:

    fma     m and v, and the gradient under L2 decay                                     2 or 3
    sqrt    of v                                                                         1
    div     of the root, of the step                                                     2
    mul     v * f(b2), f(1 - b2) * g, m * move; the shrinking weight; each factor        3, or 4, and one a factor
    add     d + eps, p + step                                                            2
    sub     g - m                                                                        1
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from patrickstar.optim import triton_kernels as kernels
from patrickstar.optim import triton_passes
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.masters import rest_type
from patrickstar.optim.triton_passes import TritonNorm, TritonPasses
from tests.triton import parts
from tests.triton.compiled.launches import Compiled, compiling_for

ADAMW = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
DECAYS = {"AdamW": ADAMW, "Adam": replace(ADAMW, decoupled=False), "none": replace(ADAMW, weight_decay=0.0)}
BLOCK = kernels.BLOCK_NUMEL
# Addresses and lengths that are multiples of 16, as nearly all are; none; a single element.
PLACES = {"aligned": (0, 4096), "unaligned": (1, 4001), "one": (0, 1)}
TYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = tuple(itertools.product(TYPES, TYPES))  # of weights (fp32: whole masters) and of gradients


@pytest.fixture(params=[80, 90], ids=["sm_80", "sm_90"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Compiled]]:
    """What is launched in the test; afterwards, that each of it rounds as it should."""
    with compiling_for(request.param, monkeypatch) as found:
        yield found
        assert found, "nothing was launched"
        for each in found:
            check(each, request.param)


def check(each: Compiled, capability: int) -> None:
    assert f".target sm_{capability}" in each.ptx
    assert each.binary.startswith(b"\x7fELF"), "ptxas made nothing of it"
    for word in (".approx", ".full", ".ftz"):
        assert word not in each.ptx, f"{each.name}: {word}"
    for name in each.arithmetic():
        assert ".rn" in name, f"{each.name}: {name} may be contracted, or rounds otherwise"
    assert not each.has_loop(), f"{each.name}: what stands there once is executed several times"


def plane(dtype: torch.dtype, place: str) -> Tensor:
    start, numel = PLACES[place]
    return torch.zeros(start + numel, dtype=dtype)[start:]


def flag() -> Tensor:
    return torch.ones((), dtype=torch.int32)


def update(*, kept: torch.dtype, grad: torch.dtype, hyper: Hyper, place: str, factors: Sequence[Tensor] = ()) -> None:
    weight = plane(kept, place)
    rest = None if kept is torch.float32 else plane(rest_type(kept), place)
    averages = plane(torch.float32, place), plane(torch.float32, place)
    TritonPasses().update(weight, rest, plane(grad, place), *averages, step=3, hyper=hyper, factors=factors)


def defined(hyper: Hyper, *, n_factors: int = 0) -> dict[str, int]:
    """The operations of an element's update. See Counting."""
    decays = hyper.weight_decay != 0
    return {
        "fma.rn.f32": 3 if decays and not hyper.decoupled else 2,
        "sqrt.rn.f32": 1,
        "div.rn.f32": 2,
        "mul.rn.f32": (4 if decays and hyper.decoupled else 3) + n_factors,
        "add.rn.f32": 2,
        "sub.rn.f32": 1,
    }


@pytest.mark.parametrize(("kept", "grad"), FORMATS, ids=str)
@pytest.mark.parametrize("beta1", [0.9, 0.25])
@pytest.mark.parametrize("decay", DECAYS)
def test_an_update_has_the_operations_of_the_definition(
    kept: torch.dtype, grad: torch.dtype, beta1: float, decay: str, launched: list[Compiled]
) -> None:
    hyper = replace(DECAYS[decay], beta1=beta1)
    for place in PLACES:
        update(kept=kept, grad=grad, hyper=hyper, place=place)
    assert [each.each(BLOCK) for each in launched] == [defined(hyper)] * len(PLACES)


@pytest.mark.parametrize(("kept", "grad"), FORMATS, ids=str)
@pytest.mark.parametrize("n_factors", [1, 2, 3])
def test_a_factor_is_a_product_of_its_own_wherever_it_is(
    kept: torch.dtype, grad: torch.dtype, n_factors: int, launched: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in (False, True):
        if (
            host
        ):  # no device is here that a factor could be on: one in memory is read from there, one on the host is a number
            monkeypatch.setattr(
                triton_passes,
                "factor_arguments",
                lambda factors, _: (tuple(map(float, factors)), (False,) * len(factors)),
            )
        update(kept=kept, grad=grad, hyper=ADAMW, place="aligned", factors=[torch.tensor(0.5)] * n_factors)
    assert [each.each(BLOCK) for each in launched] == [defined(ADAMW, n_factors=n_factors)] * 2
    loads = [len(re.findall(r"ld\.global", each.ptx)) for each in launched]
    assert loads[0] == loads[1] + n_factors, "each factor in memory is one load"


@pytest.mark.parametrize(("kept", "grad"), FORMATS, ids=str)
def test_planes_at_multiples_of_16_are_read_and_written_16_bytes_at_a_time(
    kept: torch.dtype, grad: torch.dtype, launched: list[Compiled]
) -> None:
    update(kept=kept, grad=grad, hyper=ADAMW, place="aligned")
    master = 6 if kept is torch.float16 else 4  # in one part or two
    reads = re.findall(r"\bld\.global\S*", launched[0].ptx)
    assert reads == ["ld.global.v4.b32"] * (BLOCK // 128 * (master + 4 + 4 + grad.itemsize) // 16)
    writes = re.findall(r"\bst\.global\S*", launched[0].ptx)
    assert writes == ["st.global.v4.b32"] * (BLOCK // 128 * (master + 4 + 4) // 16)


@pytest.mark.parametrize("kept", TYPES)
@pytest.mark.parametrize("comes", TYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_gradients_are_added_by_one_rounded_addition(
    kept: torch.dtype, comes: torch.dtype, adds: bool, launched: list[Compiled]
) -> None:
    for place in PLACES:
        target, source = plane(kept, place), plane(comes, place)
        TritonPasses().put(target, source, adds=adds)
        TritonPasses().put(target, source, adds=adds, is_finite=flag())
    if adds and kept is comes is torch.float16:
        # In fp16, mostly two at once: the sum in fp32 of two fp16 numbers, rounded to fp16, is their sum rounded once.
        assert {name for each in launched for name in each.arithmetic()} == {"add.rn.f16", "add.rn.f16x2"}
        return
    assert [each.each(BLOCK) for each in launched] == [{"add.rn.f32": 1} if adds else {}] * 2 * len(PLACES)
    for each in launched:
        narrowing = re.findall(r"cvt\.\S*f16\S*\.f32", each.ptx)
        assert all(name.startswith("cvt.rn.f16") for name in narrowing)
        rounds = kept is torch.float16 and (adds or comes is not torch.float16)
        assert bool(narrowing) == rounds, "fp16 is rounded to nearest by one instruction; bf16 by its bits"


def test_a_flag_anywhere_among_others_has_the_same_kernel(launched: list[Compiled]) -> None:
    for flag in torch.ones(4, dtype=torch.int32):
        TritonPasses().look(plane(torch.float16, "aligned"), flag)
        TritonPasses().put(*(plane(torch.float16, "aligned") for _ in range(2)), adds=True, is_finite=flag)
    assert [len({each.key for each in launched[first::2]}) for first in range(2)] == [1, 1]


def test_what_only_moves_bits_computes_nothing(launched: list[Compiled]) -> None:
    for place in PLACES:
        for kept in (torch.bfloat16, torch.float16):
            master, weight, rest = (plane(dtype, place) for dtype in (torch.float32, kept, rest_type(kept)))
            triton_passes.launch(parts.split_kernel, (master, weight, rest))
            triton_passes.launch(parts.join_kernel, (weight, rest, master))
        for dtype in TYPES:
            TritonPasses().look(plane(dtype, place), flag())
    assert len(launched) == 7 * len(PLACES)
    assert not any(each.arithmetic() for each in launched)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n_factors", [0, 2])
def test_the_norm_adds_and_squares_in_fp64_and_fuses_nothing(
    dtype: torch.dtype, n_factors: int, launched: list[Compiled]
) -> None:
    norm = TritonNorm(torch.device("cpu"))
    for start in (0, 1):
        norm.add(torch.zeros(start + 70_000, dtype=dtype)[start:], [torch.tensor(0.5)] * n_factors)
        norm.end_tensor()
    by_name = {
        name: [each for each in launched if each.name == name]
        for name in ("subtrees_kernel", "trees_kernel", "numbers_kernel")
    }
    assert [len(found) for found in by_name.values()] == [4, 4, 4]
    # A warp has two trees of 2,048 elements each, 32 rows of 16, or 32 rows of 16 of which each thread has one.
    squares = 2 * 2_048 // 32
    alone = {"mul.rn.f64": squares, "add.rn.f64": squares - 1}
    scaled = {**alone, "mul.rn.f32": n_factors * squares} if n_factors else alone
    # What is left of a tensor has been multiplied when it was collected.
    assert [each.arithmetic() for each in by_name["subtrees_kernel"]] == [scaled, alone, scaled, alone]
    assert all(set(each.arithmetic()) == {"add.rn.f64"} for each in by_name["trees_kernel"])
    assert all(each.arithmetic() == {"add.rn.f64": 15} for each in by_name["numbers_kernel"])


def test_by_default_the_update_would_be_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests look for is there where nothing is done against it."""
    monkeypatch.setattr(triton_passes.kernels, "OPTIONS", {**kernels.OPTIONS, "enable_fp_fusion": True})
    with compiling_for(80, monkeypatch) as launched:
        update(kept=torch.float32, grad=torch.float32, hyper=ADAMW, place="aligned")
    assert launched[0].each(BLOCK) != defined(ADAMW)
    with pytest.raises(AssertionError, match="may be contracted"):
        check(launched[0], 80)
