"""A forecast of one of several ranks: what it sends is what collectives count, and what a formula says; what fits has room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import patrickstar
from patrickstar.core.shard_layout import RankOf, ShardLayout
from patrickstar.errors import BudgetError
from patrickstar.session.forecast import Forecast, forecast
from tests.ranks import Team, all_well
from tests.sampling import only

MEMORY = {"device": "cpu", "precision": "fp32", "host_memory": "1GiB"}
SHAPE = (2, 16)
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def gpt2() -> nn.Module:
    """Its head is tied to the embedding, which no block owns."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=3, n_head=2, **NO_TOKENS)
    ).train()


def frozen_llama() -> nn.Module:
    """The first block and the embedding get no gradients."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=32, use_cache=False, **sizes)).train()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


MODELS = {build.__name__: build for build in (gpt2, frozen_llama)}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batch_of(rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(128, SHAPE, generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def train(rank: int, name: str, arguments: dict[str, Any]) -> list[int]:
    """The bytes that this rank has sent by each step's end."""
    model, sent = build(name), list[int]()
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters()), **{**MEMORY, **arguments}) as session:
        collectives = session._parts.collectives
        assert collectives is not None
        for _ in range(3):
            model(**batch_of(rank)).loss.backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
            sent.append(collectives.sent_bytes)
        return sent


def foreseen(name: str, rank: int, size: int, **arguments: Any) -> Forecast:
    with torch.device("meta"):
        model = build(name)
    return forecast(model, batch_of(rank), which=RankOf(rank, size, size), **{**MEMORY, **arguments})


def formula(layout: ShardLayout, trained: set[str]) -> int:
    """(2 W - L + S + G) (p - 1) / p: weights of all blocks, of the one called last, and of what is gathered once; gradients. Padding included."""
    chunk_bytes = 4 * layout.whole.chunk_numel
    weights = {block: len(chunks) * chunk_bytes for block, chunks in layout.chunks_of.items()}
    blocks = {block: nbytes for block, nbytes in weights.items() if block.startswith("transformer.h.")}
    last = 0 if "transformer.ln_f" in weights else blocks["transformer.h.2"]  # the norm comes last, if it is a block
    reduced = {piece.chunk for name in trained for piece in layout.whole.parts(name)}
    whole = sum(blocks.values()) - last + sum(weights.values()) + len(reduced) * chunk_bytes
    return whole * (layout.size - 1) // layout.size


@pytest.mark.parametrize("name", only(["frozen_llama"], MODELS))
def test_what_a_rank_sends_is_foreseen_to_the_byte(ranks: Team, name: str) -> None:
    found = all_well(ranks.run(train, name, {}))
    trained = {key for key, p in build(name).named_parameters() if p.requires_grad}
    for rank, sent in enumerate(found):
        expected = foreseen(name, rank, ranks.size)
        assert isinstance(expected.layout, ShardLayout)
        assert expected.moved["ranks"] == sent[2] - sent[1]
        if name == "gpt2":  # a frozen block has no backward, and is not gathered for one
            assert expected.moved["ranks"] == formula(expected.layout, trained)
        assert sum(expected.by_rank) == expected.model_data_bytes
        assert len(expected.by_rank) == ranks.size


def test_the_smallest_budget_that_is_foreseen_is_the_machines_and_fits(two: Team) -> None:
    short, other = (foreseen("gpt2", rank, two.size, host_memory=64 << 10) for rank in range(2))
    assert isinstance(short.refused, BudgetError)
    smallest = max(short.minimum["host"], other.minimum["host"])
    assert short.refused.smallest_bytes == short.minimum["host"] <= smallest
    assert foreseen("gpt2", 0, two.size, host_memory=smallest).fits
    all_well(two.run(train, "gpt2", {"host_memory": smallest}))
