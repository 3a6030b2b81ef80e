"""Calls are counted one by one, against a package of known size in place of ours."""

import enum
import gc
import sys
import types
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from benchmarks.spans import Spans, has_state
from torch import nn
from torch.nn import functional as F

BINDING = """
import torch
from dataclasses import dataclass
from torch import nn

class Owner:
    def __init__(self):
        self.log = []

    def used(self, tensor):
        self.log.append(len(tensor.shape))
{more}

@dataclass(frozen=True)
class Ref:
    name: str

    def text(self):
        return self.name

owner = Owner()

class Managed(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.nn.functional.linear:
                owner.used(args[0])
                Ref.text(REF)
            return func(*args, **(kwargs or {{}}))

REF = Ref("r")

class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {{}}))

class Hooks:
    def pack(self, tensor):
        return tensor

    def unpack(self, saved):
        return saved.detach()

    def arrived(self, parameter):
        owner.used(parameter)

def fail():
    raise ValueError
"""


@pytest.fixture
def package(monkeypatch):
    """Makes `ours.binding`, with some more in its middle."""

    def make(more=""):
        module = types.ModuleType("ours.binding")
        monkeypatch.setitem(sys.modules, "ours.binding", module)
        exec(BINDING.format(more=more), module.__dict__)
        return module

    return make


def spans_of(work):
    spans = Spans(F.linear, package="ours")
    with spans.counting():
        work()
    return spans.found


def used(ours):
    weight = ours.Managed(torch.randn(3, 3))
    x = torch.randn(2, 3)
    (span,) = spans_of(lambda: F.linear(x, weight))
    return span


def test_a_use_is_every_call_from_torch_to_torch(package):
    span = used(package())
    # __torch_function__, used, text; linear, len, append, linear again, and as Python has it the context's ends.
    assert (span.kind, span.python) == ("use", 3)
    assert span.c >= 4
    assert span.files == {"binding.py"}
    assert span.classes == {"binding.Owner"}


@pytest.mark.parametrize(
    ("more", "python", "c"),
    [("        (lambda: None)()", 1, 0), ("        len('')", 0, 1), ("        any(True for _ in ())", 1, 1)],
)
def test_one_call_more_is_one_more(package, more, python, c):
    before, after = used(package()), used(package(more))
    assert (after.python - before.python, after.c - before.c) == (python, c)


def test_a_plain_parameter_is_used_by_one_call_in_c(package):
    x, weight = torch.randn(2, 3), nn.Parameter(torch.randn(3, 3))
    (span,) = spans_of(lambda: F.linear(x, weight))
    assert (span.kind, span.python, span.c, span.classes, span.files) == ("use", 0, 1, set(), set())


def test_hooks_are_told_by_what_they_get_and_give(package):
    hooks = package().Hooks()
    weight = nn.Parameter(torch.randn(3, 3))
    weight.register_post_accumulate_grad_hook(hooks.arrived)
    x = torch.randn(2, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        loss = F.linear(x, weight).sum()
    found = spans_of(loss.backward)
    unpacked = [span for span in found if span.kind == "unpack"]
    assert sorted(span.shape for span in unpacked) == [(2, 3), (3, 3)]
    assert {(span.python, span.c) for span in unpacked} == {(1, 1)}
    (gradient,) = (span for span in found if span.kind == "gradient")
    # arrived and used; the length and the log's append.
    assert (gradient.python, gradient.c, gradient.shape) == (2, 2, None)
    assert gradient.classes == {"binding.Hooks", "binding.Owner"}
    assert len(found) == 3


def test_what_sees_every_operation_unpacks_nothing(package):
    x = torch.randn(2, 3)
    with package().Seeing():
        found = spans_of(lambda: x + x)
    assert [span.kind for span in found] == ["operation"]


def test_a_span_ends_with_an_exception(package):
    ours = package()

    def work():
        for _ in range(2):
            with suppress(ValueError):
                ours.fail()

    assert [(span.kind, span.python) for span in spans_of(work)] == [("other", 1)] * 2


def test_nothing_that_is_returned_is_kept(package):
    ours = package()
    made = []

    def work():
        made.append(weakref.ref(ours.Hooks().unpack(torch.ones(2))))

    (span,) = [span for span in spans_of(work) if span.kind == "unpack"]
    assert span.shape == (2,)
    assert made[0]() is None


def test_no_garbage_is_collected_while_calls_are_counted():
    spans = Spans(F.linear)
    with spans.counting():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert sys.getprofile() is None


@dataclass(frozen=True)
class Frozen:
    pass


@dataclass
class Changing:
    pass


class Pair(NamedTuple):
    left: int


class Way(enum.Enum):
    IN = 1


@pytest.mark.parametrize(
    ("cls", "has"),
    [
        (Frozen, False),
        (Pair, False),
        (Way, False),
        (ValueError, False),
        (nn.Parameter, False),
        (type, False),
        (Changing, True),
        (Spans, True),
    ],
)
def test_frozen_data_has_no_state(cls, has):
    assert has_state(cls) is has
