"""Scripts as modules."""

import importlib
import sys

import pytest

from tests.docs.pages import ROOT
from tests.forked import run_script

BESIDE = (
    "step",
    "step_process",
    "flops",
    "machine",
    "speeds",
    "variants",
    "worker",
    "make_tables",
    "places",
    "calls",
    "spans",
    "disk",
    "overhead_sides",
    "budgets",
    "compare_sides",
)


def script(folder, name):
    """A script as a module, with the modules that stand beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / folder)
        found = importlib.import_module(name)
    for beside in BESIDE:
        sys.modules.pop(beside, None)
    return found


def run(name, *arguments):
    """What a script of `benchmarks/` prints, which must come to its end."""
    path = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}"}
    done = run_script(ROOT / "benchmarks" / name, *arguments, environment=path)
    assert done.returncode == 0, done.stderr
    return done.stdout
