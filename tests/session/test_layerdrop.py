"""Forwards that draw a number and branch on it: they have a forecast, whose bound holds whatever is drawn."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from patrickstar import BudgetError
from patrickstar.core.trace import Trace
from tests.session.builders import ROOMY, SLOT, WIDTH, MakePair, batch, finish, machine_with, managed, seeded

ROWS = 96  # so many that activations, and not the update's four planes, need the largest budget
LAYERS = 5
STEPS = 12

DROPS: Mapping[str, Callable[[float], bool]] = {
    "compared": lambda p: bool(torch.rand([]) < p),
    "compared with a tensor": lambda p: bool(torch.rand([]) < torch.tensor(p)),
    "kept where it is larger": lambda p: not torch.rand([]) > p,
    "kept where it is smaller": lambda p: not torch.rand(1) < 1 - p,
    "read as a number": lambda p: torch.rand(1).item() < p,
    "in a list": lambda p: torch.rand(2).tolist()[1] < p,
    "on a device": lambda p: bool(torch.rand([], device=torch.device("cpu")) < p),
    "in 16 bits": lambda p: bool(torch.rand([], dtype=torch.bfloat16) < p),
    "filled": lambda p: bool(torch.empty(1).uniform_() < p),
    "filled from -1 to 1": lambda p: bool((torch.empty(2).uniform_(-1, 1)[1] + 1) / 2 < p),
    "floored": lambda p: not torch.floor(torch.rand([]) + 1 - p),
    "Bernoulli": lambda p: bool(torch.bernoulli(torch.tensor(p))),
    "filled by Bernoulli": lambda p: bool(torch.empty(()).bernoulli_(p)),
    "an integer": lambda p: torch.randint(0, 100, (1,)).item() < 100 * p,
    "filled with an integer": lambda p: torch.empty(1).random_(0, 100).item() < 100 * p,
}
"""Ways to draw whether a layer is dropped, with probability p."""


class Dropping(nn.Module):
    """Drops its inner layers by chance in training, and computes its loss itself.

    Args:
        drops: given a probability, whether the next layer is dropped; None: never.
        at_once: whether the draws of all layers come first, as fairseq has it.
    """

    def __init__(
        self, drops: Callable[[float], bool] | None, probability: float = 0.3, *, at_once: bool = False
    ) -> None:
        super().__init__()
        self.drops, self.probability, self.at_once = drops, probability, at_once
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.recomputes = False
        self.kept: list[int] = []

    def is_dropped(self) -> bool:
        return self.training and self.drops is not None and self.drops(self.probability)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        drawn = torch.empty(LAYERS).uniform_() if self.at_once else None
        kept = 0
        for number, layer in enumerate(self.layers):
            if self.is_dropped() if drawn is None else drawn[number] <= self.probability:
                continue
            kept += 1
            block = nn.Sequential(layer, nn.Tanh())
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        self.kept.append(kept)
        return self.last(x).square().mean()


def dropping(*args: Any, **keywords: Any) -> Callable[[], Dropping]:
    return seeded(lambda: Dropping(*args, **keywords))


def one_step(model: Any, optimizer: Any, number: int, *, rows: int = ROWS) -> Tensor:
    torch.manual_seed(number)
    return finish(model(batch(number, rows=rows)), optimizer)


def foreseen(build: Callable[[], Dropping]) -> Trace:
    """The forecast that a session makes before the first forward, in a budget with room for everything."""
    model = build()
    with managed(model, **ROOMY) as session:
        one_step(model, session.optimizer, 0)
        (known,) = session._parts.stretches.known.kinds.values()
        assert known.offline is not None, known.reason
        trace: Trace = known.offline
        return trace


def bare(trace: Trace) -> list[tuple[Any, ...]]:
    return [(moment.phase, moment.touches, moment.held) for moment in trace.moments]


@lru_cache
def with_all_layers() -> Trace:
    """The forecast of the model that never drops a layer."""
    return foreseen(dropping(None))


@pytest.mark.parametrize(
    ("how", "probability"),
    [
        *(pytest.param(how, 0.9, marks=pytest.mark.campaign if number % 3 else ()) for number, how in enumerate(DROPS)),
        *[("compared", 0.1), ("compared", 0.5), ("Bernoulli", 0.1)],
    ],
)
def test_a_forecast_keeps_the_layers_that_may_be_dropped(how: str, probability: float) -> None:
    want, got = with_all_layers(), foreseen(dropping(DROPS[how], probability))
    assert bare(got) == bare(want)
    for moment, kept in zip(got.moments, want.moments, strict=True):
        assert 0 <= moment.nonmodel_bytes - kept.nonmodel_bytes <= 64, "but for the numbers that are drawn"


def test_so_it_is_where_the_draws_of_all_layers_come_first() -> None:
    assert bare(foreseen(dropping(DROPS["compared"], 0.1, at_once=True))) == bare(with_all_layers())


def test_so_it_is_where_layers_are_drawn_from_a_generator_of_the_users() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    states: deque[Tensor] = deque()  # not a list, of which a trial run has a copy

    def drops(p: float) -> bool:
        states.append(generator.get_state())
        return bool(torch.rand([], generator=generator) < p)

    assert bare(foreseen(dropping(drops, 0.1))) == bare(with_all_layers())
    assert len(states) > 2 * LAYERS, "there was no trial run"
    assert torch.equal(states[-LAYERS], before), "the first draw of the real forward is that of a generator nobody used"


def smallest_accepted(build: Callable[[], nn.Module], act: Callable[..., Tensor] = one_step, **machine: Any) -> int:
    """The budget that the refusal of the first forward names; `machine`: one that is too small."""
    model = build()
    machine = machine or machine_with("emulated", 5 * SLOT, Path())
    with managed(model, **machine) as session:
        with pytest.raises(BudgetError) as refusal:
            act(model, session.optimizer, 0)
        assert session.stats().steps == 0
    assert refusal.value.smallest_bytes is not None
    return refusal.value.smallest_bytes


@pytest.mark.parametrize(
    ("how", "probability", "recomputes", "step", "tiers"),
    [
        ("compared", 0.3, False, "deferred", "emulated"),
        ("compared", 0.3, True, "in_backward", "emulated"),
        ("compared", 0.3, False, "in_backward", "cpu+disk"),
        ("compared", 0.3, True, "deferred", "cpu+disk"),
        ("compared", 0.3, False, "deferred", "emulated+disk"),
        ("compared", 0.3, True, "in_backward", "emulated+disk"),
        ("kept where it is smaller", 0.3, False, "in_backward", "emulated"),
        ("read as a number", 0.7, False, "deferred", "emulated"),
        ("an integer", 0.5, True, "deferred", "emulated"),
    ],
)
def test_in_the_smallest_budget_that_is_accepted_every_draw_fits(
    make_pair: MakePair, tmp_path: Path, how: str, probability: float, recomputes: bool, step: str, tiers: str
) -> None:
    """Where layers are dropped the step departs from its plan, and needs no more."""

    def build() -> Dropping:
        model = dropping(DROPS[how], probability)()
        model.recomputes = recomputes
        return model

    nbytes = smallest_accepted(build, step=step, **machine_with(tiers, 5 * SLOT, tmp_path / "first"))
    pair = make_pair(build, step=step, **machine_with(tiers, nbytes, tmp_path / "disk"))
    pair.train_same(STEPS, by=one_step)
    kept = set(pair.plain.kept)
    assert min(kept) < LAYERS - 1, "no draw dropped several"
    assert max(kept) >= LAYERS - (probability >= 0.5), "none kept them"
    stats = pair.session.stats()
    assert stats.steps == STEPS
    assert stats.reactive_steps
    # On the host nothing is metered: a step that departs reports what is reserved for the worst of its moments.
    assert tiers == "cpu+disk" or stats.peak["device"] <= nbytes


def test_below_that_budget_the_first_forward_is_refused_whatever_it_draws() -> None:
    build = dropping(DROPS["compared"], 0.5)
    nbytes = smallest_accepted(build)
    for number in range(4):
        model = build()
        with managed(model, device="emulated", device_memory=nbytes - 1) as session:
            torch.manual_seed(number)
            before = torch.get_rng_state()
            with pytest.raises(BudgetError):
                model(batch(0, rows=ROWS))
            assert torch.equal(torch.get_rng_state(), before)
            assert session.stats().steps == 0


def test_steps_that_drop_layers_are_no_model_for_the_next(make_pair: MakePair) -> None:
    """However many in a row: what was measured of them would be a bound for fewer layers than the next step may have."""
    pair = make_pair(dropping(DROPS["compared"], 0.5), **ROOMY)
    pair.train(STEPS, by=one_step)
    (known,) = pair.session._parts.stretches.known.kinds.values()
    assert pair.session.stats().reactive_steps >= STEPS // 2
    assert known.trace is known.offline
    smaller = one_step(pair.model, pair.optimizer, 0, rows=ROWS // 2)
    assert smaller.isfinite()
    _, other = pair.session._parts.stretches.known.kinds.values()
    assert other.trace is known.trace, "smaller shapes go by the bound of larger ones"
    for number in range(STEPS):
        one_step(pair.model, pair.optimizer, number, rows=ROWS // 2)
    assert other.trace is known.trace, "and keep it"


class Tries(Dropping):
    """Draws until it is right. In a trial run all draws are alike: it would not end. And nothing bounds how often a real one tries."""

    def forward(self, x: Tensor) -> Tensor:
        while bool(torch.rand([]) < self.probability):
            x = x + 1
        return super().forward(x)


NOT_PLANNED: Mapping[str, tuple[Callable[[], Dropping], str]] = {
    "other branches": (dropping(DROPS["compared"], 0.9), r"the forward branches on numbers that it draws"),
    "until one is right": (lambda: Tries(None, 0.3), r"it asks for more than 1000 of the numbers that it draws"),
    "until one is right, seldom": (lambda: Tries(None, 0.7), r"it asks for more than 1000"),
    "without bounds": (lambda: Dropping(lambda p: bool(torch.randn(()) < p)), r"cannot be traced.*item\(\)"),
}


@pytest.mark.parametrize(("build", "says"), NOT_PLANNED.values(), ids=NOT_PLANNED)
def test_the_reason_says_why_a_step_was_not_planned(make_pair: MakePair, build: Any, says: str) -> None:
    pair = make_pair(build, **ROOMY)
    one_step(pair.model, pair.optimizer, 0)
    stats = pair.session.stats()
    assert stats.reactive_steps == 1
    assert re.search(says, stats.reason), stats.reason


def test_a_forward_that_does_not_branch_is_tried_once(make_pair: MakePair) -> None:
    """One that does is tried three times."""
    runs: list[bool] = []

    class DropsPaths(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(True)
            path = (torch.rand(len(x), 1) + 1 - self.probability).floor_()
            return super().forward(x * path)

    pair = make_pair(lambda: DropsPaths(None), **ROOMY)
    runs.clear()
    one_step(pair.model, pair.optimizer, 0)
    assert len(runs) == 2
    pair = make_pair(lambda: DropsPaths(DROPS["compared"]), **ROOMY)
    runs.clear()
    one_step(pair.model, pair.optimizer, 0)
    assert len(runs) == 4


def test_a_number_of_repetitions_that_is_drawn_is_foreseen_at_its_largest(make_pair: MakePair) -> None:
    class Repeats(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            times = int(torch.randint(1, 5, ()))
            self.kept.append(times)
            for _ in range(times):
                x = torch.tanh(self.first(x))
            return self.last(x).square().mean()

    build = seeded(lambda: Repeats(None))
    trace = foreseen(build)
    assert sum(moment.label == "first.weight" and moment.phase == "forward" for moment in trace.moments) == 4
    nbytes = smallest_accepted(build)
    pair = make_pair(build, device="emulated", device_memory=max(nbytes, 6 * SLOT))
    pair.train(STEPS, by=one_step)
    assert set(pair.plain.kept) == {1, 2, 3, 4}


def test_draws_with_which_the_model_does_not_work_are_left_out() -> None:
    """Here, those that drop every layer."""

    class NeedsOne(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            kept = [layer(x) for layer in self.layers if not self.is_dropped()]
            return torch.stack(kept).square().mean()

    trace = foreseen(seeded(lambda: NeedsOne(DROPS["compared"], 0.3)))
    assert sum(moment.phase == "forward" for moment in trace.moments) == LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.campaign), True])
@pytest.mark.parametrize(
    "name", ["opt", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("bart", "wav2vec2"))]
)
def test_transformers_with_layerdrop(make_pair: MakePair, name: str, checkpointing: bool) -> None:
    from tests.parity.architectures import ARCHITECTURES

    make, loss_of = ARCHITECTURES[name]()

    def build() -> Any:
        torch.manual_seed(0)
        made: Any = make()
        for module in made.modules():
            if hasattr(module, "layerdrop"):
                module.layerdrop = 0.4
        if name == "wav2vec2":
            made.config.layerdrop = 0.4
        if checkpointing:
            made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return made.train()

    def act(model: Any, optimizer: Any, number: int) -> Tensor:
        torch.manual_seed(number)
        return finish(loss_of(model), optimizer)

    nbytes = smallest_accepted(build, act, device="emulated", device_memory="192KiB")
    pair = make_pair(build, device="emulated", device_memory=nbytes)
    pair.train_same(8, by=act)
    stats = pair.session.stats()
    assert stats.reactive_steps
    assert "cannot be traced" not in stats.reason
    (known,) = pair.session._parts.stretches.known.kinds.values()
    assert known.offline is not None


def test_a_random_state_of_python_or_numpy_is_that_of_the_first_step() -> None:
    """Their draws are numbers: the trial run has those of the first forward, and changes nothing."""
    import random

    import numpy as np

    for drops in (lambda p: random.random() < p, lambda p: np.random.random() < p):
        random.seed(1)
        np.random.seed(1)
        model = Dropping(drops, 0.5)
        with managed(model, **ROOMY) as session:
            one_step(model, session.optimizer, 0)
            stats = session.stats()
        assert stats.planned_steps == 1, stats.reason
        assert model.kept[0] < LAYERS
