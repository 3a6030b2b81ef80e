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
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from budgets import disk_bandwidth
from flops import StepFlops, count_step, matmul_peak
from machine import describe_machine
from torch import nn
from variants import DEFAULT, Variant

import patrickstar
from patrickstar.cli.batches import Batch
from patrickstar.cli.model_source import ModelSource, check_length
from patrickstar.cli.predict import predict
from patrickstar.cli.random_data import RandomBatches
from patrickstar.cli.resident import ResidentGrowth
from patrickstar.config.arguments import check_arguments
from patrickstar.memory.allocator import release_free_memory
from patrickstar.memory.process import available_bytes

RESULT: Final = Path(__file__).parent / "results" / "step.json"
MIB: Final = 1 << 20
BYTES_PER_PARAMETER: Final = 16
WARM_UP: Final = 2
LAYER_NAMES: Final = ("n_layer", "num_hidden_layers")
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


def model_of(arguments: argparse.Namespace) -> ModelSource:
    """The model by name, cut to `--layers`."""
    source = ModelSource.find(arguments.model)
    check_length(source.config(), arguments.seq_len)
    if arguments.layers is None:
        return source
    cut = {name: arguments.layers for name in LAYER_NAMES if name in source.settings}
    return replace(source, name=f"{source.name} of {arguments.layers} layers", settings={**source.settings, **cut})


def count(source: ModelSource, arguments: argparse.Namespace, *, checkpointing: str) -> StepFlops:
    return count_step(
        lambda: checkpointed(source.build(), checkpointing), batch_size=arguments.batch_size, seq_len=arguments.seq_len
    )


def checkpointed(model: Any, checkpointing: str) -> Any:
    """The model, its blocks computed again in backward where that is asked for."""
    if checkpointing == "on":
        # The older name is deprecated in transformers 5.23; versions before 5.2x have no other.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


# processes


Runs = Mapping[Variant, tuple[Connection, Any]]


def start(arguments: argparse.Namespace, parameters: int) -> tuple[Runs, dict[Variant, str]]:
    """A waiting process for each variant, and why the others cannot run."""
    context = multiprocessing.get_context("spawn")
    runs: dict[Variant, tuple[Connection, Any]] = {}
    refused: dict[Variant, str] = {}
    for variant in arguments.variant or DEFAULT:
        whole = BYTES_PER_PARAMETER * parameters
        need = whole if variant.share is None or variant.device == "emulated" else int(whole * variant.share)
        if need > available_bytes():
            refused[variant] = (
                f"needs {need / MIB:.0f} MiB beside the others; {available_bytes() / MIB:.0f} MiB are available"
            )
        else:
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, arguments, variant), daemon=True)
            process.start()
            said = ours.recv()
            if said is None:
                runs[variant] = ours, process
            else:
                refused[variant] = said
        print(f"{variant}: {refused.get(variant, 'ready')}", flush=True)
    return runs, refused


def work(pipe: Connection, arguments: argparse.Namespace, variant: Variant) -> None:
    """One process: says that it is ready (None) or why not, then steps whenever it is sent a round's number."""
    source = model_of(arguments)
    shape = {"batch_size": arguments.batch_size, "seq_len": arguments.seq_len}
    batches = RandomBatches(source.config().vocab_size, **shape, seed=0)
    torch.manual_seed(0)
    model = checkpointed(source.build(), variant.checkpointing)
    with torch.no_grad():
        # Two threads that call a function of MKL for the first time may get other last bits than ever after, with and without us.
        model(**RandomBatches(source.config().vocab_size, **shape, seed=1).next())
    release_free_memory()
    growth = ResidentGrowth(model)
    with ExitStack() as end:
        try:
            if variant.managed:
                session = patrickstar.manage(
                    model,
                    torch.optim.AdamW(model.parameters(), lr=1e-4),
                    **memory_options(model, variant, source, arguments),
                )
                end.callback(session.close, keep_weights=False)
                step = managed(model, session)
            else:
                session, step = None, plain(model, variant)
            growth.managed()
            pipe.send(None)
            while pipe.recv() is not None:
                pipe.send(timed(step, batches.next(), session, growth))
        except patrickstar.Error as error:
            pipe.send(f"{type(error).__name__}: {error}")


def timed(step: Step, batch: Batch, session: patrickstar.Session | None, growth: ResidentGrowth) -> dict[str, Any]:
    """One step, and what it took."""
    before = dict(session.stats().moved) if session is not None else {}
    began = time.perf_counter()
    loss = step(batch)
    row: dict[str, Any] = {"seconds": time.perf_counter() - began, "loss": loss.item().hex(), "grew": growth.peak()}
    if session is not None:
        stats = session.stats()
        row["moved"] = {link: nbytes - before[link] for link, nbytes in stats.moved.items()}
        row["device_peak"] = stats.peak["device"]
    return row


Step = Callable[[Batch], torch.Tensor]


def plain(model: nn.Module, variant: Variant) -> Step:
    """A step of an ordinary loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    narrow = partial(torch.autocast, "cpu", torch.bfloat16) if variant.precision == "bf16" else nullcontext

    def step(batch: Batch) -> torch.Tensor:
        with narrow():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def managed(model: nn.Module, session: patrickstar.Session) -> Step:
    """The same on a session; the scaler does nothing but in fp16."""
    optimizer: Any = session.optimizer
    scaler: Any = session.scaler

    def step(batch: Batch) -> torch.Tensor:
        loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


def memory_options(
    model: nn.Module, variant: Variant, source: ModelSource, arguments: argparse.Namespace
) -> dict[str, Any]:
    """What `manage` is given."""
    # A scale that stays: a step that is skipped would count as a fast one.
    options = patrickstar.Options(
        eviction=variant.eviction,
        chunk_size=variant.chunk,
        loss_scale=patrickstar.LossScale(initial=256.0, dynamic=False),
    )
    given: dict[str, Any] = {
        "device": variant.device,
        "precision": variant.precision,
        "step": variant.step,
        "options": options,
    }
    if variant.disk == "on":
        given["disk"] = arguments.disk
    bounded = "device_memory" if variant.device == "emulated" else "host_memory"
    if variant.share is not None:
        whole = BYTES_PER_PARAMETER * sum(parameter.numel() for parameter in model.parameters())
        given[bounded] = int(variant.share * whole)
    elif variant.budget == "minimum":
        forecast = predict(
            checkpointed(source.build_on_meta(), variant.checkpointing),
            batch_size=arguments.batch_size,
            seq_len=arguments.seq_len,
            clip=False,
            arguments=check_arguments(**given, **{bounded: "1KiB"}),
        )
        given[bounded] = forecast.minimum[bounded.removesuffix("_memory")]
    return given


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
