"""Sentences on jobs that share GPUs: what each has, what it waits for, and what one GPU more would bring it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from patrickstar.errors import ConfigError, nearest


def explain(state: Mapping[str, Any], name: str | None = None) -> Iterator[str]:
    """A line for each job, or for one, from the state that a dispatcher has written. ConfigError: there is no such job."""
    jobs = {job["of"]["name"]: job for job in state["jobs"]}
    if name is not None and name not in jobs:
        raise ConfigError(f"no job {name!r} here: there are {', '.join(jobs)}{nearest(name, jobs)}")
    holders = [f"{key} has {len(job['gpu_ids'])}" for key, job in jobs.items() if job["gpu_ids"]]
    free = max(0, state["gpus"] - sum(len(job["gpu_ids"]) for job in jobs.values()))
    there = ", ".join([f"{free} of {state['gpus']} are free", *holders])
    for key, job in jobs.items():
        if name in (None, key):
            yield f"{key}: {_of_job(job, state['now'], there)}"


def _of_job(job: Mapping[str, Any], now: float, there: str) -> str:
    of, held = job["of"], len(job["gpu_ids"])
    at = f"step {job['step']}" + (f" of {of['steps']}" if of["steps"] else "")
    if job["finish"] is not None:
        return f"{job['state']} at {job['finish']:.0f} s, at {at}"
    if job["submit"] > now:
        return f"is submitted at {job['submit']:.0f} s, in {job['submit'] - now:.0f} s"

    def left(gpus: int) -> float:
        serial, parallel = job["per_step"]
        return float(job["rest"] * (serial + parallel / gpus))

    if not held:
        least = of["min"]
        return f"waits at {at} for at least {least} GPUs ({job['why']}; {there}); would end {left(least):.0f} s after a start on {least}"
    has = f"{held} GPUs ({', '.join(map(str, job['gpu_ids']))}; {job['why']}), at {at}, ends in {left(held):.0f} s"
    if job["state"] == "stopping":
        return f"{has}; it is saving, as others come first"
    if job["target"] != held:
        return f"{has}; it is to have {job['target']}"
    if of["pinned"] or not job["has_begun"]:
        return f"{has}; it is pinned, or has not come to steps that can be resized"
    if held >= of["max"]:
        return f"{has}; it has its max"
    return f"{has}; one GPU more would bring that forward by {left(held) - left(held + 1):.0f} s"
