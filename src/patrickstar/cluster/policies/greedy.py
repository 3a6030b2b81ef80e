"""GPUs shared out by gain: each job what it needs at least, then always the step that gains most for a GPU."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from patrickstar.cluster.job_view import Cluster, JobView, Numbers


def size_grid(jobs: Sequence[JobView], cluster: Cluster) -> tuple[int, ...]:
    """Sizes worth a look, ascending: all up to 64, above that about a tenth apart, and those that jobs have, need or may have."""
    grid = {round(64 * 1.1**step) for step in range(80)} | set(range(1, 65)) | {cluster.gpus}
    grid |= {size for job in jobs for size in (job.min_gpus, job.asked, len(job.gpu_ids))}
    grid |= {min(job.max_gpus, cluster.gpus) for job in jobs}
    return tuple(sorted(size for size in grid if 1 <= size <= cluster.gpus))


def share_out(jobs: Sequence[JobView], values: Sequence[Numbers], sizes: Sequence[int], gpus: int) -> dict[str, int]:
    """Sizes by job, 0 left out.

    Jobs get the least size that they can have in the order given, those that do not fit are passed over; what is left goes step by step to
    the job whose value grows most for a GPU, over as many GPUs at once as make that most (a plateau is stepped over).

    Args:
        values: of each job at each of `sizes`; minus infinity where it cannot run. The larger, the better.
    """
    grid = np.asarray(sizes)
    found: dict[str, int] = {job.name: len(job.gpu_ids) for job in jobs if job.pinned and job.gpu_ids}
    free = gpus - sum(found.values())
    at: dict[int, int] = {}
    ends: dict[int, int] = {}
    for number, (job, value) in enumerate(zip(jobs, values, strict=True)):
        able = np.flatnonzero((grid >= job.min_gpus) & (grid <= job.max_gpus) & (value > -np.inf)).tolist()
        if job.name not in found and able and sizes[able[0]] <= free:
            at[number], ends[number] = able[0], able[-1] + 1
            free -= sizes[able[0]]

    def step(number: int) -> tuple[float, int, int] | None:
        """The negative of the best gain for a GPU, the job, and where it leads."""
        here, value = at[number], values[number]
        last = min(ends[number], int(np.searchsorted(grid, grid[here] + free, side="right")))
        if last <= here + 1:
            return None
        gains = (value[here + 1 : last] - value[here]) / (grid[here + 1 : last] - grid[here])
        best = int(gains.argmax())
        return (-float(gains[best]), number, here + 1 + best) if gains[best] > 0 else None

    heap = [found_step for number in at if (found_step := step(number))]
    heapq.heapify(heap)
    while heap and free:
        _, number, there = heapq.heappop(heap)
        more = sizes[there] - sizes[at[number]]
        if more <= free:
            at[number], free = there, free - more
        # A step that no longer fits is looked for anew, among those that do.
        if following := step(number):
            heapq.heappush(heap, following)
    return found | {jobs[number].name: sizes[place] for number, place in at.items()}
