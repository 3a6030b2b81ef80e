"""State in plain PyTorch's format: out of a session, into one, and back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import patrickstar
from patrickstar import BudgetError, ConfigError
from tests.parity.compare import same_bits
from tests.session.builders import (
    ROOMY,
    SLOT,
    TIGHT,
    MakePair,
    Pair,
    adamw,
    backward,
    expect_bits,
    is_ordinary,
    managed,
    mlp,
    tied,
    tiny_gpt2,
    train,
    values,
)


def normed() -> nn.Module:
    """A model with buffers: floating ones, a counter, and one that no state dict has."""
    model = nn.Sequential(mlp(), nn.BatchNorm1d(32))
    model.register_buffer("scale", torch.tensor(2.0))
    model.register_buffer("passing", torch.ones(3), persistent=False)
    return model


@pytest.mark.parametrize("build", [mlp, normed, tied])
@pytest.mark.parametrize("of", ["model", "session"])
def test_a_state_dict_is_what_plain_pytorch_has(
    make_pair: MakePair, build: Callable[[], nn.Module], of: str, on_disk: dict[str, Any]
) -> None:
    """A session's reads one tensor at a time."""
    pair = make_pair(build, **on_disk)
    pair.train(2)
    want, got = pair.plain.state_dict(), getattr(pair, of).state_dict()
    assert list(want) == list(got)
    assert len(want) == len(got)
    expect_bits(want, {name: got[name].clone() for name in got})
    with pytest.raises(KeyError):
        got["nothing"]
    pair.expect_same()


def test_a_state_dict_is_not_the_master(trained: Pair) -> None:
    trained.session.state_dict()["0.weight"].fill_(7)
    trained.expect_same()


WRITERS: dict[str, tuple[Callable[..., None], Callable[[Path], dict[str, Any]]]] = {
    "torch": (lambda state, path: torch.save(state, path), lambda path: torch.load(path, weights_only=True)),
    "safetensors": (safetensors.torch.save_file, safetensors.torch.load_file),
}


