"""What transformers does with the names of tensors, and what of its inside is relied upon for it."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from patrickstar.checkpoint.naming import describe, naming_of, own_keys  # noqa: E402
from patrickstar.errors import ConfigError  # noqa: E402

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 11}


def bert(head: bool = True) -> Any:
    kind = transformers.BertForSequenceClassification if head else transformers.BertModel
    return kind(transformers.BertConfig(**SMALL))


def targets(model: nn.Module, *names: str) -> list[str]:
    keys = model.state_dict().keys()
    found = {name: key for name, key, _ in naming_of(model).renamed(names, keys)}
    return [found[name] for name in names]


def test_a_model_of_no_library_has_its_own_names():
    model = nn.Linear(2, 2)
    assert targets(model, "weight", "model.weight") == ["weight", "model.weight"]
    assert not naming_of(model).missing.search("weight")
    assert not naming_of(model).unexpected.search("weight")


def test_the_base_model_s_prefix_is_added_or_taken_away():
    name = "embeddings.word_embeddings.weight"
    assert targets(bert(), name, f"bert.{name}", "classifier.bias") == [f"bert.{name}"] * 2 + ["classifier.bias"]
    assert targets(bert(head=False), name, f"bert.{name}", "bertish.x") == [name, name, "bertish.x"]


def test_the_names_of_old_files_are_known():
    assert targets(bert(), "bert.embeddings.LayerNorm.gamma") == ["bert.embeddings.LayerNorm.weight"]
    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(**{key: SMALL[key] for key in SMALL if key != "vocab_size"}, image_size=8, patch_size=4)
    )
    keys = [*vit.state_dict()]
    assert targets(vit, *keys) == keys
    (key,) = targets(vit, "vit.encoder.layer.0.attention.attention.query.weight")
    assert key in keys


def test_experts_in_separate_tensors_are_put_together_by_the_library():
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_local_experts=12, num_key_value_heads=2)
    )
    naming, target = naming_of(model), "model.layers.0.mlp.experts.down_proj"
    names = [f"model.layers.0.block_sparse_moe.experts.{number}.w2.weight" for number in range(12)]
    rows = list(naming.renamed(reversed(names), model.state_dict().keys()))
    assert [name for name, _, _ in rows] == names, "by number, not by spelling"
    assert {key for _, key, _ in rows} == {target}
    parts = [(name, pattern or "", torch.full((8, 16), float(at))) for at, (name, _, pattern) in enumerate(rows)]
    for _ in range(2):  # nothing of one conversion is left for the next
        made = naming.convert(target, parts)
        assert made.keys() == {target}
        assert made[target][:, 0, 0].tolist() == list(range(12))
    bare = [(name, pattern, tensor.to("meta")) for name, pattern, tensor in parts]
    assert naming.convert(target, bare)[target].shape == (12, 8, 16)


def test_what_the_library_expects_nobody_is_told():
    naming = naming_of(bert())
    assert naming.unexpected.search("bert.embeddings.position_ids")
    assert not naming.unexpected.search("bert.embeddings.word_embeddings.weight")
    model = bert()
    model._keys_to_ignore_on_load_missing = {r"classifier\.bias"}
    assert naming_of(model).missing.search("classifier.bias")
    assert not naming_of(model).missing.search("classifier.weight")


def test_of_tied_tensors_the_one_is_kept_that_the_library_keeps():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    both = ("lm_head.weight", "transformer.wte.weight")
    assert own_keys(model, [both]) == {both: "transformer.wte.weight"}
    model._keys_to_ignore_on_save = {"x"}
    assert own_keys(model, [("x",), ("y", "z")]) == {("y", "z"): "y"}
    assert own_keys(nn.Linear(1, 1), [("a", "b")]) == {("a", "b"): "a"}


def test_a_description_is_what_from_pretrained_needs_and_leaves_the_model_alone(tmp_path):
    model = bert().to(torch.bfloat16)
    before = model.config.to_dict()
    describe(model, torch.float32, tmp_path)
    assert model.config.to_dict() == before
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["architectures"] == ["BertForSequenceClassification"]
    assert told["dtype"] == "float32"
    assert transformers.AutoConfig.from_pretrained(tmp_path).hidden_size == 8
    describe(nn.Linear(1, 1), torch.float32, tmp_path / "nothing is written")


def test_what_the_library_refuses_to_save_is_told(tmp_path, monkeypatch):
    model = bert()

    def refuse(*_):
        raise ValueError("temperature")

    monkeypatch.setattr(type(model.config), "save_pretrained", refuse)
    with pytest.raises(ConfigError, match="temperature"):
        describe(model, torch.float32, tmp_path)


def test_of_a_library_of_another_make_prefixes_are_known_all_the_same(monkeypatch):
    monkeypatch.delattr(importlib.import_module("transformers.conversion_mapping"), "get_model_conversion_mapping")
    old = "embeddings.LayerNorm.gamma"
    assert targets(bert(), "embeddings.LayerNorm.weight", old) == ["bert.embeddings.LayerNorm.weight", old]
