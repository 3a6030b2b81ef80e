"""Compiles the test accelerator against the installed torch, once for each state of its sources. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MODULE = "_accelerator"
TORCH = "2.13"  # what it is written against: it implements interfaces that change from one minor version to the next
SOURCE = Path(__file__).parent / "source"
BUILDS = Path(__file__).parents[2] / "build" / "accelerator"
# Without NDEBUG the records of torch's profiler have another layout than in its wheels.
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-DNDEBUG", f"-DTORCH_EXTENSION_NAME={MODULE}")


class BuildError(Exception):
    """The compiler refused the sources."""


def why_not() -> str | None:
    """What is missing here to build it, or None."""
    version = importlib.metadata.version("torch")
    if not version.startswith(f"{TORCH}."):
        return f"it is written against torch {TORCH}, and torch {version} is installed"
    if shutil.which("g++") is None:
        return "there is no g++ on PATH"
    return None


def library() -> Path:
    """The compiled library: built first if it has not been.

    Raises:
        BuildError: the compiler's own words.
    """
    built = BUILDS / _key() / f"{MODULE}.so"
    if not built.exists():
        _build(built)
    return built


def _key() -> str:
    texts = [path.read_bytes() for path in sorted(SOURCE.iterdir())]
    about = [importlib.metadata.version("torch"), sys.version, *FLAGS]
    return hashlib.sha256(b"\0".join([*texts, *(text.encode() for text in about)])).hexdigest()[:16]


def _build(target: Path) -> None:
    torch = _torch_folder()
    include = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    objects = target.parent / f"objects-{os.getpid()}"
    objects.mkdir(parents=True, exist_ok=True)
    sources = sorted(SOURCE.glob("*.cpp"), key=lambda path: -path.stat().st_size)  # the longest first

    def compiled(source: Path) -> Path:
        result = objects / f"{source.stem}.o"
        # Headers of the system's kind: their warnings are torch's.
        _run(
            ["g++", *FLAGS, "-Wall", *(f"-isystem{folder}" for folder in include), "-c", str(source), "-o", str(result)]
        )
        return result

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        parts = list(pool.map(compiled, sources))
    linked = objects / target.name
    libraries = torch / "lib"
    names = ("-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10")
    _run(["g++", "-shared", *map(str, parts), "-o", str(linked), f"-L{libraries}", *names, f"-Wl,-rpath,{libraries}"])
    linked.replace(target)  # whole, or not there: others may build it at the same time
    shutil.rmtree(objects)


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None, "torch is not installed"
    assert found.origin is not None
    return Path(found.origin).parent


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
