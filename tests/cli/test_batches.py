import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.cli.batches import Batches, validation_batches
from patrickstar.cli.corpus import DataError
from patrickstar.errors import CheckpointError

TOKENS = np.arange(1000, dtype=np.int32)


def batches(tokens=TOKENS, *, batch_size=4, seq_len=10, seed=0):
    return Batches(tokens, batch_size=batch_size, seq_len=seq_len, seed=seed)


def take(source, count):
    return [source.next()["input_ids"] for _ in range(count)]


def test_a_batch_is_what_causal_models_take():
    batch = batches().next()
    assert batch["input_ids"].shape == (4, 10)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"])  # the model shifts them


def test_rows_are_windows_of_adjacent_tokens():
    for rows in take(batches(), 60):
        assert torch.equal(rows, rows[:, :1] + torch.arange(10))
        assert not (rows[:, 0] % 10).any()


def test_every_window_comes_once_an_epoch_and_epochs_differ():
    source = batches(batch_size=4)
    first, second = torch.cat(take(source, 25))[:, 0], torch.cat(take(source, 25))[:, 0]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(0, 1000, 10))
    assert first.tolist() != second.tolist()


def test_the_seed_decides_the_order_and_nothing_else_does():
    first = torch.stack(take(batches(seed=3), 30))
    torch.manual_seed(99)
    assert torch.equal(first, torch.stack(take(batches(seed=3), 30)))
    assert not torch.equal(first, torch.stack(take(batches(seed=4), 30)))


def test_drawing_batches_leaves_the_models_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    take(batches(), 30)
    assert torch.equal(torch.rand(3), expected)


@given(done=st.integers(0, 60), batch_size=st.integers(1, 7), seed=st.integers(0, 5))
def test_going_on_from_a_state_gives_what_not_stopping_gives(done, batch_size, seed):
    unbroken, resumed = batches(batch_size=batch_size, seed=seed), batches(batch_size=batch_size, seed=seed)
    take(unbroken, done)
    resumed.load_state_dict(unbroken.state_dict())
    assert torch.equal(torch.stack(take(unbroken, 3)), torch.stack(take(resumed, 3)))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"seq_len": 20}, "seq_len was 10, is 20"),
        ({"batch_size": 2}, "batch_size was 4, is 2"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"tokens": TOKENS + 1}, "tokens was"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(other, named):
    with pytest.raises(CheckpointError, match=named):
        batches(**other).load_state_dict(batches().state_dict())


def test_text_shorter_than_a_sequence_is_refused():
    with pytest.raises(DataError, match="the training text has 1000 tokens, less than one sequence of 1001"):
        batches(seq_len=1001)
    with pytest.raises(DataError, match="the held-out text has 1000 tokens, less than one sequence of 1001"):
        validation_batches(TOKENS, batch_size=1, seq_len=1001, most=8)


def test_validation_spreads_over_the_held_out_text_in_batches_of_the_training_shape():
    chosen = validation_batches(TOKENS, batch_size=4, seq_len=10, most=5)
    starts = torch.cat([batch["input_ids"][:, 0] for batch in chosen])
    assert [tuple(batch["input_ids"].shape) for batch in chosen] == [(4, 10)] * 5
    assert starts.tolist() == [50 * n for n in range(20)]


def test_a_short_held_out_text_repeats_windows_rather_than_change_the_shape():
    (only,) = validation_batches(TOKENS[:25], batch_size=4, seq_len=10, most=8)
    assert only["input_ids"][:, 0].tolist() == [0, 0, 10, 10]
