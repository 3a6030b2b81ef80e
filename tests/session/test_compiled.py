"""Blocks and models that `torch.compile` compiles, before `manage` or after it, have the bits of the same model compiled alike without us."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import patrickstar
from tests.session.blocks import MOVING, Block, build
from tests.session.builders import adamw, batch, managed, step_with_loss

ROOMY = {"device": "emulated", "device_memory": "64MiB"}


class Compilable(Block):
    """A block whose forward uses no number of its own, on which a compiler would guard."""

    def forward(self, x):
        return x + self.scale * self.down(nn.functional.gelu(self.up(x)))


def compile_blocks(model, **given):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, fullgraph=True, **given)
    return model


def compile_calls_of_blocks(model, **given):
    for block in model.blocks:
        block.compile(fullgraph=True, **given)
    return model


def compile_calls(model, **given):
    model.compile(**given)
    return model


COMPILED = {
    "blocks": compile_blocks,
    "calls of blocks": compile_calls_of_blocks,
    "the model": lambda model, **given: torch.compile(model, **given),
    "calls of the model": compile_calls,
}
WAYS = [(what, when) for what in COMPILED for when in ("before", "after") if (what, when) != ("blocks", "after")]
"""What is compiled, and whether before `manage`. Blocks that are wrapped after it are other modules, which it has not seen."""


@pytest.fixture(autouse=True)
def compiled_anew():
    torch.compiler.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield


def train_both(what, when, machine, **given):
    """Trains a model compiled under management, and the same one without; fails where a bit differs. Gives statistics, and graphs after each step."""
    backend = given.pop("backend", None)
    counters = [{} if backend is None else {"backend": CompileCounterWithBackend(backend)} for _ in range(2)]
    plain, model = build(Compilable), build(Compilable)
    compiled = COMPILED[what](plain, **counters[0], **given)
    ours = COMPILED[what](model, **counters[1], **given) if when == "before" else None
    optimizer = adamw(plain)
    with managed(model, **machine) as session:
        if ours is None:
            ours = COMPILED[what](model, **counters[1], **given)
        graphs = []
        for number in range(4):
            assert torch.equal(
                step_with_loss(compiled, optimizer, number), step_with_loss(ours, session.optimizer, number)
            )
            graphs += [counter["backend"].frame_count for counter in counters[1:] if counter]
        stats = session.stats()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))
    return stats, graphs


BY_BLOCK = pytest.param(MOVING, marks=pytest.mark.blocks, id="by block")
WHOLE = pytest.param(ROOMY, marks=pytest.mark.whole, id="whole")
ON_THE_HOST = pytest.param({"host_memory": "1GiB"}, marks=pytest.mark.whole, id="on the host")


@pytest.mark.parametrize("machine", [BY_BLOCK, WHOLE, ON_THE_HOST])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("what", "when"), WAYS)
def test_what_is_compiled_has_the_same_bits_and_all_graphs_after_two_steps(what, when, backend, machine):
    stats, graphs = train_both(what, when, machine, backend=backend)
    assert stats.binding.startswith("8 blocks" if machine is MOVING else "whole")
    assert stats.moved["H>D"] or machine is not MOVING
    assert 0 < graphs[0] <= graphs[1] == graphs[-1]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("what", "mode", "machine"),
    [
        pytest.param("the model", "default", *WHOLE.values, marks=WHOLE.marks),
        pytest.param("the model", "reduce-overhead", *WHOLE.values, marks=WHOLE.marks),
        pytest.param("calls of the model", "reduce-overhead", *WHOLE.values, marks=WHOLE.marks),
        pytest.param("blocks", "default", *BY_BLOCK.values, marks=BY_BLOCK.marks),
        pytest.param("calls of blocks", "default", *BY_BLOCK.values, marks=BY_BLOCK.marks),
    ],
)
def test_so_it_has_where_it_is_compiled_by_inductor(what, mode, machine):
    train_both(what, "before", machine, mode=mode)


@pytest.mark.blocks
def test_a_compiled_block_that_does_not_fit_at_once_is_refused():
    model = compile_blocks(build(Compilable), backend="eager")
    with managed(model, **{**MOVING, "device_memory": "50KiB"}):
        with pytest.raises(patrickstar.BudgetError, match="blocks"):
            model(batch())
    plain = build(Compilable)
    with managed(plain, **{**MOVING, "device_memory": "50KiB"}):
        plain(batch())


@pytest.mark.blocks
@pytest.mark.parametrize("what", ["calls of blocks", "the model"])
def test_a_block_that_has_no_room_in_the_middle_of_compiled_code_is_refused_before_it_is_entered(what):
    """Views of the blocks before, which the user holds, keep their slots."""
    held, entered = [], []
    model = build(Compilable)
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: entered.append(number))
    with managed(model, **{**MOVING, "device_memory": "110KiB"}) as session:
        ours = COMPILED[what](model, backend="eager")
        step_with_loss(ours, session.optimizer)
        entered.clear()
        for block in model.blocks:
            block.register_forward_hook(lambda block, *_: held.append((block.up.weight.data, block.down.weight.data)))
        with pytest.raises(patrickstar.BudgetError):
            ours(batch())
        assert len(held) == len(entered) < 6
