"""`session.export`, and the round trip: `save_pretrained`, `weights=`, training, `export`, `from_pretrained`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
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
from tests.session.builders import EMULATED, Layers, Pair, adamw, expect_bits, mlp, options, store_of, train, values

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
IDS = torch.arange(3, 19).reshape(2, 8)
PIXELS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
MODELS: Mapping[str, tuple[str, str, dict[str, Any], dict[str, Tensor]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, **WORDS}, {"input_ids": IDS}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, **WORDS}, {"input_ids": IDS}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8, "vocab_size": 50},
        {"input_ids": IDS, "decoder_input_ids": IDS},
    ),
    "bert": ("BertForSequenceClassification", "BertConfig", {**SIZES, "vocab_size": 50}, {"input_ids": IDS}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**SIZES, "image_size": 8, "patch_size": 4},
        {"pixel_values": PIXELS},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**SIZES, **WORDS, "num_local_experts": 3, "num_key_value_heads": 2},
        {"input_ids": IDS},
    ),
}
BUDGET = {"device": "emulated", "device_memory": "400KiB"}


@pytest.fixture(autouse=True, scope="module")
def quiet_library() -> None:
    transformers.utils.logging.set_verbosity(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()


def build(name: str, seed: int, **more: Any) -> Any:
    kind, config, settings, _ = MODELS[name]
    torch.manual_seed(seed)
    return getattr(transformers, kind)(getattr(transformers, config)(**settings, **more)).eval()


def logits(model: Any, name: str) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**MODELS[name][3]).logits.clone()
    return found


def read_back(model: Any, path: Path) -> Any:
    found, told = type(model).from_pretrained(path, output_loading_info=True, local_files_only=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    return found.eval()


@pytest.mark.sampled
@pytest.mark.parametrize("shard", ["50GB", "6KB"])
@pytest.mark.parametrize("name", MODELS)
def test_what_goes_in_trained_comes_out_for_the_model_s_own_library(tmp_path: Path, name: str, shard: str) -> None:
    start = build(name, 7)
    start.save_pretrained(tmp_path / "start", max_shard_size=shard)
    model = build(name, 0)
    with patrickstar.manage(model, adamw(model), weights=tmp_path / "start", **BUDGET) as session:
        assert same_bits(logits(start, name), logits(model, name))
        model(**MODELS[name][3]).logits.square().mean().backward()
        session.optimizer.step()  # type: ignore[union-attr]
        session.optimizer.zero_grad()  # type: ignore[union-attr]
        session.export(tmp_path / "end", max_shard_size=shard)
        want = logits(model, name)
        held = values(session)
    assert not same_bits(want, logits(start, name))
    found = read_back(model, tmp_path / "end")
    assert same_bits(want, logits(found, name))
    expect_bits(held, values(found))
    assert (len(list((tmp_path / "end").glob("*.safetensors"))) > 2) == (shard == "6KB")


def test_a_file_of_the_base_model_fits_with_a_head_and_the_other_way_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = build("bert", 7)
    whole.bert.save_pretrained(tmp_path / "base")
    whole.save_pretrained(tmp_path / "whole")
    base = transformers.BertModel(whole.config).eval()
    caplog.set_level(logging.WARNING, "patrickstar")
    with patrickstar.manage(base, weights=tmp_path / "whole", **BUDGET) as session:
        expect_bits(whole.bert.state_dict(), dict(session.state_dict()))
    assert (
        "2 tensors in the files are none of the model's and are not used: classifier.bias, classifier.weight"
        in caplog.text
    )
    caplog.clear()
    model = build("bert", 0)
    before = {name: model.state_dict()[name].clone() for name in ("classifier.weight", "classifier.bias")}
    with patrickstar.manage(model, weights=tmp_path / "base", **BUDGET) as session:
        want = {f"bert.{name}": tensor for name, tensor in whole.bert.state_dict().items()}
        expect_bits({**want, **before}, dict(session.state_dict()))
    assert "keep the values they have: classifier.weight, classifier.bias" in caplog.text


def test_tied_weights_stand_in_the_files_once_and_may_come_back_from_either_name(tmp_path: Path) -> None:
    with patrickstar.manage(build("gpt2", 7), **BUDGET) as session:
        session.export(tmp_path)
        want = values(session)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    safetensors.torch.save_file(tensors, tmp_path / "other.safetensors")
    with patrickstar.manage(build("gpt2", 0), weights=tmp_path / "other.safetensors", **BUDGET) as session:
        expect_bits(want, dict(session.state_dict()))


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
        model(**MODELS["gpt2"][3]).logits.float().square().mean().backward()
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
    with patrickstar.manage(model, adamw(model), options=options(), **machine) as session:
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


def test_exporting_changes_nothing_of_the_training(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make_pair()
    for number in range(3):
        pair.train(1, first=number)
        pair.session.export(tmp_path)
        expect_bits(values(pair.plain), safetensors.torch.load_file(tmp_path / "model.safetensors"))
    pair.expect_same()


def test_a_pending_step_is_part_of_what_is_exported(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make_pair()
    for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.model, pair.optimizer)):
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
    pair.session.export(tmp_path)
    expect_bits(values(pair.plain), safetensors.torch.load_file(tmp_path / "model.safetensors"))


def test_exporting_needs_the_slots_of_a_weight_and_no_more(tmp_path: Path) -> None:
    model = mlp(layers=12)
    with patrickstar.manage(model, options=options(), **EMULATED | {"device_memory": "24KiB"}) as session:
        session.export(tmp_path / "out")
        assert session.stats().peak["device"] <= 24 << 10
        assert store_of(session).state.slots_used[Tier.DEVICE] <= 3
    expect_bits(values(model), safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))


def test_what_cannot_be_is_told(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make_pair()
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
