"""Writes the table of `docs/benchmarks/gpu.md` from `benchmarks/results/gpu/`.

    python docs/make_gpu_page.py [--check]

A figure that no result has is "not measured". With `--check` nothing is written; the exit status is 1 where the page is not up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from places import fill

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
NOT_MEASURED = "not measured"
GB = 1e9


def main() -> int:
    return fill([PAGE], "gpu", TABLES, script=Path(__file__).name)


def result(part: str) -> Mapping[str, Any]:
    """What a part has found, or nothing; figures of a tiny scale are none."""
    file = RESULTS / f"{part}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found if found.get("scale") == "full" else {}


def at(part: str, *path: str) -> Any:
    """A figure by where it stands, or None."""
    found: Any = result(part)
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def share(found: Any, text: Callable[[float], str] = "{:.1%}".format) -> str:
    """The middle of a spread, and its ends."""
    if not found:
        return NOT_MEASURED
    return f"{text(found['median'])} ({text(found['least'])} to {text(found['most'])}, {found['count']} times)"


def times(found: Any) -> str:
    """The same of ratios."""
    return share(found, "{:.2f} x".format)


def one(number: Any, text: str) -> str:
    """A single figure."""
    return NOT_MEASURED if number is None else text.format(number)


def tokens_of(name: str, count: int) -> Any:
    """How fast a side is at so many tokens a step, over plain PyTorch."""
    return at("step", f"{name}, {count} tokens", "speed_over_first", name)


def against(peer: str) -> str:
    """How much faster the library is than a peer, or why the peer has not been measured."""
    why = at(peer, "missing", peer)
    if why is not None:
        return f"{NOT_MEASURED}: {why.partition(': ')[2]}"
    return times(at(peer, "steps", "speed_over_first", "managed"))


def targets() -> str:
    """A row for each thing that was to be shown."""
    numel = at("step", "numel")
    size = "4B to 6B" if numel is None else f"{numel / 1e9:.1f}B"
    idle = {count: at("eight", f"{count} tokens", "profile", "kernels_share") for count in (16384, 8192)}
    clipped, in_backward = at("largest-clipped", "numel"), at("largest-in-backward", "numel")
    equal = at("placement", "equal")
    pinned = at("eight", "16384 tokens", "pinned_over_asked")
    foreseen = at("eight", "16384 tokens", "device_foreseen_over_measured")
    rows = [
        (
            f"states off the device, in backward, 16k tokens, {size}: speed of plain PyTorch",
            ">= 95 %",
            share(tokens_of("states off", 16384)),
        ),
        (f"all off the device, in backward, 16k tokens, {size}", ">= 90 %", share(tokens_of("all off", 16384))),
        (f"all off the device, in backward, 8k tokens, {size}", ">= 85 %", share(tokens_of("all off", 8192))),
        (f"all off the device, deferred, 16k tokens, {size}", "reported", share(tokens_of("deferred", 16384))),
        (
            "model TFLOP/s, 8B, in backward, 16k tokens, all off",
            ">= 420 on an H200",
            share(at("eight", "16384 tokens", "model_tflops"), "{:.0f}".format),
        ),
        ("against FSDP2 with CPU offload", ">= 4 x", against("fsdp2")),
        ("against DeepSpeed ZeRO-3 with CPU offload", ">= 4 x", against("deepspeed")),
        ("largest model, in backward, no disk", ">= 18B on 139 GiB", one(in_backward and in_backward / 1e9, "{:.1f}B")),
        (
            "largest model, deferred and clipped, no disk",
            ">= 15B on 139 GiB",
            one(clipped and clipped / 1e9, "{:.1f}B"),
        ),
        ("pinned memory over what was asked for", "<= 1.02", one(pinned, "{:.3f}")),
        ("peak of the device, foreseen over measured, 8B", "0.97 to 1.00", one(foreseen, "{:.3f}")),
        ("the device idles, 8B, 16k tokens", "-", one(None if idle[16384] is None else 1 - idle[16384], "{:.1%}")),
        ("the device idles, 8B, 8k tokens", "<= 3 %", one(None if idle[8192] is None else 1 - idle[8192], "{:.1%}")),
        ("bits at all budgets and ways", "equal", NOT_MEASURED if equal is None else "equal" if equal else "not equal"),
    ]
    return "\n".join(["| what | must | measured |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def roofline() -> str:
    """What the machine reaches when it does one thing alone."""
    names = (
        "slots, up",
        "slots, down",
        "slots, both",
        "pinned by torch, up",
        "pinned by torch, down",
        "pageable, up",
        "pageable, down",
    )
    rows = [*names, "device, read and write", "host, read and write"]
    lines = [
        f"| {name} | {share(at('link', 'bytes_per_second', name), lambda n: f'{n / GB:.1f} GB/s')} |" for name in rows
    ]
    products = share(at("link", "bf16_flops_per_second"), lambda n: f"{n / 1e12:.0f} TFLOP/s")
    passes = at("kernels", "bytes_per_second") or {}
    lines += [f"| products in bf16, 8192 x 8192 | {products} |"]
    lines += [
        f"| {name} | {share(found, lambda n: f'{n / GB:.1f} GB/s')} |"
        for name, found in passes.items()
        if "median" in found
    ]
    lines += [] if passes else [f"| updates and norms | {NOT_MEASURED} |"]
    return "\n".join(["| what | measured |", "|---|---|", *lines])


def machine() -> str:
    """Where the figures come from."""
    lines = []
    for file in sorted(RESULTS.glob("*.json")):
        found = result(file.stem)
        if found:
            about = found["machine"]
            whole = "" if found["complete"] else "; it did not come to its end"
            lines.append(
                f"- `{found['command']}`: {about['gpu']}, CUDA {about['cuda']}, torch {about['torch']}, {about.get('cores', '?')} cores, "
                f"commit `{about['commit'][:12] or 'not known'}`{whole}"
            )
    return "\n".join(lines) or "No GPU has run them yet."


TABLES = {"targets": targets, "roofline": roofline, "machine": machine}


if __name__ == "__main__":
    sys.exit(main())
