"""Operations are shown, and compute what they compute unseen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from patrickstar.torch_private import unobserved
from patrickstar.tracing.seen_operations import show_to, shown_to
from tests.parity.compare import same_bits


@pytest.fixture
def seen() -> Iterator[list[str]]:
    names: list[str] = []
    show_to((lambda func, _: names.append(func.overloadpacket.__name__),))
    try:
        yield names
    finally:
        show_to(())


def test_forward_and_backward_are_shown_but_not_what_an_operation_calls(seen: list[str]) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    torch.stack([weight, weight]).exp().sum().backward()
    assert seen[:4] == ["ones", "stack", "exp", "sum"]
    assert {"mul", "expand"} <= set(seen[4:])
    assert "cat" not in seen


def test_the_users_modes_see_the_same_and_what_is_hidden_nobody_sees(seen: list[str]) -> None:
    square = torch.ones(2, 2)
    with FlopCounterMode(display=False) as counter:
        square.mm(square)
    assert counter.get_total_flops() == 16
    with unobserved():
        square.mm(square)
    assert seen == ["ones", "mm"]


def test_what_torch_tries_out_to_compile_is_not_shown(seen: list[str]) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: x.exp().sin(), backend=counter)
    for _ in range(3):
        compiled(torch.ones(2))
    assert seen == ["ones", "exp", "sin"] * 3
    assert counter.frame_count == 1


def test_what_ends_in_a_backward_is_put_back_by_it(seen: list[str]) -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda _: show_to(()))
    (leaf * 2).sum().backward()
    assert len(shown_to()) == 1
    show_to(())
    before = len(seen)
    leaf.exp()
    assert len(seen) == before


def test_an_error_of_who_sees_it_reaches_the_caller() -> None:
    loss = torch.ones(2, requires_grad=True).exp().sum()

    def refuse(func: Any, result: Any) -> None:
        raise MemoryError(str(func))

    show_to((refuse,))
    try:
        with pytest.raises(MemoryError):
            loss.backward()
    finally:
        show_to(())


def computed(info: Any, sample: Any) -> list[Tensor]:
    """What an operation returns, and the gradients of what it is given."""
    torch.manual_seed(1)
    given = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(leaf, Tensor)]
    leaves = [tensor for tensor in given if tensor.requires_grad and tensor.is_leaf]
    for leaf in leaves:
        leaf.grad = None
    found = [
        out for out in tree_leaves(info.op(sample.input, *sample.args, **sample.kwargs)) if isinstance(out, Tensor)
    ]
    wanted = [out for out in found if out.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.randn_like(out) for out in wanted])
    every = [*(out.detach() for out in found), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return [
        tensor.clone() for tensor in every if tensor.layout is torch.strided and tensor.dtype is not torch.complex32
    ]


def differs(info: Any, sample: Any, seen: Callable[[Any, Any], None]) -> bool:
    plain = computed(info, sample)
    if not all(map(same_bits, plain, computed(info, sample))):
        return False  # it has no values of its own, such as `empty`
    show_to((seen,))
    try:
        shown = computed(info, sample)
    finally:
        show_to(())
    return len(plain) != len(shown) or not all(map(same_bits, plain, shown))


@pytest.mark.campaign
def test_each_operation_that_torch_tests_computes_the_same() -> None:
    wrong, compared = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in op_db:
            # Some have no values of their own, and the solver's depend on addresses: it differs from itself.
            if not info.supports_dtype(torch.float32, "cpu") or "empty" in info.name or info.name == "linalg.lstsq":
                continue
            for sample in [*info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)][:12]:
                try:
                    computed(info, sample)
                except (RuntimeError, AssertionError):
                    continue  # of samples that are not differentiable here
                compared += 1
                if differs(info, sample, lambda func, result: None):
                    wrong.append(info.name)
    assert not wrong
    assert compared > 4000
