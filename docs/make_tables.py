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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from places import fill

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "steps.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("ranks", "long-sequences", "tensor-2d", "elastic", "scheduling")),
)
GIB = 1 << 30
MIB = 1 << 20


def main() -> int:
    return fill(PAGES, "generated", TABLES, script=Path(__file__).name)


def result(name: str) -> dict[str, Any]:
    """What a benchmark has written."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def what_trains_under_a_cap() -> str:
    """Contenders by model and cap, each with its peak and its seconds."""
    found = result("compare")
    machine, versions, cells = found["machine"], found["versions"], found["cells"]
    columns = list(dict.fromkeys((cell["cap_bytes"], cell["model"]) for cell in cells))
    by_place = {(cell["contender"], cell["cap_bytes"], cell["model"]): cell for cell in cells}
    rows = [
        f"| {title} | {' | '.join(cap_cell(by_place[(name, *column)]) for column in columns)} |"
        for name, title in found["contenders"].items()
    ]
    heads = [f"{model} in {nbytes / GIB:g} GiB" for nbytes, model in columns]
    libraries = ", ".join(f"{name} {number}" for name, number in versions.items())
    before = paragraph(
        f"GPT-2 in fp32, one sequence of {found['tokens']} tokens, activation checkpointing, under a cap on the whole process (resident memory",
        "without shared files). A cell has the peak RSS and s/step, as the median and range of some steps of one run; `no`: the process passed",
        "the cap, or that of a smaller model did." + busy(found["load"], machine["cores"]),
        f"{machine['cores']} cores ({machine['cpu'].strip()}), a disk; {libraries}. `make bench-compare`",
        "measures it on your machine, and [this page](docs/others.md) says how.",
    )
    return "\n".join([before, "", f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|", *rows])


def busy(load: list[float], cores: int) -> str:
    """A warning where more may have run than a contender, which keeps all cores busy by itself."""
    if load[1] <= 1.5 * cores:
        return ""
    return f" The load average was {load[0]:.1f} to {load[1]:.1f} on {cores} cores, of which a contender makes {cores}: compare seconds with care."


def cap_cell(cell: Mapping[str, Any]) -> str:
    """A model under a cap: what it took, or why there is nothing to say."""
    if not cell["trained"]:
        return (
            "no" if cell["why"] == "passed the cap" or cell["why"].endswith("did not train") else f"no: {cell['why']}"
        )
    seconds = cell["seconds"]
    spread_of = f"{statistics.median(seconds):.1f} s/step ({min(seconds):.1f} to {max(seconds):.1f})"
    return f"{gib(cell['peak_bytes'])}, {spread_of}"


def what_fits_where() -> str:
    """A step at several budgets, against plain PyTorch."""
    budgets, overhead = result("budgets"), result("overhead")
    rows = [row(entry) for entry in budgets["rows"]]
    machine, disk = budgets["machine"], budgets["disk_bytes_per_second"]
    ratio, ratios = overhead["ratio_of_medians"], overhead["ratios"]
    sizes = f"GPT-2 of {budgets['parameters'] / 1e6:.0f}M parameters in fp32, {budgets['tokens']} tokens per step"
    before = paragraph(
        f"{sizes}, model states (weight, gradient, two optimizer states) {gib(budgets['rows'][0]['model_data_bytes'])}.",
        f"{machine['cores']} cores, and a disk that reads {disk['read'] / 1e9:.1f} and writes {disk['write'] / 1e9:.1f} GB/s,",
        f"{disk['both'] / 1e9:.1f} GB/s of both together.",
        "All rows are of one run, a step of each in turn; every loss has the same bits.",
    )
    after = paragraph(
        f"Where everything fits and no `host_memory` is given, a step of 512 tokens took {ratio:.2f} x that of plain PyTorch",
        f"with `AdamW(fused=True)` ({ratios[0]:.2f} to {ratios[-1]:.2f} over {len(ratios)} rounds).",
        "`python benchmarks/budgets.py` and `python benchmarks/overhead.py` measure both on your machine.",
    )
    head = "| `host_memory` | peak RSS increase | transferred per step, each way | s/step | against plain PyTorch |"
    return "\n".join([before, "", head, "|---|---|---|---|---|", *rows, "", after])


def paragraph(*sentences: str) -> str:
    """Sentences as lines of a page."""
    return textwrap.fill(" ".join(sentences), width=125)


def row(entry: Mapping[str, Any]) -> str:
    """One budget."""
    moved = entry["moved"].get("K>H", 0)
    what, budget = NAMES.get(entry["name"], ""), entry["budget_bytes"]
    if budget:
        what = f"{gib(budget)}, {budget / entry['model_data_bytes']:.0%} of the model states{what}"
    against = spread(entry["ratios"]) if entry["name"] != "plain" else ""
    return (
        f"| {what} | {gib(entry['growth_bytes'])} | {gib(moved) if moved else '-'} "
        f"| {entry['median_seconds']:.1f} | {against} |"
    )


NAMES: Final = {
    "plain": "plain PyTorch",
    "fsdp2": "FSDP2 on one rank, nothing offloaded",
    "no budget": "none",
    "minimum": ", the smallest that fits",
}
"""Sides of `benchmarks/budgets.py`, as a row calls them."""


def gib(nbytes: float) -> str:
    """A size."""
    return f"{nbytes / GIB:.2f} GiB"


def steps() -> str:
    """A step by variant, every optimization on and off."""
    found = result("step")
    machine = found["machine"]
    peaks, disk = machine["matmul_flops_per_second"], machine["disk_bytes_per_second"]
    rounds = len(found["rows"][0]["seconds"])
    speeds = " and ".join(f"{peak / 1e12:.2f} TFLOP/s in {name}" for name, peak in peaks.items())
    before = paragraph(
        f"{found['model']}: {found['parameters'] / 1e6:.1f}M parameters, {found['batch_size']} sequences of {found['seq_len']} random tokens,",
        f"{found['model_flops'] / 1e9:.0f} GFLOP per step without activation checkpointing.",
        f"{machine['cores']} cores, torch {machine['torch']}; products of large matrices reach {speeds}.",
        f"The disk reads {disk['read'] / 1e9:.1f} and writes {disk['write'] / 1e9:.1f} GB/s." if disk else "",
        f"All rows are of one run of {rounds} rounds, a step of each in turn.",
    )
    head = (
        "| variant | s/step | against the first | against its base line | TFLOP/s, model | executed | tokens/s | transferred per step "
        "| peak RSS increase | of the roofline |"
    )
    left_out = [f"- `{variant}` did not run: {why.splitlines()[0]}" for variant, why in found["refused"].items()]
    rows = [variant_row(entry) for entry in found["rows"]]
    return "\n".join([before, "", head, "|---" * 10 + "|", *rows, *(["", *left_out] if left_out else [])])


def variant_row(entry: Mapping[str, Any]) -> str:
    """One variant."""
    seconds, moved = entry["seconds"], entry["moved"]
    base_line = f"{spread(entry['base_line_ratios'])} of `{entry['base_line']}`" if entry["base_line"] else "-"
    bounds = "".join(f", `{name}` {nbytes / MIB:.0f} MiB" for name, nbytes in entry["bound_bytes"].items())
    links = ", ".join(f"{link} {nbytes / MIB:.0f} MiB" for link, nbytes in moved.items() if nbytes)
    return (
        f"| `{entry['variant']}`{bounds} | {entry['median_seconds']:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) "
        f"| {spread(entry['ratios'])} | {base_line} | {entry['model_tflops']:.3f} | {entry['executed_tflops']:.3f} "
        f"| {entry['tokens_per_second']:.0f} | {links or '-'} | {entry['grew_bytes'] / MIB:.0f} MiB | {entry['share_of_roofline']:.0%} |"
    )


def spread(ratios: list[float]) -> str:
    """The middle one, the smallest and the largest; they are sorted."""
    return f"{statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def ranks() -> str:
    """Steps of several ranks, beside FSDP2's."""
    found = [result(f"ranks-{precision}") for precision in ("fp32", "bf16")]
    first, machine = found[0], found[0]["machine"]
    before = paragraph(
        f"A GPT-2 of {first['layers']} layers of {first['width']}, one sequence of {first['tokens']} tokens a rank, all in memory, over gloo on one",
        f"machine ({machine['cores']} cores, {machine['cpu'].strip()}, torch {machine['torch']}, which ranks share): seconds of a step, medians",
        "of steps taken in turn with those of FSDP2 (`fully_shard` of each block, `AdamW(fused=True)`), their ratio with its 90 % interval, and",
        "what a rank sends.",
        "`python benchmarks/ranks.py` measures it on your machine.",
    )
    rows = [
        f"| {one['ranks']} | {one['precision']} | {one['seconds']['ours']:.2f} | {one['seconds']['fsdp2']:.2f} | {one['ratio']:.2f} "
        f"({one['ratio_interval'][0]:.2f} to {one['ratio_interval'][1]:.2f}) | {one['sent_bytes'] / MIB:.0f} MiB |"
        for of_precision in found
        for one in of_precision["rows"]
    ]
    heads = "| ranks | precision | s/step | FSDP2 | ratio | sent |"
    return "\n".join([before, "", heads, "|---" * 6 + "|", *rows])


