import pytest

from patrickstar.cli.main import main
from patrickstar.cli.models import DEFAULT, MODELS, ModelSource
from patrickstar.errors import ConfigError

ONE_OF_EACH = ["Bert", "GPT2small", "GPT_175B", "llama-3.2-1b", "llama-2-7b", "mistral-7b", "qwen2.5-0.5b"]


@pytest.mark.parametrize("name", [DEFAULT, "gpt2", *ONE_OF_EACH])
def test_the_count_of_parameters_is_that_of_the_model_that_transformers_builds(name):
    model = ModelSource.find(name).build_on_meta()
    assert sum(p.numel() for p in model.parameters()) == MODELS[name].numel()


# What the makers publish, in millions.
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *[("gpt2", 124), ("gpt2-xl", 1558), ("llama-3.2-1b", 1236), ("llama-3.1-8b", 8030), ("llama-2-7b", 6738)],
        *[("mistral-7b", 7248), ("qwen2.5-0.5b", 494), ("qwen2.5-7b", 7616), ("GPT2small", 757), ("GPT_175B", 174592)],
    ],
)
def test_shapes_have_the_published_size(name, millions):
    assert round(MODELS[name].numel() / 1e6) == millions


def test_the_whole_table_of_the_original_is_there():
    original = [name for name in MODELS if not name.islower()]
    assert original[:3] == ["Bert", "Bertlarge", "GPT2small"]
    assert original[-1] == "GPT_454B"
    assert len(original) == 29
    # What `make train` trains has a vocabulary that a small corpus can fill.
    assert MODELS[DEFAULT].numel() > 100_000_000
    assert MODELS[DEFAULT].vocab <= 8192
    assert all(MODELS[name].hidden % MODELS[name].heads == 0 for name in original)


@pytest.mark.parametrize(
    ("typed", "meant"), [("gpt2-xxl", "gpt2-xl"), ("GPT2-XL", "gpt2-xl"), ("gpt_175b", "GPT_175B")]
)
def test_an_unknown_name_is_refused_with_the_nearest(typed, meant):
    with pytest.raises(ConfigError, match=f'did you mean "{meant}"'):
        ModelSource.find(typed)


def test_models_lists_every_name_with_its_size(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(MODELS)
    assert next(line for line in lines if line.startswith("GPT_175B")).endswith("174.59B")
