"""Random programs: models, hooks, inputs and loops that nobody has thought of, beside plain PyTorch.

A program is data: blocks of a model, hooks, budgets, and statements of a loop. It is run in plain PyTorch, then under a session. After each statement
what it has shown has the same bits, or the session has refused it, in which case nothing has differed before.
"""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import patrickstar
from patrickstar.torch_private import top_saved_tensors_hooks
from tests.parity.compare import describe, same_bits
from tests.session.builders import held_states, options, states
from tests.session.random_loops import LAST, STATEMENTS, World, shown
from tests.session.random_parts import AFTER, AROUND, BLOCKS, BUDGETS, HOOKS, SECOND

UNREADABLE = ("placeholder", "Storage that is invalid", "refers to a single memory location")
"""Texts of torch's errors where a placeholder is read or written."""


@dataclass(frozen=True)
class Program:
    """What is run twice."""

    blocks: list[tuple[str, str, bool | None]]
    statements: list[tuple[str, int]]
    last: str = "nothing"
    hooks: list[tuple[str, int]] = ()
    around: str = ""
    budget: str = "roomy"
    kib: int = 64
    rest: int = 0
    second: str = "fused"
    in_backward: bool = False

    def run(self, world: World) -> Iterator[tuple[str, list[Any], Exception | None]]:
        """What each statement shows, and the error that ends it."""
        for number, (name, n) in enumerate([*self.statements, (self.last, len(self.statements))]):
            torch.manual_seed(number)
            world.number, world.seen[:] = number, []
            found, error = [], None
            with AROUND[self.around]() as around:
                try:
                    found = shown((STATEMENTS | LAST)[name](world, n))
                except Exception as problem:
                    error = problem
            flops = around.get_total_flops() if isinstance(around, FlopCounterMode) else 0
            yield name, [*found, *shown(world.seen), repr(flops)], error
            if error is not None:
                return


def programs() -> st.SearchStrategy[Program]:
    numbers = st.integers(0, 60)
    few = ["train", "train", "evaluate", "schedule", "hold", "read", "edit weight", "freeze", "copy"]
    block = st.tuples(
        st.sampled_from(list(BLOCKS)), st.sampled_from(list(AFTER)), st.sampled_from([None, None, None, True, False])
    )

    def of(in_backward: bool) -> st.SearchStrategy[Program]:
        names = few if in_backward else [*STATEMENTS, *["train", "forward", "backward", "step"] * 2]
        return st.builds(
            Program,
            blocks=st.lists(block, min_size=1, max_size=5),
            statements=st.lists(st.tuples(st.sampled_from(names), numbers), min_size=2, max_size=10),
            last=st.sampled_from(["nothing"] * len(LAST) + list(LAST)),
            hooks=st.lists(st.tuples(st.sampled_from(HOOKS), numbers), max_size=2),
            around=st.sampled_from(["", "", "", *AROUND]),
            budget=st.sampled_from(list(BUDGETS)),
            kib=st.integers(48, 128),
            rest=st.sampled_from([0, 0, 1, 3, 6]),
            second=st.sampled_from(list(SECOND)),
            in_backward=st.just(in_backward),
        )

    return st.sampled_from([False, False, False, True]).flatmap(of)


def compare(program: Program) -> str:
    """Runs a program twice, and compares; gives how it ended."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        warnings.simplefilter("ignore")
        plain = World(program)
        want = list(program.run(plain))

        def manage(model: nn.Module, optimizer: Any) -> Any:
            memory = BUDGETS[program.budget](f"{folder}/disk", program.kib * 1024)
            step = "in_backward" if program.in_backward else "deferred"
            session = patrickstar.manage(
                model, optimizer, precision="fp32", step=step, options=options(chunk_size=1024), **memory
            )
            stack.callback(session.close)
            return session

        try:
            world = World(program, manage)
        except patrickstar.Error as refusal:
            return f"not managed: {type(refusal).__name__}"
        for number, ((name, ours, raised), (_, theirs, error)) in enumerate(
            zip(want, program.run(world), strict=False)
        ):
            if raised is not None:
                assert error is not None, (
                    f"statement {number}, {name}: plain PyTorch raises {raised!r}, nothing else does"
                )
                return f"both raise in {name}: {str(raised)[:50]}"
            if error is not None:
                if not isinstance(error, patrickstar.Error) and not any(text in str(error) for text in UNREADABLE):
                    raise AssertionError(f"statement {number}, {name}: {error!r}") from error
                return f"refused: {type(error).__name__} in {name}: {str(error)[:50]}"
            expect_same(f"statement {number}, {name}", ours, theirs)
        ours = shown(
            [
                plain.model.state_dict(),
                dict(sorted(states(plain.optimizer).items())),
                plain.second and plain.second.state_dict(),
            ]
        )
        seen = dict(sorted(held_states(world.session).items()))
        theirs = shown([dict(world.session.state_dict()), seen, world.second and world.second.state_dict()])
        expect_same("at the end", ours, theirs)
        world.session.close()
        expect_same("closed", shown(plain.model.state_dict()), shown(world.model.state_dict()))
        return "equal"


def expect_same(where: str, want: list[Any], got: list[Any]) -> None:
    for number, (ours, theirs) in enumerate(itertools.zip_longest(want, got)):
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            assert same_bits(ours, theirs), describe(f"{where}, value {number}", ours, theirs)
        else:
            assert isinstance(ours, str), f"{where}, value {number}: want {ours}, got {theirs}"
            assert ours == theirs, f"{where}, value {number}: want {ours}, got {theirs}"


def run(examples: int, **fixed: Any) -> Counter[str]:
    """How so many programs have ended. `fixed`: what they have in common."""
    ends: Counter[str] = Counter()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(programs())
    def program_shows_nothing_else(program: Program) -> None:
        end = compare(replace(program, **fixed))
        assert top_saved_tensors_hooks() is None, "hooks of saved tensors were left"
        event(end)
        ends[end] += 1

    program_shows_nothing_else()
    assert ends["equal"] > sum(ends.values()) / 3, f"few programs have run to their end: {ends}"
    return ends


def test_a_random_program_has_the_bits_of_plain_pytorch_or_is_refused() -> None:
    run(examples=25)


@pytest.mark.campaign
def test_each_of_many_random_programs_has_the_bits_of_plain_pytorch_or_is_refused() -> None:
    run(examples=300)


@pytest.mark.whole
@pytest.mark.parametrize("examples", [15, pytest.param(300, marks=pytest.mark.campaign)])
def test_where_everything_fits_nothing_is_refused(examples: int) -> None:
    ends = run(examples, budget="roomy")
    assert all(end == "equal" or end.startswith("both raise") for end in ends), ends


@pytest.mark.blocks
@pytest.mark.parametrize("examples", [15, pytest.param(300, marks=pytest.mark.campaign)])
def test_in_blocks_a_random_program_has_the_bits_of_plain_pytorch_or_is_refused(examples: int) -> None:
    run(examples)
