"""What pages claim of the code is so: devices and defaults, the route of a step, and what does not follow the style."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import patrickstar
from patrickstar.config.arguments import DEVICES
from patrickstar.memory.disk import DISK_SHARE
from patrickstar.step.budgets import DEVICE_SHARE, HOST_SHARE, resolve_device
from tests.docs.pages import ROOT

SOURCE = Path(patrickstar.__file__).parent
GUIDE, GLOSSARY, ROADMAP, VIOLATIONS = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("guide", "glossary", "roadmap", "violations")
)


def line_of(page: str, start: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(start))


# devices and defaults


def documented() -> dict[str, str]:
    """What the docstring of `manage` says of each argument, by name; of several in one entry, each has all of it."""
    told = inspect.cleandoc(patrickstar.manage.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
    entries = re.split(r"\n {4}(?=[a-z])", told)
    parts = [entry.partition(": ") for entry in entries if entry]
    return {name: " ".join(text.split()) for names, _, text in parts for name in names.split(", ")}


def test_every_argument_of_manage_is_documented_with_its_default() -> None:
    arguments = dict(inspect.signature(patrickstar.manage).parameters)
    del arguments["unknown"]  # takes those that there are not, to refuse them
    assert documented().keys() == arguments.keys()
    assert documented()["step"].startswith(json.dumps(arguments["step"].default))
    for name in ("optimizer", "device", "precision", "device_memory", "host_memory", "disk"):
        assert arguments[name].default is None
        assert "None: " in documented()[name], name


def test_devices_are_those_that_are_taken_and_the_default_is_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, default = documented()["device"].split("None: ")
    assert {*re.findall(r'"([\w:]+)"', devices)} == {*DEVICES, "cuda:1"}
    found = []
    for is_there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        found.append(resolve_device(None).partition(":")[0])
    assert re.findall("cuda|cpu|emulated", default.lower()) == found
    assert '`device` is CUDA where there is one, else `"cpu"`' in GUIDE
    for text in (line_of(GLOSSARY, "| compute device"), (ROOT / "docs" / "how-it-works.md").read_text()):
        assert all(f'`device="{name}"`' in text for name in DEVICES)


def test_shares_that_budgets_are_without_arguments() -> None:
    shares = {"device_memory": DEVICE_SHARE, "host_memory": HOST_SHARE, "disk_memory": DISK_SHARE}
    for name, share in shares.items():
        assert f"{share * 100:.0f} % of the" in line_of(GUIDE, f"| `{name}`")
        assert f"{share * 100:.0f} % of the" in documented()[name]


# the route of a step


def defined_in(path: Path) -> Iterator[str]:
    """Names of classes and functions in a file, wherever they are defined, and `Class.method`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef))


def test_classes_that_a_use_meets_are_counted_as_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/results/calls.json").read_text())["rows"]
    routes = [row["route"] for row in measured if "route" in row]
    counts = [sorted(len(route[what]) for route in routes) for what in ("classes", "files")]
    classes, files = (f"{found[0]} to {found[-1]}" for found in counts)
    assert f"One use meets {classes} classes with state in {files} files" in ROADMAP


def test_violations_list_every_class_of_many_methods() -> None:
    missing = []
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        names = [name for name in defined_in(path) if "." in name]
        many = [name for name, count in Counter(name.partition(".")[0] for name in names).items() if count > 20]
        missing += [f"{file} {name}" for name in many if f"`{file}` `{name}`" not in VIOLATIONS]
    assert missing == []
    listed = re.findall(r"`(\S+\.py)` `(\w+)`", VIOLATIONS)
    assert [(file, name) for file, name in listed if name not in defined_in(SOURCE / file)] == []
