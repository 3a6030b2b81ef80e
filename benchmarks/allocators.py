"""What a memory allocator holds over the live tensors of a training step.

    python benchmarks/allocators.py [--rounds 1] [--only tcmalloc] [--scenario plain] [--output FILE.json]

Rows of the output that are not measured again stay.

A GPT-2-shaped decoder (8 layers of 512, 1,024 tokens, vocabulary 50,257, fp32) runs forward and backward; gradients are copied
away and freed as they land, as a session does. "mixed" adds other shapes, evaluation and generation. Every (allocator,
scenario) pair has a fresh process, and pairs are interleaved over the rounds. In each process the same steps run three times:
under a dispatch mode that counts the bytes of live storages at every moment; as they are, for peak and time; and with the
high-water mark of the resident size taken moment by moment.

    live      the largest sum of live tensor bytes, counted by finalizers on storages
    peak      the resident high-water mark over the size before the first step
    settled   growth that stays when everything is freed: lazy imports, thread pools, workspaces
    excess    the most by which the resident high-water mark between two moments exceeded the live peak between them: what
              a plan that gives chunks the room which activations leave would overrun by
    releases  how often a step's guard had the allocator give back what it keeps

A guard looks at the resident size at every moment and acts when that size plus the coming rise of the live bytes would pass a
limit: with "peak" the live peak of the whole run plus 64 MiB, with "tide" that of the coming stretch plus 64 MiB.
Times are of the processor, of one step, with page faults: wall-clock times mean nothing next to other work.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel

from patrickstar.memory.allocator import release_free_memory, tcmalloc_library
from patrickstar.memory.process import peak_resident_bytes, reset_peak, resident_bytes

MIB = 1 << 20
SCENARIOS = ("checkpointed", "mixed", "plain")
SLACK = 64 * MIB
THRESHOLDS = {-3: 128 << 10, -1: 128 << 10, -2: 0}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD


class Variant(NamedTuple):
    tcmalloc: bool = False
    environment: Mapping[str, str] = {}
    options: Mapping[int, int] = {}  # of mallopt
    properties: Mapping[str, int] = {}  # of tcmalloc
    guard: str = ""
    aside: bool = False  # an idea tried in one scenario only


VARIANTS = {
    "glibc": Variant(),
    "glibc, guard peak": Variant(guard="peak"),
    "glibc, guard tide": Variant(guard="tide", aside=True),
    "glibc 1 MiB": Variant(options={-3: 1 << 20, -1: 1 << 20, -2: 0}, aside=True),
    "glibc 128 KiB": Variant(options=THRESHOLDS),
    "glibc 128 KiB, one arena": Variant(options={**THRESHOLDS, -8: 1}, aside=True),
    "glibc 128 KiB, huge pages": Variant(
        environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, options=THRESHOLDS, aside=True
    ),
    "tcmalloc": Variant(tcmalloc=True),
    "tcmalloc, guard peak": Variant(tcmalloc=True, guard="peak"),
    "tcmalloc, guard tide": Variant(tcmalloc=True, guard="tide", aside=True),
    "tcmalloc, decommit": Variant(tcmalloc=True, properties={"tcmalloc.aggressive_memory_decommit": 1}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "allocators.json")
    parser.add_argument("--only", default="", help="only variants whose name contains this")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="only these; may be given again")
    parser.add_argument("--child", nargs=2, metavar=("VARIANT", "SCENARIO"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(*arguments.child)))
        return

    library = tcmalloc_library()
    if library is None:
        print("tcmalloc is not installed: left out")
    names = [name for name in VARIANTS if arguments.only in name and (library or not VARIANTS[name].tcmalloc)]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for scenario in arguments.scenario or SCENARIOS:
            for name in names:
                if VARIANTS[name].aside and scenario != SCENARIOS[0]:
                    continue
                row = in_a_process(name, scenario, library)
                rows.setdefault((name, scenario), []).append(row)
                print(json.dumps(row), flush=True)
                write(arguments.output, [summarise(found) for found in rows.values()])
    summary = json.loads(arguments.output.read_text())["rows"]
    print(
        f"\n{'allocator':28}{'scenario':14}{'live':>7}{'peak':>7}{'excess':>8}{'settled':>9}{'releases':>10}{'cpu s':>8}"
    )
    for row in summary:
        print(
            f"{row['variant']:28}{row['scenario']:14}{row['live_mib']:7.0f}{row['peak_mib']:7.0f}{row['excess_mib']:8.0f}"
            f"{row['settled_mib']:9.0f}{row['releases']:10}{row['step_cpu_s']:8.2f}"
        )


def write(output: Path, rows: list[dict[str, Any]]) -> None:
    """After every row, since the whole takes long."""
    known = json.loads(output.read_text())["rows"] if output.exists() else []
    merged = {(row["scenario"], row["variant"]): row for row in [*known, *rows]}
    order = {name: number for number, name in enumerate([*SCENARIOS, *VARIANTS])}
    ordered = [merged[key] for key in sorted(merged, key=lambda key: [order.get(name, 0) for name in key])]
    output.write_text(json.dumps({"machine": machine(), "rows": ordered}, indent=1) + "\n")


def in_a_process(name: str, scenario: str, library: Path | None) -> dict[str, Any]:
    variant = VARIANTS[name]
    environment = {**os.environ, **variant.environment, **({"LD_PRELOAD": str(library)} if variant.tcmalloc else {})}
    command = [sys.executable, "-W", "ignore", __file__, "--child", name, scenario]
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest of every memory figure over the rounds, the median of the times."""
    most = {key: round(max(row[key] for row in rows), 1) for key in rows[0] if key.endswith("_mib")}
    times = [step for row in rows for step in row["steps_cpu_s"]]
    same = {key: rows[0][key] for key in ("variant", "scenario", "moments", "releases")}
    return {**same, **most, "step_cpu_s": round(statistics.median(times), 3)}


