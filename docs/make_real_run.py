"""A real run: trains a decoder on text in several precisions, checks what must have the same bits, and writes `docs/real-run.md`.

    python docs/make_real_run.py --work DIR [--data PATH...] [--steps N] [--only NAME...] [--minutes N]
    python docs/make_real_run.py [--check]

The first trains each run in turn (`real_run_stage.py`), in processes that go on from where they were: with `--minutes` this program stops after
about as long, with exit status 75, and is called again with the same arguments. When all have ended, their figures are kept in
`docs/real-run.json` and drawn in `docs/images/real-run.svg`. Plain PyTorch and `precision="fp32"` must agree in every bit of every loss and of
the final weights, or nothing is kept and the exit status is 1.

The second fills the page from the figures; with `--check` it only looks whether page and picture are up to date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import runpy
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from places import fill

DOCS = Path(__file__).parent
FIGURES = DOCS / "real-run.json"
PICTURE = DOCS / "images" / "real-run.svg"
PAGE = DOCS / "real-run.md"

MODEL: Final = MappingProxyType(
    {
        "model_type": "gpt2",
        "vocab_size": 4096,
        "n_positions": 128,
        "n_embd": 512,
        "n_layer": 6,
        "n_head": 8,
        # As in current pre-training, and in `patrickstar train`.
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    }
)
NAMES: Final = ("plain", "fp32", "bf16", "fp16")
UNFINISHED: Final = 75
LAST: Final = 50  # steps whose mean is called the training loss at the end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where runs keep their state; without it only the page is written")
    parser.add_argument("--data", nargs="+", default=[], help="text; without it the standard library's sources")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="leave the other runs out")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=DOCS, help="where figures and picture go")
    parser.add_argument("--check", action="store_true", help="look whether the page is up to date, write nothing")
    arguments = parser.parse_args()
    if arguments.work is None:
        return write_page()
    status = train(arguments)
    if status == 0:
        figures = collect(arguments)
        if figures is None:
            return 1
        write_figures(figures, arguments.out)
        if arguments.out == DOCS:
            return write_page()
    return status


# training


def train(arguments: argparse.Namespace) -> int:
    """Every run in turn; gives the exit status of the first that does not end."""
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    wanted = {
        "settings": dict(MODEL),
        "data": arguments.data,
        "steps": arguments.steps,
        "batch_size": 2,
        "seq_len": 128,
        "lr": 1e-3,
        "seed": 0,
        "look_every": max(5, arguments.steps // 20),
        "save_every": 200,
    }
    course = work / "course.json"
    if course.exists() and json.loads(course.read_text()) != wanted:
        sys.stderr.write(f"{work} has runs of another kind (course.json): name another directory\n")
        return 2
    course.write_text(json.dumps(wanted, indent=1) + "\n")
    began = time.monotonic()
    for name in arguments.only:
        home = work / name
        if (home / "end.json").exists():
            continue
        home.mkdir(exist_ok=True)
        if not (home / "machine.json").exists():
            (home / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")
        left = arguments.minutes - (time.monotonic() - began) / 60
        command = [sys.executable, str(DOCS / "real_run_stage.py"), str(work), name, "--minutes", str(left)]
        done = subprocess.run(command, check=False)  # noqa: S603 - the other half of this program
        if done.returncode:
            return done.returncode
    return 0


def machine() -> dict[str, Any]:
    """What a figure belongs to."""
    found: dict[str, Any] = runpy.run_path(str(DOCS.parent / "benchmarks" / "machine.py"))["describe_machine"]()
    return found


# figures


def collect(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of all runs; None, and a word on standard error, where bits differ that must not."""
    work = arguments.work
    course = json.loads((work / "course.json").read_text())
    runs = {name: figures_of(work / name) for name in arguments.only}
    ends = {name: json.loads((work / name / "end.json").read_text()) for name in runs}
    same = None
    if {"plain", "fp32"} <= runs.keys():
        same, problem = compare(runs, ends)
        if problem:
            sys.stderr.write(f"plain PyTorch gives other bits than precision='fp32': {problem}\n")
            return None
    first = next(iter(ends.values()))
    about = {key: first[key] for key in ("parameters", "corpus", "tokenizer", "train_tokens", "validation_tokens")}
    command = ["python", "docs/make_real_run.py", "--work", "DIR"]
    command += ["--data", "PATH"] if arguments.data else []
    command += ["--only", *runs] if tuple(runs) != NAMES else []
    return {
        "what": "a decoder trained on text in several precisions, from the same weights on the same batches",
        "command": " ".join(command),
        "course": {**course, "data": [Path(path).name for path in course["data"]]},
        **about,
        "same_bits": same,
        "runs": runs,
    }