@pytest.mark.parametrize("source", ["model", "session"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_state_dict_is_written_and_loaded_by_plain_pytorch(
    make_pair: MakePair, source: str, writer: str, tmp_path: Path
) -> None:
    save, load = WRITERS[writer]
    pair = make_pair(normed)
    pair.train(2)
    try:
        save(dict(getattr(pair, source).state_dict()), tmp_path / "file")
    except (patrickstar.Error, RuntimeError, ValueError):
        assert (writer, source) == ("safetensors", "model"), "it asks for all addresses at once"
        return
    loaded = load(tmp_path / "file")
    assert all(type(tensor) is torch.Tensor for tensor in loaded.values())
    plain = normed()
    plain.load_state_dict(loaded)
    expect_bits(pair.plain.state_dict(), plain.state_dict())


@pytest.mark.parametrize("tie", [True, False])
def test_transformers_saves_a_managed_model_as_it_is_or_refuses(tmp_path: Path, tie: bool) -> None:
    """Its writer asks for the address of every tensor before it reads the first."""
    model = tiny_gpt2(tie_word_embeddings=tie)
    want = values(model)
    with managed(model, device="emulated", device_memory="64KiB"):
        try:
            model.save_pretrained(tmp_path)
        except patrickstar.Error as refusal:
            assert "session.export" in str(refusal)
            return
    expect_bits(want, values(type(model).from_pretrained(tmp_path)))


def test_the_whole_model_is_pickled_as_an_ordinary_one(trained: Pair) -> None:
    file = io.BytesIO()
    torch.save(trained.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert is_ordinary(loaded)
    expect_bits(values(trained.plain), values(loaded))
    backward(loaded)
    trained.train_same(1, first=1)


@pytest.mark.parametrize(
    ("of", "into"),
    [("plain", "model"), ("plain", "session"), ("model", "model"), ("session", "model"), ("session", "session")],
)
def test_a_state_dict_of_another_model_is_loaded(make_pair: MakePair, of: str, into: str) -> None:
    pair, other = make_pair(normed), make_pair(normed, **ROOMY)
    pair.train(1)
    other.train(3)
    source = getattr(other, of).state_dict()
    pair.plain.load_state_dict({name: source[name].clone() for name in source})
    getattr(pair, into).load_state_dict(source)
    pair.expect_same()
    pair.train_same(2, first=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_state_dict_of_another_type_is_rounded_as_copy_does(pair: Pair, dtype: torch.dtype) -> None:
    other = {name: tensor.to(dtype) for name, tensor in mlp(9).state_dict().items()}
    pair.plain.load_state_dict(other)
    pair.session.load_state_dict(other)
    pair.train_same(1)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda state: state.pop("4.weight"), r"missing.*4\.weight"),
        (lambda state: state.update({"4.wieght": torch.ones(3)}), r"unexpected.*4\.wieght"),
        (lambda state: state.update({"10.bias": torch.ones(3)}), r"10\.bias.*\(3,\)"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_a_state_dict_of_another_model_is_refused_before_anything_has_changed(
    trained: Pair, spoil: Callable[[dict[str, Any]], None], says: str
) -> None:
    other = dict(mlp(9).state_dict())
    spoil(other)
    with pytest.raises(ConfigError, match=says):
        trained.session.load_state_dict(other)
    trained.expect_same()


def test_the_models_own_loading_reports_as_in_pytorch(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match=r"Missing key.*4\.weight"):
        pair.model.load_state_dict({name: p for name, p in mlp(9).state_dict().items() if name != "4.weight"})
    found = pair.model.load_state_dict({"0.bias": torch.ones(32)}, strict=False)
    assert len(found.missing_keys) == 11
    assert same_bits(pair.session.state_dict()["0.bias"], torch.ones(32))


# the optimizer's


def test_the_optimizers_state_dict_is_torchs_and_goes_on_there(make_pair: MakePair) -> None:
    pair = make_pair(make_optimizer=adamw)
    pair.train(3)
    plain = mlp()
    plain.load_state_dict(dict(pair.session.state_dict()))
    for kind in (torch.optim.AdamW, patrickstar.AdamW):
        resumed = kind(plain.parameters(), lr=9.0)
        resumed.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
        assert resumed.state_dict()["param_groups"][0]["lr"] == 1e-2
    want = train(pair.plain, pair.plain_optimizer, 2, first=3)
    assert same_bits(want, train(plain, resumed, 2, first=3))
    expect_bits(values(pair.plain), values(plain))


def test_a_state_dict_of_torchs_optimizer_is_loaded_and_goes_on_here(pair: Pair) -> None:
    trained = mlp()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3, betas=(0.7, 0.9))
    train(trained, optimizer, 2)
    pair.train(1)
    for model, mine in ((pair.plain, pair.plain_optimizer), (pair.model, pair.optimizer)):
        model.load_state_dict(trained.state_dict())
        mine.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert pair.original.param_groups[0]["betas"] == (0.7, 0.9)
    pair.train_same(2, first=1)


def test_a_state_without_updates_is_loaded_over_one_with(pair: Pair) -> None:
    fresh = adamw(mlp()).state_dict()
    pair.train(2)
    pair.each(lambda model, optimizer: optimizer.load_state_dict(copy.deepcopy(fresh)))
    pair.train_same(2, first=2)


def test_an_optimizers_state_that_does_not_fit_names_save_checkpoint(tmp_path: Path) -> None:
    model = mlp()
    keywords = {"device": "cpu", "host_memory": TIGHT + SLOT, "disk": tmp_path / "disk"}
    with managed(model, **keywords) as session:
        train(model, session.optimizer, 1)
        with pytest.raises(BudgetError, match="save_checkpoint") as refusal:
            session.optimizer.state_dict()
        assert refusal.value.tier == "host"
        assert refusal.value.needed_bytes > refusal.value.available_bytes
        train(model, session.optimizer, 1, first=1)


def test_a_models_state_dict_that_does_not_fit_names_export_when_it_is_copied(tmp_path: Path) -> None:
    """Its tensors are read when they are used; all at once they are more than the process may hold."""
    model = mlp()
    keywords = {"device": "cpu", "host_memory": 4 * SLOT, "disk": tmp_path / "disk"}
    with managed(model, **keywords):
        with pytest.raises(BudgetError, match="session.export"):
            _ = [tensor.view(-1) for tensor in model.state_dict().values()]
