"""What management costs when everything fits: a step under `manage` against the same step in plain PyTorch, interleaved in one run.

    python benchmarks/overhead.py [--rounds N] [--layers N] [--tokens N] [--write]

GPT-2 (124M), fp32, dropout off, one sequence of `--tokens`; plain PyTorch with `AdamW(fused=True)`. Both models take the same steps and must
end with the same losses. Prints the ratio of medians and its spread over rounds; `--write` keeps the result beside this file.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import describe_machine
from transformers import GPT2Config, GPT2LMHeadModel

import patrickstar

WANTED = 1.05


def build(layers: int, tokens: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_positions=tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    return GPT2LMHeadModel(config).train()


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> tuple[float, float]:
    """Seconds and loss of one step, the gradients let go at its end."""
    began = time.perf_counter()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began, loss.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    plain = build(arguments.layers, arguments.tokens)
    managed = copy.deepcopy(plain)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    session = patrickstar.manage(managed, torch.optim.AdamW(managed.parameters(), lr=1e-4), device="cpu")
    assert session.optimizer is not None
    runs: dict[str, Callable[[torch.Tensor], tuple[float, float]]] = {
        "plain": lambda batch: one_step(plain, plain_optimizer, batch),
        "managed": lambda batch: one_step(managed, session.optimizer, batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    generator = torch.Generator().manual_seed(1)
    for round_number in range(arguments.rounds + 2):
        batch = torch.randint(0, plain.config.vocab_size, (1, arguments.tokens), generator=generator)
        order = list(runs) if round_number % 2 else list(reversed(runs))
        taken = {name: runs[name](batch) for name in order}
        if taken["plain"][1] != taken["managed"][1]:
            print(f"round {round_number}: losses differ: {taken}", file=sys.stderr)
            return 1
        if round_number >= 2:  # the first rounds plan, import and warm up
            for name, (took, _) in taken.items():
                seconds[name].append(took)
            print(
                f"round {round_number - 1}: plain {taken['plain'][0]:.3f} s, managed {taken['managed'][0]:.3f} s",
                flush=True,
            )
    ratios = sorted(managed / plain for managed, plain in zip(seconds["managed"], seconds["plain"], strict=True))
    result = {
        "what": "a step under manage() over the same step in plain PyTorch with AdamW(fused=True), everything fits",
        "wanted": WANTED,
        "ratio_of_medians": statistics.median(seconds["managed"]) / statistics.median(seconds["plain"]),
        "ratio_of_minima": min(seconds["managed"]) / min(seconds["plain"]),
        "ratios": ratios,
        "seconds": seconds,
        "planned_steps": session.stats().planned_steps,
        "command": " ".join(["python", "benchmarks/overhead.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    print(
        f"ratio of medians {result['ratio_of_medians']:.3f}, of minima {result['ratio_of_minima']:.3f}; "
        f"by round {ratios[0]:.3f} to {ratios[-1]:.3f} (median {statistics.median(ratios):.3f}); wanted at most {WANTED}"
    )
    if arguments.write:
        path = Path(__file__).parent / "results" / "overhead.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
    session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
