"""Jobs as processes of `patrickstar elastic run` on this machine, which end with the one that has started them. Ranks may be on nodes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from patrickstar.cluster.job_view import Ids
from patrickstar.elastic.job_directory import JobDirectory
from patrickstar.elastic.rank_process import end_with_parent, threads_of
from patrickstar.elastic.ray_cluster import RayCluster
from patrickstar.errors import Error
from patrickstar.sharing.jobs_file import SharedJob
from patrickstar.sharing.live_job import Standing

_SAVE_EVERY: Final = 100
_ENDS_S: Final = 40.0  # longer than a supervisor gives its ranks


@dataclass(slots=True)
class _ElasticRun:
    process: subprocess.Popen[bytes]
    directory: JobDirectory
    gpu_of_slot: list[int]
    standing: Standing


class ElasticRuns:
    """The executor. A resize takes effect after a while, as does a stop: `status` says what is so.

    Each rank has as many threads as there are cores for a GPU, at every size: results depend on them.

    Args:
        path: directory of those of the jobs, and of their output. lock: a descriptor that they are to have, too.
        gpus: of this machine, or at most of the nodes where those are given, which Ray says which of a rank has.
    """

    def __init__(self, path: Path, *, gpus: int, lock: int, nodes: RayCluster | None = None) -> None:
        self._path, self._lock, self._most, self._nodes = path, lock, gpus, nodes
        self._threads = nodes.threads if nodes else threads_of(gpus)
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._devices = [str(gpu) for gpu in range(gpus)] if shown is None else shown.split(",")
        self._runs: dict[str, _ElasticRun] = {}

    @property
    def gpus(self) -> int:
        """GPUs that there are now."""
        return min(self._most, self._nodes.gpus) if self._nodes else self._most

    def start(self, job: SharedJob, gpu_ids: Ids) -> None:
        """Starts a job, which goes on from its newest checkpoint if there is one. Output goes to its directory."""
        directory = self._path / job.name
        directory.mkdir(mode=0o700, exist_ok=True)
        sizes = {"--min": job.min, "--max": job.max, "--size": len(gpu_ids), "--warm": 0, "--threads": self._threads}
        flags: dict[str, Any] = {**sizes, "--save-every": _SAVE_EVERY, "--job-dir": directory}
        flags |= self._nodes.flags if self._nodes else {}
        words = [str(word) for flag in flags.items() for word in flag]
        with (directory / "output").open("ab") as output:
            process = subprocess.Popen(  # noqa: S603  (the program that the user gave)
                [sys.executable, "-m", "patrickstar", "elastic", "run", *words, "--", *shlex.split(job.run)],
                env={**os.environ, **self._shown(gpu_ids)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, who stop it
                preexec_fn=end_with_parent,  # noqa: PLW1509  (one call of the system)
                pass_fds=(self._lock,),
            )
        self._runs[job.name] = _ElasticRun(process, JobDirectory(directory), [*gpu_ids], Standing(gpu_ids=gpu_ids))

    def resize(self, name: str, gpu_ids: Ids, *, why: str) -> None:
        """Asks for as many ranks as GPUs: on these, or where there are to be fewer, on which of its own the job likes.

        Those that come take the lowest slots that are free, which have the GPUs that are new.
        """
        run = self._runs[name]
        held = run.standing.gpu_ids
        new = [gpu for gpu in gpu_ids if gpu not in held]
        free = [slot for slot, gpu in enumerate(run.gpu_of_slot) if gpu not in held]
        for slot in free[: len(new)]:
            run.gpu_of_slot[slot] = new.pop(0)
        run.gpu_of_slot += new
        run.standing = Standing(gpu_ids=tuple(sorted({*held, *gpu_ids})))
        order = {"do": "resize", "size": len(gpu_ids), "why": f"scheduler: {why}"}
        with suppress(Error, ValueError):  # it has just ended, as `status` will say
            run.directory.ask({**order, "devices": self._shown(run.gpu_of_slot)})

    def stop(self, name: str) -> None:
        """Has a job save and end."""
        self._runs[name].process.send_signal(signal.SIGTERM)

    def status(self, name: str) -> Standing:
        """State of a job; as it last stood, where it does not answer now."""
        run = self._runs[name]
        if (status := run.process.poll()) is not None:
            return Standing(exit_status=status)
        with suppress(Error, ValueError):  # it has not come so far, or is about to end
            told = run.directory.ask({"do": "status"})
            if told["slots"]:
                gpu_ids = tuple(sorted(run.gpu_of_slot[slot] for slot in told["slots"] if slot < len(run.gpu_of_slot)))
                now = {"size": told["size"], "step": told["step"], "has_begun": told["has_begun"]}
                run.standing = Standing(gpu_ids=gpu_ids, **now)
        return run.standing

    def close(self) -> None:
        """Has all jobs save and end, and waits for them."""
        there = [run.process for run in self._runs.values() if run.process.poll() is None]
        for process in there:
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + _ENDS_S
        for process in there:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in there:
            process.kill()
            process.wait()

    def _shown(self, gpu_ids: Ids | list[int]) -> dict[str, str]:
        shown = ",".join(self._devices[gpu] for gpu in gpu_ids if gpu < len(self._devices))
        return {} if self._nodes else {"CUDA_VISIBLE_DEVICES": shown}