def sequences() -> str:
    """Ways of attention over ranks, beside each other."""
    found = result("sequences")
    machine, rows = found["machine"], found["sequences"]
    before = paragraph(
        f"Causal attention, forward and backward, of one sequence of {rows[0]['tokens']} tokens (8 heads of 64, fp32), by ranks over gloo that",
        f"share one machine ({machine['cores']} cores, {machine['cpu'].strip()}, torch {machine['torch']}): medians of ratios of runs in",
        "turn, with their 90 % interval. Paced hops take half as long, in all, as computing. `python benchmarks/sequences.py` measures it on yours.",
    )
    cells = [
        f"| {row['ranks']} | {row['seconds']['zigzag']:.2f} | {' | '.join(ratio(row[way]) for way in ('zigzag', 'gathered', 'paced'))} |"
        for row in rows
    ]
    heads = (
        "| ranks | zigzag, s | of contiguous parts | of gathering keys and values first | paced hops, of nothing sent |"
    )
    return "\n".join([before, "", heads, "|---" * 5 + "|", *cells])


def blocks() -> str:
    """Blocks beside 1D tensor parallelism."""
    found = result("sequences")
    before = paragraph(
        "Forward and backward of a Llama (4 layers of 512) on 4 ranks over gloo that share one machine, in 2 x 2 blocks, and under torch's 1D tensor",
        "parallelism: medians of runs taken in turn, their ratio with its 90 % interval, and what a rank sends.",
    )
    cells = [
        f"| {row['tokens']} ({row['tokens_over_hidden']:g} h) | {row['seconds']['2d']:.2f} | {row['seconds']['1d']:.2f} | {ratio(row)} "
        f"| {row['sent']['2d'] / MIB:.0f} and {row['sent']['1d'] / MIB:.0f} MiB |"
        for row in found["blocks"]
    ]
    heads = "| tokens | 2D, s | 1D, s | ratio | sent, 2D and 1D |"
    return "\n".join([before, "", heads, "|---" * 5 + "|", *cells])


