"""Outside of the trace: correct, and the next ordinary step goes by its plan again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.session.builders import SLOT, Layers, MakePair, Pair, backward, batch, finish, loss_of, tiny_gpt2, train_step


def skip_the_step(model: nn.Module, optimizer: Any) -> torch.Tensor:
    loss = backward(model, number=9)
    optimizer.zero_grad()
    return loss


def a_layer_twice(model: nn.Module, optimizer: Any) -> torch.Tensor:
    return finish(model[0](model(model[0](batch(9)))).square().mean(), optimizer)


def under_autocast(model: nn.Module, optimizer: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch(9)).float().square().mean()
    return finish(loss, optimizer)


DEPARTURES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "no step": skip_the_step,
    "a layer twice": a_layer_twice,
    "the input's gradient": lambda model, _: torch.autograd.grad(model(x := batch(9).requires_grad_()).sum(), x)[0],
    "recomputed by the user": lambda model, optimizer: finish(
        checkpoint(model, batch(9), use_reentrant=False).square().mean(), optimizer
    ),
    "autocast": under_autocast,
}


@pytest.mark.parametrize("departure", DEPARTURES)
def test_what_is_outside_of_the_trace_is_correct_and_the_next_step_planned(departure: str, disk_pair: Pair) -> None:
    disk_pair.train(2)
    assert disk_pair.session.stats().planned_steps == 2
    disk_pair.same(DEPARTURES[departure])
    before = disk_pair.session.stats()
    disk_pair.train_same(2, first=2)
    after = disk_pair.session.stats()
    assert after.planned_steps == before.planned_steps + 2, after.reason
    assert after.reactive_steps == before.reactive_steps


def test_an_input_that_another_model_made_can_be_traced(disk_pair: Pair) -> None:
    """It has a history, which a trial run must not go back to."""

    def act(model: nn.Module, optimizer: Any, _: int) -> torch.Tensor:
        x = batch().requires_grad_()
        finish(model(x.tanh() * 2).square().mean(), optimizer)
        return x.grad.clone()

    disk_pair.train_same(2, by=act)
    assert disk_pair.session.stats().planned_steps == 2, disk_pair.session.stats().reason


class Hops(Layers):
    """Calls its layers in an order and number that the caller gives, as no signature can tell."""

    order: Sequence[int] = range(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = torch.tanh(self.layers[2 * number](x))
        return x


@pytest.mark.parametrize(
    "order",
    [[0, 0, 1, 2, 3, 4, 5], [0, 2, 3, 5], [5, 4, 3, 2, 1, 0], [2], [0, 1, 2, 3, 4, 5, 5, 5]],
    ids=["twice", "not at all", "backwards", "one", "more"],
)
def test_a_module_called_twice_or_not_at_all(make_pair: MakePair, order: list[int]) -> None:
    pair = make_pair(Hops, device="emulated", device_memory=6 * SLOT)
    pair.train(2)
    pair.plain.order = pair.model.order = order
    pair.train(1, first=2)
    pair.plain.order = pair.model.order = [0, 1, 2, 3, 4, 5]
    before = pair.session.stats().planned_steps
    pair.train_same(3, first=3)
    assert pair.session.stats().planned_steps >= before + 2, pair.session.stats().reason


def test_a_model_that_changes_for_good_is_planned_anew(make_pair: MakePair) -> None:
    pair = make_pair(Hops, device="emulated", device_memory=6 * SLOT)
    pair.train(2)
    pair.plain.order = pair.model.order = [5, 4, 3, 2, 1, 0]
    pair.train_same(4, first=2)
    stats = pair.session.stats()
    assert stats.reactive_steps <= 2
    assert stats.planned_steps >= 4


class Counts(Layers):
    """Changes something that it is given."""

    def forward(self, x: torch.Tensor, counter: SimpleNamespace) -> torch.Tensor:
        counter.uses += 1
        return self.layers(x)


def test_an_input_that_a_trial_run_could_change_is_left_alone(make_pair: MakePair) -> None:
    def act(model: nn.Module, optimizer: Any, _: int) -> int:
        counter = SimpleNamespace(uses=0)
        finish(model(batch(), counter).square().mean(), optimizer)
        return counter.uses

    pair = make_pair(Counts, device="emulated", device_memory=8 * SLOT)
    pair.train_same(3, by=act)
    assert pair.each(act, 0) == (1, 1)


class Lists(Layers):
    """Asks for a value in the middle of its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for value in self.layers[0](x).sum(0).tolist()[:2]:
            x = x + value
        return self.layers(x)


