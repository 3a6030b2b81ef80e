"""Every mutant is about code and tests that are there, and the runner tells a caught one from one that is not."""

from __future__ import annotations

import ast
from collections import Counter
from functools import lru_cache

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import ROOT, SOURCE, Mutant, MutantError
from tests.mutants.runner import Run, copy_of_the_library, judge, run_mutant, run_tests

UNITS = ("tests/test_units.py",)


@lru_cache
def functions_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_to_one_place_and_its_tests_exist(mutant: Mutant) -> None:
    mutant.applied_to((SOURCE / mutant.file).read_text())
    assert mutant.tests
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert function.partition("[")[0] in functions_in(file), test


def test_no_two_mutants_have_a_name_or_a_replacement_in_common() -> None:
    for found in (Counter(m.name for m in MUTANTS), Counter((m.file, m.old, m.new) for m in MUTANTS)):
        assert not [item for item, count in found.items() if count > 1]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("x = 1", "x = 2", "2 times, not once"),
        ("y = 1", "y = 2", "0 times, not once"),
        ("z = 3", "z = ", "does not compile"),
        ("z = 3", "z = 3  # three", "is the same code"),
    ],
)
def test_what_is_no_mutant_is_refused(old: str, new: str, problem: str) -> None:
    with pytest.raises(MutantError, match=problem):
        Mutant("m", "core/planes.py", old, new, UNITS).applied_to("x = 1\nx = 1\nz = 3\n")


@pytest.mark.parametrize(
    ("code", "output", "caught", "by"),
    [
        (1, "FAILED tests/a.py::test_b[x y] - AssertionError: no\n1 failed\n", True, "tests/a.py::test_b[x y]"),
        (1, "ERROR tests/a.py::test_b\n1 error\n", True, "tests/a.py::test_b"),
        (None, "", True, "a HANG"),
        (0, "3 passed\n", False, "nothing: it SURVIVED"),
        (4, "ERROR: not found: tests/a.py::test_b\n", False, "nothing: its tests did NOT RUN (pytest's exit code 4)"),
        (2, "ERROR tests/a.py - SyntaxError\n", False, "nothing: its tests did NOT RUN (pytest's exit code 2)"),
    ],
)
def test_only_a_failing_test_and_a_hang_catch(code: int | None, output: str, caught: bool, by: str) -> None:
    verdict = judge(Run(code, output, 1.0))
    assert (verdict.caught, verdict.by) == (caught, by)


@pytest.mark.parametrize("output", ["2 passed, 1 skipped in 1s", "1 passed, 1 xfailed in 1s", "1 deselected in 1s"])
def test_a_run_that_left_something_out_is_not_green(output: str) -> None:
    assert Run(0, "2 passed in 1s", 1.0).green
    assert not Run(0, output, 1.0).green
    assert not Run(1, "2 passed in 1s", 1.0).green


@pytest.mark.campaign
@pytest.mark.slow
def test_a_fault_is_caught_a_change_without_effect_survives_and_a_hang_is_stopped() -> None:
    fault = Mutant("a-kibibyte-is-1000-bytes", "units.py", "= 1 << 10,", "= 1000,", UNITS)
    harmless = Mutant("a-kibibyte-is-1024-bytes", "units.py", "= 1 << 10,", "= 1024,", UNITS)
    hang = Mutant("units-never-end", "units.py", "= 1 << 10,", "= __import__('time').sleep(3600) or 1 << 10,", UNITS)
    with copy_of_the_library() as copy:
        assert run_tests(UNITS, copy).green
        assert run_mutant(fault, copy, limit_s=120).by.startswith("tests/test_units.py::")
        assert not run_mutant(harmless, copy, limit_s=120).caught
        assert run_mutant(hang, copy, limit_s=3).by == "a HANG"


@pytest.mark.slow
def test_tests_do_not_run_against_another_copy() -> None:
    with copy_of_the_library() as copy:
        (copy / SOURCE.name).rename(copy / "elsewhere")
        run = run_tests(UNITS, copy)
    assert run.code == 4
    assert "not against the copy" in run.output