def tokens_in_memory() -> str:
    """The longest sequence in the same memory a rank."""
    return in_memory(0, "one sequence", "tokens")


def rows_in_memory() -> str:
    """The largest batch in the same memory a rank."""
    return in_memory(2, f"sequences of {result('mesh_memory')['rows_of']} tokens", "sequences")


def in_memory(first: int, batch: str, unit: str) -> str:
    """One process and 4 ranks, of which the rows of the result begin at `first`."""
    found = result("mesh_memory")
    model, pair = found["model"], found["rows"][first : first + 2]
    before = paragraph(
        f"What trains in `host_memory` of {found['memory_bytes'] // MIB} MiB for each rank ({batch}; a Llama of {model['layers']} layers of",
        f"{model['width']} and {model['vocabulary']} tokens, fp32, AdamW, nothing recomputed), whose activations are most of it: sizes found by",
        "forecasts, trained for two steps, and with a sixteenth more refused. `python benchmarks/mesh_memory.py` measures it on yours.",
    )
    cells = [
        f"| {row['name']} | {row['largest']} | {row.get('ratio', 1):.2f} x "
        f"| {max(row['peak_bytes']) / MIB:.0f} MiB | {row['state_bytes'] / MIB:.0f} MiB |"
        for row in pair
    ]
    return "\n".join(
        [before, "", f"| | {unit} | | peak RSS increase of a rank | of it model states |", "|---" * 5 + "|", *cells]
    )


