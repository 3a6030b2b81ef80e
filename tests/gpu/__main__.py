"""`python -m tests.gpu [OPTIONS OF PYTEST]`: the tests that need a device, on a GPU of this machine. `make test-gpu` runs it.

Needs Python, torch with CUDA and pytest, and nothing else: no compiler, no network. Processes share the GPU where pytest-xdist is installed. What
tells most comes first: traps of the binding on CUDA, then lanes, spaces and sessions, then the parity matrix.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
FIRST = ("gpu/test_traps.py", "cuda/test_stream_lane.py", "cuda/test_spaces.py", "cuda/test_store.py")
PROCESSES = 4
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS may add in another order from run to run
    "NVIDIA_TF32_OVERRIDE": "0",
}


def main(options: list[str]) -> int:
    if importlib.util.find_spec("pytest") is None:
        print("NOT TESTED: pytest is not installed", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print(f"NOT TESTED: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    environment = {**os.environ, **ENVIRONMENT}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    paths = [option for option in options if Path(option.partition("::")[0]).exists()]
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.plugin", "-p", "no:cacheprovider", "-q"]
    # A library that warns on this machine is no failure of ours.
    command += ["-m", "not campaign", "-o", "filterwarnings=", "--durations=15", *options]
    if importlib.util.find_spec("xdist") is not None and "-n" not in options:
        command += ["-n", str(PROCESSES)]
    first = [str(TESTS / path) for path in FIRST]
    everything = [str(TESTS / folder) for folder in ("gpu", "cuda")]
    results = [
        subprocess.run([*command, *some], check=False, cwd=ROOT, env=environment).returncode
        for some in ([[]] if paths else [first, everything])
    ]
    return max(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
