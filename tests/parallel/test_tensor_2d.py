"""Models in q x q blocks have the loss, logits and gradients of one process; what they send and keep is what formulas say."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil, prod

import pytest
import torch
from torch import nn

from patrickstar.parallel import costs
from patrickstar.parallel.grid import chunk_sizes
from tests.parallel import programs_of_2d
from tests.parallel.programs_of_2d import MODELS, VOCABULARY
from tests.ranks import Team, Teams, all_well

THREE = pytest.param(3, marks=pytest.mark.campaign)
S = 9


@pytest.fixture
def four(team_of: Teams) -> Team:
    return team_of(4)


@pytest.mark.parametrize("q", [2, THREE])
@pytest.mark.parametrize("name", MODELS)
def test_loss_logits_and_gradients_are_those_of_one_process(team_of: Teams, name: str, q: int) -> None:
    answers = all_well(team_of(q * q).run(programs_of_2d.train, q, name, q + 1))
    most = 5e-6 if name == "llama" else 1e-11  # its norms compute in fp32, also in a model of fp64
    for answer in answers:
        assert answer["loss"] <= most
        assert answer["logits"] <= most
        assert max(answer["gradients"].values()) <= most, answer["gradients"]
        assert answer["state"]
        assert answer["kinds"] == {nn.Parameter}
    assert len({answer["value"] for answer in answers}) == 1  # the same bits on all ranks


@pytest.mark.parametrize("q", [2, THREE])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_bytes_are_those_of_the_formulas(team_of: Teams, name: str, q: int) -> None:
    """Matrices as the paper says, and what it leaves out: head, embedding, vectors, norms and loss."""
    h, layers, v = 12 * q, 2, VOCABULARY
    for rank, answer in enumerate(all_well(team_of(q * q).run(programs_of_2d.train, q, name, 2 * q + 1))):
        i, j = divmod(rank, q)
        tokens, features = answer["rows"] * S, h // q
        assert answer["rows"] == (2 if i else 3)
        if name == "gpt2":
            inputs, weights, of_norm = 7 * h, 12 * h * features, 2
            vectors = layers * 13 * features + 2 * features + 16 * features
            head = (v * tokens, v * features)
        else:
            inputs, weights, of_norm = (3 * h + 18 * q), (h * 2 * h + h * h + 3 * h * 18 * q) // q, 1
            vectors = layers * 2 * features + features
            # Its own matrix: the input comes, not the logits' parts.
            head = (h * tokens, h * chunk_sizes(v, q)[j])
        norms = (2 * layers + 1) * of_norm * tokens
        if name == "gpt2" and not i:
            both = (q - 1) * 8 * layers * (inputs * tokens + weights)
            assert costs.summa(q, 2 * q + 1, S, h, layers, element=8).forward * q == both
        forward = {
            "col": layers * inputs * tokens + head[0] + 2 * (norms + 3 * tokens),
            "row": layers * weights + v * features + head[1] + 2 * 2,
        }
        backward = {
            "col": 2 * layers * inputs * tokens + 2 * head[0] + 2 * (2 * layers + 1) * of_norm * tokens,
            "row": 2 * layers * weights + v * features + 2 * head[1] + 2 * vectors,
        }
        expected = [
            {line: ceil(Fraction((q - 1) * 8 * n, q)) for line, n in way.items()} for way in (forward, backward)
        ]
        assert list(answer["sent"]) == expected


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_holds_its_part_of_matrices_and_vectors(four: Team, name: str) -> None:
    for answer in all_well(four.run(programs_of_2d.train, 2, name, 4)):
        for shape, numel in answer["numel"]:
            if VOCABULARY in shape:
                assert numel in {
                    prod(shape) // VOCABULARY * n // (len(shape) if len(shape) == 2 else 1) for n in (34, 33)
                }
            elif len(shape) == 1 or shape[0] == 16:  # positions are alike in a column
                assert numel == prod(shape) // 2
            else:
                assert numel == prod(shape) // 4


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_backward_needs_is_a_part_of_what_one_process_keeps(four: Team, name: str) -> None:
    for answer in all_well(four.run(programs_of_2d.train, 2, name, 8)):
        of_blocks, of_all = answer["kept"]
        assert (
            of_all / 4 * 0.9 <= of_blocks <= of_all / 4 * 1.1
        )  # two numbers a token and norm are on each rank of a row


@pytest.mark.parametrize("name", ["gpt2", "llama, tied, biases, norms in fp64"])
def test_20_steps_are_those_of_one_process(four: Team, name: str) -> None:
    for plain, blocks in all_well(four.run(programs_of_2d.steps, 2, name)):
        assert blocks == pytest.approx(plain, rel=2e-5)
        assert abs(plain[-1] - plain[0]) > 0.02


def test_a_loss_and_its_gradient_are_those_of_whole_logits(four: Team) -> None:
    for found in all_well(four.run(programs_of_2d.losses, 2)):
        assert max(found.values()) <= 1e-12, found
        assert found["none"] == found["none, gradient"] == 0


def test_a_norm_keeps_the_digits_of_a_small_variance(four: Team) -> None:
    for found in all_well(four.run(programs_of_2d.norms, 2)):
        assert max(found.values()) <= 1.5, found


def test_16_bits_and_autocast_have_the_errors_of_one_process(four: Team) -> None:
    for found in all_well(four.run(programs_of_2d.narrow, 2)):
        assert found["ratio"] <= 3
        assert (found["logits"], found["gradients"]) == (torch.bfloat16, {torch.float32})
        assert 0 < found["loss"] < 1e-2


def test_a_model_built_without_memory_is_the_same(four: Team) -> None:
    assert all(all_well(four.run(programs_of_2d.deferred, 2)))


def test_dropout_differs_by_rank_and_forward_and_is_the_same_when_a_block_runs_again(four: Team) -> None:
    answers = all_well(four.run(programs_of_2d.drop, 2))
    masks = [mask for answer in answers for mask in answer["masks"]]
    assert len(set(masks)) == len(masks) == 12
    assert len({answer["state"] for answer in answers}) == 1
    for answer in answers:
        assert len(set(answer["losses"])) == 3
        assert answer["recomputed"]
        assert not answer["eval draws"]


def test_a_copy_with_fake_tensors_has_shapes_and_sends_nothing(four: Team) -> None:
    for rank, answer in enumerate(all_well(four.run(programs_of_2d.faked, 2))):
        assert answer == {"logits": (2, S, (34, 33)[rank % 2]), "sent": {}, "all": True}


def test_models_of_different_seeds_are_an_error_on_all_ranks(four: Team) -> None:
    for said in all_well(four.run(programs_of_2d.other_seeds, 2)):
        assert "the values that blocks are cut from: rank 0 has digest" in said
        assert "and rank 3 has digest" in said
        assert "torch.manual_seed(0)" in said


ANSWERS: Mapping[str, tuple[str, ...]] = {
    "a line": ("ConfigError", "two dimensions of equal size", "DeviceMesh", "row"),
    "not square": ("ConfigError", "DeviceMesh", "col"),
    "no mesh": ("ConfigError", "got (2, 2)"),
    "heads": ("ConfigError", "num_attention_heads 3 does not divide by 2", "num_key_value_heads 3"),
    "key heads": ("ConfigError", "num_key_value_heads 1 does not divide by 2"),
    "hidden": ("ConfigError", "hidden_size 27 does not divide by 2"),
    "intermediate": ("ConfigError", "intermediate_size 35 does not divide by 2"),
    "rows": ("ConfigError", "a batch of 1 over 2 rows"),
    "rows of a batch": ("ConfigError", "a batch of 1 over 2 rows"),
    "no plan": ("ConfigError", "Own (model_type None) has no plan", "plan=", "linear_qkv"),
    "a kind": ("ConfigError", "'embeding'", 'did you mean "embedding"?'),
    "left out": ("ConfigError", "no module for the parameters place.weight, first_norm.weight, out.weight and 2 more"),
    "another type": ("ConfigError", "out is Linear, and 'norm' takes nn.LayerNorm"),
    "thirds": ("ConfigError", "qkv has dimensions [75, 24]: 25 does not divide by 2"),
    "another norm": ("ConfigError", "first_norm is Shifted"),
    "two cuts": ("ConfigError", "a parameter [16, 24] of several modules"),
    "twice": ("StateError", "parallelized already"),
    "compiled": ("ConfigError", "compiled"),
    "generate": ("StateError", "state_dict()"),
    "blocks": ("ConfigError", "[3, 4] and [5, 6]", "size="),
}


def test_bad_input_is_refused_with_its_numbers_before_anything_is_sent(four: Team) -> None:
    for found in all_well(four.run(programs_of_2d.refused, 2)):
        assert found.keys() == ANSWERS.keys()
        for name, words in ANSWERS.items():
            assert [word for word in words if word not in found[name]] == [], found[name]
