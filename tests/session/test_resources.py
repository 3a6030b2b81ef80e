"""Budgets and types from what a machine has, without asking any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar.cli.predict import with_precision
from patrickstar.config.arguments import check_arguments
from patrickstar.core.machine import Tier
from patrickstar.session.forecast import forecast
from patrickstar.session.start import layout_of, with_pass_bytes
from patrickstar.step import resources
from patrickstar.step.budgets import find_budgets, find_resources, resolve_device
from patrickstar.step.overflow import overflow_bytes
from patrickstar.step.precision import find_precision
from patrickstar.step.resources import Resources, uncounted_settings
from patrickstar.units import GIB, MIB, format_bytes
from tests.composed import Composed

HAS = Resources(
    device="cuda:0",
    fast_types=frozenset(("bf16", "fp16")),
    host_free_bytes=100 * GIB,
    host_total_bytes=200 * GIB,
    device_free_bytes=20 * GIB,
    device_total_bytes=24 * GIB,
    granule_bytes=2 * MIB,
    disk_free_bytes=1000 * GIB,
    threads=4,
    extra_bytes=64 * MIB,
)
ON_CPU = replace(HAS, device="cpu", fast_types=frozenset(), granule_bytes=0)


def budget(has: Resources, **given: Any) -> Mapping[Tier, int]:
    machine = find_budgets(check_arguments(**given), weight_bytes=0, has=has).machine
    return {tier: machine.given(tier) for tier in machine.budget}


def test_what_is_not_given_is_a_share_of_what_is_free() -> None:
    assert budget(HAS, disk="nowhere") == {Tier.DEVICE: 18 * GIB, Tier.HOST: 80 * GIB, Tier.DISK: 900 * GIB}
    assert budget(ON_CPU) == {Tier.HOST: 80 * GIB}
    assert budget(replace(HAS, device="emulated")) == {Tier.DEVICE: 80 * GIB, Tier.HOST: 80 * GIB}


def test_per_cent_are_of_what_there_is() -> None:
    shares = {"device_memory": "50%", "host_memory": "50%", "disk": "nowhere", "disk_memory": "50%"}
    assert budget(HAS, **shares) == {Tier.DEVICE: 12 * GIB, Tier.HOST: 100 * GIB, Tier.DISK: 500 * GIB}


def test_fixed_costs_are_those_of_the_machine_s_threads() -> None:
    """240 MiB and 8 MiB a thread are the floor: 272 MiB with four, 304 with eight."""
    given = check_arguments(host_memory=280 * MIB)
    four = find_budgets(given, weight_bytes=GIB, has=ON_CPU)
    eight = find_budgets(given, weight_bytes=GIB, has=replace(ON_CPU, threads=8))
    assert four.machine.budget[Tier.HOST] < 232 * MIB
    assert eight.machine.budget[Tier.HOST] > four.machine.budget[Tier.HOST]
    assert (four.fixed_bytes, eight.fixed_bytes) == (32 * MIB, 63 * MIB)


@pytest.mark.parametrize(
    ("has", "step", "want"),
    [
        (HAS, "deferred", "bf16"),
        (replace(HAS, fast_types=frozenset(["fp16"])), "deferred", "fp16"),
        (replace(HAS, fast_types=frozenset(["fp16"])), "in_backward", "fp32"),
        (replace(HAS, fast_types=frozenset()), "deferred", "fp32"),
        (ON_CPU, "deferred", "fp32"),
        (replace(ON_CPU, fast_types=frozenset(["fp16"])), "deferred", "fp32"),
        (replace(ON_CPU, fast_types=frozenset(["bf16"])), "in_backward", "bf16"),
    ],
)
def test_the_command_line_takes_the_type_that_the_machine_is_fast_in(has: Resources, step: str, want: str) -> None:
    memory, said = with_precision(check_arguments(step=step), has)
    assert (memory.precision, want in said) == (want, want != "fp32")
    types = find_precision(memory, nn.Linear(2, 2), has)
    assert types.compute == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[want]


def test_weights_that_are_nowhere_are_no_memory_to_take_over() -> None:
    """A model on `meta` has the forecast of the same model in memory, but for what it frees when it is taken over."""
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    model = Composed(lambda model, x: model.layers(x).square().mean(), layers=layers)
    # 4 MiB of weights are no part of what is free: 16 bytes a parameter fit 80 % of 22 MiB, and not of 18.
    batch = {"x": torch.zeros(1, 512)}
    for free, fits in ((22 * MIB, True), (18 * MIB, False)):
        has = replace(ON_CPU, host_free_bytes=free, host_total_bytes=GIB)
        assert forecast(model, batch, has=has, precision="fp32").fits is fits


def test_only_a_gpu_leaves_a_share_for_workspaces_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)  # as on a device that tests bring
    assert resources._workspace_percent() == 0
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert resources._workspace_percent() == 3
    assert (
        Resources.of_this_machine("cpu").workspace_percent
        == Resources.of_this_machine("emulated").workspace_percent
        == 0
    )


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, []),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8"}, []),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, ["max_split_size_mb"]),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,>:2],max_split_size_mb:64"},
            ["max_split_size_mb", "roundup_power2_divisions"],
        ),
    ],
)
def test_settings_of_larger_blocks_are_known(environment: Mapping[str, str], settings: list[str]) -> None:
    assert uncounted_settings(environment) == settings


@pytest.mark.parametrize(("given", "left"), [(18 * GIB, 18 * GIB * 3 // 100), (GIB, 256 * MIB), (100 * MIB, 100 * MIB)])
def test_budgets_of_a_gpu_say_what_is_left_for_workspaces_of_kernels(given: int, left: int) -> None:
    has = replace(HAS, workspace_percent=3)
    budgets = find_budgets(check_arguments(device="cuda", device_memory=given), weight_bytes=0, has=has)
    assert budgets.machine.given(Tier.DEVICE) == given
    assert budgets.room_bytes() == budgets.machine.budget[Tier.DEVICE] == given - left
    assert f"of the device's {format_bytes(left)} are fixed costs: left for workspaces of kernels" in str(budgets)
    known = budgets.machine_for(0, kept_bytes=5)
    assert known.budget[Tier.DEVICE] == known.given(Tier.DEVICE) == budgets.room_bytes(kept_bytes=5) == given - 5


def test_a_refusal_of_a_gpu_s_budget_names_what_is_left_and_a_budget_that_fits() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    has = replace(HAS, workspace_percent=3)
    arguments = {"batch": {"input": torch.zeros(8, 256)}, "has": has, "device": "cuda:0", "precision": "fp32"}
    for memory in (MIB, 100 * MIB, 257 * MIB):
        refused = forecast(model, **arguments, device_memory=memory)
        assert not refused.fits
        assert "+ fixed costs 256.00 MiB" in refused.refusal
    smallest = refused.minimum["device"]
    assert 257 * MIB < smallest < 270 * MIB
    assert forecast(model, **arguments, device_memory=smallest).fits
    assert not forecast(model, **arguments, device_memory=smallest - 1).fits
    roomy = forecast(model, **arguments, device_memory=GIB)
    assert (roomy.fits, roomy.workspace_bytes) == (True, 256 * MIB)


def test_looks_for_overflows_count_in_backwards_and_in_norms() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    memory = check_arguments(device="emulated", precision="fp16", options=patrickstar.Options(accumulate=300))
    has = find_resources(memory)
    precision = find_precision(memory, model, has)
    others = {"granule_bytes": 0, "trained": attrgetter("requires_grad"), "ranks": None, "sizes": ()}
    layout = layout_of(model, dict(model.named_parameters()), memory, precision, **others)
    budgets = replace(find_budgets(memory, weight_bytes=0, has=has), device=torch.device("cuda"))
    scaled = with_pass_bytes(budgets, layout, memory, precision)
    other = with_pass_bytes(budgets, layout, memory, replace(precision, scales=False))
    looks = 300 * sum(len(layout.parts(name)) for name in layout.slices)
    assert looks >= 4 * 300
    assert scaled.fixed_bytes - other.fixed_bytes == overflow_bytes(looks)
    assert scaled.passes.norm - other.passes.norm == overflow_bytes(looks)
    assert scaled.passes.update == other.passes.update


@pytest.mark.parametrize(
    ("count", "current", "given", "taken"),
    [(4, 0, None, 2), (4, 3, "cuda", 3), (4, 0, "cuda:1", 1), (1, 0, "cuda", 0)],
)
def test_a_rank_has_the_gpu_of_its_number_where_nobody_has_chosen_one(
    count: int, current: int, given: str | None, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may show each process its own alone."""
    monkeypatch.setenv("LOCAL_RANK", "2")
    for name, value in {"is_available": True, "device_count": count, "current_device": current}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert resolve_device(given) == f"cuda:{taken}"


def test_of_the_host_each_rank_has_its_part_less_what_its_data_go_through() -> None:
    has, memory = replace(HAS, staging_bytes=8 * MIB), check_arguments(host_memory="1GiB")
    budgets = find_budgets(memory, weight_bytes=0, has=has, local_ranks=4)
    assert budgets.machine.budget[Tier.HOST] == 256 * MIB - 8 * MIB
