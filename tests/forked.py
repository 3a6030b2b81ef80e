"""Children of a process that has imported torch: scripts, which then need not import it, and what a fork of this very process does.

For what these say and do. Where memory is measured, or how an interpreter ends, a new interpreter is started instead.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from typing import Final

# What nearly every script imports. No thread of torch's has started there, none of its random numbers been drawn.
_IMPORTED_ONCE: Final = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.gpt2.modeling_gpt2",
    "patrickstar.cli.predict",
    "patrickstar.session.forecast",
    "patrickstar.session.manage",
)


def forkserver() -> ForkServerContext:
    """What starts processes that have imported all of that."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED_ONCE))
    return context


def run_script(
    script: Path | str,
    *arguments: object,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> CompletedProcess[str]:
    """As `python SCRIPT ARGUMENTS` (a path, or the name of a module) would be run; what it printed and its exit status.

    Raises:
        TimeoutError: it has not ended by then, and has been killed.
    """
    words = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as name:
        out, err = Path(name) / "out", Path(name) / "err"
        known = {**os.environ, **(environment or {})}
        process = forkserver().Process(target=_run, args=(words, cwd or Path.cwd(), known, out, err))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{' '.join(words)} has not ended after {timeout:.0f} s")
        return CompletedProcess(words, process.exitcode, out.read_text(), err.read_text())


def as_torchrun(size: int, script: Path | str, *arguments: object, cwd: Path) -> list[CompletedProcess[str]]:
    """Runs it as so many ranks, with the environment that torchrun gives each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[1]
    known = {"PYTHONPATH": os.pathsep.join((str(root / "src"), str(root))), "OMP_NUM_THREADS": "1"}
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    known |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "ACCELERATE_USE_CPU": "true"}

    def one(rank: int) -> CompletedProcess[str]:
        which = {**known, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return run_script(script, *arguments, cwd=cwd, environment=which, timeout=200)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def _run(words: list[str], cwd: Path, environment: Mapping[str, str], out: Path, err: Path) -> None:
    for stream, file in ((sys.stdout, out), (sys.stderr, err)):
        stream.flush()
        with file.open("w") as opened:
            os.dup2(opened.fileno(), stream.fileno())
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    script = words[0]
    sys.argv = words
    try:
        if script.endswith(".py"):
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def in_forked_child(act: Callable[[], str]) -> str:
    """What `act` gives in a fork of this process as it is now; of what it raises, the traceback."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork in a process with threads
        child = os.fork()
    if child == 0:
        try:
            os.write(write, act().encode())
        except BaseException:  # nothing may leave: up there it would go on as a second pytest
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said
