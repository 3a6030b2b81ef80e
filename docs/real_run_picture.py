"""The picture of `docs/real-run.md`: curves of several runs over the same steps. Needs matplotlib (`pip install 'patrickstar[docs]'`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["draw"]

SMOOTHED: Final = 20  # steps whose mean is a point: single batches say more about the text than about the training
# Name in the figures: label, and how the line looks. The dashed one lies exactly on the broad one, so both must be seen.
LINES: Final = (
    ("plain", "plain PyTorch, fp32", {"color": "#b0b8c4", "linewidth": 4.0}),
    ("fp32", "fp32, half in memory (same bits)", {"color": "#1f2937", "linewidth": 1.0, "linestyle": (0, (4, 3))}),
    ("bf16", "bf16", {"color": "#2563eb", "linewidth": 1.0}),
    ("fp16", "fp16", {"color": "#dc2626", "linewidth": 1.0}),
)
SETTINGS: Final = {
    "svg.hashsalt": "patrickstar",  # else every drawing has other names inside
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
}


def draw(figures: Mapping[str, Any], path: Path, *, mark: str) -> None:
    """Writes the picture as SVG; it carries `mark`, which says from what it was drawn."""
    runs = figures["runs"]
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(9.0, 6.0), layout="constrained")
        training, held_out, accuracy, apart = figure.subplots(2, 2).flat
        _titles(training, f"training loss (mean of {SMOOTHED} steps)")
        _titles(held_out, "loss on held-out text")
        _titles(accuracy, "share of held-out tokens guessed right")
        _titles(apart, f"training loss less plain PyTorch's (mean of {SMOOTHED} steps)")
        for name, label, look in LINES:
            if name not in runs:
                continue
            run = runs[name]
            steps, losses = _smoothed(run["losses"])
            training.plot(steps, losses, label=label, **look)
            if "plain" in runs:
                apart.plot(steps, losses - _smoothed(runs["plain"]["losses"])[1], **look)
            at, loss, right = np.array(run["held_out"]).T
            held_out.plot(at, loss, **look)
            accuracy.plot(at, right, **look)
        training.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Description": mark})


def _titles(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")


def _smoothed(losses: Sequence[float]) -> tuple[Any, Any]:
    """Means of so many steps, and the step in the middle of each."""
    whole = len(losses) // SMOOTHED * SMOOTHED or len(losses)
    width = min(SMOOTHED, whole)
    means = np.array(losses[:whole]).reshape(-1, width).mean(axis=1)
    return np.arange(len(means)) * width + (width + 1) / 2, means
