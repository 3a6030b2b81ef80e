"""The program of `make train`: a 120M-parameter GPT-2-class decoder on real text, in half of the memory that its model states take.

    .venv/bin/python examples/train_stdlib.py [options of `patrickstar train`, which replace those below]

The text is the standard library's own sources, which every machine with Python has. Model data is what training keeps of
a model beside activations: weight, gradient and two moments, 16 bytes a parameter in fp32. Where torch sees a GPU, it
trains there, and what the budget does not hold lies in host memory; else the CPU computes, and the rest lies in files
below `runs/`, which are gone at the end. No budget changes a bit of the result: `--compare-plain` runs the same steps in
plain PyTorch and compares.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

from patrickstar.cli.models import DEFAULT, MODELS

RUNS = Path("runs")
LOG = RUNS / "train.jsonl"
BYTES_PER_PARAMETER = 16
MIB = 1 << 20


def options(*, on_gpu: bool) -> list[str]:
    """The command line, an option a line with its reason."""
    model_data = BYTES_PER_PARAMETER * MODELS[DEFAULT].numel()
    half = f"{model_data // 2 // MIB}MiB"  # activations included
    return [
        *("--model", DEFAULT),
        *("--precision", "fp32"),
        *(
            ("--device", "cuda", "--device-memory", half)
            if on_gpu
            else ("--device", "cpu", "--host-memory", half, "--disk", str(RUNS / "disk"))
        ),
        # 192 tokens a step: some minutes on two cores, and the loss on held-out files falls clearly within 44 steps.
        *("--batch-size", "2", "--seq-len", "96", "--steps", "44"),
        *("--lr", "6e-4", "--warmup", "8", "--seed", "0"),
        *("--log-json", str(LOG)),
    ]


def main() -> NoReturn:
    RUNS.mkdir(exist_ok=True)
    on_gpu = torch.cuda.is_available()
    print("torch sees a GPU: training there" if on_gpu else "torch sees no GPU: training on the CPU")
    command = [sys.executable, "-m", "patrickstar", "train", *options(on_gpu=on_gpu), *sys.argv[1:]]
    print(" ".join(["patrickstar", *command[3:]]), flush=True)
    # Our place, not our child: Ctrl-C and the terminal belong to the command line.
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
