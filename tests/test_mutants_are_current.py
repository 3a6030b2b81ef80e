"""Every mutant is about code and tests that are there, and the runner tells a caught one from one that is not."""

from __future__ import annotations

import ast
from collections import Counter
from functools import lru_cache

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import ROOT, SOURCE, Mutant
from tests.mutants.operators import MutantError, Operator, always, assign, drop, never, replace, returns, without
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


def test_no_two_mutants_have_a_name_or_a_change_in_common() -> None:
    for found in (Counter(m.name for m in MUTANTS), Counter((m.place, m.operator) for m in MUTANTS)):
        assert not [item for item, count in found.items() if count > 1]


CODE = """
WIDTH = max(1, 2)
class Box:
    def fits(self, n):
        if self.full or n < 0:
            return False
        for item in self.items:
            item.box.check(n)
        with self.lock:
            self.count += n - 1
        self.log(n, level=1)
        return self.count <= n
"""


@pytest.mark.parametrize(
    ("place", "operator", "old", "new"),
    [
        ("Box.fits", drop("check"), "item.box.check(n)", "pass"),
        ("Box.fits", drop("box.check"), "item.box.check(n)", "pass"),
        ("Box.fits", drop("count"), "self.count += n - 1", "pass"),
        ("Box.fits", drop("return False"), "return False", "pass"),
        ("Box.fits", drop("with ...: ..."), "with self.lock:\n            self.count += n - 1", "pass"),
        ("Box.fits", never("full"), "self.full or n < 0", "False"),
        ("Box.fits", always("self.full or n < 0"), "self.full or n < 0", "True"),
        ("Box.fits", without("n < 0"), "self.full or n < 0", "self.full"),
        ("Box.fits", without("n", nth=2), "self.count += n - 1", "self.count += 1"),
        ("Box.fits", without("level="), "self.log(n, level=1)", "self.log(n)"),
        ("Box.fits", without("self.lock"), "with self.lock", "if True"),
        ("WIDTH", without("2"), "max(1, 2)", "max(1)"),
        ("WIDTH", assign("WIDTH", "3"), "max(1, 2)", "3"),
        ("Box.fits", assign("level", "_ + n"), "level=1", "level=1 + n"),
        ("Box.fits", returns("_ or n", nth=2), "return self.count <= n", "return self.count <= n or n"),
        ("Box", replace("self.count <= n", "self.count < n"), "self.count <= n", "self.count < n"),
        ("Box.fits", replace("self.log(...)", "n = 1; _"), "self.log(n, level=1)", "n = 1; self.log(n, level=1)"),
        ("Box.fits", replace("for item in ...: ...", "n = 2; _"), "for item", "n = 2\n        for item"),
    ],
)
def test_an_operator_changes_one_node(place: str, operator: Operator, old: str, new: str) -> None:
    mutated = Mutant("m", f"core.planes:{place}", operator, UNITS).applied_to(CODE)
    assert mutated == ast.unparse(ast.parse(CODE.replace(old, new)))


@pytest.mark.parametrize(
    ("place", "operator", "problem"),
    [
        ("f", drop("g"), "2 times, nth=0"),
        ("f", drop("g", nth=3), "2 times, nth=3"),
        ("f", drop("h"), "0 times"),
        ("g", drop("h"), "there is no core.planes:g"),
        ("f", replace("z = 3", "z = "), "is no code"),
        ("f", replace("z = 3", "break"), "does not compile"),
        ("f", replace("z = 3", "z = (3)"), "is the same code"),
    ],
)
def test_what_is_no_mutant_is_refused(place: str, operator: Operator, problem: str) -> None:
    with pytest.raises(MutantError, match=problem):
        Mutant("m", f"core.planes:{place}", operator, UNITS).applied_to("def f():\n    g()\n    a.g()\n    z = 3\n")


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
    fault, harmless, hang = (
        Mutant(name, "units:KIB", replace("1 << 10", new), UNITS)
        for name, new in (
            ("a-kibibyte-is-1000-bytes", "1000"),
            ("a-kibibyte-is-1024-bytes", "1024"),
            ("units-never-end", "__import__('time').sleep(3600) or _"),
        )
    )
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
