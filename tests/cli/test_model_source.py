import json
import os

import pytest
import torch

from patrickstar.cli.main import main
from patrickstar.cli.models import ModelError, ModelSource, check_length
from patrickstar.errors import ConfigError

TINY = {"model_type": "gpt2", "vocab_size": 512, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
TINY = {**TINY, "bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def folder(config, tmp_path):
    """A directory as `save_pretrained` writes it."""
    torch.manual_seed(7)
    ModelSource.find(str(config)).build().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_name_gives_its_shape_without_dropout_and_without_a_cache():
    config = ModelSource.find("gpt2-120m").config()
    assert (config.n_layer, config.n_embd, config.vocab_size) == (16, 768, 8192)
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0
    assert not config.use_cache


def test_a_file_is_taken_as_it_is_and_built_from_the_seed(config):
    source = ModelSource.find(str(config))
    assert source.config().resid_pdrop == 0.1  # what the file does not say is transformers' default
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(source.build())
    first, again, other = (model.lm_head.weight for model in models)
    assert models[0].training
    assert first.dtype == torch.float32
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_directory_gives_its_weights(folder):
    torch.manual_seed(7)
    expected = ModelSource.find(str(folder / "config.json")).build().state_dict()
    torch.manual_seed(8)
    found = ModelSource.find(str(folder)).build().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_its_tokenizer_comes_with_the_weights_only(folder, config):
    assert ModelSource.find(str(folder)).tokenizer is None
    (folder / "tokenizer.json").write_text("{}")
    assert ModelSource.find(str(folder)).tokenizer == folder / "tokenizer.json"
    assert ModelSource.find(str(folder / "config.json")).tokenizer is None


def test_on_the_meta_device_nothing_is_allocated():
    model = ModelSource.find("GPT_DS_68B").build_on_meta()
    assert all(p.is_meta for p in model.parameters())


def changed(**settings):
    return json.dumps({**TINY, **settings})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "no model_type"),
        (changed(model_type="gpt3"), "transformers refuses the configuration"),
        (changed(model_type="vit"), "none of the causal language models"),
        (changed(n_layer="many"), "transformers refuses the configuration"),
    ],
)
def test_a_file_that_is_no_configuration_is_a_wrong_argument(tmp_path, content, says):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says) as error:
        ModelSource.find(str(path)).config()
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("spoil", "status", "says"),
    [
        (lambda config, weights: config.unlink(), 2, "has no config.json"),
        (
            lambda config, weights: weights.rename(weights.with_suffix(".bin")),
            2,
            "no *.safetensors weights (other form",
        ),
        (lambda config, weights: os.truncate(weights, 1000), 1, "model.safetensors: "),
        (lambda config, weights: config.write_text(changed(n_layer=3)), 1, "12 tensors of the model are not in the f"),
    ],
)
def test_a_directory_that_is_not_whole_is_refused(folder, capsys, spoil, status, says):
    spoil(folder / "config.json", folder / "model.safetensors")
    assert main(["train", "--data", "random", "--seq-len", "16", "--steps", "1", "--model", str(folder)]) == status
    assert says in capsys.readouterr().err
    if status == 1:
        with pytest.raises(ModelError):
            ModelSource.find(str(folder)).build()


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    path = tmp_path / "config.json"
    path.write_text(changed(auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}))
    assert type(ModelSource.find(str(path)).build_on_meta()).__module__.startswith("transformers.")


def test_sequences_longer_than_the_model_has_positions_are_refused(config):
    settings = ModelSource.find(str(config)).config()
    check_length(settings, 64)
    with pytest.raises(ConfigError, match="--seq-len 65: this model has 64 positions"):
        check_length(settings, 65)
