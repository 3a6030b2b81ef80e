"""Passes beside the update by Triton's kernels: torch's bits in every type, for every value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from patrickstar.optim import masters
from patrickstar.optim import triton_kernels as kernels
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.masters import rest_type
from patrickstar.optim.passes import Passes
from patrickstar.optim.triton_passes import TritonPasses, launch
from tests.optim.definition import Definition
from tests.optim.oracle import different
from tests.optim.planes import Plane, numbers, of_bits, planes_of
from tests.triton import parts

OURS = TritonPasses()
TORCHS = Passes(Definition().update)
TYPES = (torch.float32, torch.bfloat16, torch.float16)
KEPT = (torch.bfloat16, torch.float16)
BLOCK = kernels.BLOCK_NUMEL
SIZES = (0, 1, 15, 16, 17, 997, BLOCK - 1, BLOCK, BLOCK + 1)


def check_put(target: Tensor, source: Tensor, *, adds: bool, start: int = 0) -> Tensor:
    want = target.clone()
    TORCHS.put(want, source, adds=adds)
    plane, read = Plane.of(target, start=start), Plane.of(source, start=start)
    OURS.put(plane.values, read.values, adds=adds)
    plane.check_neighbours()
    assert different(read.values, source) == 0, "the source has changed"
    assert different(plane.values, want) == 0
    return want


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("kept", TYPES)
@pytest.mark.parametrize("comes", TYPES)
def test_gradients_are_widened_narrowed_and_added_as_torch_does(
    adds: bool, kept: torch.dtype, comes: torch.dtype
) -> None:
    target, source = numbers(3 * BLOCK + 7, seed=1).to(kept), numbers(3 * BLOCK + 7, seed=2).to(comes)
    want = check_put(target, source, adds=adds)
    assert torch.isfinite(want).sum() > BLOCK


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("numel", SIZES)
def test_every_length_is_put_to_its_end_and_no_further(adds: bool, numel: int) -> None:
    check_put(numbers(numel, seed=3), numbers(numel, seed=4).bfloat16(), adds=adds)


@pytest.mark.parametrize("start", [1, 3, 8])
def test_every_address_is_put_at(start: int) -> None:
    check_put(numbers(100, seed=5), numbers(100, seed=6).bfloat16(), adds=True, start=start)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_all_of_16_bits_are_widened(narrow: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(narrow)
    check_put(torch.zeros(1 << 16), every, adds=False)


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), narrow=st.sampled_from(TYPES[1:]))
def test_anything_is_narrowed_to_the_nearest(bits: list[int], narrow: torch.dtype) -> None:
    check_put(torch.zeros(len(bits), dtype=narrow), of_bits(bits), adds=False)


@pytest.mark.parametrize("low", [0x7FFF, 0x8000, 0x8001])
def test_ties_of_bf16_go_to_even(low: int) -> None:
    source = of_bits([upper << 16 | low for upper in range(0, 1 << 16, 7)])
    want = check_put(torch.zeros(source.numel(), dtype=torch.bfloat16), source, adds=False)
    assert low != 0x8000 or (want[torch.isfinite(want)].view(torch.int16) & 1).sum() == 0


def test_a_negative_zero_that_is_written_stays_one() -> None:
    assert torch.signbit(check_put(torch.ones(3), torch.full((3,), -0.0), adds=False)).all()


@pytest.mark.parametrize("adds", [False, True])
def test_what_no_kernel_reads_is_put_by_torch(adds: bool) -> None:
    check_put(numbers(50, seed=7), numbers(50, seed=8).double() / 3, adds=adds)
    target = numbers(50, seed=7, special=False)
    assert not found_by_putting(target, torch.full((50,), 1e300, dtype=torch.float64), adds=adds)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("kept", TYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, None])
@pytest.mark.parametrize("place", [0, 15, BLOCK - 1, BLOCK, BLOCK + 70])
def test_a_look_sees_what_is_not_finite_wherever_it_is(
    adds: bool, kept: torch.dtype, bad: float | None, place: int
) -> None:
    target, source = torch.ones(BLOCK + 71, dtype=kept), torch.full((BLOCK + 71,), -2.0)
    if bad is not None:
        source[place] = bad
    assert found_by_putting(target, source, adds=adds) == (bad is None)
    assert found_by_looking(OURS, target) == found_by_looking(TORCHS, target) == (bad is None)


def test_what_overflows_when_it_is_rounded_or_added_is_seen() -> None:
    assert not found_by_putting(torch.zeros(5, dtype=torch.float16), torch.full((5,), 65520.0), adds=False)
    assert found_by_putting(torch.zeros(5, dtype=torch.float16), torch.full((5,), 65519.0), adds=False)
    assert not found_by_putting(torch.full((5,), 3e38), torch.full((5,), 3e38), adds=True)


def test_what_has_been_found_is_not_forgotten() -> None:
    for passes in (OURS, TORCHS):
        assert not found_by_looking(passes, torch.tensor([torch.inf]), torch.ones(1))


def found_by_putting(target: Tensor, source: Tensor, *, adds: bool) -> bool:
    is_finite = torch.ones((), dtype=torch.int32)
    OURS.put(target, source, adds=adds, is_finite=is_finite)
    return is_finite.item() == 1


def found_by_looking(passes: Passes, *pieces: Tensor) -> bool:
    is_finite = torch.ones((), dtype=torch.int32)
    for piece in pieces:
        passes.look(piece, is_finite)
    return is_finite.item() == 1


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_nothing_beyond_the_end_is_looked_at(dtype: torch.dtype, numel: int) -> None:
    whole = torch.full((numel + 40,), torch.nan, dtype=dtype)
    piece = whole[20 : 20 + numel].fill_(torch.finfo(dtype).max)
    assert found_by_looking(OURS, piece)
    assert found_by_looking(TORCHS, piece)


def check_parts(master: Tensor, kept: torch.dtype, *, start: int = 0) -> None:
    weight, rest = torch.empty_like(master, dtype=kept), torch.empty_like(master, dtype=rest_type(kept))
    masters.split(master, weight, rest)
    shown, left = Plane.of(torch.zeros_like(weight), start=start), Plane.of(torch.zeros_like(rest), start=start)
    launch(parts.split_kernel, (Plane.of(master, start=start).values, shown.values, left.values))
    # Bits of NaN too: the definition has those of both halves.
    assert torch.equal(shown.values.view(torch.int16), weight.view(torch.int16))
    assert torch.equal(left.values, rest)
    want, again = torch.empty_like(master), Plane.of(torch.empty_like(master), start=start)
    masters.join(weight, rest, want)
    launch(parts.join_kernel, (shown.values, left.values, again.values))
    assert not different(again.values, want)
    # Which NaN an fp16 one is widened to is the processor's choice.
    assert kept is torch.float16 or torch.equal(again.values.view(torch.int32), want.view(torch.int32))
    for plane in (shown, left, again):
        plane.check_neighbours()


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("low", [0, 1, 0x0FFF, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_all_upper_halves_are_split_and_joined(low: int, kept: torch.dtype) -> None:
    check_parts(of_bits([upper << 16 | low for upper in range(1 << 16)]), kept)


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    kept=st.sampled_from(KEPT),
    start=st.integers(0, 9),
)
def test_anything_is_split_and_joined(bits: list[int], kept: torch.dtype, start: int) -> None:
    check_parts(of_bits(bits), kept, start=start)


@pytest.mark.parametrize("kept", KEPT)
def test_every_length_is_split_and_joined(kept: torch.dtype) -> None:
    for numel in SIZES:
        check_parts(numbers(numel, seed=9), kept)


@pytest.mark.parametrize("kept", KEPT)
def test_parts_that_nobody_has_rounded_are_joined_by_their_bits(kept: torch.dtype) -> None:
    """But for fp16 that is NaN, which a GPU widens to the one NaN it knows: such a master is NaN, whichever."""
    weight, rest = (torch.arange(-(1 << 15), 1 << 15).to(torch.int16) for _ in range(2))
    kept_weight = weight.view(kept)
    if kept is torch.float16:
        kept_weight = kept_weight.nan_to_num(1.0, torch.inf, -torch.inf)
    for shift in (0, 1, 12345):
        moved = rest.roll(shift).to(rest_type(kept))
        want, got = torch.empty(1 << 16), torch.empty(1 << 16)
        masters.join(kept_weight, moved, want)
        launch(parts.join_kernel, (kept_weight, moved, got))
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


class Recorder:
    """A kernel that notes which planes it is launched over."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, int]] = []

    def __getitem__(self, grid: tuple[int]) -> object:
        def record(plane: Tensor, numel: int, **constants: object) -> None:
            self.launches.append((plane.storage_offset(), numel, grid[0] * constants["block_numel"]))

        return record