def ratio(row: Mapping[str, Any]) -> str:
    """A ratio, and its interval."""
    low, high = row["interval"]
    return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def scheduling(part: str) -> str:
    """Policies beside each other, by workload or load; simulated."""
    found = result("cluster")
    names = {"fitted": "workload", "artifact": "load", "short": None, "robust": "sigma"}
    first = names[part]
    heads = [
        *([first] if first else []),
        "policy",
        "resize",
        "mean JCT, s",
        *(["published"] if part == "artifact" else []),
    ]
    heads += ["p50", "p99", "makespan, h", "GPU time lost", "worst FTF", "resizes per job"]
    rows = []
    for row in found[part]:
        published = row.get("published")
        cells = [
            *([str(row[first]).removesuffix("-fitted")] if first else []),
            f"`{row['policy']}`",
            f"{row['resize_s']:g} s",
        ]
        cells.append(f"{row['mean_jct']:.0f}")
        if part == "artifact":
            cells.append(f"{published} ({row['mean_jct'] / published - 1:+.1%})" if published else "")
        cells += [f"{row['p50_jct']:.0f}", f"{row['p99_jct']:.0f}", f"{row['makespan'] / 3600:.1f}"]
        cells += [f"{row['lost']:.1%}", f"{row['worst_ftf']:.1f}", f"{row['resizes']:.1f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [f"Simulated, {found['gpus']} GPUs.", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows]
    )


def resizes() -> str:
    """Changes of the number of ranks, beside save, stop, start, load."""
    found = result("elastic")
    machine, rounds = found["machine"], found["rounds"]
    low, high = found["step_ratio_interval"]
    carried = sorted(one["loopback"] for one in rounds)
    before = paragraph(
        f"GPT-2 (124M, fp32) on ranks that share one machine ({machine['cores']} cores, {machine['cpu'].strip()}, torch {machine['torch']}), with",
        "warm processes: seconds from the last update to the first forward after, on the slowest rank, and of the same job that is told to save",
        f"and stop, and started again. Medians of {len(rounds)} rounds in turn, with the smallest and the largest. The loopback carries",
        f"{statistics.median(carried) / 1e9:.1f} GB/s ({carried[0] / 1e9:.1f} to {carried[-1] / 1e9:.1f}). A step under `elastic run` takes",
        f"{found['step_ratio']:.3f} ({low:.3f} to {high:.3f}) of one alone. `python benchmarks/elastic.py` measures it on yours.",
    )
    rows = []
    for at, (old, new) in enumerate(pairwise(found["sizes"])):
        ours, theirs = ([one["in_process"]["seconds"][at] for one in rounds], [one["stopped"][at] for one in rounds])
        moved = rounds[0]["in_process"]["moved_bytes"][at]
        cells = (f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in (ours, theirs))
        rows.append(f"| {old} to {new} | {' | '.join(cells)} | {moved / 1e6:.0f} MB |")
    heads = "| ranks | resized, s | stopped and started, s | moved |"
    return "\n".join([before, "", heads, "|---" * 4 + "|", *rows])


def decisions() -> str:
    """Seconds of single decisions, measured."""
    found = result("cluster")
    machine = found["machine"]
    rows = [
        f"| `{row['policy']}` | {row['gpus']} GPUs, {row['jobs']} jobs | {row['p50'] * 1e3:.1f} ms | {row['p99'] * 1e3:.1f} ms |"
        for row in found["decisions"]
    ]
    before = f"Measured on one of {machine['cores']} cores ({machine['cpu'].strip()}); NumPy {machine['numpy']}."
    return "\n".join([before, "", "| policy | | p50 | p99 |", "|---|---|---|---|", *rows])


TABLES: Mapping[str, Callable[[], str]] = {
    "what trains under a cap": what_trains_under_a_cap,
    "what fits where": what_fits_where,
    "steps": steps,
    "ranks": ranks,
    "sequences": sequences,
    "blocks": blocks,
    "tokens in memory": tokens_in_memory,
    "rows in memory": rows_in_memory,
    **{f"scheduling {part}": partial(scheduling, part) for part in ("fitted", "artifact", "short", "robust")},
    "scheduling decisions": decisions,
    "resizes": resizes,
}


if __name__ == "__main__":
    sys.exit(main())
