"""Text to train on: files and directories, or the sources of Python's standard library where nothing is given.

Held out for validation are whole files that make up 1 to 10 % of the text, or the last tenth of the largest file where
no files do. Which ones depends on the texts alone, so that every run of one corpus validates on the same.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from patrickstar.errors import ConfigError, Error

# Shares of the text: what to hold out, what is too little to validate on, what is too much to go without.
HELD_OUT, LEAST_HELD_OUT, MOST_HELD_OUT = 0.05, 0.01, 0.1
# Parts of an installed standard library that are no running text of it: tests, other people's packages, caches.
_NOT_LIBRARY: Final = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class DataError(Error):
    """Text that cannot be trained on; the message names the file."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in a fixed order, the held-out ones apart."""

    source: str
    train: tuple[str, ...]
    validation: tuple[str, ...]
    skipped: int
    """Files of directories that are not UTF-8 text."""
    digest: str

    @property
    def nbytes(self) -> int:
        return sum(len(text.encode()) for text in (*self.train, *self.validation))


def read_corpus(given: Sequence[str]) -> Corpus:
    """The corpus of `--data`: files as named, all files of directories, sorted; the default where nothing is given.

    Raises:
        ConfigError: a path that does not exist.
        DataError: a file named outright that is empty, binary or not UTF-8; a directory without text.
    """
    if not given:
        return _split("the Python standard library", list(_library()), skipped=0)
    texts: dict[Path, str] = {}
    skipped = 0
    for path in map(Path, given):
        if path.is_dir():
            found, unread = _read_directory(path)
            if not found:
                raise DataError(f"--data {path}: no text in this directory ({unread} files are not UTF-8 text)")
            texts.update(found)
            skipped += unread
        elif path.is_file():
            texts[path.resolve()] = text = _read_file(path)
            if not text.strip():
                raise DataError(f"--data {path}: the file is empty")
        else:
            raise ConfigError(f"--data {path}: no such file or directory")
    return _split(", ".join(given), list(texts.values()), skipped=skipped)


def _library() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts) and (text := _text_or_none(path)):
            yield text


def _read_directory(root: Path) -> tuple[dict[Path, str], int]:
    """All texts below a directory, hidden and empty files aside, and how many files are none."""
    seen = [path for path in sorted(root.rglob("*")) if path.is_file()]
    shown = [path for path in seen if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    read = {path.resolve(): _text_or_none(path) for path in shown}
    return {path: text for path, text in read.items() if text}, sum(text is None for text in read.values())


def _text_or_none(path: Path) -> str | None:
    with suppress(DataError):
        return _read_file(path)
    return None


def _read_file(path: Path) -> str:
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--data {path}: not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from error
    except OSError as error:
        raise DataError(f"--data {path}: {error.strerror}") from error
    if "\0" in text:
        raise DataError(f"--data {path}: not text: character {text.index(chr(0))} is a zero byte")
    return text


def _split(source: str, texts: list[str], *, skipped: int) -> Corpus:
    if not texts:
        raise DataError(f"no text in {source}; name text files or directories with --data")
    marks = [hashlib.sha256(text.encode()).digest() for text in texts]
    held = _held_out(texts, marks)
    if held:
        train = [text for index, text in enumerate(texts) if index not in held]
        validation = [texts[index] for index in sorted(held)]
    else:
        largest = max(texts, key=len)
        cut = len(largest) - int(len(largest) * MOST_HELD_OUT)
        train = list(texts)
        train[texts.index(largest)], validation = largest[:cut], [largest[cut:]]
    digest = hashlib.sha256(b"".join(marks)).hexdigest()
    return Corpus(source, tuple(train), tuple(validation), skipped, digest)


def _held_out(texts: Sequence[str], marks: Sequence[bytes]) -> set[int]:
    """Files in the order of their digests (as good as random, and the same everywhere) until they are enough."""
    total, taken = sum(map(len, texts)), 0
    chosen: set[int] = set()
    for index in sorted(range(len(texts)), key=lambda index: (marks[index], index)):
        if taken < total * HELD_OUT and taken + len(texts[index]) <= total * MOST_HELD_OUT:
            chosen.add(index)
            taken += len(texts[index])
    return chosen if taken >= total * LEAST_HELD_OUT else set()
