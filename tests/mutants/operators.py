"""What a mutant does to code: operators, each of which changes one node of the tree of a function, a class or a constant.

An operator finds its node by a name or by code. A name is found by its end, too: `wait` is `self._ticket.wait`. Code is compared as a tree;
`...` in it stands for any expression, and alone for all arguments of a call or all statements of a body. Where several nodes are found,
`nth` says which one, counted from 1 in the order of the text.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

Node: TypeAlias = Any  # fields of nodes are looked for by pattern matching, which no checker follows


class MutantError(Exception):
    """A mutant that is not one: the code it is about has changed, or it changes nothing."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A node, and where it is: in which field of the node above, and where in that field if it is a list."""

    node: Node
    above: Slot | None = None
    field: str = ""
    index: int | None = None

    @property
    def parent(self) -> Node:
        """The node above."""
        return self.above.node if self.above else None

    def put(self, *nodes: ast.AST) -> None:
        """Puts one node, or several into a list, in its place."""
        if self.index is None:
            setattr(self.parent, self.field, *nodes)
        else:
            getattr(self.parent, self.field)[self.index : self.index + 1] = nodes

    def below(self) -> Iterator[Slot]:
        """All nodes below this one, in the order of the text."""
        for field, value in ast.iter_fields(self.node):
            for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(node, ast.AST):
                    slot = Slot(node, self, field, index)
                    yield slot
                    yield from slot.below()


@dataclass(frozen=True, slots=True)
class Operator:
    """A change of one node.

    Attributes:
        finds: whether a node is one that `what` describes. puts: changes it; `new`: the code that takes its place.
        nth: which of the nodes that are found; 0: there is one only.
    """

    finds: Callable[[Slot, str], bool]
    puts: Callable[[Slot, str], None]
    what: str
    new: str = ""
    nth: int = 0

    def change(self, places: Sequence[ast.AST]) -> None:
        """Changes the node, which is in one of `places`.

        Raises:
            MutantError: there is no such node, there are several, or what should take its place is no code.
        """
        try:
            found = [slot for place in places for slot in Slot(place).below() if self.finds(slot, self.what)]
            if len(found) < self.nth or (len(found) != 1 and not self.nth):
                raise MutantError(f"{self.what!r} is there {len(found)} times, nth={self.nth}")
            self.puts(found[self.nth - 1], self.new)
        except SyntaxError as error:
            raise MutantError(f"{error.text!r} is no code: {error}") from error


def drop(what: str, *, nth: int = 0) -> Operator:
    """Leaves a statement out: a call of a name, an assignment to one, or a statement as it is written."""
    return Operator(_is_statement, _put, what, "pass", nth)


def never(what: str, *, nth: int = 0) -> Operator:
    """Has the condition in which a name stands, or which is this one, be false."""
    return Operator(_is_condition, _put, what, "False", nth)


def always(what: str, *, nth: int = 0) -> Operator:
    """Has the condition in which a name stands, or which is this one, be true."""
    return Operator(_is_condition, _put, what, "True", nth)


def without(what: str, *, nth: int = 0) -> Operator:
    """Leaves out an operand, an element, a context manager or an argument (`name=`, where it has one)."""
    return Operator(_is_part, _leave_out, what, nth=nth)


def returns(new: str, *, nth: int = 0) -> Operator:
    """Returns something else."""
    return Operator(_is_returned, _put, "return", new, nth)


def assign(what: str, new: str, *, nth: int = 0) -> Operator:
    """Gives another value to a variable, an attribute or an argument that has a name."""
    return Operator(_is_value, _put, what, new, nth)


def replace(what: str, new: str, *, nth: int = 0) -> Operator:
    """Puts other code in the place of an expression or a statement, which is `_` in the new one."""
    return Operator(_is_code, _put, what, new, nth)


