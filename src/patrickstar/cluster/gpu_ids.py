"""GPUs for jobs of given sizes: few nodes a job, and nobody moves without need."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from patrickstar.cluster.job_view import Allocation, Cluster, JobView


def place(
    jobs: Sequence[JobView],
    sizes: Mapping[str, int],
    cluster: Cluster,
    *,
    why: Callable[[JobView, int], str],
    own_batch: bool = False,
) -> dict[str, Allocation]:
    """Allocations of these sizes, each with the batch that is best where it is, or its own; `why` is asked for the sentence."""
    ids, found = assign(jobs, sizes, cluster), {}
    for job in jobs:
        if mine := ids.get(job.name):
            batch = 1.0 if own_batch else job.speed.best_batch(len(mine), nodes=cluster.nodes(mine))
            found[job.name] = Allocation(mine, batch, why(job, len(mine)))
    return found


def assign(jobs: Sequence[JobView], sizes: Mapping[str, int], cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """Ids for each job of a size above 0.

    A job of an unchanged size keeps its GPUs, a smaller one those on the nodes where it has most, a larger one all of them and more.
    Others take, the largest first, the fullest node that holds them, or whole nodes and the rest. Ties go to the lowest id.
    """
    per_node = cluster.gpus_per_node
    wanted = [job for job in jobs if sizes.get(job.name, 0)]
    found: dict[str, list[int]] = {}
    for job in wanted:
        here = Counter(gpu // per_node for gpu in job.gpu_ids)
        by_node = sorted(job.gpu_ids, key=lambda gpu: (-here[gpu // per_node], gpu))
        found[job.name] = by_node[: sizes[job.name]]
    held = {gpu for ids in found.values() for gpu in ids}
    free: defaultdict[int, list[int]] = defaultdict(list)
    for gpu in range(cluster.gpus):
        if gpu not in held:
            free[gpu // per_node].append(gpu)
    for job in sorted(wanted, key=lambda job: (-sizes[job.name], job.submit, job.name)):
        ids = found[job.name]
        while (missing := sizes[job.name] - len(ids)) > 0:
            node = min(
                (number for number, gpus in free.items() if gpus),
                # Where its others are; a node that holds all that is missing, the fullest such; else the emptiest.
                key=lambda number: (
                    not any(gpu // per_node == number for gpu in ids),
                    len(free[number]) < missing,
                    len(free[number]) if len(free[number]) >= missing else -len(free[number]),
                    number,
                ),
            )
            ids += free[node][:missing]
            del free[node][:missing]
    return {name: tuple(sorted(ids)) for name, ids in found.items()}
