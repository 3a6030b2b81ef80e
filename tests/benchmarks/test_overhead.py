"""`benchmarks/overhead.py` from beginning to end on a tiny model, and what it would say of two sides that are not alike."""

import json

import pytest
import torch
from benchmarks.overhead_sides import alike, measure, plain_step, ratios_of
from torch import nn

from tests.benchmarks.scripts import run

SIZES = ["--rounds", 2, "--layers", 1, "--tokens", 16, "--width", 48, "--vocabulary", 128]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_sides_take_the_same_steps(tmp_path, precision):
    out = tmp_path / "overhead.json"
    shown = run("overhead.py", "--precision", precision, *SIZES, "--out", out)
    result = json.loads(out.read_text())
    assert result["precision"] == precision
    assert len(result["seconds"]["plain"]) == len(result["seconds"]["managed"]) == len(result["ratios"]) == 2
    assert result["planned_steps"] == 4  # with those that warm up
    assert ("fp32 masters" in result["what"]) is (precision == "bf16")
    assert "round 2: plain" in shown


class Toy(nn.Module):
    """As a causal model of transformers is called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 16)
        self.head = nn.Linear(16, 11)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids)).float()
        self.loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return self


def test_plain_bf16_updates_fp32_masters_and_computes_with_their_rounded_values():
    torch.manual_seed(3)
    batches = [torch.randint(0, 11, (2, 8)) for _ in range(4)]
    model = Toy()
    step = plain_step(model, "bf16")
    losses = [step(batch) for batch in batches]

    expected, masters = Toy().bfloat16(), Toy()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-4, fused=True)
    for batch, loss in zip(batches, losses, strict=True):
        assert torch.equal(expected(batch, batch).loss, loss)
        expected.loss.backward()
        for weight, master in zip(expected.parameters(), masters.parameters(), strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        for weight, master in zip(expected.parameters(), masters.parameters(), strict=True):
            weight.data = master.data.bfloat16()
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    assert losses[0].dtype is torch.float32
    assert losses[-1] != losses[0]


def losing(*losses):
    """A side with these losses."""
    left = iter(losses)
    return lambda _: torch.tensor(next(left))


@pytest.mark.parametrize(
    ("exact", "managed", "says"),
    [
        (True, [2.0, 1.0, 0.5], ""),
        (True, [2.0, 1.0, 0.5000001], "round 2: losses differ"),
        (False, [2.0, 1.001, 0.501], ""),
        (False, [2.0, 1.001, 0.51], "round 2: losses differ"),
        (False, [2.001, 1.0, 0.5], "round 0: losses differ"),
        (False, [2.0, 1.0, float("nan")], "round 2: losses differ"),
    ],
)
def test_losses_that_must_be_alike_and_are_not_end_it(exact, managed, says):
    seconds, different = measure(
        {"plain": losing(2.0, 1.0, 0.5), "managed": losing(*managed)}, [torch.zeros(1)] * 3, exact=exact
    )
    assert different.startswith(says)
    assert bool(different) is bool(says)
    assert len(seconds["plain"]) <= 1  # the first two rounds warm up


def test_figures():
    found = ratios_of({"managed": [2.0, 3.0, 8.0], "plain": [1.0, 2.0, 2.0]})
    assert found == {"ratio_of_medians": 1.5, "ratio_of_minima": 2.0, "ratios": [1.5, 2.0, 4.0]}
    assert alike(0.0, 0.0, within=0.0)
