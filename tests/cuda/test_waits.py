"""Waits of the host for the device: none of ours in a step but for a number that the host needs; and memory, which nobody has to wait for either."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar.core.machine import Tier
from patrickstar.errors import DeviceError
from patrickstar.optim.masters import rest_type, split
from patrickstar.plan.update_choice import UpdateChoice
from tests.cuda.schedules import FEW_SCHEDULES, Accelerator
from tests.cuda.twins import TIGHT, Hungry, batch, hungry_mlp, step, twins

LANES = "patrickstar "  # what the names of their threads begin with


def waits_by_whom(accelerator: Accelerator) -> tuple[int, int]:
    """Waits since the last call: of threads of lanes, and of all others."""
    lanes = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(LANES)}
    counts = Counter[bool]()
    for thread, kinds in accelerator.waits().items():
        counts[thread in lanes] += kinds.total()
    return counts[True], counts[False]


WAYS: dict[str, dict[str, Any]] = {
    "deferred": {},
    "deferred, updated on the device": {"choice": UpdateChoice(tier=lambda chunk: Tier.DEVICE)},
    "in_backward": {"step": "in_backward"},
}
WARM_UP = 4  # steps, after which units lie where they lie after every step, and the allocator has what kernels take


@pytest.mark.parametrize("accelerator", FEW_SCHEDULES, indirect=True, ids=str)
@pytest.mark.parametrize("share", [100, 60])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_never_waits_for_the_device(way: str, share: int, accelerator: Accelerator) -> None:
    with twins(device_memory=TIGHT * share // 100, **WAYS[way]) as pair:
        for number in range(WARM_UP + 3):
            inputs = batch(number)
            waits_by_whom(accelerator)
            step(pair.model, pair.session, inputs)
            lanes, ours = waits_by_whom(accelerator)
            assert ours == 0 or number < WARM_UP
            # Where the host updates, its lane waits for the gradients.
            assert lanes == 0 or way in ("deferred", "in_backward")
        assert pair.session.stats().reason == ""


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nan", [False, True])
def test_parts_are_written_on_a_device_without_a_wait_and_as_on_the_host(
    nan: bool, kept: torch.dtype, accelerator: Accelerator
) -> None:
    master = torch.randn(1000)
    master[[3, 7]] = torch.tensor([torch.inf, 3.4028234e38])
    if nan:
        master.view(torch.int32)[[5, 6, 9]] = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    parts = []
    for device in ("cpu", "cuda"):
        there = master.to(device)
        weight = torch.empty(1000, dtype=kept, device=device)
        rest = torch.empty(1000, dtype=rest_type(kept), device=device)
        accelerator.waits()
        split(there, weight, rest)
        assert not accelerator.waits()
        is_nan = weight.isnan()  # whose bits are each device's own in fp16
        parts.append((is_nan.cpu(), weight.view(torch.int16).masked_fill(is_nan, 0).cpu(), rest.cpu()))
    assert all(map(torch.equal, *parts))


WIDE = 256  # so that the slots of a few weights are more than what a norm, or an update of 16 bits, takes beside them


SCALE = patrickstar.LossScale(initial=2.0, dynamic=False)  # with which no gradient overflows


class Checkpointed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)


def wide_mlp(width: int = WIDE, layer: type[nn.Linear] = nn.Linear) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(16) for part in (layer(width, width), nn.Tanh())])


STEPS = ("plain", "checkpointing", "clipping", "accumulation")


def _is_counted(precision: str, way: str, what: str) -> bool:
    """What a session allows; but for units of several sizes, which have a test of their own."""
    if way == "in_backward":  # the number would be known when parameters have been updated
        return precision != "fp16" and what not in {"clipping", "accumulation"}
    return not _has_sizes(precision, way, what)


def _has_sizes(precision: str, way: str, what: str) -> bool:
    """Whether units of one slot and of two come to a device: weights of 2 bytes, and moments or gradients of 4."""
    return precision != "fp32" and way != "in_backward" and ("on the device" in way or what == "accumulation")


ALL = list(product(["fp32", "bf16", "fp16"], WAYS, STEPS))
COUNTED = [one for one in ALL if _is_counted(*one)]
OF_SIZES = [one for one in ALL if _has_sizes(*one)]


@pytest.mark.parametrize(
    ("precision", "way", "what"),
    [pytest.param(*one, marks=() if number % 3 == 0 else pytest.mark.campaign) for number, one in enumerate(COUNTED)],
)
def test_a_step_of_any_precision_waits_for_no_more_than_its_numbers(
    precision: str, way: str, what: str, accelerator: Accelerator
) -> None:
    expect_no_more_waits(precision, way, what, accelerator, width=WIDE, memory=(12 if precision == "bf16" else 8) << 20)


@pytest.mark.parametrize(
    ("precision", "way", "what"),
    [pytest.param(*one, marks=() if number == 0 else pytest.mark.campaign) for number, one in enumerate(OF_SIZES)],
)
def test_units_of_one_slot_and_of_two_change_places_without_a_wait(
    precision: str, way: str, what: str, accelerator: Accelerator
) -> None:
    """Slots are as on a GPU, whole pieces of what the driver maps: what is free, and not side by side, is mapped side by side."""
    expect_no_more_waits(
        precision, way, what, accelerator, width=4 * WIDE, memory=(12 if precision == "bf16" else 8) << 24
    )


def expect_no_more_waits(
    precision: str, way: str, what: str, accelerator: Accelerator, *, width: int, memory: int, least: int = 0
) -> None:
    arguments = {"build": partial(wide_mlp, width), **WAYS[way]}
    accumulate = 1
    match what:
        case "checkpointing":
            arguments["build"] = partial(wide_mlp, width, Checkpointed)
        case "clipping":
            arguments["max_grad_norm"] = 0.01
        case "accumulation":
            accumulate = 2
    options = patrickstar.Options(chunk_size=width * width, poison=True, accumulate=accumulate, loss_scale=SCALE)
    most = int(precision == "fp16" or what == "clipping")
    with twins(device_memory=memory, precision=precision, options=options, **arguments) as pair:
        session = pair.session
        for number in range(WARM_UP + 3):
            inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(number)).cuda()
            waits_by_whom(accelerator)
            step(pair.model, session, inputs, parts=accumulate)
            _, ours = waits_by_whom(accelerator)
            assert least <= ours <= most or number < WARM_UP
        assert (session.stats().steps, session.stats().reason) == (WARM_UP + 3, "")


@pytest.mark.parametrize("accelerator", FEW_SCHEDULES, indirect=True, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_that_needs_a_number_waits_for_that_alone(precision: str, accelerator: Accelerator) -> None:
    """A norm, or whether gradients have overflowed; both are read together."""
    expect_no_more_waits(precision, "deferred", "clipping", accelerator, width=WIDE, memory=8 << 20, least=1)


def most_bytes(accelerator: Accelerator) -> int:
    return accelerator.driver_bytes() + torch.accelerator.memory_stats()["allocated_bytes.all.current"]


def test_more_than_was_foreseen_is_said_and_planned_with(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hungry, "nbytes", 1 << 17)
    with twins(hungry_mlp, device_memory=2 * TIGHT) as pair, caplog.at_level(logging.INFO, logger="patrickstar"):
        torch.accelerator.reset_peak_memory_stats()
        pair.model(batch(0)).square().mean().backward()
        pair.session.optimizer.zero_grad()
        pair.train(3, first=1)
        said = [
            record.message for record in caplog.records if "more at some op than its plan left them" in record.message
        ]
        assert len(said) == 1
        assert pair.session.stats().planned_steps == 3
        assert min(moment.nonmodel_bytes for moment in pair.session.trace.moments) > Hungry.nbytes
        pair.expect_same()


def test_memory_that_torch_keeps_and_does_not_use_is_taken_back(accelerator: Accelerator) -> None:
    torch.accelerator.empty_cache()
    accelerator.configure(0.3, 1, capacity=most_bytes(accelerator) + (16 << 20))
    torch.empty(14 << 20, dtype=torch.uint8, device="cuda")  # a block of 15 MiB, which the allocator keeps
    with twins() as pair:
        pair.train(2)
        pair.expect_same()


def test_memory_that_somebody_has_is_named(accelerator: Accelerator) -> None:
    torch.accelerator.empty_cache()
    accelerator.configure(0.3, 1, capacity=most_bytes(accelerator) + (16 << 20))
    mine = torch.empty(14 << 20, dtype=torch.uint8, device="cuda")  # of whose block a MiB more is not cut off
    with (
        pytest.raises(DeviceError, match=r"of .* MiB .* are free, .*torch's allocator has 15\.\d+ MiB in use"),
        twins() as pair,
    ):
        pair.train(1)
    del mine
