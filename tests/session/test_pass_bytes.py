"""What plans leave on a device for passes over planes, and for looks at gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import patrickstar
from patrickstar.config.arguments import check_arguments
from patrickstar.session.start import layout_of, with_pass_bytes
from patrickstar.step.budgets import find_budgets, find_resources
from patrickstar.step.overflow import overflow_bytes
from patrickstar.step.precision import find_precision


def test_looks_for_overflows_count_in_backwards_and_in_norms() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    memory = check_arguments(device="emulated", precision="fp16", options=patrickstar.Options(accumulate=300))
    has = find_resources(memory)
    precision = find_precision(memory, model, has)
    layout = layout_of(model, dict(model.named_parameters()), memory, precision)
    budgets = replace(find_budgets(memory, weight_bytes=0, has=has), device=torch.device("cuda"))
    scaled = with_pass_bytes(budgets, layout, memory, precision)
    other = with_pass_bytes(budgets, layout, memory, replace(precision, scales=False))
    looks = 300 * sum(len(layout.parts(name)) for name in layout.slices)
    assert looks >= 4 * 300
    assert scaled.fixed_bytes - other.fixed_bytes == overflow_bytes(looks)
    assert scaled.passes.norm - other.passes.norm == overflow_bytes(looks)
    assert scaled.passes.update == other.passes.update