def test_a_forward_that_cannot_be_traced_runs_reactively_and_says_why(make_pair: MakePair) -> None:
    pair = make_pair(Lists, device="emulated", device_memory=8 * SLOT)
    pair.train(1)
    assert pair.session.stats().reactive_steps == 1
    assert "traced" in pair.session.stats().reason
    pair.train_same(3, first=1)
    assert pair.session.stats().planned_steps >= 2, "measured once, it is planned"


# Hugging Face


def tokens(number: int, *, rows: int = 2, length: int = 8) -> torch.Tensor:
    return torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(number))


def step_on_text(model: Any, optimizer: Any, number: int, *, length: int = 8) -> torch.Tensor:
    torch.manual_seed(number)  # dropout
    ids = tokens(number, length=length)
    return finish(model(input_ids=ids, labels=ids).loss, optimizer)


GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 8},
    "beams": {"do_sample": False, "num_beams": 2},
    "without a cache": {"do_sample": False, "use_cache": False},
}


@pytest.mark.parametrize("how", GENERATIONS)
def test_generate_between_steps(make_pair: MakePair, how: str, machine: dict[str, Any]) -> None:
    def generate(model: Any, _: Any) -> list[Any]:
        torch.manual_seed(5)
        model.eval()
        found = model.generate(tokens(3), max_new_tokens=4, pad_token_id=0, **GENERATIONS[how])
        model.train()
        return found.tolist()

    tier = "device_memory" if "device_memory" in machine else "host_memory"
    pair = make_pair(tiny_gpt2, **machine | {tier: "256KiB"})
    pair.train(2, by=step_on_text)
    pair.same(generate)
    before = pair.session.stats()
    pair.train_same(2, first=2, by=step_on_text)
    after = pair.session.stats()
    assert after.planned_steps == before.planned_steps + 2, after.reason
    assert after.peak[tier.partition("_")[0]] <= 256 * 1024


def test_sequences_of_other_lengths_each_have_their_plan(make_pair: MakePair) -> None:
    pair = make_pair(tiny_gpt2, device="emulated", device_memory="256KiB")
    for number, length in enumerate((8, 5, 8, 6, 5, 8)):
        pair.same(step_on_text, number, length=length)
    pair.expect_same()
    assert pair.session.stats().planned_steps == 6


def test_backward_on_another_thread(pair: Pair) -> None:
    """On a GPU autograd has a thread of its own."""

    def act(model: nn.Module, optimizer: Any) -> None:
        loss = loss_of(model)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        pair.each(act)
    pair.expect_same()


def test_smaller_shapes_go_by_the_plan_of_larger_ones(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of every length are not traced anew, each."""
    from patrickstar.tracing.offline import OfflineTracer

    pair = make_pair()
    pair.each(train_step, 0, rows=6)
    traced: list[Any] = []
    original = OfflineTracer.foresee

    def foresee(self: OfflineTracer, *args: Any, **given: Any) -> Any:
        traced.append(args)
        return original(self, *args, **given)

    monkeypatch.setattr(OfflineTracer, "foresee", foresee)
    for number, rows in enumerate((5, 2, 6, 1), start=1):
        pair.each(train_step, number, rows=rows)
    assert not traced
    pair.each(train_step, 9, rows=8)
    assert len(traced) == 1
    pair.expect_same()
    assert pair.session.stats().planned_steps == 6, pair.session.stats().reason
