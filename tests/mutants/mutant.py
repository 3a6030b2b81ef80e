"""One fault: a replacement in one place of one file, and the tests that must notice it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "SOURCE", "Mutant", "MutantError"]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "patrickstar"


class MutantError(Exception):
    """A mutant that is not one: the code it is about has changed, or it changes nothing."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault.

    Attributes:
        name: what is wrong then.
        file: in the package. old, new: text in it that stands there once, and what takes its place.
        tests: node ids, of which at least one fails.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied_to(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
            MutantError: the text to replace is not there exactly once, or the result is no other code.
        """
        count = text.count(self.old)
        if count != 1:
            raise MutantError(f"{self.name}: {self.file} has its text {count} times, not once:\n{self.old}")
        mutated = text.replace(self.old, self.new)
        try:
            changed = ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))
        except SyntaxError as error:
            raise MutantError(f"{self.name}: {self.file} does not compile with it: {error}") from error
        if not changed:
            raise MutantError(f"{self.name}: {self.file} is the same code with it")
        return mutated
