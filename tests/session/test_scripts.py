"""Programs of a line each, on every machine and in every precision: what plain PyTorch makes of them. The words are in `script.py`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.session.builders import MACHINES
from tests.session.masters import KINDS
from tests.session.script import Script

LINES = (
    "forward backward step zero forward backward step zero",
    "step zero forward backward step",
    # gradients
    "forward backward grad(0)*=.5 grad(3)+=.1 step zero forward backward step",
    "forward backward grad(4)=.3 grad(7)=None read step zero forward backward step zero",
    "forward backward grad(0) step grad(0) zero grad(0)",
    "forward backward clip(.01) step zero forward backward clip(.01) clip(.001) step",
    "forward backward clamp(.001) step norm zero norm",
    "forward backward limit(.01) step zero forward backward grad(3)*=.5 limit(.001) limit(.0001) norm step",
    # zeros, or nothing, at every place of the loop
    "forward backward step zero(zeros) forward backward step zero(zeros) step",
    "forward zero backward step forward zero backward step forward zero(zeros) backward step",
    "forward backward zero step forward backward step",
    # several backwards
    "forward backward forward backward forward backward step zero forward backward step",
    "forward forward backward backward step zero",
    "forward backward(keep) backward step zero forward backward step",
    "forward differentiate(3) forward backward step zero",
    # weights and moments by hand
    "forward backward norm step weight(3)*=.5 zero forward backward weight(0)+=.1 step weight(1)=.1 zero forward backward step",
    "forward backward step data(3)*=.5 zero forward backward step data(2)+=.1 forward drop zero forward backward step",
    "forward backward step average(3)*=.5 zero forward backward average(1)+=.1 step average(0)=0 average(11)",
    "keep forward backward step zero back forward backward back step evaluate",
    "forward backward step save weight(0)*=.5 zero forward backward load forward backward step zero",
    "forward backward lr*=.5 step lr*=.5 zero forward backward step",
    # what is trained, and how much of it
    "freeze(2) forward backward step zero thaw(2) forward backward step zero",
    "forward backward freeze(2) step zero forward backward step thaw(2) zero forward backward step",
    "forward(layers=2) backward step zero forward backward step zero forward(layers=2) backward forward backward step",
    "forward(rows=9) backward step zero forward backward forward(rows=2) backward step zero",
    # forwards that no backward follows
    "forward backward step evaluate zero evaluate forward backward evaluate step evaluate",
    "forward backward forward drop step zero forward drop forward backward step",
    "forward forward evaluate backward evaluate backward read step",
)

ADDING = (
    "forward backward step forward backward step read step",
    "forward backward grad(0) forward backward grad(0) step",
    "step grad(7)=.1 forward backward step read",
    "forward backward grad(4)=.1 grad(7)=.1 forward backward step zero forward backward step zero",
)
"""In fp16 these would add gradients that are scaled to some that no longer are, as with torch's own scaler."""


def runs() -> Iterator[Any]:
    """fp32 on every machine, and each 16-bit precision on one after the other; the rest belongs to `make test-full`."""
    for place, line in enumerate(LINES + ADDING):
        for number, (kind, machine) in enumerate(product(("fp32", *KINDS), MACHINES)):
            if line not in ADDING or not kind.startswith("fp16"):
                is_rest = kind != "fp32" and (place + number // len(MACHINES) + number) % len(MACHINES)
                yield pytest.param(line, kind, machine, marks=pytest.mark.campaign if is_rest else ())


@pytest.mark.sampled
@pytest.mark.parametrize(("line", "kind", "machine"), list(runs()))
def test_a_line_means_what_it_means_in_plain_pytorch(line: str, kind: str, machine: str, tmp_path: Path) -> None:
    script = Script(kind, **MACHINES[machine](tmp_path / "disk"))
    try:
        script.run(line)
    finally:
        script.close()


def test_other_bits_are_shown_with_what_was_said(tmp_path: Path) -> None:
    script = Script(**MACHINES["cpu+disk"](tmp_path / "disk"))
    script.run("evaluate")
    script.managed.batches += 1
    with pytest.raises(AssertionError, match=r"^evaluate evaluate: gives 0\.\d+, plain PyTorch 0\.\d+$"):
        script.run("evaluate")
    script.managed.session.write("0.bias", torch.ones(32))
    with pytest.raises(AssertionError, match=r"(?s)^evaluate evaluate\n.*weight 0\.bias: 32 of 32 elements"):
        script.close()
