"""The sources of the package as syntax trees, and the rules they keep: each gives back what breaks it, by line."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import patrickstar

PACKAGE = Path(patrickstar.__file__).parent
PURE = ("core", "plan", "config", "units.py", "errors.py")

_HOOKS = re.compile(r"register_(forward_hook|forward_pre_hook|full_backward_\w+|backward_hook|module_\w+)")
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
_FROZEN_CALLS = {"MappingProxyType", "frozenset", "tuple"}
_MUTABLE_CALLS = {
    *("list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "ChainMap", "local"),
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "SimpleNamespace"),
}
_NO_NOUN_OR_VERB = frozenset(
    {
        *("as", "at", "before", "after", "by", "for", "from", "how", "in", "inside", "into", "like", "not", "of"),
        *("on", "our", "over", "per", "see", "so", "under", "until", "up", "what", "whatever", "when", "where"),
        *("wherever", "whether", "which", "who", "whoever", "whom", "whose", "why", "with", "without", "he", "it"),
        *("its", "she", "such", "that", "their", "them", "there", "these", "they", "this", "those"),
    }
)
"""First words after which a docstring cannot be read alone, and `The same`."""
_MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


def paths() -> list[Path]:
    """Every source file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """How tests name a file: its path within the package."""
    return path.relative_to(PACKAGE).as_posix()


def hook_registrations(tree: ast.Module) -> list[str]:
    """Every mention of a function that registers a hook on modules, as an attribute, a name or a string."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name) | ast.Constant(value=str(name)):
                if _HOOKS.fullmatch(name):
                    found.append(f"line {node.lineno}: {name}")
    return found


def mutable_state(tree: ast.Module) -> list[str]:
    """Names at the top of a module whose value can change, frozen collections not in capitals, and `global`."""
    found = [
        f"line {node.lineno}: global {', '.join(node.names)}" for node in ast.walk(tree) if isinstance(node, ast.Global)
    ]
    for statement in _top_level(tree):
        match statement:
            case ast.Assign(targets=targets, value=value):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                names = [name]
            case ast.AugAssign(target=ast.Name(id=name)):
                found.append(f"line {statement.lineno}: {name} is changed")
                continue
            case _:
                continue
        if names == ["__all__"]:
            continue
        if _is_mutable(value):
            found.append(f"line {statement.lineno}: {', '.join(names)} can be changed: wrap it, or pass it along")
        elif _called(value) in _FROZEN_CALLS and not all(map(_CONSTANT.fullmatch, names)):
            found.append(f"line {statement.lineno}: {', '.join(names)} is a constant: write it in capitals")
    return found


def foreign_imports(tree: ast.Module) -> list[str]:
    """Imports, at any depth of the file, of what is neither the standard library nor this package."""
    found = []
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            root = module.partition(".")[0]
            if root != "patrickstar" and root not in sys.stdlib_module_names:
                found.append(f"line {node.lineno}: {module}")
    return found


def public_names(tree: ast.Module) -> set[str]:
    """Names at the top of a module that anybody may use."""
    defined = set().union(*map(_defined, _top_level(tree)))
    return {name for name in defined if not name.startswith("_") or name == "__version__"}


def docstrings_that_cannot_be_read_alone(tree: ast.Module) -> list[str]:
    """Docstrings whose first word is neither a noun nor a verb, as far as a list of words tells."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            words = [word.lower() for word in re.findall(r"\w+", first)[:2]]
            if words[:1] == [] or first.startswith("`"):
                continue
            if words[0] in _NO_NOUN_OR_VERB or words == ["the", "same"]:
                line = 1 if isinstance(node, ast.Module) else node.lineno
                found.append(f"line {line}: {first}")
    return found


def _top_level(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, those within `if`, `try` and `with` included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _top_level(child)


def _defined(statement: ast.stmt) -> set[str]:
    """Names that a statement at the top of a module gives a meaning."""
    match statement:
        case ast.Assign(targets=targets):
            return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            return set() if future else {alias.asname or alias.name.partition(".")[0] for alias in names}
    return set()


def _called(value: ast.expr) -> str:
    match value:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
    return ""


def _is_mutable(value: ast.expr) -> bool:
    """Whether a value, or one within a frozen collection, can be changed."""
    called = _called(value)
    if called in _FROZEN_CALLS:
        assert isinstance(value, ast.Call)
        return any(_is_mutable(part) for argument in value.args for part in _parts(argument))
    if isinstance(value, ast.Tuple):
        return any(map(_is_mutable, value.elts))
    return isinstance(value, _MUTABLE_LITERALS) or called in _MUTABLE_CALLS


def _parts(argument: ast.expr) -> list[ast.expr]:
    """What remains to be looked at once the collection itself is frozen: its items."""
    match argument:
        case ast.Dict(values=items) | ast.List(elts=items) | ast.Set(elts=items) | ast.Tuple(elts=items):
            return list(items)
        case ast.DictComp(value=item):
            return [item]
        case ast.ListComp(elt=item) | ast.SetComp(elt=item) | ast.GeneratorExp(elt=item):
            return [item]
        case ast.Call() if _called(argument) in _MUTABLE_CALLS:
            return list(argument.args)
    return [argument]
