"""Models of `transformers` over ranks are the models on one: loss, logits and the gradient of each parameter."""

from __future__ import annotations

import re

import pytest

from tests.parallel import programs_of_models as programs
from tests.ranks import Ended, Team, Teams, all_well, team
from tests.sampling import only

KINDS = ["llama", "gpt2", "bert"]


@pytest.mark.parametrize("batch", only(["packed", "padded", "no labels"], programs.BATCHES))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 4], ids="{} ranks".format)
def test_models_over_ranks_are_those_of_one(team_of: Teams, n: int, kind: str, batch: str) -> None:
    for found in all_well(team_of(n).run(programs.errors, n, kind, batch, within_s=200)):
        assert {way: worst for way, worst in found.items() if not worst <= 1e-11} == {}


def test_verify_says_how_far_a_model_is_from_itself(two: Team) -> None:
    for found in all_well(two.run(programs.verified, 2, within_s=200)):
        for kind in KINDS:
            # The loss of transformers is of logits in fp32.
            assert max(found[kind].loss, found[kind].logits, found[kind].gradients) < 1e-6, kind
            assert found[kind].logits < 1e-11
            assert found[f"{kind} after"] == (True, True, "patrickstar")
        assert found["spoiled"].gradients == pytest.approx(1, abs=1e-5)
        assert found["spoiled"].parameter


def test_models_side_by_side_copied_and_released(two: Team) -> None:
    for found in all_well(two.run(programs.shared_and_released, 2, within_s=200)):
        assert [name for name, holds in found.items() if not holds] == []


def test_a_llama_is_trained_by_a_ring_as_by_one_rank(two: Team) -> None:
    for found in all_well(two.run(programs.trained, 2)):
        assert max(found) < 1e-8


REFUSED = {
    "a length that does not divide": "ConfigError.*length of 10 over 2 ranks.*12",
    "positions of such a length": "ConfigError.*12",
    "no method": 'ConfigError.*rign.*did you mean "ring"',
    "no layout": "ConfigError.*zigzag.*contiguous",
    "no gradients": "ConfigError.*half.*mean",
    "two dimensions": "ConfigError.*2 dimensions.*'dp', 'cp'",
    "no mesh": "ConfigError.*DeviceMesh",
    "heads": "ConfigError.*3 heads over 2 ranks",
    "key heads": "ConfigError.*3 key heads over 2 ranks",
    "key heads unasked": "ConfigError.*4 heads and 2 key heads: enable_gqa",
    "dropout in a ring": "ConfigError.*dropout 0.1.*ulysses",
    "a mask in a ring": "ConfigError.*attn_mask.*rsa",
    "a mask in ulysses": "ConfigError.*attn_mask.*rsa",
    "a mask of another shape": "ConfigError.*8, 16",
    "half of a zigzag": "ConfigError.*5 tokens a rank",
    "segments of another shape": r"ConfigError.*segments \[2, 16\]",
    "three dimensions": r"ConfigError.*\[B, Z, L/N, A\]",
    "labels of another shape": "ConfigError.*shard",
    "an unknown tensor": "ConfigError.*pixel_values",
    "a batch that is cut": "RankError.*rank 0 has.*rank 1 has",
    "no tokens": "ConfigError.*input_ids",
    "a mask of pairs": "ConfigError.*attention_mask",
    "one label a row": "ConfigError.*labels",
    "labels of padding": "ConfigError.*40 tokens.*-100",
    "a module": "ConfigError.*Linear.*ContextParallel.attention",
    "twice": "StateError.*release",
    "a window": "ConfigError.*sliding_window=4",
    "soft caps": "ConfigError.*soft caps",
    "states": "ConfigError.*tokens mix",
    "a pooler": "ConfigError.*add_pooling_layer",
    "a router's loss": "ConfigError.*output_router_logits",
    "two sequences": "ConfigError.*another sequence",
    "positions of a length": "ConfigError.*dynamic",
    "compiled": "ConfigError.*compiled",
    "heads of a model": "ConfigError.*1 heads over 2 ranks",
    "a row's class": r"StateError.*logits \[2, 2\]",
    "dropout in a model": "ConfigError.*attn_pdrop",
    "a batch that is whole": "StateError.*position_ids.*shard",
    "labels that are whole": "StateError.*labels.*shard",
    "a mask that is whole": "StateError.*attention_mask.*shard",
    "a cap": "ConfigError.*LlamaAttention gives softcap.*ContextParallel.attention",
    "a mask of the model's own": "ConfigError.*masks more than what comes later",
    "a window's mask": "ConfigError.*masks more than what comes later",
    "a cache": "StateError.*release",
    "generate": "StateError.*release",
    "generate without a cache": "StateError.*release",
    "a loss of its own": "StateError.*BertForMaskedLM.*cp.cross_entropy",
    "released by another": "StateError.*release",
    "verify before": "StateError.*parallelize",
}


def test_what_is_not_right_is_refused_before_anything_is_sent(two: Team) -> None:
    for found in all_well(two.run(programs.refusals, 2, within_s=200)):
        assert found.keys() == REFUSED.keys()
        assert {name: said for name, said in found.items() if not re.match(REFUSED[name], said, re.DOTALL)} == {}
        assert [name for name, said in found.items() if said.endswith("(late)")] == [
            "a row's class",
            "a loss of its own",
        ]


def test_ranks_that_differ_are_an_error_on_all_that_names_both(two: Team) -> None:
    one, other = all_well(two.run(programs.unlike, 2))
    assert one == other
    for said, words in zip(
        one, ["digest", "[2, 8].*[2, 12]", "[2, 8, 3].*[2, 12, 3]", "'ring'.*'rsa'", "4, 4.*6, 4"], strict=True
    ):
        assert re.search(f"rank 0 has.*{re.escape(words).replace(re.escape('.*'), '.*')}", said)
        assert "rank 1 has" in said


def test_a_rank_that_is_killed_in_a_hop_is_an_error_on_the_others() -> None:
    with team(3) as three:
        *others, gone = three.run(programs.killed_in_a_hop, 3)
        assert isinstance(gone, Ended)
        assert [said for said in others if "an exchange with" not in said] == []
