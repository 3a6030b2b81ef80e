"""What a memory allocator holds over the live tensors of a training step.

    python benchmarks/allocators.py [--rounds 2] [--output benchmarks/results/allocators.json]

A GPT-2-shaped decoder (8 layers of 512, 1,024 tokens, vocabulary 50,257, fp32) runs steps of forward and backward; gradients
are copied away and freed as they land, as a session does. Every (allocator, scenario) pair runs in a fresh process, pairs
interleaved over the rounds. In each process the same steps run three times: as they are, for peak and time; with the resident
size read at every moment; and under a dispatch mode that counts the bytes of live storages at the same moments.

    peak      VmHWM over the size before the first step
    live      the largest sum of live tensor bytes, counted by finalizers on storages
    excess    the most that the resident growth exceeded the live bytes of the same moment: what a plan that lets chunks
              into the room that activations leave would overrun by
    settled   growth that is left after everything is freed: lazy imports, thread pools, workspaces

Times are comparable only on an idle machine.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB = 1 << 20
SCENARIOS = ("plain", "checkpointed", "mixed")

# name -> (preload tcmalloc, environment, mallopt settings, tcmalloc properties)
VARIANTS: dict[str, tuple[bool, dict[str, str], dict[int, int], dict[str, int]]] = {
    "glibc": (False, {}, {}, {}),
    "glibc 1 MiB": (False, {}, {-3: 1 << 20, -1: 1 << 20, -2: 0}, {}),
    "glibc 128 KiB": (False, {}, {-3: 128 << 10, -1: 128 << 10, -2: 0}, {}),
    "glibc 128 KiB, one arena": (False, {}, {-3: 128 << 10, -1: 128 << 10, -2: 0, -8: 1}, {}),
    "glibc 128 KiB, huge pages": (
        False,
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        {-3: 128 << 10, -1: 128 << 10, -2: 0},
        {},
    ),
    "tcmalloc": (True, {}, {}, {}),
    "tcmalloc, decommit": (True, {}, {}, {"tcmalloc.aggressive_memory_decommit": 1}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "allocators.json")
    parser.add_argument("--only", help="run only variants whose name contains this")
    parser.add_argument("--child", nargs=2, metavar=("VARIANT", "SCENARIO"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(*arguments.child)))
        return

    from patrickstar.memory.allocators import tcmalloc_library

    library = tcmalloc_library()
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for scenario in SCENARIOS:
            for variant, (preload, environment, _, _) in VARIANTS.items():
                if (preload and library is None) or (arguments.only and arguments.only not in variant):
                    continue
                extra = {**environment, **({"LD_PRELOAD": str(library)} if preload else {})}
                child = subprocess.run(
                    [sys.executable, __file__, "--child", variant, scenario],
                    env={**os.environ, **extra},
                    capture_output=True,
                    text=True,
                    check=True,
                )
                row = json.loads(child.stdout.splitlines()[-1])
                rows.setdefault((variant, scenario), []).append(row)
                print(json.dumps(row), flush=True)
    if library is None:
        print("tcmalloc is not installed: left out")

    summary = [summarise(found) for found in rows.values()]
    arguments.output.write_text(json.dumps({"machine": machine(), "rounds": arguments.rounds, "rows": summary}, indent=1))
    print(f"\n{'allocator':28}{'scenario':14}{'live':>7}{'peak':>7}{'ratio':>7}{'excess':>8}{'settled':>9}{'step s':>8}")
    for row in summary:
        print(
            f"{row['variant']:28}{row['scenario']:14}{row['live_mib']:7.0f}{row['peak_mib']:7.0f}"
            f"{row['peak_mib'] / row['live_mib']:7.2f}{row['excess_mib']:8.0f}{row['settled_mib']:9.0f}{row['step_s']:8.2f}"
        )


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest of every memory figure over the rounds, the median of the times."""
    most = {key: round(max(row[key] for row in rows), 1) for key in rows[0] if key.endswith("_mib")}
    times = [step for row in rows for step in row["steps_s"]]
    return {**{key: rows[0][key] for key in ("variant", "scenario")}, **most, "step_s": round(statistics.median(times), 3)}