@pytest.mark.parametrize("numel", [0, 1, (1 << 28) - 1, 1 << 28, (1 << 28) + 1, 2**31 + 5, 2**32 + 3])
def test_no_launch_has_offsets_beyond_31_bits(numel: int) -> None:
    recorder = Recorder()
    launch(recorder, (torch.empty(numel, dtype=torch.int8),))  # memory that is never touched
    assert sum(count for _, count, _ in recorder.launches) == numel
    at = 0
    for offset, count, covered in recorder.launches:
        assert (offset, 0 < count <= covered < count + BLOCK) == (at, True)
        assert covered * 4 < 2**31, "bytes of the widest type"
        at += count


def test_parts_of_a_plane_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    hyper = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
    seen = []
    for numel in (1 << 28, 1 << 10, 1000):
        monkeypatch.setattr(kernels, "LAUNCH_NUMEL", numel)
        planes = planes_of(2500, seed=10)
        OURS.update(planes[0], None, *planes[1:], step=2, hyper=hyper)
        flag = torch.ones((), dtype=torch.int32)
        OURS.put(planes[1], planes[0], adds=True, is_finite=flag)
        seen.append(torch.cat([*planes, flag.float()[None]]))
    assert different(seen[1], seen[0]) == different(seen[2], seen[0]) == 0


def test_planes_of_other_types_are_refused() -> None:
    with pytest.raises(AssertionError, match="a plane of"):
        OURS.put(torch.zeros(4, dtype=torch.float64), torch.zeros(4), adds=True)
    with pytest.raises(AssertionError, match="a piece of"):
        OURS.look(torch.zeros(4, dtype=torch.float64), torch.ones((), dtype=torch.int32))
    for flag in (torch.ones(()), torch.ones(1, dtype=torch.int32)):
        with pytest.raises(AssertionError, match="a flag of"):
            OURS.look(torch.zeros(4), flag)
        with pytest.raises(AssertionError, match="a flag of"):
            OURS.put(torch.zeros(4), torch.zeros(4), adds=True, is_finite=flag)
