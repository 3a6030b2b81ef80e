"""`session.export`, and the round trip: `save_pretrained`, `weights=`, training, `export`, `from_pretrained`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import patrickstar
from patrickstar import ConfigError, DeviceError, StateError
from patrickstar.core.machine import Tier
from tests.parity.compare import same_bits
from tests.parity.zoo import CASES
from tests.sampling import only
from tests.session.builders import (
    EMULATED,
    Layers,
    Pair,
    adamw,
    expect_bits,
    finish,
    managed,
    mlp,
    options,
    seeded,
    store_of,
    train,
    values,
)

transformers = pytest.importorskip("transformers")

NAMES = ("gpt2", "llama", "t5", "bert", "vit", "mixtral")
BUDGET = {"device": "emulated", "device_memory": "1MiB"}


@pytest.fixture(autouse=True, scope="module")
def quiet_library() -> None:
    transformers.utils.logging.set_verbosity(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()


def build(name: str, seed: int) -> Any:
    return seeded(lambda: CASES[name].make("none"), seed)().eval()


def logits(model: Any, name: str) -> Tensor:
    return model(**CASES[name].batches(0, count=1)[0]).logits.float()  # type: ignore[no-any-return]


def read_back(model: Any, path: Path) -> Any:
    found, told = type(model).from_pretrained(path, output_loading_info=True, local_files_only=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    return found.eval()


@pytest.mark.parametrize("shard", ["50GB", "6KB"])
@pytest.mark.parametrize("name", only(["gpt2", "t5", "vit"], NAMES))
def test_what_goes_in_trained_comes_out_for_the_model_s_own_library(tmp_path: Path, name: str, shard: str) -> None:
    start = build(name, 7)
    start.save_pretrained(tmp_path / "start", max_shard_size=shard)
    model = build(name, 0)
    with patrickstar.manage(model, adamw(model), weights=tmp_path / "start", **BUDGET) as session:
        first = logits(model, name)
        finish(first.square().mean(), session.optimizer)
        session.export(tmp_path / "end", max_shard_size=shard)
        want = logits(model, name).detach()
        held = values(session)
    assert same_bits(logits(start, name).detach(), first.detach())
    assert not same_bits(want, first.detach())
    found = read_back(model, tmp_path / "end")
    assert same_bits(want, logits(found, name).detach())
    expect_bits(held, values(found))
    assert (len(list((tmp_path / "end").glob("*.safetensors"))) > 2) == (shard == "6KB")


def test_a_file_of_the_base_model_fits_with_a_head_and_the_other_way_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = build("vit", 7)
    whole.vit.save_pretrained(tmp_path / "base")
    whole.save_pretrained(tmp_path / "whole")
    base = transformers.ViTModel(whole.config, add_pooling_layer=False).eval()
    caplog.set_level(logging.WARNING, "patrickstar")
    with patrickstar.manage(base, weights=tmp_path / "whole", **BUDGET) as session:
        expect_bits(whole.vit.state_dict(), dict(session.state_dict()))
    assert (
        "2 tensors in the files are none of the model's and are not used: classifier.bias, classifier.weight"
        in caplog.text
    )
    caplog.clear()
    model = build("vit", 0)
    before = {name: model.state_dict()[name].clone() for name in ("classifier.weight", "classifier.bias")}
    with patrickstar.manage(model, weights=tmp_path / "base", **BUDGET) as session:
        want = {f"vit.{name}": tensor for name, tensor in whole.vit.state_dict().items()}
        expect_bits({**want, **before}, dict(session.state_dict()))
    assert "keep the values they have: classifier.weight, classifier.bias" in caplog.text


def test_the_configuration_says_what_was_written(tmp_path: Path) -> None:
    model = build("gpt2", 7).bfloat16()
    with patrickstar.manage(model, **BUDGET) as session:
        session.export(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    assert (told["architectures"], told["dtype"]) == (["GPT2LMHeadModel"], "float32")
    assert model.config.architectures is None
    assert (tmp_path / "generation_config.json").is_file()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert found.dtype is torch.float32
    expect_bits(values(model), values(found.bfloat16()))


def test_in_16_bits_masters_go_in_and_out_whole(tmp_path: Path) -> None:
    build("gpt2", 7).save_pretrained(tmp_path / "start")
    model = build("gpt2", 0)
    with patrickstar.manage(model, adamw(model), weights=tmp_path / "start", precision="bf16", **BUDGET) as session:
        expect_bits(build("gpt2", 7).state_dict(), dict(session.state_dict()))
        logits(model, "gpt2").square().mean().backward()
        session.optimizer.step()  # type: ignore[union-attr]
        session.export(tmp_path / "end")
        held = values(session)
    expect_bits(held, values(read_back(model, tmp_path / "end")))


class Odd(Layers):
    """Weights in an order of their own, tied ones, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.layers[0]
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.layers(x)) + self.convolution.weight.sum() + self.norm(x[:, :4]).sum()


def test_of_any_other_module_tensors_are_written_and_read_again(tmp_path: Path, machine: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model, want = Odd(), {}
    with managed(model, **machine) as session:
        train(model, session.optimizer, 2)
        session.export(str(tmp_path / "out"), max_shard_size=5000)
        want = values(session)
        assert sum(session.stats().moved.values()) > 0
    found: dict[str, Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found |= safetensors.torch.load_file(path)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".safetensors", ".json"}
    assert found.keys() == {name for name in want if not name.startswith("again.")}
    expect_bits({name: want[name] for name in found}, found)
    with patrickstar.manage(Odd(), weights=tmp_path / "out", options=options(), **EMULATED) as session:
        expect_bits(want, dict(session.state_dict()))


def test_exporting_has_the_pending_step_and_changes_nothing_of_the_training(pair: Pair, tmp_path: Path) -> None:
    for number in range(3):
        pair.train(1, first=number)
        pair.session.export(tmp_path)
        expect_bits(values(pair.plain), safetensors.torch.load_file(tmp_path / "model.safetensors"))
    pair.expect_same()


def test_exporting_needs_the_slots_of_a_weight_and_no_more(tmp_path: Path) -> None:
    model = mlp(layers=12)
    with patrickstar.manage(model, options=options(), **EMULATED | {"device_memory": "24KiB"}) as session:
        session.export(tmp_path / "out")
        assert session.stats().peak["device"] <= 24 << 10
        assert store_of(session).state.slots_used[Tier.DEVICE] <= 3
    expect_bits(values(model), safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))


def test_what_cannot_be_is_told(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="file"):
        pair.session.export(tmp_path / "file")
    for size in (0, -1, "many", "10%"):
        with pytest.raises(ConfigError, match="max_shard_size"):
            pair.session.export(tmp_path / "out", max_shard_size=size)
    assert not (tmp_path / "out").exists()
    pair.train(1)
    pair.session.close()
    with pytest.raises(StateError, match="closed"):
        pair.session.export(tmp_path / "out")
