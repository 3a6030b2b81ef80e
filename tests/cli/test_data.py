import math

import pytest
import torch

from patrickstar.cli.batches import Batches, RandomBatches
from patrickstar.cli.data import Data, prepare_data
from patrickstar.cli.display import Display
from patrickstar.errors import CheckpointError, ConfigError
from tests.cli.test_batches import TOKENS


def batches(vocab_size=50, *, batch_size=4, seq_len=10, seed=0):
    return RandomBatches(vocab_size, batch_size=batch_size, seq_len=seq_len, seed=seed)


def take(source, count):
    return torch.stack([source.next()["input_ids"] for _ in range(count)])


def test_a_batch_is_what_causal_models_take():
    batch = batches().next()
    assert batch["input_ids"].shape == (4, 10)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"])


def test_every_token_of_the_vocabulary_comes_about_as_often():
    counts = torch.bincount(take(batches(), 500).flatten(), minlength=50)
    assert len(counts) == 50
    assert (counts - 400).abs().max() < 6 * math.sqrt(400)


def test_the_seed_and_the_position_decide_the_tokens_and_nothing_else_does():
    first = take(batches(seed=3), 5)
    torch.manual_seed(99)
    assert torch.equal(first, take(batches(seed=3), 5))
    assert not torch.equal(first, take(batches(seed=4), 5))
    assert len({tuple(batch.flatten().tolist()) for batch in first}) == 5


def test_drawing_leaves_the_models_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    take(batches(), 3)
    assert torch.equal(torch.rand(3), expected)


def test_going_on_from_a_state_gives_what_not_stopping_gives():
    unbroken, resumed = batches(), batches()
    take(unbroken, 7)
    resumed.load_state_dict(unbroken.state_dict())
    assert torch.equal(take(unbroken, 3), take(resumed, 3))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"vocab_size": 60}, "tokens was random of a vocabulary of 50, is random of a vocabulary of 60"),
        ({"batch_size": 2}, "batch_size was 4, is 2"),
        ({"seed": 1}, "seed was 0, is 1"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(other, named):
    with pytest.raises(CheckpointError, match=named):
        batches(**other).load_state_dict(batches().state_dict())


def test_a_run_on_text_does_not_go_on_with_random_tokens():
    text = Batches(TOKENS, batch_size=4, seq_len=10, seed=0)
    with pytest.raises(CheckpointError, match="tokens was"):
        batches().load_state_dict(text.state_dict())


def test_validation_has_other_tokens_than_training_and_the_same_in_every_run():
    data = Data(50)
    held_out = torch.stack([batch["input_ids"] for batch in data.validation(batch_size=4, seq_len=10)])
    again = torch.stack([batch["input_ids"] for batch in data.validation(batch_size=4, seq_len=10)])
    assert torch.equal(held_out, again)
    training = take(data.batches(batch_size=4, seq_len=10, seed=0), 8)
    assert not any(torch.equal(one, other) for one in held_out for other in training)


@pytest.mark.parametrize("given", [["random", "other/path"], ["other/path", "random"], ["random", "random"]])
def test_the_word_goes_with_nothing_else(given):
    with pytest.raises(ConfigError, match=r"a file of that name is \./random"):
        prepare_data(given, vocab_size=50, own_tokenizer=None, display=Display())


# the verb


def test_a_run_reads_no_text_and_makes_no_tokenizer(runs, capsys, monkeypatch):
    monkeypatch.setattr("patrickstar.cli.data.read_corpus", None)
    monkeypatch.setattr("patrickstar.cli.data.make_tokenizer", None)
    assert runs.train_random("--compare-plain") == 0
    assert "plain PyTorch gives the same bits" in capsys.readouterr().out
    start, *_, summary = runs.rows()
    assert (start["config"]["data"], start["config"]["corpus"]) == (["random"], "random tokens")
    assert start["config"]["tokenizer"] is start["config"]["train_tokens"] is None
    # Nothing is learnt: the loss is that of a guess.
    assert abs(summary["validation_loss"] - math.log(512)) < 0.2


def test_stopping_and_resuming_gives_the_bits_of_not_stopping(runs):
    assert runs.train_random(steps=4, log="whole") == 0
    assert runs.train_random("--checkpoint-dir", runs.checkpoints, steps=2) == 0
    assert runs.train_random("--checkpoint-dir", runs.checkpoints, "--resume", steps=4) == 0
    assert runs.losses() == runs.losses("whole")


def test_a_path_beside_the_word_is_a_wrong_argument(runs, capsys):
    assert runs.train_random(runs.text) == 2
    assert "random stands for random tokens and goes with nothing else" in capsys.readouterr().err
