"""Pages of the documentation as data: their snippets, what those print, their links and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r" *(`{3,})(\S*)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"#{1,6} +(.+)")


@dataclass(frozen=True)
class Block:
    """A fenced block. `line`: of its first line of text, from 1. `follows`: only blank lines stand between it and the block before."""

    kind: str
    line: int
    text: str
    follows: bool


@dataclass(frozen=True)
class Snippet:
    """A block of Python, and what the page says that it prints; None where it says nothing."""

    line: int
    code: str
    output: str | None


def pages() -> list[Path]:
    """Every page: at the root, and below `docs/`."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def split(text: str) -> tuple[list[Block], list[tuple[int, str]]]:
    """The fenced blocks of a page, and its other lines with their numbers."""
    blocks: list[Block] = []
    prose: list[tuple[int, str]] = []
    fence, kind, start, follows = "", "", 0, False
    inside: list[str] = []
    blank = False
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if not fence and found:
            fence, kind, start, follows, inside = found[1], found[2], number + 1, blank, []
        elif fence and line.strip() == fence:
            blocks.append(Block(kind, start, "\n".join(inside), follows))
            fence, blank = "", True
        elif fence:
            inside.append(line)
        else:
            prose.append((number, line))
            blank = blank and not line.strip()
    assert not fence, f"the block of line {start} has no end"
    return blocks, prose


def snippets(text: str) -> list[Snippet]:
    """The blocks of Python, in order; a `text` block right after one is what it prints."""
    blocks, _ = split(text)
    found = []
    for block, after in pairwise([*blocks, None]):
        if block is not None and block.kind == "python":
            output = after.text if after is not None and after.kind == "text" and after.follows else None
            found.append(Snippet(block.line, block.text, output))
    return found


def matches(wanted: str, got: str) -> bool:
    """Whether output is what a page says, where `...` stands for anything."""
    pattern = ".*?".join(re.escape(part) for part in wanted.strip().split("..."))
    return re.fullmatch(pattern, got.strip(), re.DOTALL) is not None


def links(text: str) -> Iterator[tuple[int, str]]:
    """Targets of links and pictures with their lines, those into the web aside."""
    for number, line in split(text)[1]:
        for found in _LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            target = found[1] or found[2]
            if not re.match(r"[a-z]+:", target):
                yield number, target


def anchors(text: str) -> set[str]:
    """What `#...` may name on a page: its headings, as GitHub writes them."""
    known: set[str] = set()
    for _, line in split(text)[1]:
        found = _HEADING.fullmatch(line)
        if found:
            words = re.sub(r"[^\w\- ]", "", found[1].lower()).replace(" ", "-")
            number = 0
            while (name := words if not number else f"{words}-{number}") in known:
                number += 1
            known.add(name)
    return known
