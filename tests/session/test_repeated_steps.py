"""Where shapes repeat, steps come to have one plan, and plan nothing any more."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from patrickstar.core.machine import Tier
from patrickstar.plan.update_choice import UpdateChoice
from tests.parity.plans import recorded
from tests.session.builders import SLOT, MakePair, Pair, mlp

ON_DEVICE = UpdateChoice(tier=lambda chunk: Tier.DEVICE)
STEPS = 16


def plans_by_step(make_pair: MakePair, **arguments: Any) -> tuple[Pair, list[int]]:
    """A pair that has been trained, and how many plans were made in each of its steps."""
    made = []
    with recorded() as plans:
        pair = make_pair(partial(mlp, layers=12), precision="fp32", **arguments)
        for number in range(STEPS):
            before = len(plans)
            pair.train(1, first=number)
            made.append(len(plans) - before)
    return pair, made


@pytest.mark.parametrize("slots", [16, 20])
def test_backwards_that_update_come_to_repeat_themselves(slots: int, make_pair: MakePair) -> None:
    """Of Belady's rule alone each step would end in another state than the one before."""
    pair, made = plans_by_step(
        make_pair, step="in_backward", choice=ON_DEVICE, device="emulated", device_memory=slots * SLOT
    )
    assert made[0] == 1
    assert made[-6:] == [0] * 6
    pair.expect_same()


@pytest.mark.sampled
@pytest.mark.parametrize("tier", ["emulated", "cpu+disk", "emulated+disk"])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("slots", [12, 20])
def test_deferred_steps_come_to_repeat_themselves(
    tier: str, clips: bool, slots: int, make_pair: MakePair, tmp_path: Path
) -> None:
    memory: dict[str, Any] = {"device": "emulated", "device_memory": slots * SLOT}
    if tier == "cpu+disk":
        memory = {"device": "cpu", "host_memory": slots * SLOT}
    if tier.endswith("disk"):
        memory["disk"] = tmp_path
    # A norm that no gradient exceeds: it is computed, and the twin needs none.
    pair, made = plans_by_step(make_pair, **memory, **({"max_grad_norm": 1e9} if clips else {}))
    assert made[0] >= 1
    assert made[-6:] == [0] * 6
    pair.expect_same()
