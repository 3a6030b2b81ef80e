"""`manage(..., weights=)`: values come from files, and nothing else of a session is another."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import patrickstar
from patrickstar import CheckpointError, ConfigError
from patrickstar.checkpoint.weight_files import WeightFiles
from patrickstar.session.loading import Loading
from tests.composed import Composed
from tests.session.builders import EMULATED, adamw, assert_same, expect_bits, is_ordinary, mlp, options, train, values


def manage(model: nn.Module, weights: Path, optimizer: Any = None, **keywords: Any) -> patrickstar.Session:
    return patrickstar.manage(model, optimizer, weights=weights, options=options(), **(keywords or EMULATED))


def save(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    safetensors.torch.save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return path


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """The weights of another `mlp`."""
    return save(tmp_path / "model.safetensors", mlp(7).state_dict())


def tied(seed: int) -> Any:
    torch.manual_seed(seed)
    embed, norm, head = nn.Embedding(9, 32), nn.BatchNorm1d(32), nn.Linear(32, 9, bias=False)
    head.weight = embed.weight
    buffers = {"sixteen": nn.Buffer(torch.arange(3).half()), "mine": nn.Buffer(torch.arange(3.0), persistent=False)}
    model: Any = Composed(lambda m, x: m.head(m.norm(m.embed(x))), embed=embed, norm=norm, head=head, **buffers)
    with torch.no_grad():
        for buffer in (model.norm.running_mean, model.norm.running_var, model.norm.num_batches_tracked, model.sixteen):
            buffer.add_(seed)
    return model


def test_training_goes_on_from_the_files_bit_for_bit(machine: dict[str, Any], others: Path) -> None:
    plain, model = mlp(7), mlp(0)
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    with manage(model, others, optimizer, **machine) as session:
        assert_same(plain, None, session)
        train(plain, plain_optimizer)
        train(model, session.optimizer)
        assert_same(plain, plain_optimizer, session)
    expect_bits(values(plain), values(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_become_fp32_by_one_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    want = {name: tensor.double().mul(1 + 1e-9).to(dtype) for name, tensor in mlp(7).state_dict().items()}
    with manage(model := mlp(0), save(tmp_path / "file", want)) as session:
        expect_bits({name: tensor.float() for name, tensor in want.items()}, dict(session.state_dict()))
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_the_master_is_the_file_s_value_whatever_type_the_model_has(others: Path) -> None:
    with manage(model := mlp(0).bfloat16(), others, precision="fp32") as session:
        expect_bits(mlp(7).state_dict(), dict(session.state_dict()))
    expect_bits(mlp(7).bfloat16().state_dict(), values(model))


@pytest.mark.parametrize("left_out", ["head.weight", "embed.weight", None])
def test_tied_weights_and_persistent_buffers_are_taken(tmp_path: Path, left_out: str | None) -> None:
    want, model = tied(7), tied(0)
    mean = model.norm.running_mean
    file = save(tmp_path / "file", {name: t for name, t in want.state_dict().items() if name != left_out})
    with manage(model, file) as session:
        assert model.head.weight is model.embed.weight
        expect_bits({**want.state_dict(), "sixteen": want.sixteen.float()}, dict(session.state_dict()))
    expect_bits(want.state_dict(), values(model))
    assert model.norm.running_mean is mean, "in place: whoever has the buffer sees it"
    assert model.mine.tolist() == [0, 1, 2]


def test_weights_of_another_model_are_refused_and_nothing_has_changed(tmp_path: Path) -> None:
    """`tests/checkpoint` has more that does not match, and what is told of what either side lacks."""
    tensors = {**mlp(7).state_dict(), "10.bias": torch.ones(31)}
    model = mlp(0)
    optimizer = adamw(model)
    with pytest.raises(CheckpointError, match="file: "):
        manage(model, save(tmp_path / "file", tensors), optimizer, device="cpu", disk=tmp_path / "disk")
    assert is_ordinary(model)
    assert not (tmp_path / "disk").exists()
    expect_bits(mlp(0).state_dict(), values(model))
    train(model, optimizer)


def test_a_path_is_a_string_or_a_path(others: Path) -> None:
    for weights in (others, str(others), str(others.parent)):
        with patrickstar.manage(mlp(0), weights=weights, options=options(), **EMULATED) as session:
            expect_bits(mlp(7).state_dict(), dict(session.state_dict()))
    with pytest.raises(ConfigError, match="weights=7"):
        patrickstar.manage(mlp(0), weights=7)


def failing_reads(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    read, count = Loading.read, 0

    def failing(self: Loading, name: str) -> Tensor:
        nonlocal count
        count += 1
        if count > after:
            raise CheckpointError("the disk is gone")
        return read(self, name)

    monkeypatch.setattr(Loading, "read", failing)


@pytest.mark.parametrize("after", [0, 5, 11])
def test_a_disk_that_fails_under_way_leaves_model_and_optimizer_as_before(
    machine: dict[str, Any], others: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    plain, model = mlp(0), mlp(0)
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    train(plain, plain_optimizer, 1)
    train(model, optimizer, 1)
    failing_reads(monkeypatch, after)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        manage(model, others, optimizer, **machine)
    assert is_ordinary(model)
    expect_bits(values(plain), values(model))
    train(plain, plain_optimizer, 2)
    train(model, optimizer, 2)
    expect_bits(values(plain), values(model))


def test_where_both_values_do_not_fit_every_byte_is_read_before_anything_changes(
    others: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    pieces = WeightFiles.pieces

    def watched(self: WeightFiles, name: str, numel: int) -> Any:
        asked.append(name)
        return pieces(self, name, numel)

    monkeypatch.setattr(WeightFiles, "pieces", watched)
    small = {"device": "cpu", "host_memory": "70KiB"}  # the weights are 25 KiB, in 48 KiB of chunks
    with manage(mlp(0), others, **small) as session:
        expect_bits(mlp(7).state_dict(), dict(session.state_dict()))
    assert sorted(asked) == sorted(mlp().state_dict())
    asked.clear()
    with manage(mlp(0), others, device="cpu", host_memory="75KiB"):
        assert not asked


def test_values_pass_through_memory_one_at_a_time(others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    read, most = Loading.read, 0

    def watched(self: Loading, name: str) -> Tensor:
        nonlocal most
        most = max(most, len(alive))
        alive.add(value := read(self, name))
        return value

    monkeypatch.setattr(Loading, "read", watched)
    with manage(mlp(0), others):
        assert most == 0, "one was still there when the next was read"
        assert not alive


def test_one_buffer_in_two_places_gets_its_value_in_both(tmp_path: Path) -> None:
    def build(value: float) -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
        model[1].running_mean = model[0].running_mean
        model[0].running_mean.fill_(value)
        return model

    file = save(tmp_path / "file", {"1.running_mean": torch.full((4,), 5.0), "2.bias": torch.ones(4)})
    with manage(model := build(1.0), file, precision="fp32"):
        assert model[0].running_mean.tolist() == model[1].running_mean.tolist() == [5.0] * 4


def test_parameters_that_a_hook_keeps_out_of_the_state_dict_are_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def leave_out(_: nn.Module, found: dict[str, Tensor], prefix: str, __: object) -> None:
        del found[f"{prefix}bias"]

    model = mlp(0)
    model[0].register_state_dict_post_hook(leave_out)
    tensors = {name: tensor for name, tensor in mlp(7).state_dict().items() if name != "0.bias"}
    with caplog.at_level(logging.WARNING, "patrickstar"), manage(model, save(tmp_path / "file", tensors)):
        assert "keep the values they have: 0.bias" in caplog.text


def test_a_model_built_without_memory_is_filled_from_the_files(others: Path, tmp_path: Path) -> None:
    with patrickstar.deferred_init():
        model = mlp(0)
    tensors = {name: tensor for name, tensor in mlp(7).state_dict().items() if name != "4.bias"}
    with manage(model, save(tmp_path / "most", tensors)) as session:
        expect_bits({**mlp(7).state_dict(), "4.bias": mlp(0)[4].bias.detach()}, dict(session.state_dict()))
