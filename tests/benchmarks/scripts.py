"""Scripts as modules."""

import importlib
import sys

import pytest

from tests.docs.pages import ROOT

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
