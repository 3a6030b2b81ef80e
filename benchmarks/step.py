"""What a training step costs, every optimization switched on and off: random tokens, any model by name, all variants interleaved in one run.

    python benchmarks/step.py [--model NAME] [--layers N] [--batch-size N] [--seq-len N] [--rounds N] [--all | --variant TEXT] [--disk DIR] [--write]

`patrickstar models` lists the names; `--layers` cuts the model to its first blocks. Each variant (`variants.py`) has a process of its own, which
waits while another takes its step. A variant that cannot run here says why, and is left out. Variants that compute alike must end every round with
the same loss, in all bits; plain bf16 is autocast, and stands alone. For each: seconds a step, the ratios round by round to the first variant and to
its base line, TFLOP/s of the model and of what is executed (`flops.py`), tokens a second, bytes moved a step, how far the process grew above its size
without weights. The roofline: what is executed at the speed of a large matrix product on this machine, or what crosses to the disk at its speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from flops import StepFlops, count_step
from machine import describe_machine, usable_cores
from speeds import disk_bandwidth, matmul_peak
from step_process import BYTES_PER_PARAMETER, checkpointed, model_of, work
from variants import ALL, DEFAULT, Variant
from worker import Worker, WorkerError

from patrickstar.cli.models import ModelSource
from patrickstar.memory.process import available_bytes
from patrickstar.torch_private import computes_bf16, computes_fp16

RESULT: Final = Path(__file__).parent / "results" / "step.json"
MIB: Final = 1 << 20
# The first step is traced, the second takes the plan that follows from the trace, and files are written for the first time.
WARM_UP: Final = 2
TYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SLOW: Final = "autocast computes in bf16, for which this processor has no instructions; --variant runs it all the same"


def main() -> int:
    arguments = parse()
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    source = model_of(arguments)
    parameters = sum(parameter.numel() for parameter in source.build_on_meta().parameters())
    print(
        f"{source.name}: {parameters / 1e6:.1f}M parameters, model data {BYTES_PER_PARAMETER * parameters / MIB:.0f} MiB"
    )
    variants, refused = chosen(arguments)
    try:
        runs = start(variants, refused, arguments, parameters)
        if not runs:
            print("no variant can run here", file=sys.stderr)
            return 1
        flops = {on: count(source, arguments, checkpointing=on) for on in {variant.checkpointing for variant in runs}}
        disk = disk_bandwidth(arguments.disk) if any(variant.disk == "on" for variant in runs) else None
        rows, peaks, different = measure(runs, refused, arguments.rounds)
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 1
    if different:
        print(f"losses differ: {different}", file=sys.stderr)
        return 1
    machine = {"matmul_flops_per_second": peaks, "disk_bytes_per_second": disk, **describe_machine()}
    tokens = arguments.batch_size * arguments.seq_len
    first = next(iter(rows))
    result = {
        "what": f"a step of {source.name} on random tokens by variant; ratios to {str(first)!r}; the first {WARM_UP} rounds warm up",
        "model": source.name,
        "parameters": parameters,
        "batch_size": arguments.batch_size,
        "seq_len": arguments.seq_len,
        "model_flops": flops[first.checkpointing].model,
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
    parser.add_argument("--rounds", type=int, default=10)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help=f"{len(ALL)} variants, not the {len(DEFAULT)} default ones")
    which.add_argument(
        "--variant",
        type=variant_of,
        action="append",
        help="instead of the default ones; all are compared with the first",
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


def chosen(arguments: argparse.Namespace) -> tuple[list[Variant], dict[Variant, str]]:
    """The variants to run, named as the library runs them on this processor, and those of the lists that would take minutes a step here."""
    fast = [
        name for name, is_fast in {"fp32": True, "bf16": computes_bf16(), "fp16": computes_fp16()}.items() if is_fast
    ]
    asked = arguments.variant or (ALL if arguments.all else DEFAULT)
    variants = list(dict.fromkeys(variant.as_run(fast) for variant in asked))
    slow = [] if arguments.variant else [v for v in variants if not v.managed and v.precision not in fast]
    for variant in slow:
        print(f"{variant}: {SLOW}")
    return [variant for variant in variants if variant not in slow], dict.fromkeys(slow, SLOW)


# processes


Runs = Mapping[Variant, Worker]


def start(
    variants: list[Variant], refused: dict[Variant, str], arguments: argparse.Namespace, parameters: int
) -> dict[Variant, Worker]:
    """A waiting process for each variant that can run; the others join `refused`. As many begin at a time as there are cores.

    Raises:
        WorkerError: one ended otherwise than it should.
    """
    runs: dict[Variant, Worker] = {}
    together, left = usable_cores(), available_bytes()
    for some in (variants[at : at + together] for at in range(0, len(variants), together)):
        begun: dict[Variant, Worker] = {}
        for variant in some:
            need = needed_bytes(variant, parameters)
            if need > left:
                refused[variant] = f"needs {need / MIB:.0f} MiB beside the others; {left / MIB:.0f} MiB are available"
                continue
            left -= need
            begun[variant] = Worker(work, arguments, variant)
        for variant, worker in begun.items():
            said = worker.hear()
            if said is None:
                runs[variant] = worker
            else:
                refused[variant] = said
        for variant in some:
            print(f"{variant}: {refused.get(variant, 'ready')}", flush=True)
    return runs


def needed_bytes(variant: Variant, parameters: int) -> int:
    """Roughly what its process will hold in memory. The smallest budget is found there, by a model that is whole first."""
    whole = BYTES_PER_PARAMETER * parameters
    return whole if variant.share is None or variant.device == "emulated" else int(whole * variant.share)


# measuring


Rows = dict[Variant, list[dict[str, Any]]]


def measure(runs: Runs, refused: dict[Variant, str], rounds: int) -> tuple[Rows, dict[str, float], str]:
    """Rows by variant, the machine's best products by type, and which losses differ that must not.

    A variant that finds at its first step that it does not fit joins `refused`.

    Raises:
        WorkerError: a process ended otherwise than it should.
    """
    rows: Rows = {variant: [] for variant in runs}
    peaks = {name: 0.0 for name in TYPES if any(variant.products == name for variant in runs)}
    total, began = rounds + WARM_UP, time.perf_counter()
    for number in range(total):
        round_began = time.perf_counter()
        peaks = {name: max(peak, matmul_peak(TYPES[name])) for name, peak in peaks.items()}
        for variant in list(rows) if number % 2 else list(reversed(rows)):
            row = runs[variant].ask(number)
            if isinstance(row, str):
                print(f"{variant}: {row}", flush=True)
                del rows[variant]
                refused[variant] = row
            else:
                rows[variant].append(row)
        now = time.perf_counter()
        print(
            f"round {number + 1} of {total}: {seconds_of(rows)} s; {now - began:.0f} s so far, "
            f"{(total - number - 1) * (now - round_began):.0f} s left at this speed",
            flush=True,
        )
        if different := differing(rows):
            return rows, peaks, f"round {number + 1}: {different}"
    for variant in rows:
        runs[variant].dismiss()
    for variant in rows:
        runs[variant].join()
    return rows, peaks, ""


def seconds_of(rows: Rows) -> str:
    """The last step of each."""
    return ", ".join(f"{row[-1]['seconds']:.2f}" for row in rows.values())


def differing(rows: Rows) -> str:
    """Of variants with the same arithmetic, the last losses, where they are not one."""
    alike: dict[tuple[object, ...], dict[str, str]] = {}
    for variant, row in rows.items():
        if variant.managed or variant.precision == "fp32":
            arithmetic = variant.precision, variant.products, variant.tile_rows
            alike.setdefault(arithmetic, {})[str(variant)] = row[-1]["loss"]
    return "; ".join(str(losses) for losses in alike.values() if len(set(losses.values())) > 1)


def ratios(of: Iterable[Mapping[str, Any]], to: Iterable[Mapping[str, Any]]) -> list[float]:
    """Of the seconds of each round, from the smallest to the largest."""
    return sorted(row["seconds"] / other["seconds"] for row, other in zip(of, to, strict=True))


def summary(variant: Variant, rows: Rows, flops: StepFlops, machine: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The figures of one variant."""
    measured = rows[variant][WARM_UP:]
    variants = list(rows)
    base_line = variant.base_line(variants[: variants.index(variant)])
    seconds = [row["seconds"] for row in measured]
    median, last = statistics.median(seconds), measured[-1]
    moved, disk = last.get("moved", {}), machine["disk_bytes_per_second"]
    bounds = [flops.executed / machine["matmul_flops_per_second"][variant.products]]
    if disk is not None:
        bounds.append(moved.get("K>H", 0) / disk["read"] + moved.get("H>K", 0) / disk["write"])
    return {
        "variant": str(variant),
        "seconds": seconds,
        "median_seconds": median,
        "ratios": ratios(measured, rows[variants[0]][WARM_UP:]),
        "base_line": None if base_line is None else str(base_line),
        "base_line_ratios": [] if base_line is None else ratios(measured, rows[base_line][WARM_UP:]),
        "model_tflops": flops.model / median / 1e12,
        "executed_tflops": flops.executed / median / 1e12,
        "tokens_per_second": tokens / median,
        "moved": moved,
        "bound_bytes": last["bound"],
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
        moved, against = sum(row["moved"].values()), ""
        bounds = "".join(f" with {name} {nbytes / MIB:.0f} MiB" for name, nbytes in row["bound_bytes"].items())
        if row["base_line"] not in (None, result["rows"][0]["variant"]):
            against = f", {spread(row['base_line_ratios'])} of {row['base_line']!r}"
        print(
            f"{row['variant']}: {row['median_seconds']:.3f} s ({min(row['seconds']):.3f} to {max(row['seconds']):.3f}), "
            f"{spread(row['ratios'])}{against}, {row['model_tflops']:.3f} TFLOP/s "
            f"({row['executed_tflops']:.3f} executed), {row['tokens_per_second']:.0f} tokens/s, {moved / MIB:.0f} MiB moved, "
            f"grew {row['grew_bytes'] / MIB:.0f} MiB{bounds}, {row['share_of_roofline']:.0%} of the roofline"
        )


def spread(ratios: list[float]) -> str:
    """The middle one, the smallest and the largest."""
    return f"x {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    sys.exit(main())
