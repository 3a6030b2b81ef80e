"""FIFO on many GPUs and shortest remaining time on one, told once more in forty lines: no events, no views, no batches."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[float, int, float]
"""When a job is submitted, the GPUs it asks for, and the seconds it takes on them; rows are in order of submission."""


def fifo(rows: Sequence[Row], *, gpus: int, start_s: float) -> list[float]:
    """Ends of jobs none of which overtakes another."""
    running: list[tuple[float, int]] = []
    ends, now = [], 0.0
    for submit, size, seconds in rows:
        now = max(now, submit)
        while sum(held for end, held in running if end > now) + size > gpus:
            now = min(end for end, _ in running if end > now)
        ends.append(now + start_s + seconds)
        running.append((ends[-1], size))
    return ends


def srtf_on_one(rows: Sequence[Row], *, start_s: float) -> list[float]:
    """Ends of jobs on one GPU that the shortest has, each return after a stop taking `start_s`."""
    left = [seconds for _, _, seconds in rows]
    ends = [0.0] * len(rows)
    now, holder, ready = 0.0, -1, 0.0
    while any(left):
        there = [job for job in range(len(rows)) if left[job] and rows[job][0] <= now]
        if not there:
            now = min(rows[job][0] for job in range(len(rows)) if left[job])
            continue
        shortest = min(there, key=lambda job: (left[job], job))
        if shortest != holder:
            holder, ready = shortest, now + start_s
        end = max(now, ready) + left[holder]
        arrival = min((row[0] for row in rows if row[0] > now), default=end)
        if end <= arrival:
            now, left[holder], ends[holder], holder = end, 0.0, end, -1
        else:
            left[holder] -= max(0.0, arrival - max(now, ready))
            now = arrival
    return ends
