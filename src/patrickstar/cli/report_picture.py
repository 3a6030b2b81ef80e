"""The picture beside a report of simulations: means, times of jobs, and GPUs held over time, by policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patrickstar.cluster.figures import timeline
from patrickstar.cluster.simulation import Outcome


def write_picture(path: Path, outcomes: Mapping[str, Outcome], told: Sequence[Mapping[str, Any]]) -> None:
    """Writes a PNG; needs matplotlib, the extra `cluster`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    means, times, load = figure.subplots(1, 3)
    for number, ((name, outcome), one) in enumerate(zip(outcomes.items(), told, strict=True)):
        jct = np.sort([job["jct"] for job in one["jobs"]])
        moments, held, _ = timeline(outcome)
        means.barh(name, one["mean_jct"], color=f"C{number}")
        times.step(jct, np.arange(1, len(jct) + 1) / len(jct), where="post", color=f"C{number}", label=name)
        load.step(moments / 3600, held, where="post", color=f"C{number}", linewidth=0.8)
    means.invert_yaxis()
    means.set(xlabel="mean job completion time, s (simulated)")
    times.set(xscale="log", xlabel="job completion time, s", ylabel="share of jobs")
    times.legend(fontsize=8)
    load.set(xlabel="hours", ylabel="GPUs held", ylim=(0, None))
    figure.savefig(path, dpi=110, metadata={"Software": None})
