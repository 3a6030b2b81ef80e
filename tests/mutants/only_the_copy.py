"""A pytest plugin: refuses to run where the library that is imported is not the copy that carries the mutant.

The package may be installed in the environment, too; then a wrong search path would test the unspoiled one, and call every mutant alive.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import patrickstar

VARIABLE = "PATRICKSTAR_MUTANT_COPY"


def pytest_configure() -> None:
    wanted, found = Path(os.environ[VARIABLE]), Path(patrickstar.__file__)
    if wanted not in found.parents:
        raise pytest.UsageError(f"the tests would run against {found}, not against the copy in {wanted}")
