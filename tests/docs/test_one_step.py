"""`docs/one-step.md` is walked: a run meets the files and functions that each of its sections names, in the order in which they stand there."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import patrickstar
from tests.docs.pages import ROOT

SOURCE = Path(patrickstar.__file__).parent
PAGE = (ROOT / "docs" / "one-step.md").read_text()
SECTIONS = re.split(r"^##? (?:\d\. )?(.*)$", PAGE, flags=re.MULTILINE)
TEXTS = dict(zip(SECTIONS[1::2], SECTIONS[2::2], strict=True))
QUESTIONS = {
    "Who does an update?": ("step 1", "forward 2", "backward 2"),
    "Which traces are there?": ("forward 1", "step 1", "forward 2"),
    "Who may change a phase?": ("forward 1", "backward 1", "step 1"),
    "How much room is there?": ("manage", "forward 1"),
}
WALKED = {
    "`manage`: where it will lie": ("manage",),
    "`model(x)`: it is used": ("forward 1",),
    "`loss.backward()`: it is needed again, and its gradient comes": ("backward 1",),
    "`optimizer.step()` and `zero_grad()`: it is updated": ("step 1", "forward 2"),
    **QUESTIONS,
}
"""What the user's loop does while what a section says happens."""
LINES_OF_A_SCREEN = 40
FILE = r"`(\w+(?:/\w+)*\.py)`"

Call = tuple[str, str]
"""A file of the package, and the function there that was called."""


@cache
def defined() -> dict[str, set[Call]]:
    """The calls that a name stands for: a function, or `Class.method`. `Class.attribute` stands for none."""
    found: dict[str, set[Call]] = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        file = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                found[node.name].add((file, node.name))
            if isinstance(node, ast.ClassDef):
                for part in ast.walk(node):
                    if isinstance(part, ast.FunctionDef):
                        found[f"{node.name}.{part.name}"].add((file, part.name))
                    elif isinstance(getattr(part, "ctx", None), ast.Store):
                        found[f"{node.name}.{getattr(part, 'attr', getattr(part, 'id', ''))}"] |= set()
    return dict(found)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Call]]:
    """Every call of a function of ours, in whatever thread, in two steps of a stack of linears."""
    found: dict[str, list[Call]] = defaultdict(list)

    @contextmanager
    def during(what: str) -> Iterator[None]:
        def see(frame: FrameType, event: str, _: object) -> None:
            file = frame.f_code.co_filename
            if event == "call" and file.startswith(f"{SOURCE}/") and frame.f_code.co_name != "<module>":
                found[what].append((file.removeprefix(f"{SOURCE}/"), frame.f_code.co_name))

        threading.setprofile(see)
        sys.setprofile(see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    optimizer, chunk_numel = torch.optim.AdamW(model.parameters()), 64 * 64
    arguments = {"device": "cpu", "disk": tmp_path_factory.mktemp("disk"), "host_memory": 10 * 4 * chunk_numel}
    with during("manage"):
        session = patrickstar.manage(model, optimizer, options=patrickstar.Options(chunk_size=chunk_numel), **arguments)
    with session:
        for step in (1, 2):
            with during(f"forward {step}"):
                loss = model(torch.ones(2, 64)).square().mean()
            with during(f"backward {step}"):
                loss.backward()
            with during(f"step {step}"):
                session.optimizer.step()  # type: ignore[union-attr]
                session.optimizer.zero_grad()  # type: ignore[union-attr]
        assert session.stats().planned_steps == 2
        assert session.stats().moved["K>H"] > 8 * 4 * chunk_numel
    return found


@pytest.mark.parametrize("heading", WALKED)
def test_a_run_meets_what_a_section_names_in_that_order(heading: str, calls: dict[str, list[Call]]) -> None:
    numbered = "\n".join(re.findall(r"^\d\. .*(?:\n   .*)*", TEXTS[heading], re.MULTILINE))
    named = [file or name for file, name in re.findall(FILE + r"|`([A-Z]\w+\.\w+|[a-z]\w+)`", numbered)]
    met = [name for name in named if name.endswith(".py") or defined().get(name)]
    assert len(met) > 4
    run = iter([call for part in WALKED[heading] for call in calls[part]])
    for name in met:
        is_next = any(name == call[0] or call in defined().get(name, ()) for call in run)
        assert is_next, f"{name} is not met, or not after what stands before it"


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_on_a_screen_and_the_glossary_leads_to_it(question: str) -> None:
    assert len(TEXTS[question].splitlines()) <= LINES_OF_A_SCREEN
    anchor = question.lower().replace(" ", "-").rstrip("?")
    assert f"one-step.md#{anchor}" in (ROOT / "docs" / "glossary.md").read_text()


def test_the_page_names_what_is_there() -> None:
    assert [file for file in re.findall(FILE, PAGE) if not (SOURCE / file).exists()] == []
    assert set(re.findall(r"`([A-Z]\w+\.\w+)`", PAGE)) <= defined().keys()
    placed = re.findall(r"`([A-Za-z_][\w.]*)`\s+\(" + FILE + r"\)", PAGE)
    assert [(name, file) for name, file in placed if not re.search(rf"\b{name}\b", (SOURCE / file).read_text())] == []
