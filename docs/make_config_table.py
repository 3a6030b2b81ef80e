"""Writes the tables of config keys into `deepspeed.md`, from the table that reads configs.

    python docs/make_config_table.py [--check]

A place is what stands between `<!-- keys: SUBJECT -->` and `<!-- end of keys -->`. With `--check` nothing is written; the exit status
is 1 where the page is not up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path

from places import fill

from patrickstar.config.engine.key import Key, Verdict
from patrickstar.config.engine.table import SUBJECTS

PAGE = Path(__file__).parent / "deepspeed.md"
# A comment names its subject in letters, spaces and hyphens.
NAMES = {
    "".join(letter if letter.isalnum() or letter in " -" else "" for letter in subject): subject for subject in SUBJECTS
}


def main() -> int:
    texts: Mapping[str, Callable[[], str]] = {name: partial(table, subject) for name, subject in NAMES.items()}
    return fill([PAGE], "keys", texts, script=Path(__file__).name)


def table(subject: str) -> str:
    """The rows of one subject. Keys of one object that share their verdict and its reason are one row."""
    rows = [row for group in groups(SUBJECTS[subject]) for row in lines(group)]
    return "\n".join(["| key | values | here |", "|---|---|---|", *rows])


def groups(keys: tuple[Key, ...]) -> Iterator[list[Key]]:
    for _, group in groupby(keys, key=lambda key: (within(key), key.verdict, key.why, key.harmless)):
        yield list(group)


def lines(group: list[Key]) -> Iterator[str]:
    first = group[0]
    if first.verdict is Verdict.HONOURED or len(group) == 1:
        for key in group:
            yield f"| `{key.path}` | {values(key)} | {said(key)} |"
    else:
        names = ", ".join(f"`{key.name}`" for key in group)
        yield f"| {f'`{within(first)}`: ' if within(first) else ''}{names} |  | {said(first)} |"


def within(key: Key) -> str:
    return key.path.rpartition(".")[0]


def values(key: Key) -> str:
    return "" if key.kind.words == "anything" else key.kind.words


def said(key: Key) -> str:
    """The verdict, and why."""
    if key.verdict is Verdict.HONOURED:
        return key.why
    if key.verdict is Verdict.NO_EFFECT:
        return f"no effect: {key.why}"
    harmless = " or ".join(f"`{json.dumps(value)}`" for value in key.harmless if key.kind.takes(value))
    return f"**refused** unless {harmless}: {key.why}"


if __name__ == "__main__":
    sys.exit(main())
