"""One fault: a change in one place of the library, and the tests that must notice it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.operators import MutantError, Operator

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "patrickstar"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault.

    Attributes:
        name: what is wrong then.
        place: `module:name`, of a function, a class, or a constant, with the names of what it is in: `memory.store:ChunkStore.trim`.
        operator: what is done there.
        tests: node ids, of which at least one fails.
    """

    name: str
    place: str
    operator: Operator
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        """The file in the package."""
        return self.place.partition(":")[0].replace(".", "/") + ".py"

    def applied_to(self, text: str) -> str:
        """The file's text with the fault, without comments.

        Raises:
            MutantError: the place is not there, the operator finds no node or several in it, or the result is no other code.
        """
        tree = ast.parse(text)
        places: list[ast.AST] = [tree]
        for name in self.place.partition(":")[2].split("."):
            places = [node for place in places for node in _named(place, name)]
        if not places:
            raise MutantError(f"{self.name}: there is no {self.place}")
        before = list(map(ast.unparse, places))
        try:
            self.operator.change(places)
        except MutantError as error:
            raise MutantError(f"{self.name}: {self.place}: {error}") from error
        if before == list(map(ast.unparse, places)):
            raise MutantError(f"{self.name}: {self.place} is the same code with it")
        mutated = ast.unparse(tree)
        try:
            compile(mutated, self.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise MutantError(f"{self.name}: {self.place} does not compile with it: {error}") from error
        return mutated


@dataclass(frozen=True, slots=True)
class Fault:
    """A mutant of which it is not said yet how it comes about."""

    name: str
    place: str

    def by(self, operator: Operator, *tests: str) -> Mutant:
        """By an operator; `tests`: which are to notice."""
        return Mutant(self.name, self.place, operator, tests)


def _named(place: ast.AST, name: str) -> Iterator[ast.AST]:
    """What has a name in a place; several where a property has a setter."""
    for node in ast.iter_child_nodes(place):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if node.name == name:
                    yield node
            case ast.Assign() | ast.AnnAssign():
                stored = (one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
                if any(one.id == name for one in stored):
                    yield node
            case _:
                yield from _named(node, name)
