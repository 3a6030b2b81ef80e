import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import patrickstar
from tests.architecture.sources import (
    PACKAGE,
    PURE,
    docstrings_that_cannot_be_read_alone,
    foreign_imports,
    hook_registrations,
    mutable_state,
    name_of,
    paths,
    public_names,
)
from tests.conftest import SLOW

TO_BE_DONE = re.compile("|".join(["TODO", "FIXME", "XXX"]))


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def offenders(rule):
    """All that breaks a rule in any file, with the file's name."""
    return [f"{name_of(path)}: {found}" for path in paths() for found in rule(path)]


def test_only_hooks_py_registers_module_hooks():
    assert offenders(lambda path: hook_registrations(tree(path)) if name_of(path) != "hooks.py" else []) == []


def test_no_module_has_state_that_can_change():
    assert offenders(lambda path: mutable_state(tree(path))) == []


def test_all_that_is_public_is_in_all():  # that it is sorted and there, ruff sees
    assert public_names(tree(PACKAGE / "__init__.py")) <= set(patrickstar.__all__)


def test_a_docstring_begins_with_a_noun_or_a_verb():
    assert offenders(lambda path: docstrings_that_cannot_be_read_alone(tree(path))) == []


def test_nothing_is_left_to_be_done():
    assert offenders(lambda path: TO_BE_DONE.findall(path.read_text(encoding="utf-8"))) == []


def test_the_pure_layers_import_the_standard_library_only():
    assert set(PURE) <= {name_of(path).partition("/")[0] for path in paths()}
    is_pure = {path for path in paths() if name_of(path).partition("/")[0] in PURE}
    assert offenders(lambda path: foreign_imports(tree(path)) if path in is_pure else []) == []


def test_nobody_changes_a_stretch_but_its_own_methods():
    def written(path):
        targets = (node for node in ast.walk(tree(path)) if isinstance(getattr(node, "ctx", None), ast.Store))
        owners = (ast.unparse(node.value) for node in targets if isinstance(node, ast.Attribute))
        return [owner for owner in owners if owner.rpartition(".")[2] == "stretch"]

    assert offenders(written) == []


def test_no_module_leads_back_to_itself():
    names = {"patrickstar." + name_of(path)[:-3].replace("/", ".").removesuffix(".__init__"): path for path in paths()}
    imported = {name: imports_of(tree(path)) & names.keys() for name, path in names.items()}
    while leaves := {name for name, found in imported.items() if not found & imported.keys()}:
        for name in leaves:
            del imported[name]
    assert sorted(imported) == [], "a circle, or what leads to one"


def imports_of(module):
    """Every module that one imports, wherever in it and for whatever."""
    found = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    return {name for node in found for name in (node.module, *(f"{node.module}.{each.name}" for each in node.names))}


def test_no_file_and_no_class_has_the_name_of_another():
    files = [name_of(path) for path in paths() if not path.name.startswith("__")]
    classes = [node.name for path in paths() for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    files.remove("cli/plan.py")  # called as its verb is
    assert twice(file.rpartition("/")[2] for file in files) == []
    assert twice(classes) == []


def twice(names):
    return [name for name, count in Counter(names).items() if count > 1]


def test_every_public_name_can_be_imported():
    assert [name for name in patrickstar.__all__ if not hasattr(patrickstar, name)] == []


def test_the_errors_are_public():
    kinds = ("Budget", "Checkpoint", "Config", "Device", "Layout", "Rank", "State", "")
    assert {f"{kind}Error" for kind in kinds} <= set(patrickstar.__all__)


@pytest.mark.parametrize(
    "code",
    [
        "module.register_forward_hook(f)",
        "self.module.register_full_backward_pre_hook(f)",
        "torch.nn.modules.module.register_module_forward_hook(f)",
        "from torch.nn.modules.module import register_module_full_backward_hook",
        "getattr(module, 'register_forward_pre_hook')(f)",
    ],
)
def test_a_registration_is_found(code):
    assert len(hook_registrations(ast.parse(code))) == 1


def test_hooks_on_tensors_are_no_module_hooks():
    code = "p.register_post_accumulate_grad_hook(f); p.register_hook(f); optimizer.register_step_post_hook(f)"
    assert hook_registrations(ast.parse(code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "CACHE = {}",
        "_seen: set[int] = set()",
        "NAMES = ['a']",
        "OF = collections.defaultdict(list)",
        "SESSIONS = weakref.WeakKeyDictionary()",
        "TABLE = MappingProxyType({'a': [1]})",
        "PAIRS = (1, [2])",
        "table = MappingProxyType({'a': 1})",
        "names = frozenset({'a'})",
        "if True:\n    CACHE = [n for n in range(3)]",
        "N = 1\nN += 1",
        "N = 1\ndef f():\n    global N\n    N = 2",
    ],
)
def test_state_at_the_top_of_a_module_is_found(code):
    assert len(mutable_state(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "__all__ = ['a']",
        "TABLE = MappingProxyType({'a': (1, 2), 'b': frozenset({3})})",
        "TABLE = MappingProxyType({name: f(name) for name in 'ab'})",
        "NAMES = frozenset({'a'})",
        "log = logging.getLogger('patrickstar')",
        "def f():\n    seen = []",
        "class A:\n    def f(self):\n        self.seen = {}",
        "try:\n    def f():\n        seen = []\nfinally:\n    pass",
        "Way = tuple[int, int]",
    ],
)
def test_constants_and_local_state_are_no_state_of_the_module(code):
    assert mutable_state(ast.parse(code)) == []


@pytest.mark.parametrize(
    "first", ["What it is.", "Whether it is.", "See `x`.", "The same, in fp32.", "As in torch.", "They are.", "Of x."]
)
def test_a_docstring_that_cannot_be_read_alone_is_found(first):
    for code in ("{}", "class A:\n    {}", "class A:\n    def f(self):\n        {}"):
        assert len(docstrings_that_cannot_be_read_alone(ast.parse(code.format(f'"""{first}"""')))) == 1


@pytest.mark.parametrize(
    "first", ["Bytes of a slot.", "Tells whether it is.", "The slots.", "`of` a snapshot.", "Raises StateError."]
)
def test_a_docstring_that_begins_with_a_noun_or_a_verb_passes(first):
    assert docstrings_that_cannot_be_read_alone(ast.parse(f'def f():\n    """{first}"""')) == []


@pytest.mark.parametrize("code", ["import torch", "from numpy import array", "def f():\n    import torch.nn"])
def test_a_foreign_import_is_found(code):
    assert len(foreign_imports(ast.parse(code))) == 1
    assert foreign_imports(ast.parse("import os.path\nfrom patrickstar.units import GIB")) == []


def test_files_that_are_slow_as_a_whole_exist():
    assert [name for name in SLOW if not (Path(__file__).parents[1] / name).is_file()] == []