def _is_statement(slot: Slot, what: str) -> bool:
    if not _is_name(what):
        return isinstance(slot.node, ast.stmt) and _is_code(slot, what)
    match slot.node:
        case ast.Expr(value=ast.Call(func=subject)) | ast.AugAssign(target=subject) | ast.AnnAssign(target=subject):
            return _has_name(subject, what)
        case ast.Assign(targets=subjects):
            return any(_has_name(subject, what) for subject in subjects)
    return False


def _is_condition(slot: Slot, what: str) -> bool:
    match slot.parent, slot.field:
        case (ast.If() | ast.While() | ast.IfExp(), "test") | (ast.comprehension(), "ifs"):
            if _is_name(what):
                return any(_has_name(node, what) for node in ast.walk(slot.node))
            return _is_code(slot, what)
    return False


def _is_part(slot: Slot, what: str) -> bool:
    if what.endswith("="):
        return isinstance(slot.node, ast.keyword) and what == f"{slot.node.arg}="
    part = slot.node.context_expr if isinstance(slot.node, ast.withitem) else slot.node
    is_one_of_some = slot.index is not None or isinstance(slot.parent, ast.BinOp)
    return is_one_of_some and isinstance(part, ast.expr) and _is_like(part, *_parsed(what))


def _is_value(slot: Slot, what: str) -> bool:
    match slot.parent:
        case ast.keyword(arg=name):
            return bool(name == what)
        case ast.Assign(targets=[subject]) | ast.AnnAssign(target=subject) | ast.AugAssign(target=subject):
            return slot.field == "value" and _has_name(subject, what)
    return False


def _is_returned(slot: Slot, _: str) -> bool:
    return isinstance(slot.parent, ast.Return)


def _is_code(slot: Slot, what: str) -> bool:
    return _is_like(slot.node, *_parsed(what))


def _is_like(node: Node, pattern: Node) -> bool:
    match pattern:
        case ast.Constant(value=value) | ast.Expr(value=ast.Constant(value=value)) if value is ...:
            return True
        case ast.Call(args=[ast.Constant(value=value)]) if value is ...:
            return isinstance(node, ast.Call) and _is_like(node.func, pattern.func)
        case [ast.Expr(value=ast.Constant(value=value))] if value is ...:
            return bool(node)
        case [*_]:
            return len(node) == len(pattern) and all(map(_is_like, node, pattern))
        case ast.AST():
            fields = [name for name in pattern._fields if name not in {"ctx", "kind", "type_comment"}]
            same = type(node) is type(pattern)
            return same and all(_is_like(getattr(node, name), getattr(pattern, name)) for name in fields)
    return bool(type(node) is type(pattern) and node == pattern)


def _is_name(what: str) -> bool:
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in what.split("."))


def _has_name(node: Node, name: str) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name | ast.Attribute) and f".{ast.unparse(node)}".endswith(f".{name}")


@lru_cache
def _parsed(text: str) -> list[Node]:
    """The statements of a text; an expression is no statement."""
    return [node.value if isinstance(node, ast.Expr) else node for node in ast.parse(text).body]


def _put(slot: Slot, new: str) -> None:
    class Filling(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return slot.node if node.id == "_" and isinstance(node.ctx, ast.Load) else node

    nodes = [Filling().visit(deepcopy(node)) for node in _parsed(new)]
    if any(isinstance(node, ast.stmt) for node in nodes) or len(nodes) > 1:
        statement = slot if isinstance(slot.node, ast.stmt) else slot.above
        statement.put(*(node if isinstance(node, ast.stmt) else ast.Expr(node) for node in nodes))
    else:
        slot.put(*nodes)


def _leave_out(slot: Slot, _: str) -> None:
    match slot.parent:
        case ast.BinOp(left=left, right=right):
            slot.above.put(right if slot.field == "left" else left)
        case ast.BoolOp(values=[one, other]):
            slot.above.put(other if slot.index == 0 else one)
        case ast.With(items=[_], body=body):
            slot.above.put(ast.If(ast.Constant(True), body, []))
        case _:
            slot.put()