def machine() -> dict[str, Any]:
    import torch
    import transformers

    return {
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def measure(variant: str, scenario: str) -> dict[str, Any]:
    """One process: three passes over the same steps."""
    _, _, options, properties = VARIANTS[variant]
    library = ctypes.CDLL(None)
    for option, value in options.items():
        assert library.mallopt(option, value) == 1
    for name, value in properties.items():
        library.MallocExtension_SetNumericProperty.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        assert library.MallocExtension_SetNumericProperty(name.encode(), value) == 1

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = GPT2Config(n_layer=8, n_embd=512, n_head=8, n_positions=1024, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()
    if scenario != "plain":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    model.generation_config.pad_token_id = 0
    landed = torch.zeros(max(parameter.numel() for parameter in model.parameters()))
    landed += 0
    shapes = [(2, 512)] * 4 if scenario != "mixed" else [(2, 512), (3, 300), (1, 640), (2, 512), (5, 177), (2, 512)]
    batches = [torch.randint(0, config.vocab_size, shape) for shape in shapes]

    watch: list[Callable[[], None]] = []

    def entered(*_: object) -> None:
        for look in watch:
            look()

    for parameter in model.parameters():

        def take(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            landed[: parameter.numel()].copy_(parameter.grad.view(-1))
            parameter.grad = None
            for look in watch:
                look()

        parameter.register_post_accumulate_grad_hook(take)
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(entered)

    def steps() -> list[float]:
        times = []
        for batch in batches:
            start = time.perf_counter()
            model(input_ids=batch, labels=batch).loss.backward()
            times.append(time.perf_counter() - start)
            if scenario == "mixed":
                model.eval()
                with torch.no_grad():
                    model(input_ids=batch)
                    model.generate(batch[:1, :32], max_new_tokens=8, do_sample=False, use_cache=True)
                model.train()
        return times

    gc.collect()
    release(library)
    Path("/proc/self/clear_refs").write_text("5")
    base = status("VmRSS")
    times = steps()
    peak = status("VmHWM") - base
    first_seen: list[int] = []
    watch.append(lambda: first_seen.append(status("VmRSS") - base))
    steps()
    watch.clear()
    gc.collect()
    release(library)
    settled = status("VmRSS") - base
    counted: list[int] = []
    with counting_live_bytes(model) as live:
        watch.append(lambda: counted.append(live["now"]))
        steps()
        watch.clear()
    assert len(counted) == len(first_seen)
    excess = max(size - alive for size, alive in zip(first_seen, counted, strict=True))
    return {
        "variant": variant,
        "scenario": scenario,
        "live_mib": live["peak"] / MIB,
        "peak_mib": peak / MIB,
        "excess_mib": excess / MIB,
        "settled_mib": settled / MIB,
        "steps_s": times[1:],
    }


def release(library: ctypes.CDLL) -> None:
    """Give back what the allocator keeps."""
    if hasattr(library, "MallocExtension_ReleaseFreeMemory"):
        library.MallocExtension_ReleaseFreeMemory()
    else:
        library.malloc_trim(0)


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


@contextlib.contextmanager
def counting_live_bytes(model: Any) -> Iterator[dict[str, int]]:
    """Bytes of all storages that operations made and that are alive: now, and at most."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    import torch

    known: set[int] = set()
    live = {"now": 0, "peak": 0}

    def dead(key: int, nbytes: int) -> None:
        known.discard(key)
        live["now"] -= nbytes

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    storage = leaf.untyped_storage()
                    if storage._cdata not in known:
                        known.add(storage._cdata)
                        live["now"] += storage.nbytes()
                        live["peak"] = max(live["peak"], live["now"])
                        weakref.finalize(storage, dead, storage._cdata, storage.nbytes())
            return out

    for tensor in [*model.parameters(), *model.buffers()]:
        known.add(tensor.untyped_storage()._cdata)
    with Count():
        yield live


if __name__ == "__main__":
    main()
