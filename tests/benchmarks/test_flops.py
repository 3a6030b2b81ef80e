"""The count of torch against counts by hand, of a model whose every product is known."""

import pytest
import torch
from benchmarks.flops import count_step
from transformers import GPT2Config, GPT2LMHeadModel

LAYERS, WIDTH, VOCABULARY = 3, 64, 320
BATCH, LENGTH = 2, 16
TOKENS = BATCH * LENGTH
# A multiplication with an addition counts two. Queries, keys and values; what joins the heads; the two of the feed-forward.
BLOCK = 2 * TOKENS * (3 + 1 + 4 + 4) * WIDTH**2
# Scores, and values weighed by them.
ATTENTION = 2 * 2 * BATCH * LENGTH**2 * WIDTH
HEAD = 2 * TOKENS * VOCABULARY * WIDTH
FORWARD = LAYERS * (BLOCK + ATTENTION) + HEAD


def build(*, checkpointing=False, dropout=0.0):
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    others = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "attn_pdrop": dropout, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **others)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def test_a_forward_is_counted_product_by_product():
    assert count_step(build, batch_size=BATCH, seq_len=LENGTH).model == 3 * FORWARD


def test_the_model_has_what_the_published_formula_gives_without_recomputing():
    formula = 72 * TOKENS * LAYERS * WIDTH**2 * (1 + LENGTH / (6 * WIDTH) + VOCABULARY / (12 * LAYERS * WIDTH))
    assert count_step(build, batch_size=BATCH, seq_len=LENGTH).model == pytest.approx(formula, rel=1e-12)


def test_attention_in_one_kernel_computes_its_scores_again_in_backward():
    flops = count_step(build, batch_size=BATCH, seq_len=LENGTH)
    assert flops.executed == 3 * FORWARD + LAYERS * ATTENTION // 2


def test_attention_with_dropout_is_products_one_by_one_and_computes_nothing_again():
    flops = count_step(lambda: build(dropout=0.1), batch_size=BATCH, seq_len=LENGTH)
    assert flops.executed == flops.model == 3 * FORWARD


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the name by which checkpointing is switched on
def test_checkpointing_runs_blocks_again_up_to_the_last_thing_that_backward_needs():
    flops = count_step(lambda: build(checkpointing=True), batch_size=BATCH, seq_len=LENGTH)
    # The last product of a block gives its output, which backward does not need: torch stops before it.
    last = 2 * TOKENS * 4 * WIDTH**2
    assert flops.model == 3 * FORWARD
    assert flops.executed == 3 * FORWARD + LAYERS * ATTENTION // 2 + LAYERS * (BLOCK + ATTENTION - last)


def test_counting_takes_no_numbers_and_draws_none():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    count_step(build, batch_size=BATCH, seq_len=LENGTH)
    assert torch.equal(torch.rand(3), expected)
