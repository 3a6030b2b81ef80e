"""What a training step costs, every optimization switched on and off: random tokens, any model by name, all variants interleaved in one run.

    python benchmarks/step.py [--model NAME] [--layers N] [--batch-size N] [--seq-len N] [--rounds N] [--variant TEXT]... [--disk DIR] [--write]

`patrickstar models` lists the names; `--layers` cuts the model to its first blocks. Each variant (`variants.py`) has a process of its own, which
waits while another takes its step. A variant that cannot run here says why, and is left out. Variants of one precision must end every round with
the same loss, in all bits; plain bf16 is autocast, and stands alone. For each: seconds a step, the ratio to the first variant round by round,
TFLOP/s of the model and of what is executed (`flops.py`), tokens a second, bytes moved a step, how far the process grew above its size without
weights. The roofline: what is executed at the speed of a large matrix product on this machine, or what crosses to the disk at the disk's speed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from budgets import disk_bandwidth
from flops import StepFlops, count_step, matmul_peak
from machine import describe_machine
from step_process import BYTES_PER_PARAMETER, checkpointed, model_of, work
from variants import DEFAULT, Variant

from patrickstar.cli.model_source import ModelSource
from patrickstar.memory.process import available_bytes

RESULT: Final = Path(__file__).parent / "results" / "step.json"
MIB: Final = 1 << 20
WARM_UP: Final = 2
# What products compute in. fp16 is widened to fp32 on CPUs.
PEAKS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> int:
    arguments = parse()
    source = model_of(arguments)
    parameters = sum(parameter.numel() for parameter in source.build_on_meta().parameters())
    print(
        f"{source.name}: {parameters / 1e6:.1f}M parameters, model data {BYTES_PER_PARAMETER * parameters / MIB:.0f} MiB"
    )
    runs, refused = start(arguments, parameters)
    if not runs:
        print("no variant can run here", file=sys.stderr)
        return 1
    flops = {on: count(source, arguments, checkpointing=on) for on in {variant.checkpointing for variant in runs}}
    disk = disk_bandwidth(arguments.disk) if any(variant.disk == "on" for variant in runs) else None
    rows, peaks, different = measure(runs, refused, arguments.rounds)
    if different:
        print(f"losses differ: {different}", file=sys.stderr)
        return 1
    machine = {"matmul_flops_per_second": peaks, "disk_bytes_per_second": disk, **describe_machine()}
    tokens = arguments.batch_size * arguments.seq_len
    baseline = next(iter(rows))
    result = {
        "what": f"a step of {source.name} on random tokens by variant; ratios to {str(baseline)!r}; the first {WARM_UP} rounds warm up",
        "model": source.name,
        "parameters": parameters,
        "batch_size": arguments.batch_size,
        "seq_len": arguments.seq_len,
        "model_flops": flops[baseline.checkpointing].model,
        "rows": [summary(variant, rows, flops[variant.checkpointing], machine, tokens) for variant in rows],
        "refused": {str(variant): why for variant, why in refused.items()},
        "command": " ".join(["python", "benchmarks/step.py", *sys.argv[1:]]),
        "machine": machine,
    }
    show(result)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-120m")
    parser.add_argument("--layers", type=int, help="blocks of the model (4 of the default model)")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--variant", type=variant_of, action="append", help="instead of the default ones; the first is the baseline"
    )
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument(
        "--write", dest="out", action="store_const", const=RESULT, help="keep the result beside this file"
    )
    parser.add_argument("--out", type=Path, help="keep it in a file of yours")
    arguments = parser.parse_args()
    if arguments.layers is None and arguments.model == parser.get_default("model"):
        arguments.layers = 4
    return arguments


def variant_of(text: str) -> Variant:
    """For argparse, which keeps what a ValueError says to itself."""
    try:
        return Variant.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def count(source: ModelSource, arguments: argparse.Namespace, *, checkpointing: str) -> StepFlops:
    return count_step(
        lambda: checkpointed(source.build(), checkpointing), batch_size=arguments.batch_size, seq_len=arguments.seq_len
    )


# processes


Runs = Mapping[Variant, tuple[Connection, Any]]


def start(arguments: argparse.Namespace, parameters: int) -> tuple[Runs, dict[Variant, str]]:
    """A waiting process for each variant, and why the others cannot run. As many begin at a time as there are cores."""
    context = multiprocessing.get_context("spawn")
    runs: dict[Variant, tuple[Connection, Any]] = {}
    refused: dict[Variant, str] = {}
    variants, together = list(arguments.variant or DEFAULT), os.cpu_count() or 1
    for some in (variants[at : at + together] for at in range(0, len(variants), together)):
        left = available_bytes()
        begun: dict[Variant, tuple[Connection, Any]] = {}
        for variant in some:
            need = needed_bytes(variant, parameters)
            if need > left:
                refused[variant] = f"needs {need / MIB:.0f} MiB beside the others; {left / MIB:.0f} MiB are available"
                continue
            left -= need
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, arguments, variant), daemon=True)
            process.start()
            begun[variant] = ours, process
        for variant, (pipe, process) in begun.items():
            said = pipe.recv()
            if said is None:
                runs[variant] = pipe, process
            else:
                refused[variant] = said
        for variant in some:
            print(f"{variant}: {refused.get(variant, 'ready')}", flush=True)
    return runs, refused


def needed_bytes(variant: Variant, parameters: int) -> int:
    """Roughly what its process will hold in memory. The smallest budget is found there, by a model that is whole first."""
    whole = BYTES_PER_PARAMETER * parameters
    return whole if variant.share is None or variant.device == "emulated" else int(whole * variant.share)


# measuring


Rows = dict[Variant, list[dict[str, Any]]]


def measure(runs: Runs, refused: dict[Variant, str], rounds: int) -> tuple[Rows, dict[str, float], str]:
    """Rows by variant, the machine's best products by type, and which losses differ that must not.

    A variant that finds at its first step that it does not fit joins `refused`.
    """
    rows: Rows = {variant: [] for variant in runs}
    peaks = dict.fromkeys(PEAKS, 0.0)
    for number in range(rounds + WARM_UP):
        for name, dtype in PEAKS.items():
            peaks[name] = max(peaks[name], matmul_peak(dtype))
        for variant in list(rows) if number % 2 else list(reversed(rows)):
            pipe, _ = runs[variant]
            pipe.send(number)
            row = pipe.recv()
            if isinstance(row, str):
                print(f"{variant}: {row}", flush=True)
                del rows[variant]
                refused[variant] = row
            else:
                rows[variant].append(row)
        print(f"round {number}: " + ", ".join(f"{row[-1]['seconds']:.2f}" for row in rows.values()) + " s", flush=True)
        if different := differing(rows):
            return rows, peaks, f"round {number}: {different}"
    for variant in rows:
        pipe, process = runs[variant]
        pipe.send(None)
        process.join()
    return rows, peaks, ""


def differing(rows: Rows) -> str:
    """Of variants with the same arithmetic, the last losses, where they are not one."""
    for precision in PEAKS | {"fp16": None}:
        alike = [v for v in rows if v.precision == precision and (v.managed or precision == "fp32")]
        losses = {str(variant): rows[variant][-1]["loss"] for variant in alike}
        if len(set(losses.values())) > 1:
            return str(losses)
    return ""


def summary(variant: Variant, rows: Rows, flops: StepFlops, machine: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The figures of one variant."""
    measured = rows[variant][WARM_UP:]
    baseline = next(iter(rows.values()))[WARM_UP:]
    seconds = [row["seconds"] for row in measured]
    median, last = statistics.median(seconds), measured[-1]
    moved, disk = last.get("moved", {}), machine["disk_bytes_per_second"]
    bounds = [flops.executed / machine["matmul_flops_per_second"]["bf16" if variant.precision == "bf16" else "fp32"]]
    if disk is not None:
        bounds.append(moved.get("K>H", 0) / disk["read"] + moved.get("H>K", 0) / disk["write"])
    return {
        "variant": str(variant),
        "seconds": seconds,
        "median_seconds": median,
        "ratios": sorted(row["seconds"] / other["seconds"] for row, other in zip(measured, baseline, strict=True)),
        "model_tflops": flops.model / median / 1e12,
        "executed_tflops": flops.executed / median / 1e12,
        "tokens_per_second": tokens / median,
        "moved": moved,
        "grew_bytes": last["grew"],
        "device_peak_bytes": last.get("device_peak", 0),
        "roofline_seconds": max(bounds),
        "share_of_roofline": max(bounds) / median,
    }


def show(result: Mapping[str, Any]) -> None:
    """As lines."""
    peaks = result["machine"]["matmul_flops_per_second"]
    print(
        f"products of large matrices: {', '.join(f'{name} {peak / 1e12:.2f} TFLOP/s' for name, peak in peaks.items())}"
    )
    for row in result["rows"]:
        ratios, moved = row["ratios"], sum(row["moved"].values())
        print(
            f"{row['variant']}: {row['median_seconds']:.3f} s ({min(row['seconds']):.3f} to {max(row['seconds']):.3f}), "
            f"x {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), {row['model_tflops']:.3f} TFLOP/s "
            f"({row['executed_tflops']:.3f} executed), {row['tokens_per_second']:.0f} tokens/s, {moved / MIB:.0f} MiB moved, "
            f"grew {row['grew_bytes'] / MIB:.0f} MiB, {row['share_of_roofline']:.0%} of the roofline"
        )


if __name__ == "__main__":
    sys.exit(main())
