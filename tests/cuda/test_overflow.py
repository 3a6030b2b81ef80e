"""step/overflow.py on a device: flags are kept there, and read once."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

import patrickstar
from patrickstar.optim.passes import Passes
from patrickstar.step.overflow import Overflow, OverflowFlag, names_of, overflow_bytes, read
from tests.cuda.schedules import FEW_SCHEDULES, Accelerator
from tests.cuda.twins import CHUNK, batch, step, twins
from tests.session.builders import in_the_smallest

PASSES = Passes()
ONE_LOOK = 8 * 512  # while it is taken: extremes, whether they are finite, and both


@pytest.mark.parametrize("accelerator", FEW_SCHEDULES, indirect=True, ids=str)
def test_the_host_waits_once_for_all_gradients(accelerator: Accelerator) -> None:
    pieces = {
        "fine": torch.ones(8, device="cuda"),
        "late": torch.ones(8, device="cuda"),
        "infinite": torch.tensor([1.0, -torch.inf], device="cuda"),
        "none": torch.tensor([torch.nan, 1.0], device="cuda"),
        "empty": torch.empty(0, device="cuda"),
    }
    overflow = Overflow()
    accelerator.waits()
    for name in ("infinite", "fine", "none", "empty", "late", "infinite"):
        note(overflow, name, pieces[name])
    assert not accelerator.waits()
    seen_before = overflow.flags()
    numbers = torch.tensor([3.0, torch.inf], dtype=torch.float64, device="cuda")
    accelerator.waits()
    assert read(overflow.flags(), numbers) == [3.0, torch.inf]
    assert accelerator.waits()[threading.get_native_id()].total() == 1
    assert names_of(overflow.flags()) == names_of(seen_before) == ["infinite", "none"]
    assert not accelerator.waits()


def test_what_is_let_go_is_forgotten_read_or_not() -> None:
    overflow = Overflow()
    bad = torch.tensor([torch.nan], device="cuda")
    for name in ("one", "other", "third"):
        note(overflow, name, bad)
    overflow.forget("one")
    assert names_of(overflow.flags()) == ["other", "third"]
    overflow.forget("other")
    assert names_of(overflow.flags()) == ["third"]
    note(overflow, "third", torch.ones(1, device="cuda"))
    assert names_of(overflow.flags()) == ["third"]


def test_names_come_in_the_order_of_what_was_found() -> None:
    """Also where a gradient was looked at before, and was fine."""
    overflow = Overflow()
    for name, value in (("second", 1.0), ("first", torch.inf), ("second", torch.inf)):
        note(overflow, name, torch.full((4,), value, device="cuda"))
    own = [
        OverflowFlag.of(name, torch.isfinite(torch.full((4,), value, device="cuda")).all())
        for name, value in (("finite", 1.0), ("the user's own", torch.nan))
    ]
    assert names_of([*overflow.flags(), *own]) == ["first", "second", "the user's own"]


@pytest.mark.parametrize("looks", [1, 127, 128, 129, 1_000])
def test_many_looks_take_no_more_than_plans_have_for_them(looks: int) -> None:
    overflow, piece = Overflow(), torch.ones(16, device="cuda")
    numbers = torch.zeros(2, dtype=torch.float64, device="cuda")
    with measured(least=overflow_bytes(looks) // 4, most=overflow_bytes(looks) + ONE_LOOK):
        for each in range(looks):
            note(overflow, f"{each}", piece)
    with measured(least=0, most=overflow_bytes(looks)):
        assert read(overflow.flags(), numbers) == [0.0, 0.0]
    assert overflow.flags() == []


@contextmanager
def measured(*, least: int, most: int) -> Iterator[None]:
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    yield
    assert least <= torch.accelerator.max_memory_allocated() - before <= most


@pytest.mark.parametrize("accelerator", FEW_SCHEDULES, indirect=True, ids=str)
def test_looks_on_several_streams_share_nothing(accelerator: Accelerator) -> None:
    overflow, streams = Overflow(), [torch.Stream(device="cuda") for _ in range(2)]
    for number in range(6):
        with streams[number % 2]:
            note(overflow, f"{number}", torch.full((4,), torch.inf if number == 3 else 1.0, device="cuda"))
    for stream in streams:
        torch.accelerator.current_stream().wait_stream(stream)
    assert names_of(overflow.flags()) == ["3"]


def note(overflow: Overflow, name: str, piece: Tensor) -> None:
    with overflow.look(name, piece.device) as is_finite:
        PASSES.look(piece, is_finite)


def test_gradients_that_a_hook_changes_before_the_step_count_as_changed_in_its_norm(accelerator: Accelerator) -> None:
    """The norm is taken before `step()`, to be read with the flags, but where a hook comes between them."""
    weights = []
    for by_hook in (False, True):
        with twins(precision="fp16", max_grad_norm=1e-3) as pair:
            model, session = pair.model, pair.session
            session.optimizer.param_groups[0]["eps"] = 1e-3  # with which the size of a gradient matters
            halve = partial(halve_gradients, model)
            if by_hook:
                session.optimizer.register_step_pre_hook(halve)
            for number in range(3):
                session.scaler.scale(model(batch(number)).float().square().mean()).backward()
                if not by_hook:
                    session.scaler.unscale_(session.optimizer)
                    halve()
                session.scaler.step(session.optimizer)
                session.scaler.update()
                session.optimizer.zero_grad()
            weights.append({name: value.clone() for name, value in session.state_dict().items()})
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def halve_gradients(model: torch.nn.Module, *_: object) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def test_plans_have_room_for_the_looks_of_every_backward() -> None:
    peaks = []
    for backwards in (100, 1_000):
        options = patrickstar.Options(chunk_size=CHUNK, accumulate=backwards)
        with twins(device_memory=64 << 20, precision="fp16", options=options) as pair:
            pair.model(batch())
            peaks.append(pair.session.trace.peak)
    parts = 10  # five weights and biases, each in one chunk
    assert peaks[1] - peaks[0] == overflow_bytes(1_000 * parts) - overflow_bytes(100 * parts)


def test_a_step_of_many_gradients_takes_what_was_foreseen(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    """In the smallest budget; what allocators give out for each look alone would be more."""
    count, width = 150, 8

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(count)])

    scale = patrickstar.LossScale(initial=2.0)
    options = patrickstar.Options(chunk_size=CHUNK, poison=True, loss_scale=scale)

    def train(device_memory: int) -> None:
        with twins(build, device_memory=device_memory, precision="fp16", max_grad_norm=1.0, options=options) as pair:
            session = pair.session
            for number in range(3):
                inputs = torch.randn(4, width, generator=torch.Generator().manual_seed(number)).cuda()
                step(pair.model, session, inputs)
            assert session.stats().planned_steps == session.stats().steps == 3
            assert session.stats().peak["device"] <= device_memory

    with caplog.at_level(logging.INFO, logger="patrickstar"):
        in_the_smallest(train, CHUNK)
    assert not [record.message for record in caplog.records if "than its plan left them" in record.message]
