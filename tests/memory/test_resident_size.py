"""`host_memory` bounds what the process really holds, over its whole life, whatever allocator serves it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from patrickstar.memory.allocator import tcmalloc_library
from patrickstar.torch_private import computes_bf16
from tests.memory.resident import MIB, budgets, in_child

WITH_TCMALLOC = pytest.mark.skipif(
    tcmalloc_library() is None, reason="tcmalloc is not installed (Debian: libtcmalloc-minimal4)"
)
ALLOCATORS = ["glibc", pytest.param("tcmalloc", marks=WITH_TCMALLOC)]
SMALL = {
    "config": {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 2048, "n_positions": 512},
    "batch": (4, 512),
    "checkpointing": True,
}
LARGE = {
    "config": {"n_layer": 9, "n_embd": 768, "n_head": 12, "vocab_size": 8192, "n_positions": 256},
    "batch": (2, 128),
}
"""70M parameters, 1.1 GB of model data."""

GPT2 = {"config": {"n_positions": 256, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, "batch": (1, 256)}
GPT2_BYTES = 16 * 123_849_984  # of model data, with 256 positions


def preload(allocator: str) -> Path | None:
    return tcmalloc_library() if allocator == "tcmalloc" else None


def promised(budget: int, *, threads: int) -> int:
    """What the process may grow by: the budget, and below a floor what cannot be a part of it."""
    floor = 240 * MIB + 8 * MIB * threads
    return budget if budget >= floor else min(budget * 101 // 100 + 48 * MIB, floor)


def too_much(budget: int, run: Mapping[str, Any]) -> dict[str, str]:
    """The parts of a life in which the process took more than was promised."""
    most = promised(budget, threads=run["threads"])
    return {name: f"{(grown - most) / MIB:.1f} MiB more" for name, grown in run["parts"].items() if grown > most}


def log(allocator: str, share: float, budget: int, run: Mapping[str, Any]) -> None:
    """For a table (`pytest -s`)."""
    parts = {name: round(grown / MIB) for name, grown in run["parts"].items()}
    print(
        json.dumps({"allocator": allocator, "share": share, "budget": round(budget / MIB), "parts": parts}), flush=True
    )


def expect_within(budget: int, run: Mapping[str, Any]) -> None:
    over = too_much(budget, run)
    assert not over, (
        f"budget {budget / MIB:.0f} MiB under {run['allocator']}: {over}\n{run['parts']}\n{run['said'][-2000:]}"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "allocator", [ALLOCATORS[0], pytest.param("tcmalloc", marks=[WITH_TCMALLOC, pytest.mark.campaign])]
)
def test_a_short_life_in_little_memory_stays_within_it(allocator: str, tmp_path: Path) -> None:
    budget = 120 * MIB  # 112 are needed, nearly all of them for activations
    run = in_child(preload(allocator), "measure", budget=budget, disk=str(tmp_path), steps=1, **SMALL)
    assert run["allocator"] == allocator
    assert run["moved"]["H>K"] > 0
    expect_within(budget, run)


@pytest.mark.campaign
@pytest.mark.skipif(
    not computes_bf16(), reason="kernels of 16 bits are kept on processors that have instructions for them"
)
def test_kernels_of_many_lengths_in_16_bits_stay_within_the_fixed_costs(tmp_path: Path) -> None:
    what = {"config": SMALL["config"], "batch": (1, 64), "precision": "bf16"}
    run = in_child(
        None, "vary", budget=64 * MIB, disk=str(tmp_path), lengths=12, **what
    )  # each makes 20 kernels of 0.6 MiB
    expect_within(64 * MIB, run)


LIVES: list[tuple[float, dict[str, Any]]] = [
    *((share, {}) for share in (0.0, 0.25, 0.5, 0.75, 1.0)),
    *((share, {"precision": precision}) for precision in ("bf16", "fp16") for share in (0.0, 0.5, 1.0)),
    (0.0, {"checkpointing": True, "generate_first": True}),
    (0.0, {"clip": True, "batch": (4, 256)}),
    (0.0, {"holes": True}),
]
"""Shares of what a budget may give between the smallest that fits and all, and what is other than usual."""


@pytest.mark.campaign
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize(("share", "what"), LIVES, ids=repr)
def test_a_whole_life_on_a_gigabyte_of_model_data_stays_within_every_budget_and_was_foreseen(
    share: float, what: Mapping[str, Any], allocator: str, tmp_path: Path
) -> None:
    wanted = {**LARGE, **what}
    known = {name: value for name, value in wanted.items() if name not in ("generate_first", "holes")}
    budget = budgets(preload(allocator), shares=(share,), disk=str(tmp_path), **known)[0]
    run = in_child(preload(allocator), "measure", budget=budget, disk=str(tmp_path), **wanted)
    log(f"{allocator} {what}", share, budget, run)
    assert run["allocator"] == allocator
    assert sum(run["moved"].values()) > 0 or share == 1.0
    expect_within(budget, run)
    if what:
        return
    assert run["reactive"].startswith("0 of"), run["reactive"]
    growth = in_child(preload(allocator), "foresee", host_memory=budget, disk=str(tmp_path), **LARGE)["growth"]
    assert max(run["parts"][f"step {number}"] for number in range(3)) == pytest.approx(growth, rel=0.08)


@pytest.mark.campaign
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_tens_of_steps_whose_loss_makes_a_third_of_the_activations_stay_within_shares_of_the_model_data(
    share: float, allocator: str, tmp_path: Path
) -> None:
    budget = int(share * GPT2_BYTES)
    run = in_child(preload(allocator), "measure", budget=budget, disk=str(tmp_path), steps=24, **GPT2)
    log(f"{allocator} GPT-2", share, budget, run)
    assert run["moved"]["H>K"] > 0
    expect_within(budget, run)


@pytest.mark.campaign
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_check_fails_where_the_allocator_keeps_what_it_likes(allocator: str, tmp_path: Path) -> None:
    wanted = {**LARGE, "checkpointing": True, "batch": (4, 256)}
    budget = budgets(preload(allocator), shares=(0.0,), disk=str(tmp_path), **wanted)[0]
    run = in_child(preload(allocator), "measure", budget=budget, disk=str(tmp_path), spoil=True, **wanted)
    assert too_much(budget, run)
