"""Batches: windows of a text, or random tokens, in an order that the seed alone decides."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.cli.batches import Batches, prepare_data, random_tokens
from patrickstar.cli.corpus import DataError
from patrickstar.cli.display import Display
from patrickstar.errors import CheckpointError, ConfigError

TOKENS = np.arange(1000, dtype=np.int32)


def batches(tokens=TOKENS, *, batch_size=4, seq_len=10, seed=0):
    return Batches(tokens, batch_size=batch_size, seq_len=seq_len, seed=seed)


def take(source, count):
    return torch.stack([source.next()["input_ids"] for _ in range(count)])


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
    first, second = take(batches(), 50).flatten(0, 1)[:, 0].split(100)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(0, 1000, 10))
    assert first.tolist() != second.tolist()


def test_every_random_token_of_the_vocabulary_comes_about_as_often():
    tokens, held_out = random_tokens(50)
    assert all(map(np.array_equal, (tokens, held_out), random_tokens(50)))
    assert len(held_out) > 60_000
    counts = torch.bincount(take(batches(tokens), 500).flatten(), minlength=50)
    assert len(counts) == 50
    assert (counts - 400).abs().max() < 6 * math.sqrt(400)


def test_the_seed_decides_the_order_and_the_models_random_numbers_are_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first = take(batches(seed=3), 30)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, take(batches(seed=3), 30))
    assert not torch.equal(first, take(batches(seed=4), 30))
    assert len({tuple(batch.flatten().tolist()) for batch in first}) == 30


@given(done=st.integers(0, 60), batch_size=st.integers(1, 7), seed=st.integers(0, 5))
def test_going_on_from_a_state_gives_what_not_stopping_gives(done, batch_size, seed):
    unbroken, resumed = (batches(batch_size=batch_size, seed=seed) for _ in range(2))
    for _ in range(done):
        unbroken.next()
    resumed.load_state_dict(unbroken.state_dict())
    assert torch.equal(take(unbroken, 3), take(resumed, 3))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (batches(seq_len=20), "seq_len was 10, is 20"),
        (batches(batch_size=2), "batch_size was 4, is 2"),
        (batches(seed=1), "seed was 0, is 1"),
        (batches(TOKENS + 1), "tokens was"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(other, named):
    with pytest.raises(CheckpointError, match=named):
        other.load_state_dict(batches().state_dict())


def test_text_shorter_than_a_sequence_is_refused():
    with pytest.raises(DataError, match="the training text has 1000 tokens, less than one sequence of 1001"):
        batches(seq_len=1001)
    with pytest.raises(DataError, match="the held-out text has 1000 tokens, less than one sequence of 1001"):
        batches(np.tile(TOKENS, 2), seq_len=1001).held_out(TOKENS, most=8)


def test_validation_spreads_over_the_held_out_text_in_batches_of_the_training_shape():
    chosen = batches().held_out(TOKENS, most=5)
    starts = torch.cat([batch["input_ids"][:, 0] for batch in chosen])
    assert [tuple(batch["input_ids"].shape) for batch in chosen] == [(4, 10)] * 5
    assert starts.tolist() == [50 * n for n in range(20)]
    # A short text repeats windows rather than change the shape.
    (only,) = batches().held_out(TOKENS[:25], most=8)
    assert only["input_ids"][:, 0].tolist() == [0, 0, 10, 10]


@pytest.mark.parametrize("given", [["random", "other/path"], ["other/path", "random"], ["random", "random"]])
def test_the_word_random_goes_with_nothing_else(given):
    with pytest.raises(ConfigError, match=r"a file of that name is \./random"):
        prepare_data(given, vocab_size=50, own_tokenizer=None, display=Display())


def test_a_run_on_random_tokens_reads_no_text_and_makes_no_tokenizer(runs, capsys, monkeypatch):
    monkeypatch.setattr("patrickstar.cli.batches.read_corpus", None)
    monkeypatch.setattr("patrickstar.cli.batches.make_tokenizer", None)
    assert runs.train("--compare-plain", data="random", steps=4, log="whole") == 0
    assert "plain PyTorch gives the same bits" in capsys.readouterr().out
    start, *_, summary = runs.rows("whole")
    assert (start["config"]["data"], start["config"]["corpus"]) == (["random"], "random tokens")
    assert start["config"]["tokenizer"] is None
    # Nothing is learnt: the loss is that of a guess.
    assert abs(summary["validation_loss"] - math.log(512)) < 0.2
    # Stopping and resuming gives the same.
    assert runs.train("--checkpoint-dir", runs.checkpoints, data="random", steps=2) == 0
    assert runs.train("--checkpoint-dir", runs.checkpoints, "--resume", data="random", steps=4) == 0
    assert runs.losses() == runs.losses("whole")
