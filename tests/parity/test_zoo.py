"""Each case of the zoo has the habit it is there for; otherwise its rows show nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parity import oracle
from tests.parity.compare import differences, same_bits
from tests.parity.test_compare import run
from tests.parity.zoo import CASES, STEPS, micro_seed
from tests.sampling import only


@pytest.mark.parametrize("name", only(list(CASES)[::4], CASES))
def test_a_run_repeats_bit_for_bit_whatever_was_drawn_before(name: str) -> None:
    torch.randn(13)
    assert differences(run(name), oracle.train(CASES[name])) == []


@pytest.mark.parametrize("name", only(list(CASES)[1::4], CASES))
def test_every_case_moves_and_is_clipped(name: str) -> None:
    record = run(name, clipping=True)
    assert len(record.losses) == len(record.norms) == STEPS
    assert all(loss.isfinite() for loss in record.losses)
    assert max(norm.item() for norm in record.norms) > CASES[name].max_norm
    assert differences(run(name), record), "clipping changed nothing"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "reentrant" in case.checkpointing])
def test_checkpointing_recomputes(name: str) -> None:
    calls = {}
    for kind in CASES[name].checkpointing:
        model, seen = CASES[name].build(kind), []
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_pre_hook(lambda module, _, seen=seen: seen.append(module))
        CASES[name].loss_of(model, CASES[name].batches(seed=0, count=1)[0]).backward()
        calls[kind] = len(seen)
    assert calls["none"] < calls["non-reentrant"] <= calls["reentrant"]


def test_parameters_without_gradient_keep_their_bits_and_have_no_moments() -> None:
    record, before = run("scalars"), CASES["scalars"].build().state_dict()
    for name in ("unused.weight", "unused.bias"):
        assert all(name not in step for step in record.gradients)
        assert name not in record.updates
        assert same_bits(record.weights[name], before[name])
    branches = run("branches").updates
    assert branches["head.weight"] == STEPS
    assert 0 < branches["left.up.weight"] < STEPS
    assert branches["left.up.weight"] + branches["right.up.weight"] == STEPS
    assert run("thawed").updates["frozen.0.weight"] == STEPS - 2
    assert "loose.weight" in run("adapted").gradients[0]
    assert "loose.weight" not in run("adapted").updates


def test_the_fused_encoder_path_has_bits_of_its_own() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        slow = oracle.train(CASES["encoder"])
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert [line.split()[0] for line in differences(run("encoder"), slow)] == ["evaluation", "evaluation"]


def test_summing_a_backward_before_adding_it_is_another_number_under_reentrant_checkpointing() -> None:
    """PyTorch adds each firing of an accumulator to `.grad` in turn: the row that tells the two orders apart."""
    case = CASES["one-block"]
    want = oracle.train(case, checkpointing="reentrant", accumulation=4, steps=1).gradients[0]
    model, summed = case.build("reentrant"), {}
    for micro, batch in enumerate(case.batches(seed=0, count=4)):
        torch.manual_seed(micro_seed(1, micro))
        (case.loss_of(model, batch) / 4).backward()
        oracle.add_up(summed, dict(model.named_parameters()), kept=None, whole=())
    assert any(not same_bits(want[name], summed[name]) for name in want)


def test_a_copy_with_row_major_weights_has_bits_of_its_own() -> None:
    case = CASES["strided"]

    def made_row_major(kind: str) -> torch.nn.Module:
        model = case.make(kind)
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        return model

    assert sum(not p.is_contiguous() for p in case.build().parameters()) >= 2
    assert differences(run("strided"), oracle.train(replace(case, make=made_row_major)))


def test_one_parameter_is_longer_than_a_norm_block() -> None:
    assert max(p.numel() for p in CASES["long-embedding"].build().parameters()) > oracle.NORM_BLOCK


def test_a_tower_spans_more_chunks_than_one_parameters_planes() -> None:
    case = CASES["tower"]
    layer = sum(p.numel() for p in case.build().towers[0][0].parameters())
    assert layer <= case.chunk_numel < 2 * layer  # each layer a chunk: six in a block, four planes of one in a step
