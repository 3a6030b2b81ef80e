"""No budget, tier, policy or way of stepping changes a bit on a device: the library against plain PyTorch on the same device, row by row.

The rows are those of the parity matrix that have a device, at the budgets that are known for the emulated one, under schedules of what is queued;
at each of them no race is reported. Where activations take more on this device, which has no attention of its own and gives out whole grains, they
run in the budgets that refusals name; of the smallest, a page less is refused. No tier holds more than its budget.
"""

from __future__ import annotations

import gc
import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar.optim.choose import choose_kernels
from patrickstar.session.start import set_up
from patrickstar.tracing.inputs import signature
from patrickstar.tracing.offline import Foreseen, OfflineTracer
from tests.cuda.schedules import FEW_SCHEDULES, SCHEDULES, Accelerator
from tests.parity import managed
from tests.parity.compare import differences
from tests.parity.cover import every, quick_first
from tests.parity.forecasts import compare
from tests.parity.limits import PAGE_BYTES, limits_of
from tests.parity.matrix import PAIRS, WIDE, Row
from tests.parity.test_parity import FORESEEN, OTHERS, assert_moved, at_once, binding_of, want, where_everything_fits
from tests.sampling import cover

ROWS = sorted((row for row in (*PAIRS, *WIDE) if row.tier.startswith("emulated")), key=quick_first)
# What `make test` runs: every value of each dimension, and each way of stepping on either machine at each budget.
FEW = cover(ROWS, every(*((name,) for name in OTHERS), ("step", "tier", "budget")))
REFUSALS = (
    8  # budgets that are tried: a forecast's, what first steps have shown, and estimates where there is no forecast
)
# Of the device: inputs, losses and gradients that a row keeps, and granules of the driver that slots of a few KiB fill by halves.
BESIDE = 8 << 20


def assert_parity(
    row: Row,
    directory: Path,
    accelerator: Accelerator,
    schedule: tuple[float, int],
    *,
    limits: managed.Limits | None = None,
    binding: str = "by use",
    has_trace: bool = True,
) -> managed.Limits:
    """Gives the budgets that were enough. `limits`: those that are known to be; none: of the emulated device. `has_trace`: of its first step."""
    expected = want(row, "cuda")
    outcome, told, is_least = run(row, limits or limits_of(row), directory, accelerator, schedule)
    unseen = {"gradients"} if row.step == "in_backward" else set()
    if not outcome.record.norms:
        unseen.add("norms")
    found = differences(expected, outcome.record, unseen=unseen, any_nan=row.tile_rows is not None)
    assert not found, "\n".join([f"{row} at {outcome.limits}, {schedule}", *found])
    assert not accelerator.races(), schedule
    assert_within(row, outcome, told)
    assert_moved(row, outcome, expected)
    if has_trace:
        assert not [message for message in told if message.startswith("no trace for this forward")], row
        assert_planned(row, outcome)
    assert binding in outcome.stats.binding
    if is_least:
        less = {**outcome.limits, "device": outcome.limits["device"] - PAGE_BYTES}
        with pytest.raises(patrickstar.BudgetError) as refusal:
            managed.train(row, less, directory / "less", device="cuda")
        assert refusal.value.tier == "device"
    return outcome.limits


def assert_within(row: Row, outcome: managed.Outcome, told: list[str]) -> None:
    """Fails where a tier has held more than its budget, but for the step that has taught it, which says so."""
    for tier, limit in outcome.limits.items():
        if not any("took more than the device_memory" in message for message in told) or tier != "device":
            assert outcome.stats.peak[tier] <= limit, f"{row}: {outcome.stats.peak} at {outcome.limits}, and {told}"


def assert_planned(row: Row, outcome: managed.Outcome) -> None:
    """Fails where a step was not planned, but for one that cannot be: its gradients have overflowed, and are let go of as they leave.

    So is any with a gradient of gradients. Autograd numbers what it makes in each thread apart, and begins with the highest number: what the thread
    of the device has made comes before what the forward has, or after, as the two numbers pass each other from step to step.
    """
    stats = outcome.stats
    assert stats.planned_steps + stats.reactive_steps == stats.steps
    if stats.reactive_steps and row.model != "penalised":
        assert stats.reactive_steps == 1, f"{row}: {stats}"
        assert "was released while it was on its way" in stats.reason, f"{row}: {stats}"


def run(
    row: Row, begin: managed.Limits, directory: Path, accelerator: Accelerator, schedule: tuple[float, int]
) -> tuple[managed.Outcome, list[str], bool]:
    """The run in the first budgets that are enough, what the library said in it, and whether a refusal has named the device's as the smallest.

    The device has little more memory than that.
    """
    limits, is_least = dict(begin), False
    for attempt in range(REFUSALS):
        restrict(accelerator, schedule, limits)
        try:
            with listening() as told:
                return managed.train(row, limits, directory / str(attempt), device="cuda"), told, is_least
        except patrickstar.BudgetError as refusal:
            assert refusal.smallest_bytes > limits[str(refusal.tier)]
            limits[str(refusal.tier)] = refusal.smallest_bytes
            is_least = (
                refusal.tier == "device" and refusal.smallest_bytes == refusal.needed_bytes
            )  # not where it is an estimate
    raise AssertionError(f"{row}: still refused after {REFUSALS} budgets that refusals had named, the last {limits}")


