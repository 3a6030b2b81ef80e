"""Scheduling policies on public workloads, simulated; and the seconds that their decisions take here.

    python benchmarks/cluster.py [--profiles DIR] [--only NAME ...] [--write]

Parts: `fitted` (the workloads beside this file), `artifact` (those of the Pollux artifact, OSDI 2021, with its tables, where `--profiles` has
a copy), `short` (jobs like those of the ONES paper), `robust` (an error in what remains), `decisions` (measured). With `--write` they go to
`results/cluster.json`, parts that were not run stay as they were there, and a picture goes to `docs/images/scheduling.png`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from machine import describe_machine

from patrickstar.cli.cluster import write_picture
from patrickstar.cluster.figures import figures
from patrickstar.cluster.four_numbers import FourNumbers
from patrickstar.cluster.job_view import Cluster, JobView
from patrickstar.cluster.policies.catalogue import POLICIES
from patrickstar.cluster.simulation import Outcome, simulate
from patrickstar.cluster.workload import Submission, read_workload

HERE: Final = Path(__file__).parent
GPUS, RESTART_S, RESIZE_S, TICK_S = 64, 30.0, 2.0, 60.0
PUBLISHED: Final = {
    "1x": {"las": 4038, "optimus": 5682, "pollux": 2751},
    "2x": {"las": 10040, "optimus": 9721, "pollux": 5289},
}
"""Mean seconds of the artifact's own simulator over its eight workloads, at their load and at twice that."""
CONTENDERS: Final = (
    *(("fifo", RESTART_S), ("srtf", RESTART_S), ("las", RESTART_S), ("optimus", RESTART_S), ("pollux", RESTART_S)),
    *(("pollux", RESIZE_S), ("ones", RESIZE_S), ("soonest", RESTART_S), ("soonest", RESIZE_S)),
)
SHORT: Final = (
    ("las", 20.0),
    ("optimus", 20.0),
    ("pollux", 20.0),
    ("pollux", 2.0),
    ("ones", 20.0),
    ("ones", 2.0),
    ("soonest", 2.0),
)
SEEDS: Final = range(6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*PARTS])
    parser.add_argument("--limit", type=int, default=8, help="workloads of a load of the artifact")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    path = HERE / "results" / "cluster.json"
    result: dict[str, Any] = json.loads(path.read_text()) if arguments.write and path.is_file() else {}
    result |= {
        "what": "scheduling policies, simulated (seconds are those of the simulation, but for `decisions`)",
        "gpus": GPUS,
        "tick_s": TICK_S,
        "seeds": list(SEEDS),
        "command": " ".join(
            [
                "python benchmarks/cluster.py",
                *("DIR" if word == str(arguments.profiles) else word for word in sys.argv[1:]),
            ]
        ),
        "machine": {**describe_machine(), "numpy": np.__version__},
    }
    for name, part in PARTS.items():
        if name in (arguments.only or PARTS) and (arguments.profiles or name not in {"artifact", "robust"}):
            print(f"{name}:")
            result[name] = part(arguments)
    if arguments.write:
        path.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def fitted(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of each contender on each workload beside this file."""
    rows, drawn = [], {}
    for file in sorted((HERE / "workloads").glob("*.csv")):
        jobs = read_workload(file, gpus=GPUS, gpus_per_node=4)
        for policy, resize_s in CONTENDERS:
            found = run(jobs, policy, resize_s=resize_s)
            rows.append({"workload": file.stem, **row([found], policy, resize_s)})
            if file.stem == "pollux-1x-6-fitted":
                drawn[f"{policy}, {resize_s:g} s"] = found
    if arguments.write:
        told = [figures(one, policy=name, seed=0) for name, one in drawn.items()]
        write_picture(HERE.parent / "docs" / "images" / "scheduling.png", drawn, told)
    return rows


def artifact(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of each contender at each load, means over workloads, beside what is published."""
    rows = []
    for load, folder in (("1x", "workloads"), ("2x", "workloads-2.0")):
        workloads = list(of_artifact(arguments, folder))
        for policy, resize_s in CONTENDERS:
            found = [run(jobs, policy, resize_s=resize_s) for jobs in workloads]
            published = PUBLISHED[load].get(policy) if resize_s == RESTART_S else None
            rows.append({"load": load, "published": published, **row(found, policy, resize_s)})
    return rows


def short(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of contenders on short jobs whose epochs take seconds; a start takes 20 s for all."""
    return [
        row(
            [run(short_jobs(seed), policy, resize_s=resize_s, start_s=20.0, tick_s=5.0, seed=seed) for seed in SEEDS],
            policy,
            resize_s,
        )
        for policy, resize_s in SHORT
    ]


def robust(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of ours where what remains is told with a log-normal error of this sigma."""
    workloads = list(of_artifact(arguments, "workloads"))
    return [
        {
            "sigma": sigma,
            **row(
                [run(jobs, "soonest", resize_s=RESIZE_S, rest_error=sigma) for jobs in workloads], "soonest", RESIZE_S
            ),
        }
        for sigma in (0.0, 0.5, 1.0)
    ]


def decisions(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of single decisions on drawn states, measured."""
    rows = []
    for gpus, jobs, rounds in ((64, 50, 200), (1024, 1000, 30)):
        for policy in ("las", "optimus", "pollux", "soonest"):
            seconds = []
            for seed in range(rounds):
                views = state(jobs, gpus, seed)
                began = time.perf_counter()
                POLICIES[policy].decide(views, Cluster(gpus=gpus), 0.0, None, np.random.default_rng(0))
                seconds.append(time.perf_counter() - began)
            rows.append(
                {
                    "policy": policy,
                    "gpus": gpus,
                    "jobs": jobs,
                    "p50": statistics.median(seconds),
                    "p99": float(np.percentile(seconds, 99)),
                }
            )
            print("  ", rows[-1], flush=True)
    return rows


PARTS: Final[dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]]] = {
    "fitted": fitted,
    "artifact": artifact,
    "short": short,
    "robust": robust,
    "decisions": decisions,
}


def run(
    jobs: Sequence[Submission],
    policy: str,
    *,
    resize_s: float,
    start_s: float = RESTART_S,
    tick_s: float = TICK_S,
    seed: int = 0,
    rest_error: float = 0.0,
) -> Outcome:
    cluster = Cluster(gpus=GPUS, start_s=start_s, resize_s=resize_s)
    return simulate(jobs, POLICIES[policy].decide, cluster=cluster, tick_s=tick_s, seed=seed, rest_error=rest_error)


def row(outcomes: Iterable[Outcome], policy: str, resize_s: float) -> dict[str, Any]:
    """Means over outcomes of the figures of each."""
    told = [figures(outcome, policy=policy, seed=0) for outcome in outcomes]
    for one in told:
        one["resizes"] = sum(job["resizes"] for job in one["jobs"]) / len(one["jobs"])
        one["lost"] = one["gpu_seconds_lost"] / (one["utilisation"] * GPUS * one["makespan"])
    keys = ("mean_jct", "p50_jct", "p99_jct", "makespan", "lost", "utilisation", "worst_ftf", "resizes")
    found = {
        "policy": policy,
        "resize_s": resize_s,
        **{key: round(statistics.fmean(one[key] for one in told), 5) for key in keys},
    }
    print("  ", found, flush=True)
    return found


def of_artifact(arguments: argparse.Namespace, folder: str) -> Iterable[tuple[Submission, ...]]:
    for number in range(1, arguments.limit + 1):
        path = arguments.profiles / folder / f"workload-{number}.csv"
        yield read_workload(path, gpus=GPUS, gpus_per_node=4, profiles=arguments.profiles)


def short_jobs(seed: int) -> list[Submission]:
    """Fifty jobs, one every 30 s or so, of a median of five minutes on the 2 or 4 GPUs asked for; an epoch takes about four seconds on them.

    Like the trace of ONES (SC 2021) in arrivals, lengths and how far batches grow: 16 times for vision, 4 or 8 times for language.
    """
    rng = np.random.default_rng(seed)
    kinds, jobs, at = ((2, 16), (4, 16), (4, 16), (2, 4), (2, 8)), [], 0.0
    for number in range(50):
        gpus, grow = kinds[rng.integers(len(kinds))]
        duration = float(np.exp(rng.normal(np.log(300), 0.8)))
        numbers = {"serial": 0.02, "noise": 16.0, "grow": float(grow)}
        course = FourNumbers(gpus=gpus, duration=duration, n_epochs=max(2, round(duration / 4)), **numbers)
        jobs.append(Submission(name=f"{number}", submit=at, gpus=gpus, max_gpus=GPUS, course=course))
        at += float(rng.uniform(0, 60))
    return jobs


def state(n_jobs: int, gpus: int, seed: int) -> list[JobView]:
    """Jobs as a policy may find them, some running."""
    rng, free, jobs = np.random.default_rng(seed), list(range(gpus)), []
    for number in range(n_jobs):
        held = tuple(free.pop(0) for _ in range(min(int(rng.integers(0, 3)), len(free))))
        speed = FourNumbers(
            gpus=int(rng.choice([1, 2, 4, 8, 16])),
            duration=float(np.exp(rng.normal(7, 1.5))),
            serial=float(rng.uniform(0.01, 0.3)),
            noise=float(rng.uniform(0, 50)),
            grow=float(rng.choice([1, 4, 16])),
        )
        rest = speed.work * float(rng.uniform(0.05, 1))
        known = {"attained": float(rng.uniform(0, 1e5)), "largest": len(held), "gpu_ids": held}
        jobs.append(
            JobView(
                name=f"{number}", submit=float(number), gpus=speed.gpus, max_gpus=gpus, speed=speed, rest=rest, **known
            )
        )
    return jobs


if __name__ == "__main__":
    sys.exit(main())
