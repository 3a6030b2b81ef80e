"""Attention over ranks is plain attention, to the last digits of fp64: outputs and each gradient. What it sends and keeps is a formula."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from patrickstar.parallel.kernels import attend, attend_backward
from patrickstar.parallel.layouts import TokenLayout
from tests.parallel import programs_of_attention as programs
from tests.parallel.programs_of_attention import GRID, WAYS, A, B, Case, L, Z
from tests.ranks import Team, Teams, all_well
from tests.sampling import only

MASKED = [
    Case("rsa", "contiguous", is_causal, 2, segments, mask=mask)
    for is_causal, segments, mask in [
        (False, False, "boolean"),
        (True, True, "boolean"),
        (False, True, "added"),
        (True, False, "added"),
    ]
]
OF_OTHER_VALUES = [Case(*way, True, 2, segments=True, of_values=6) for way in WAYS]


@pytest.mark.parametrize("n", only([4], [2, 4]), ids="{} ranks".format)
def test_attention_over_ranks_is_that_of_one(team_of: Teams, n: int) -> None:
    for found in all_well(team_of(n).run(programs.errors, n, [*GRID, *MASKED, *OF_OTHER_VALUES])):
        assert {case: worst for case, worst in found.items() if not max(worst) <= 1e-12} == {}


def test_groups_of_ranks_do_not_mix(team_of: Teams) -> None:
    cases = [case for case in GRID if case.key_heads == 2 and case.segments and case.is_causal]
    for found in all_well(team_of(4).run(programs.errors, 2, cases)):
        assert {case: worst for case, worst in found.items() if not max(worst) <= 1e-12} == {}


@pytest.mark.parametrize("n", only([2], [2, 4]), ids="{} ranks".format)
def test_in_bf16_errors_are_within_three_times_those_of_one_rank(team_of: Teams, n: int) -> None:
    cases = [Case(*way, is_causal, dtype=torch.bfloat16, length=64) for way in WAYS for is_causal in (True, False)]
    for found in all_well(team_of(n).run(programs.errors_beside_flash, n, cases)):
        assert {case: worst for case, worst in found.items() if not max(worst) <= 3} == {}


@pytest.mark.parametrize("n", only([2], [2, 4]), ids="{} ranks".format)
def test_bytes_sent_and_kept_are_those_of_the_formulas(team_of: Teams, n: int) -> None:
    cases = [case for case in GRID if case.key_heads != 2]
    cases += [replace(case, dtype=torch.bfloat16) for case in cases if case.is_causal]
    c = L // n
    for found in all_well(team_of(n).run(programs.bytes_and_storages, n, cases)):
        for case in cases:
            element, of_sums = case.dtype.itemsize, max(4, case.dtype.itemsize)
            u, ids = B * Z * c * A * element, (n - 1) * B * c * 4 * case.segments
            of_keys, rows = u * case.key_heads // Z, B * Z * c * of_sums
            forward, backward, kept, largest, dimensions = found[str(case)]
            assert dimensions == 1
            if case.method == "ulysses":
                copied = u * max(case.key_heads, n) // Z
                assert forward == 2 * (u + copied) * (n - 1) // n + ids
                assert backward == 2 * (u + copied) * (n - 1) // n
                assert kept == 2 * u + 2 * copied + rows + B * L * 4 * case.segments
                continue
            assert forward == 2 * (n - 1) * of_keys + ids
            assert backward == (2 + 2 * of_sums // element) * (n - 1) * of_keys + ids * (case.method == "ring")
            if case.method == "ring":
                assert kept == 2 * u + 2 * of_keys + rows + B * c * 4 * case.segments
                assert largest <= max(B * Z * c * A, 2 * B * case.key_heads * c * A, B * c * c * case.segments)
            else:
                assert kept == u + 2 * of_keys + B * Z * c * L * element


@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_flash_kernel_of_a_gpu_is_called_as_torch_has_it(key_heads: int) -> None:
    with FakeTensorMode():  # of shapes: nothing here has run it
        q = torch.empty(2, 4, 40, 16, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, key_heads, 48, 16, dtype=torch.bfloat16, device="cuda")
        out, lse = attend(q, k, k, mask=None, is_causal=False, scale=0.25)
        grads = attend_backward(out, q, k, k, out, lse, mask=None, is_causal=False, scale=0.25)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:3], torch.float32)
    assert [(grad.shape, grad.dtype) for grad in grads] == [(each.shape, each.dtype) for each in (q, k, k)]


def test_ranks_of_a_zigzag_compute_as_much_each() -> None:
    local = 16
    for n in (2, 4, 8):
        layout, pairs = TokenLayout("zigzag", n), []
        for rank in range(n):
            seen = 0
            for source in range(n):
                block = layout.block(rank, source, local, is_causal=True)
                assert block is not None
                queries, keys = (len(range(local)[part]) for part in (block.queries, block.keys))
                seen += queries * (queries + 1) // 2 if block.is_causal else queries * keys
            pairs.append(seen)
        assert len(set(pairs)) == 1
        assert sum(pairs) == n * local * (n * local + 1) // 2


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("local", [1, 2, 5, 8])
def test_the_two_parts_of_a_ranks_own_block_have_each_pair_once(local: int, is_causal: bool) -> None:
    times = torch.zeros(local, local, dtype=torch.int64)
    for block in itertools.chain(*TokenLayout("zigzag", 2).halves(local, is_causal=is_causal)):
        pairs = times[block.queries, block.keys]
        pairs += torch.ones_like(pairs).tril() if block.is_causal else 1
    assert torch.equal(times, torch.ones_like(times).tril() if is_causal else torch.ones_like(times))


def test_fake_tensors_give_shapes_and_say_nothing(two: Team) -> None:
    cases = [case for case in GRID if case.key_heads == 2] + MASKED[:1]
    assert all_well(two.run(programs.as_shapes, 2, cases)) == [[True] * len(cases)] * 2


def test_dropout_of_strips_has_its_gradient_and_its_mean(two: Team) -> None:
    for slope, mean in all_well(two.run(programs.with_dropout, 2)):
        assert slope < 1e-8
        assert abs(mean - 1) < 0.02


def test_a_group_of_one_has_the_bits_of_plain_pytorch(two: Team) -> None:
    assert all(all(found) for found in all_well(two.run(programs.alone)))