def machine() -> dict[str, Any]:
    return {
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def measure(name: str, scenario: str) -> dict[str, Any]:
    """One process: three passes over the same steps."""
    variant = VARIANTS[name]
    configure(variant)
    steps = Steps(scenario)
    steps.free()
    base = resident_bytes()
    at, most = count_live_bytes(steps)
    steps.free()

    guard = Guard(variant.guard, base, at, most)
    steps.watch = [guard] if variant.guard else []
    reset_peak()
    times = steps.run()
    peak = peak_resident_bytes() - base

    peaks: list[int] = []

    def sample() -> None:
        peaks.append(peak_resident_bytes() - base)

    guard = Guard(variant.guard, base, at, most)
    steps.watch = [sample, *([guard] if variant.guard else []), reset_peak]
    reset_peak()
    steps.run()
    sample()
    assert len(peaks) == len(most)
    steps.free()
    return {
        "variant": name,
        "scenario": scenario,
        "live_mib": max(most) / MIB,
        "peak_mib": peak / MIB,
        "settled_mib": (resident_bytes() - base) / MIB,
        "excess_mib": max(held - live for held, live in zip(peaks, most, strict=True)) / MIB,
        "moments": len(peaks) // len(times),
        "releases": guard.releases // len(times),
        "steps_cpu_s": times,
    }


def configure(variant: Variant) -> None:
    library = ctypes.CDLL(None)
    for option, value in variant.options.items():
        assert library.mallopt(option, value) == 1
    for key, value in variant.properties.items():
        library.MallocExtension_SetNumericProperty.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        assert library.MallocExtension_SetNumericProperty(key.encode(), value) == 1


class Steps:
    """The same training steps again and again; `watch` is called at every moment."""

    def __init__(self, scenario: str) -> None:
        transformers.utils.logging.set_verbosity_error()
        torch.manual_seed(0)
        config = GPT2Config(n_layer=8, n_embd=512, n_head=8, n_positions=1024, bos_token_id=0, eos_token_id=0)
        self.mixed = scenario == "mixed"
        self.model = GPT2LMHeadModel(config).train()
        self.model.config.use_cache = False
        self.model.generation_config.pad_token_id = 0
        if scenario != "plain":
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        shapes = [(2, 512), (3, 300), (1, 640)] if self.mixed else [(2, 512)]
        self.batches = [torch.randint(0, config.vocab_size, shape) for shape in shapes]
        self.landed = torch.ones(max(parameter.numel() for parameter in self.model.parameters()))
        self.watch: list[Callable[[], object]] = []
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self.take)
        for module in self.model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self.moment)

    def moment(self, *_: object) -> None:
        for look in self.watch:
            look()

    def take(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.landed[: parameter.numel()].copy_(parameter.grad.view(-1))
        parameter.grad = None
        self.moment()

    def run(self) -> list[float]:
        times = []
        for batch in self.batches:
            start = time.process_time()
            self.model(input_ids=batch, labels=batch).loss.backward()
            times.append(time.process_time() - start)
            if self.mixed:
                self.model.eval()
                with torch.no_grad():
                    self.model(input_ids=batch)
                    self.model.generate(batch[:1, :32], max_new_tokens=8, do_sample=False, use_cache=True)
                self.model.train()
        return times

    def free(self) -> None:
        self.watch = []
        gc.collect()
        release_free_memory()


class Guard:
    """Called at every moment: gives back what the allocator keeps where the coming stretch would pass the limit."""

    def __init__(self, kind: str, base: int, at: list[int], most: list[int]) -> None:
        self.base, self.at, self.most = base, at, most
        self.limits = [max(most)] * len(most) if kind == "peak" else most
        self.moment = self.releases = 0

    def __call__(self) -> None:
        self.moment += 1
        rise = self.most[self.moment] - self.at[self.moment]
        if resident_bytes() - self.base + rise > self.limits[self.moment] + SLACK:
            release_free_memory()
            self.releases += 1


def count_live_bytes(steps: Steps) -> tuple[list[int], list[int]]:
    """Live bytes at every moment, and the most between it and the next."""
    at, most = [0], [0]
    outside = [*steps.model.parameters(), *steps.model.buffers(), *steps.batches, steps.landed]
    with counting(outside) as live:

        def moment() -> None:
            most[-1], live["peak"] = live["peak"], live["now"]
            at.append(live["now"])
            most.append(live["now"])

        steps.watch = [moment]
        steps.run()
        most[-1] = live["peak"]
    return at, most


@contextlib.contextmanager
def counting(outside: Iterable[torch.Tensor]) -> Iterator[dict[str, int]]:
    """Bytes of all storages that operations made and that are alive: now, and at most. `outside` is not counted."""
    known = {tensor.untyped_storage()._cdata for tensor in outside}
    live = {"now": 0, "peak": 0}

    def dead(key: int, nbytes: int) -> None:
        known.discard(key)
        live["now"] -= nbytes

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in known:
                    storage = leaf.untyped_storage()
                    known.add(storage._cdata)
                    live["now"] += storage.nbytes()
                    live["peak"] = max(live["peak"], live["now"])
                    weakref.finalize(storage, dead, storage._cdata, storage.nbytes())
            return out

    with Count():
        yield live


if __name__ == "__main__":
    main()
