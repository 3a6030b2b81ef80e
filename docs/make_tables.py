"""Writes the tables of measured figures from `benchmarks/results/`.

    python docs/make_tables.py [--check]

A place is what stands between `<!-- generated: NAME -->` and `<!-- end of generated -->`. With `--check` nothing is written; the
exit status is 1 where a page is not up to date.
"""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from places import fill

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md",)
GIB = 1 << 30


def main() -> int:
    return fill(PAGES, "generated", TABLES, script=Path(__file__).name)


def result(name: str) -> dict[str, Any]:
    """What a benchmark has written."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def what_fits_where() -> str:
    """A step at several budgets, against plain PyTorch."""
    budgets, overhead = result("budgets"), result("overhead")
    rows = [row(entry) for entry in budgets["rows"]]
    machine, disk = budgets["machine"], budgets["disk_bytes_per_second"]
    ratio, ratios = overhead["ratio_of_medians"], overhead["ratios"]
    sizes = f"GPT-2 of {budgets['parameters'] / 1e6:.0f}M parameters in fp32, {budgets['tokens']} tokens a step"
    before = paragraph(
        f"{sizes}, model data (weight, gradient, two moments) {gib(budgets['rows'][0]['model_data_bytes'])}.",
        f"{machine['cores']} cores, and a disk that reads {disk['read'] / 1e9:.1f} and writes {disk['write'] / 1e9:.1f} GB/s.",
        "All rows are of one run, a step of each in turn; every loss has the same bits.",
    )
    after = paragraph(
        f"Where everything fits and no `host_memory` is given, a step of 512 tokens took {ratio:.2f} x that of plain PyTorch",
        f"with `AdamW(fused=True)` ({ratios[0]:.2f} to {ratios[-1]:.2f} over {len(ratios)} rounds).",
        "`python benchmarks/budgets.py` and `python benchmarks/overhead.py` measure both on your machine.",
    )
    head = "| `host_memory` | the process grew by | moved a step, each way | seconds a step | against plain PyTorch |"
    return "\n".join([before, "", head, "|---|---|---|---|---|", *rows, "", after])


def paragraph(*sentences: str) -> str:
    """Sentences as lines of a page."""
    return textwrap.fill(" ".join(sentences), width=125)


def row(entry: Mapping[str, Any]) -> str:
    """One budget."""
    moved = entry["moved"].get("K>H", 0)
    budget = gib(entry["budget_bytes"]) if entry["budget_bytes"] else "plain PyTorch"
    share = entry["budget_bytes"] / entry["model_data_bytes"]
    what = f"{budget}, {share:.0%} of the model data" if entry["budget_bytes"] else budget
    if entry["name"] == "minimum":
        what += ", the smallest that fits"
    ratios = entry["ratios"]
    against = (
        f"{statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})" if entry["budget_bytes"] else ""
    )
    return (
        f"| {what} | {gib(entry['growth_bytes'])} | {gib(moved) if moved else '-'} "
        f"| {entry['median_seconds']:.1f} | {against} |"
    )


def gib(nbytes: float) -> str:
    """A size."""
    return f"{nbytes / GIB:.2f} GiB"


TABLES: Mapping[str, Callable[[], str]] = {"what fits where": what_fits_where}


if __name__ == "__main__":
    sys.exit(main())
