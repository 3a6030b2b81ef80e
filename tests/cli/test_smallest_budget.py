"""The smallest budget that `plan` names is one in which `train` runs; with nine tenths of it `train` says what is missing, and where."""

import json
import re

import pytest

from patrickstar.cli.main import main
from patrickstar.units import parse_size

TIERS = {
    "device": ["--device", "emulated", "--device-memory"],
    "host": ["--device", "cpu", "--disk", "disk", "--host-memory"],
}
"""Which tier is short: the flags, up to its bytes."""


@pytest.fixture
def precision(request, monkeypatch):
    """The flags of a kind (what weights are kept in, and what computes where that is another), on a processor as fast as that needs."""
    kept, _, wide = request.param.partition("-")
    if kept != "fp32":
        monkeypatch.setattr(f"patrickstar.step.resources.computes_{kept}", lambda: not wide)
    return ["--precision", kept]


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    ("precision", "more"),
    [
        ("fp32", []),
        *(pytest.param(kind, [], marks=pytest.mark.campaign) for kind in ("bf16", "bf16-fp32", "fp16")),
        ("fp16-fp32", []),
        ("bf16", ["--accumulate", 2, "--clip", 0.1]),
        pytest.param("fp16", ["--accumulate", 2, "--clip", 0.1], marks=pytest.mark.campaign),
        pytest.param("fp32", ["--step", "in_backward"], marks=pytest.mark.campaign),
        pytest.param("bf16", ["--step", "in_backward"], marks=pytest.mark.campaign),
    ],
    indirect=["precision"],
    ids=[
        "fp32",
        "bf16",
        "bf16-fp32",
        "fp16",
        "fp16-fp32",
        "bf16-accumulated",
        "fp16-accumulated",
        "fp32-in-backward",
        "bf16-in-backward",
    ],
)
def test_a_run_fits_in_the_smallest_budget_and_less_is_refused_with_the_numbers(
    runs, capsys, monkeypatch, precision, tier, more
):
    monkeypatch.chdir(runs.home)
    flags = [*precision, *TIERS[tier]]
    asked = ["plan", "--model", runs.model, "--batch-size", 2, "--seq-len", 16, *more[:2], "--json", *flags, "4KiB"]
    assert main([str(word) for word in asked]) == 3
    smallest = json.loads(capsys.readouterr().out)["minimum"][tier]

    assert runs.train(*flags, f"{smallest}B", *more, steps=2) == 0
    summary = runs.rows()[-1]
    assert summary["steps"] == 2
    assert summary["peak"][tier] <= smallest
    assert sum(summary["moved"].values()) > 0

    capsys.readouterr()
    less = smallest * 9 // 10
    assert runs.train(*flags, f"{less}B", *more, steps=2, log="less") == 3
    assert runs.rows("less", "step") == []
    shown = capsys.readouterr()
    assert "validation" not in shown.out
    said = re.fullmatch(
        rf"patrickstar: BudgetError: {tier} memory is (.+) short at op \d+ (?:forward|backward|step) \S+\n"
        r"  needed (.+) = chunk slots (.+) \(\d+ of .+\) \+ activations (.+);  budget (.+)\n"
        rf"  fits with: {tier}_memory >= (.+)  \|  .+\n",
        shown.err,
    )
    assert said is not None
    short, needed, slots, activations, budget, fits = (parse_size(size, name="size") for size in said.groups())
    # Sizes are printed in hundredths of a KiB.
    assert budget == pytest.approx(less, abs=11)
    assert needed == pytest.approx(slots + activations, abs=21)
    assert short == pytest.approx(needed - less, abs=21)
    assert fits == pytest.approx(smallest, abs=11)
