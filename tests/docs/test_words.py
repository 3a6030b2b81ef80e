"""Public text has the field's words: pages, the reference with the help of the command line, and the messages of the library.

Code stays out: what stands in backticks or in a block of Python has the names that the code has. So do printed traces and plans.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import patrickstar
from tests.docs.pages import ROOT, split

FOREIGN = {
    r"model data": "model states",
    r"non-model": "activations and workspaces",
    r"\bmoments?\b": "op; of Adam: optimizer states",
    r"\bstretch(es)?\b": "phase",
    r"\bhoist|\bread(s|ing)? ahead\b": "prefetch",
    r"early write-?back": "asynchronous write-back",
    r"stand-in": "placeholder",
    r"\bwoven\b": "overlapped with the next forward",
    r"\bdepart|\breactive": "plan miss; unplanned",
    r"trial run|\btwin\b": "fake-tensor trace",
    r"\bfore(see|seen|saw)": "estimated; in the trace; in the plan",
    r"\bput together|\bassembl": "materialised",
    r"\bwiden|\bnarrow": "upcast, downcast",
    r"(what|that|which) computes\b": "compute device",
    r"\bleased?\b": "pinned",
    r"\bfences?\b|\btickets?\b": "event",
    r"\ba flight\b|\bflights\b": "in-flight transfer",
    r"\brests? (on|in|there|below|where)\b|\bresting\b|what rests": "is offloaded to; home tier",
    r"\bgr(ew|own) by\b": "peak RSS increase",
    r"\b(moved|moves|seconds|tokens|bytes) a (step|parameter)\b|a step, each way": "per step, per parameter",
    r"\brecomput": "activation checkpointing",
}
PAGES = (
    "README",
    "docs/guide",
    "docs/how-it-works",
    "docs/gpu",
    "docs/troubleshooting",
    "docs/reference",
    "docs/others",
)
PRINTED = re.compile(r"(trace|plan) of \S+ moments")


def prose(page: str) -> Iterator[tuple[int, str]]:
    """The lines of a page with their numbers, and what its programs print."""
    blocks, lines = split((ROOT / f"{page}.md").read_text())
    yield from ((number, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)) for number, line in lines)
    for block in blocks:
        if block.kind not in {"python", "py"}:
            yield from enumerate(block.text.splitlines(), block.line)


def messages() -> Iterator[tuple[str, str]]:
    """Where each error and each message of the log stands, and its text."""
    source = Path(patrickstar.__file__).parent
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            said = isinstance(node, ast.Raise) or (
                isinstance(node, ast.Call) and re.search(r"_?log(ger)?\.", ast.unparse(node.func))
            )
            for part in ast.walk(node) if said else ():
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield f"{path.relative_to(source)}:{part.lineno}", part.value


def foreign(where: object, text: str) -> Iterator[str]:
    for word, field in FOREIGN.items():
        if (found := re.search(word, text, re.IGNORECASE)) and not PRINTED.search(text):
            yield f"{where}: {found[0]!r} is {field}: {text.strip()}"


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_the_fields_words(page: str) -> None:
    assert [one for where, text in prose(page) for one in foreign(where, text)] == []


def test_messages_have_the_fields_words() -> None:
    assert [one for where, text in messages() for one in foreign(where, text)] == []


def test_a_foreign_word_is_found_where_it_is_read() -> None:
    assert list(foreign(1, "trace of 3 moments")) == []
    assert len(list(foreign(1, "The model data of a stretch"))) == 2
