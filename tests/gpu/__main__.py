"""`python -m tests.gpu [--out DIR] [STAGE...] [-- OPTIONS OF PYTEST]`: tests on a GPU of this machine. `make test-gpu` runs it.

Needs Python, torch with CUDA and pytest with hypothesis, and nothing else: no compiler, no network. Stages run one after the other, what tells most
first, each with a time limit of its own, all of them in ten minutes; what a stage has no time for is skipped and said. Processes share the GPU where
pytest-xdist is installed. Under `--out` (`build/gpu-tests`) there is a log of each stage, and `results.jsonl`, a line for each test as it ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS may add in another order from run to run
    "NVIDIA_TF32_OVERRIDE": "0",
    "PYTHONUNBUFFERED": "1",
}
NEEDED = ("torch", "pytest", "hypothesis")
GRACE_S = 25  # for a test that is under way at the limit
TEST_S = 100


@dataclass(frozen=True)
class Stage:
    """Files that run together. `seconds`: from the beginning, after which no test begins."""

    name: str
    paths: tuple[str, ...]
    seconds: int
    processes: int = 1
    marks: str = "not campaign"


STAGES = (
    Stage("traps", ("gpu/test_traps.py", "gpu/test_assumptions.py"), 80),
    Stage(
        "bits",
        ("cuda/test_passes_there.py::test_the_host_and_the_device_have_the_same_bits", "gpu/test_bits.py"),
        90,
        processes=2,
    ),
    Stage(
        "memory",
        (
            *("cuda/test_spaces.py", "cuda/test_stream_lane.py", "cuda/test_store.py", "cuda/test_readiness.py"),
            *("cuda/test_streams.py", "cuda/test_waits.py", "cuda/test_overflow.py", "cuda/test_out_of_memory.py"),
            *("cuda/test_random_states.py", "gpu/test_budgets.py"),
        ),
        90,
        processes=3,
    ),
    Stage("faults", ("gpu/test_faults.py",), 75, processes=3),
    Stage("ranks", ("gpu/test_attention.py", "gpu/test_ranks.py"), 90, processes=4),
    Stage("rows", ("gpu/test_rows.py",), 130, processes=6, marks="campaign or not campaign"),
)


def main(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    ours, options = arguments[:end], arguments[end + 1 :]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-tests")
    names = [stage.name for stage in STAGES]
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(names)}; all by default")
    given = parser.parse_args(ours)
    unknown = sorted(set(given.stages) - set(names))
    if unknown:
        parser.error(f"no such stage: {', '.join(unknown)}; there are {', '.join(names)}")
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            print(
                f"NOT TESTED: {sys.executable} has no {name}; `make test-gpu PYTHON=...` takes another", file=sys.stderr
            )
            return 2
    import torch

    if not torch.cuda.is_available():
        print(f"NOT TESTED: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    for name in ("xdist", "transformers", "safetensors"):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed: what needs it is not run", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "results.jsonl"
    results.unlink(missing_ok=True)
    ended = [run(stage, options, given.out, results) for stage in STAGES if stage.name in (given.stages or names)]
    return max(ended)


def run(stage: Stage, options: list[str], out: Path, results: Path) -> int:
    """Runs a stage, and says how it went; gives its exit status."""
    began = time.monotonic()
    plugins = ["-p", "tests.gpu.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", "-m", stage.marks]
    # A library that warns on this machine is no failure of ours.
    command += ["-o", "filterwarnings=", "--durations=8", "--tb=short", *options]
    if importlib.util.find_spec("xdist") is not None and stage.processes > 1 and "-n" not in options:
        command += ["-n", str(stage.processes), "--dist", "load"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command += [f"--timeout={TEST_S}", "--timeout-method=thread"]
    # Of a run that this one is part of: its tests would be taken for those of another run's worker, which logs nothing itself.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST_")}
    environment.update(ENVIRONMENT)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment["PATRICKSTAR_TESTS_UNTIL"] = str(time.time() + stage.seconds)
    environment["PATRICKSTAR_TESTS_LOG"] = str(results)
    environment["PATRICKSTAR_TESTS_STAGE"] = stage.name
    with (out / f"{stage.name}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *(str(TESTS / path) for path in stage.paths)],
            cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        why = ""
        try:
            status = process.wait(stage.seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            why, status = f", ended after {stage.seconds + GRACE_S} s", 1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own, with all that it started
                process.wait()
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    mine = [line for line in lines if line["stage"] == stage.name]
    counts = Counter(line["outcome"] for line in mine)
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no test ran"
    print(f"{stage.name}: {said} in {time.monotonic() - began:.0f} s{why}", flush=True)
    for line in mine:
        if line["outcome"] == "failed":
            print(f"  {line['test'].rpartition('tests/')[2]}: {line['why'][:300]}", flush=True)
    if not mine:
        print("  " + "\n  ".join((out / f"{stage.name}.log").read_text().splitlines()[-25:]), flush=True)
    return status or int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
