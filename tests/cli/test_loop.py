from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from patrickstar.cli.batches import Batches
from patrickstar.cli.loop import backward, validation_loss
from patrickstar.cli.request import LOWEST, WarmupSchedule

TOKENS = (np.arange(400, dtype=np.int32) ** 2) % 13


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 13)
        self.dropout = nn.Dropout(0.5)
        self.seen = []

    def forward(self, input_ids, labels):
        self.seen.append(input_ids)
        logits = self.dropout(self.embedding(input_ids))
        return SimpleNamespace(
            loss=nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 13), labels[:, 1:].reshape(-1))
        )


def batches(batch_size):
    return Batches(TOKENS, batch_size=batch_size, seq_len=10, seed=0)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_micro_batches_give_the_gradient_and_the_loss_of_the_whole_batch(accumulate):
    whole, parts = Model().eval(), Model().eval()
    loss = backward(whole, batches(8), 1, scale=lambda loss: loss)
    source = batches(8 // accumulate)
    mean = sum(backward(parts, source, accumulate, scale=lambda loss: loss) for _ in range(accumulate)) / accumulate
    assert torch.equal(torch.cat(parts.seen), torch.cat(whole.seen))
    assert mean == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(parts.embedding.weight.grad, whole.embedding.weight.grad, rtol=1e-5, atol=1e-8)


def test_validation_has_no_dropout_and_leaves_the_model_as_it_was():
    model, held_out = Model().train(), batches(2).held_out(TOKENS, most=3)
    state, advanced = torch.get_rng_state(), []
    first = validation_loss(model, held_out, advance=advanced.append)
    assert validation_loss(model, held_out, advance=advanced.append) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.embedding.weight.grad is None
    assert advanced == [1] * 6


def test_a_model_that_was_not_training_stays_so_and_so_it_is_after_an_error():
    model = Model().eval()
    held_out = batches(2).held_out(TOKENS, most=3)
    validation_loss(model, held_out, advance=print)
    assert not model.training
    model.train()
    with pytest.raises(TypeError):
        validation_loss(model, [{"wrong": 1}], advance=print)
    assert model.training


# learning rates


def test_it_rises_in_equal_steps_and_the_first_step_already_learns():
    schedule = WarmupSchedule("constant", warmup=4, steps=100)
    assert [schedule.factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_cosine_falls_to_its_lowest_at_the_end():
    schedule = WarmupSchedule("cosine", warmup=10, steps=110)
    assert schedule.factor(10) == 1.0
    assert schedule.factor(60) == pytest.approx((1 + LOWEST) / 2)
    assert schedule.factor(110) == pytest.approx(LOWEST)


@given(kind=st.sampled_from(["constant", "cosine"]), warmup=st.integers(0, 50), steps=st.integers(1, 60))
def test_every_factor_is_positive_and_at_most_one(kind, warmup, steps):
    schedule = WarmupSchedule(kind, warmup, steps)
    factors = [schedule.factor(step) for step in range(steps + 5)]
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