def restrict(accelerator: Accelerator, schedule: tuple[float, int], limits: managed.Limits) -> None:
    """Begins the schedule on a device with room for what is there, for the budget, and for what the test itself has there."""
    gc.collect()
    gc.freeze()  # what is still there is looked at no more: imports, for the most part
    torch.accelerator.empty_cache()
    there = accelerator.driver_bytes() + torch.accelerator.memory_stats()["reserved_bytes.all.current"]
    accelerator.configure(*schedule, capacity=there + limits.get("device", managed.ROOMY_BYTES) + BESIDE)


@contextmanager
def listening() -> Iterator[list[str]]:
    """Gives what the library says meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("patrickstar")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def schedule_of(row: Row) -> tuple[float, int]:
    return FEW_SCHEDULES[zlib.crc32(str(row).encode()) % len(FEW_SCHEDULES)]


@pytest.mark.parametrize("row", FEW, ids=str)
def test_no_bit_depends_on_where_model_data_lives(row: Row, tmp_path: Path, accelerator: Accelerator) -> None:
    assert_parity(row, tmp_path, accelerator, schedule_of(row))


@pytest.fixture
def one_trial_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial run uses no device: one of each kind of forward is enough for all schedules of a row."""
    foresee, known = OfflineTracer.foresee, dict[Any, Foreseen]()

    def once(
        tracer: OfflineTracer,
        model: nn.Module,
        named: Mapping[str, nn.Parameter],
        *inputs: Any,
        blocks: tuple[str, ...],
    ) -> Foreseen:
        kind = signature(model.modules(), named.values(), *inputs), blocks
        if kind not in known:
            known[kind] = foresee(tracer, model, named, *inputs, blocks=blocks)
        return known[kind]

    monkeypatch.setattr(OfflineTracer, "foresee", once)


@pytest.mark.campaign
@pytest.mark.usefixtures("one_trial_of_each_kind")
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_no_bit_depends_on_the_schedule(row: Row, tmp_path: Path, accelerator: Accelerator) -> None:
    """Refusals come under the first schedule; the others begin with budgets that are enough."""
    limits = None
    for number, schedule in enumerate(SCHEDULES):
        directory = tmp_path / str(number)
        directory.mkdir()
        limits = assert_parity(row, directory, accelerator, schedule, limits=limits)


WHOLE = where_everything_fits(ROWS)


@pytest.mark.whole
@pytest.mark.parametrize(
    "row", at_once(WHOLE, cover(WHOLE, every(("checkpointing",), ("clipping",), ("precision",), ("step",)))), ids=str
)
def test_parameters_that_keep_their_bytes_have_the_same_bits(
    row: Row, tmp_path: Path, accelerator: Accelerator
) -> None:
    assert_parity(row, tmp_path, accelerator, schedule_of(row), binding=binding_of(row))


IN_BLOCKS = [row for row in ROWS if row.tile_rows is None and row.model != "function"]  # which has no modules
OF_BLOCKS = [row for row in IN_BLOCKS if row.model in ("gpt2", "llama", "bert")]


@pytest.mark.blocks
@pytest.mark.parametrize("row", at_once(IN_BLOCKS, cover(OF_BLOCKS, every(("step",)))), ids=str)
def test_parameters_that_are_there_while_a_block_runs_have_the_same_bits(
    row: Row, tmp_path: Path, accelerator: Accelerator
) -> None:
    assert_parity(row, tmp_path, accelerator, schedule_of(row), binding="blocks")


PLANNED = sorted((row for row in FORESEEN if row.tier.startswith("emulated")), key=quick_first)


@pytest.mark.parametrize("row", at_once(PLANNED, cover(PLANNED, every(("step",)))), ids=str)
def test_a_forecast_is_the_plan_of_a_session(
    row: Row, tmp_path: Path, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels that are used here: those of a GPU, which a forecast takes for granted, need other memory."""
    accelerator.configure(*schedule_of(row))
    monkeypatch.setattr("patrickstar.session.forecast.set_up", partial(set_up, find_passes=choose_kernels))
    limits = limits_of(row)
    if row.model == "strided" and row.budget == "minimum":
        # Convolutions here copy filters that lie by channels: more than the share of the smallest budget that is left to kernels.
        limits = {tier: 3 * nbytes for tier, nbytes in limits.items()}
    compare(row, limits, tmp_path / "disk", device="cuda")