def figures_of(home: Path) -> dict[str, Any]:
    """What one run has logged."""
    rows = [json.loads(line) for line in (home / "log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["event"] == "step"]
    end = json.loads((home / "end.json").read_text())
    kept = ("budget_bytes", "bytes_per_parameter", "updates", "loss_scale")
    return {
        "machine": json.loads((home / "machine.json").read_text()),
        "median_seconds": statistics.median(row["seconds"] for row in steps),
        "grew_bytes": max(row["grew_bytes"] for row in steps),
        **{key: end[key] for key in kept if end.get(key) is not None},
        "held_out": [[row["step"], row["loss"], row["accuracy"]] for row in rows if row["event"] == "look"],
        "losses": [row["loss"] for row in steps],
    }


def compare(runs: Mapping[str, Any], ends: Mapping[str, Any]) -> tuple[dict[str, int], str]:
    """How much was compared, and the first difference in words, if there is one."""
    plain, ours = runs["plain"], runs["fp32"]
    for what in ("losses", "held_out"):
        # Every bit of a float stands in its shortest decimal form; NaN does too.
        pairs = zip(map(repr, plain[what]), map(repr, ours[what]), strict=True)
        for number, (wanted, got) in enumerate(pairs, start=1):
            if wanted != got:
                return {}, f"{what}, {number}: {wanted} and {got}"
    wanted, got = ends["plain"]["digests"], ends["fp32"]["digests"]
    differ = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
    if differ:
        return {}, f"{len(differ)} of {len(wanted)} tensors at the end, {differ[0]} first"
    return {"losses": len(plain["losses"]), "looks": len(plain["held_out"]), "tensors": len(wanted)}, ""


def write_figures(figures: Mapping[str, Any], out: Path) -> None:
    """The figures, a run a line, and their picture."""
    import real_run_picture  # noqa: PLC0415 - needs matplotlib, which only drawing does

    (out / "images").mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in figures.items() if key != "runs"]
    runs = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in figures["runs"].items())
    text = "{\n" + ",\n".join([*lines, '"runs": {\n' + runs + "\n}"]) + "\n}\n"
    (out / FIGURES.name).write_text(text)
    real_run_picture.draw(figures, out / "images" / PICTURE.name, mark=mark(text))


def mark(text: str) -> str:
    """What the picture carries of the figures that it was drawn from."""
    return f"figures {hashlib.sha256(text.encode()).hexdigest()[:16]}"


# the page


def write_page() -> int:
    if mark(FIGURES.read_text()) not in PICTURE.read_text():
        sys.stderr.write(f"{PICTURE.name}: drawn from other figures than {FIGURES.name} has\n")
        return 1
    return fill([PAGE], "generated", TEXTS, script=Path(__file__).name)


def read_figures() -> dict[str, Any]:
    """As `write_figures` has left them."""
    figures: dict[str, Any] = json.loads(FIGURES.read_text())
    return figures


def what_was_run() -> str:
    """Model, text and course."""
    figures = read_figures()
    course, settings = figures["course"], figures["course"]["settings"]
    machine = next(iter(figures["runs"].values()))["machine"]
    return paragraph(
        f"transformers' GPT-2, unmodified, with {settings['n_layer']} layers of width {settings['n_embd']}:",
        f"{figures['parameters'] / 1e6:.1f}M parameters. The text is {figures['corpus']}, as {figures['tokenizer']}:",
        f"{figures['train_tokens'] / 1e6:.1f}M tokens to train on, {figures['validation_tokens'] / 1e6:.2f}M held out.",
        f"{course['steps']:,} steps of {course['batch_size']} sequences of {course['seq_len']} tokens, dropout off; AdamW with a",
        f"learning rate that rises to {course['lr']:g} and falls along a cosine to a tenth of it, as `patrickstar train` has it; no clipping.",
        "Every run starts from the same weights and sees the same batches.",
        f"{machine['threads']} of {machine['cores']} cores, torch {machine['torch']}.",
    )


def same_bits() -> str:
    """What was compared."""
    figures = read_figures()
    same, run = figures["same_bits"], figures["runs"]["fp32"]
    share = run["budget_bytes"] / (16 * figures["parameters"])
    return paragraph(
        f"In fp32 the process may hold {share:.0%} of the model data, {run['budget_bytes'] / MIB:.0f} MiB, and the rest lies on a disk.",
        f"All {same['losses']:,} losses, the losses and accuracies of all {same['looks']} looks at held-out text, and all {same['tensors']}",
        "tensors at the end have the bits of plain PyTorch with `torch.optim.AdamW(fused=True)`.",
        "The script compares them, and fails where one differs.",
    )


def how_they_end() -> str:
    """A row a run."""
    figures = read_figures()
    plain = figures["runs"].get("plain")
    head = (
        f"| run | training loss, mean of the last {LAST} steps | held-out loss | tokens guessed right "
        "| farthest from plain PyTorch on held-out text | bytes a parameter | the process grew by |"
    )
    rows = [
        "| "
        + " | ".join(
            [
                TITLES[name],
                f"{statistics.fmean(run['losses'][-LAST:]):.4f}",
                f"{run['held_out'][-1][1]:.4f}",
                f"{run['held_out'][-1][2]:.2%}",
                "-" if plain is None or name == "plain" else farthest(run["held_out"], plain["held_out"]),
                f"{run['bytes_per_parameter']:.1f}" if "bytes_per_parameter" in run else "16",
                f"{run['grew_bytes'] / MIB:.0f} MiB",
            ]
        )
        + " |"
        for name, run in figures["runs"].items()
    ]
    return "\n".join([head, "|---" * 7 + "|", *rows])


def farthest(ours: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> str:
    """The largest difference of two curves of held-out losses, and where."""
    gap, step = max((abs(our[1] - other[1]), our[0]) for our, other in zip(ours, plain, strict=True))
    return f"{gap:.2g} at step {step}" if gap else "0"


def paragraph(*sentences: str) -> str:
    """Sentences as lines of a page."""
    return textwrap.fill(" ".join(sentences), width=125)


TITLES: Final = MappingProxyType(
    {
        "plain": "plain PyTorch, fp32",
        "fp32": '`precision="fp32"`, memory for half of the model data',
        "bf16": '`precision="bf16"`',
        "fp16": '`precision="fp16"`',
    }
)
MIB: Final = 1 << 20
TEXTS: Final[Mapping[str, Callable[[], str]]] = MappingProxyType(
    {"real run": what_was_run, "same bits": same_bits, "how they end": how_they_end}
)


if __name__ == "__main__":
    sys.exit(main())
