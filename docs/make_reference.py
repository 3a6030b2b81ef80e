"""Writes `docs/reference.md` from docstrings and from the command line's own help.

    python docs/make_reference.py [--check]

With `--check` nothing is written; the exit status is 1 where the page is not what would be written.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

import patrickstar
from patrickstar import errors
from patrickstar.cli.main import VERBS, cli
from patrickstar.core.layout import Layout
from patrickstar.core.trace import Trace
from patrickstar.engine import Engine, EngineOptimizer, initialize_engine
from patrickstar.optim.managed import ManagedOptimizer
from patrickstar.parallel import ContextParallel, Tensor2D, costs, summa_ab, summa_abt, summa_atb, traffic
from patrickstar.plan.plan import Plan
from patrickstar.session.stats import Stats

PAGE = Path(__file__).parent / "reference.md"
WIDTH = 100  # of the command line's help, whatever terminal this runs in

HEAD = """\
# Reference

Generated from docstrings by `docs/make_reference.py`; edit those, not this page. Everything else is private and
may change without notice. How to use it all is in the [guide](guide.md).
"""

SESSION = [
    "optimizer",
    "plan",
    "trace",
    "layout",
    "stats",
    "clip_grad_norm_",
    "gradients",
    "write",
    "state_dict",
    "load_state_dict",
    "save_checkpoint",
    "load_checkpoint",
    "export",
    "close",
]
OPTIMIZER = [
    "original",
    "param_groups",
    "hypers",
    "step",
    "zero_grad",
    "add_param_group",
    "state_dict",
    "load_state_dict",
]
CONTEXT = [
    *("parallelize", "release", "shard", "unshard", "positions", "multiple", "attention"),
    *("cross_entropy", "token_mean", "reduce_gradients", "verify"),
]
BLOCKS = ["parallelize", "shard", "unshard", "cross_entropy", "state_dict", "gradients"]
ENGINE = [
    *("lr_scheduler", "global_steps", "skipped_steps", "backward", "step"),
    *("zero_grad", "is_gradient_accumulation_boundary", "gradient_accumulation_steps"),
    *(
        "train_micro_batch_size_per_gpu",
        "get_lr",
        "state_dict",
        "load_state_dict",
        "save_checkpoint",
        "load_checkpoint",
    ),
    "close",
]
ENGINE_OPTIMIZER = [
    *("param_groups", "micro_steps", "at_boundary", "step", "zero_grad"),
    *("add_param_group", "state_dict", "load_state_dict"),
]
READABLE = {
    Layout: ["n_chunks", "model_numel", "padding", "digest"],
    Trace: ["peak", "name", "digest"],
    Plan: ["actions", "digest"],
}


def main() -> int:
    page = "\n".join(lines()).rstrip() + "\n"
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() == page:
            return 0
        sys.stderr.write(f"{PAGE.name} is not up to date: run `python docs/{Path(__file__).name}`\n")
        return 1
    PAGE.write_text(page)
    return 0


def lines() -> Iterator[str]:
    """The page."""
    yield HEAD
    yield from _function(patrickstar.manage, "patrickstar.manage", level=2)
    yield from _function(patrickstar.deferred_init, "patrickstar.deferred_init", level=2)
    yield "## patrickstar.Session\n"
    yield from _text(patrickstar.Session.__doc__)
    yield from _members(patrickstar.Session, "session", SESSION, level=3)
    yield "## The optimizer of a session\n"
    yield from _text(ManagedOptimizer.__doc__)
    yield from _members(ManagedOptimizer, "session.optimizer", OPTIMIZER, level=3)
    yield from _fields(Stats, "What session.stats() returns")
    yield from _fields(patrickstar.Options, "patrickstar.Options")
    for optimizer in (patrickstar.AdamW, patrickstar.Adam):
        yield from _function(optimizer, f"patrickstar.{optimizer.__name__}", level=2)
    for kind, name, members in ((ContextParallel, "cp", CONTEXT), (Tensor2D, "tp", BLOCKS)):
        yield from _function(kind, f"patrickstar.parallel.{kind.__name__}", level=2)
        yield from _members(kind, name, members, level=3)
    for function in (summa_ab, summa_abt, summa_atb, traffic):
        yield from _function(function, f"patrickstar.parallel.{function.__name__}", level=2)
    yield "## patrickstar.parallel.costs\n"
    yield from _text(costs.__doc__)
    for name in ("attention", "summa", "memory"):
        yield from _function(getattr(costs, name), f"costs.{name}", level=3)
    yield from _function(initialize_engine, "patrickstar.runtime.initialize_engine", level=2)
    yield "## The engine\n"
    yield from _text(Engine.__doc__)
    yield from _members(Engine, "engine", ENGINE, level=3)
    yield "## The optimizer of an engine\n"
    yield from _text(EngineOptimizer.__doc__)
    yield from _members(EngineOptimizer, "optimizer", ENGINE_OPTIMIZER, level=3)
    yield "## Errors\n"
    tree = (inspect.getdoc(errors) or "").split("\n\n")[1]
    yield f"```text\n{textwrap.dedent(tree)}\n```\n"
    for name in errors.__all__:
        yield f"### patrickstar.{name}\n"
        yield from _text(getattr(errors, name).__doc__)
    yield "## Readable parts\n\nWhat `session.layout`, `session.trace` and `session.plan` are. Each prints as text.\n"
    for kind, names in READABLE.items():
        yield f"### {kind.__name__}\n"
        yield from _text(kind.__doc__)
        yield from _members(kind, f"session.{kind.__name__.lower()}", names, level=4)
    yield from _command_line()


def _members(kind: type, prefix: str, names: list[str], *, level: int) -> Iterator[str]:
    said = _attribute_docs(kind)
    for name in names:
        member = inspect.getattr_static(kind, name, None)
        if isinstance(member, property):
            yield f"{'#' * level} {prefix}.{name}\n"
            yield from _text(member.fget.__doc__ if member.fget else None)
        elif member is not None:
            yield from _function(getattr(kind, name), f"{prefix}.{name}", level=level)
        else:
            text = said.get(name) or _attribute_of_docstring(kind, name)
            assert text, f"{kind.__name__}.{name} is documented nowhere"
            yield f"{'#' * level} {prefix}.{name}\n"
            yield from _text(text[0].upper() + text[1:])


def _fields(kind: Any, title: str) -> Iterator[str]:
    """A frozen group of fields, each with the docstring under it."""
    yield f"## {title}\n"
    yield from _text(kind.__doc__)
    said = _attribute_docs(kind)
    for field in dataclasses.fields(kind):
        default = "" if field.default is dataclasses.MISSING else f" = {_literal(field.default)}"
        yield f"- `{field.name}: {field.type}{default}`: {_flow(said[field.name])}"
    yield ""


def _function(function: Callable[..., Any], title: str, *, level: int) -> Iterator[str]:
    yield f"{'#' * level} {title}\n"
    yield f"```py\n{_signature(function, title.rpartition('.')[2])}\n```\n"
    yield from _text(function.__doc__)


def _signature(function: Callable[..., Any], name: str) -> str:
    signature = inspect.signature(function)
    words: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name in {"self", "unknown"}:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {_literal(parameter.default)}"
        words.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    result = signature.return_annotation
    arrow = "" if result in (None, "None", signature.empty) else f" -> {result}"
    one_line = f"{name}({', '.join(words)}){arrow}"
    return one_line if len(one_line) <= WIDTH else f"{name}(\n    " + ",\n    ".join(words) + f",\n){arrow}"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


_SECTION = re.compile(r"(Args|Attributes|Raises):$")
_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.+)")
_NEXT_ENTRY = re.compile(r"(?:; |\. )(?=(?:[a-z_]+(?:, [a-z_]+)*|\w+Error): )")  # several on a line


def _text(docstring: str | None) -> Iterator[str]:
    """A docstring as Markdown: paragraphs, and a list for each section. Essays (`Note [...]`) are for readers of the code."""
    assert docstring, "everything on this page has a docstring"
    section = ""
    paragraph: list[str] = []
    entries: list[str] = []

    def flush() -> Iterator[str]:
        if paragraph:
            yield _flow(" ".join(paragraph)) + "\n"
            paragraph.clear()
        if entries:
            yield from (f"- {entry}" for entry in entries)
            yield ""
            entries.clear()

    for line in inspect.cleandoc(docstring).splitlines():
        if line.startswith("Note ["):
            break
        found = _SECTION.match(line)
        if found:
            yield from flush()
            section = found[1]
            yield {"Args": "Arguments:", "Attributes": "Attributes:", "Raises": "Raises:"}[section] + "\n"
        elif not line.startswith(" ") and line.strip():
            section = ""
            paragraph.append(line.strip())
        elif not line.strip():
            yield from flush()
        elif section:
            _enter(line, entries)
        else:
            paragraph.append(line.strip())
    yield from flush()


def _enter(line: str, entries: list[str]) -> None:
    """A line of a section: an entry of its own, or the continuation of the one before."""
    if entries and (len(line) - len(line.lstrip()) > 4 or not _ENTRY.match(line.strip())):
        entries[-1] += f" {line.strip()}"
        return
    for part in _NEXT_ENTRY.split(line.strip()):
        found = _ENTRY.match(part)
        names = ", ".join(f"`{name}`" for name in found[1].split(", ")) if found else ""
        entries.append(f"{names}: {found[2]}" if found else part)


def _flow(text: str) -> str:
    return " ".join(text.split())


def _attribute_docs(kind: type) -> dict[str, str]:
    """The docstrings that stand under attributes, in the class or in its `__init__`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    found: dict[str, str] = {}
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    for body in bodies:
        for before, after in pairwise(body):
            target = before.target if isinstance(before, ast.AnnAssign) else None
            name = (
                target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""
            )
            if name and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[name] = str(after.value.value)
    return found


def _attribute_of_docstring(kind: type, name: str) -> str:
    """What a class's docstring says of an attribute: "`name`: text", up to the end of the paragraph."""
    text = inspect.cleandoc(kind.__doc__ or "")
    found = re.search(rf"^`?{name}`?: (.+?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def _command_line() -> Iterator[str]:
    yield "## Command line\n\n`patrickstar` and `python -m patrickstar` are the same.\n"
    commands = {verb: cli.get_command(click.Context(cli), verb) for verb in VERBS}
    within = [
        (verb, *(f"{verb} {name}" for name in getattr(command, "commands", ()))) for verb, command in commands.items()
    ]
    for verb in ("", *(verb for verbs in within for verb in verbs)):
        shown = CliRunner().invoke(cli, [*verb.split(), "--help"], prog_name="patrickstar", terminal_width=WIDTH)
        assert shown.exit_code == 0, shown.output
        yield f"### patrickstar {verb}".rstrip() + "\n"
        yield f"```text\n{click.unstyle(shown.output).rstrip()}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
