"""What management costs when everything fits: a step under `manage` against the same step in plain PyTorch, interleaved in one run.

    python benchmarks/overhead.py [--precision fp32|bf16] [--rounds N] [--layers N] [--tokens N] [--write]

GPT-2 (124M unless flags say otherwise), dropout off, one sequence of `--tokens`. Both models take the same steps. Plain PyTorch is

fp32: the model, and `AdamW(fused=True)`. Every loss must be the same, in all bits.
bf16: a model of bf16 weights, and `AdamW(fused=True)` on fp32 masters that are kept by hand: gradients are copied to fp32, masters are updated,
    weights are copied from them. The managed model computes in bf16 too, and has the same masters, 16 bits of each beside its weight. Both begin
    with weights that bf16 holds exactly, so the first loss must be the same in all bits. Later ones may differ in last places, because copying
    rounds ties to even and a split master away from zero (`docs/bits.md`): they must agree within half a per cent.

Prints the ratio of medians and its spread over rounds; `--write` keeps the result beside this file.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from machine import describe_machine
from overhead_sides import LR, WARM_UP, managed_step, measure, plain_step, ratios_of
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import patrickstar

WANTED: Final = 1.05
RESULTS: Final = Path(__file__).parent / "results"
PLAIN: Final = {
    "fp32": "plain PyTorch with AdamW(fused=True)",
    "bf16": "plain PyTorch with weights of bf16 and AdamW(fused=True) on fp32 masters kept by hand",
}


def main() -> int:
    arguments = parse()
    began = build(arguments)
    managed = copy.deepcopy(began)
    plain = plain_step(began, arguments.precision)
    options = patrickstar.Options(compute=None if arguments.precision == "fp32" else arguments.precision)
    optimizer = torch.optim.AdamW(managed.parameters(), lr=LR)
    with patrickstar.manage(
        managed, optimizer, device="cpu", precision=arguments.precision, options=options
    ) as session:
        steps = {"plain": plain, "managed": managed_step(managed, session)}
        taken, different = measure(steps, batches(arguments), exact=arguments.precision == "fp32")
        planned = session.stats().planned_steps
    if different:
        print(different, file=sys.stderr)
        return 1
    result = {
        "what": f"a step under manage() over the same step in {PLAIN[arguments.precision]}, everything fits",
        "precision": arguments.precision,
        "wanted": WANTED,
        **ratios_of(taken),
        "seconds": taken,
        "planned_steps": planned,
        "command": " ".join(["python", "benchmarks/overhead.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    ratios = result["ratios"]
    print(
        f"ratio of medians {result['ratio_of_medians']:.3f}, of minima {result['ratio_of_minima']:.3f}; "
        f"by round {ratios[0]:.3f} to {ratios[-1]:.3f} (median {statistics.median(ratios):.3f}); wanted at most {WANTED}"
    )
    out = arguments.out or (RESULTS / result_name(arguments.precision) if arguments.write else None)
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=tuple(PLAIN), default="fp32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50_257)
    parser.add_argument("--write", action="store_true", help="keep the result beside this file")
    parser.add_argument("--out", type=Path, help="keep it in a file of yours")
    return parser.parse_args()


def result_name(precision: str) -> str:
    """The file that `--write` writes."""
    return "overhead.json" if precision == "fp32" else f"overhead-{precision}.json"


def build(arguments: argparse.Namespace) -> GPT2LMHeadModel:
    """An fp32 model, of numbers that the precision holds exactly."""
    torch.manual_seed(0)
    sizes = {"n_layer": arguments.layers, "n_embd": arguments.width, "vocab_size": arguments.vocabulary}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **ends, **dropout, n_positions=arguments.tokens, use_cache=False)
    model = GPT2LMHeadModel(config).train()
    return model if arguments.precision == "fp32" else model.bfloat16().float()


def batches(arguments: argparse.Namespace) -> Iterator[Tensor]:
    """One for each round, those that warm up included: [1, tokens]."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(arguments.rounds + WARM_UP):
        yield torch.randint(0, arguments.vocabulary, (1, arguments.tokens), generator=generator)


if __name__ == "__main__":
    sys.exit(main())
