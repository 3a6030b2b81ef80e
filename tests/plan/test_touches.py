"""What each event of a step touches: the rule that the real step, its twin and the traces of norm and update have in common."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from patrickstar.core.formats import FP32, SessionFormats, formats_of_16_bits
from patrickstar.core.layout import Layout, TensorSpec, build_layout
from patrickstar.core.planes import GradientUse
from patrickstar.core.trace import Touch
from patrickstar.plan.touches import Touches, gradients_freed, master_touches, norm_trace, step_trace
from tests.plan.builders import CHUNK_NUMEL
from tests.plan.texts import unit


def layout() -> Layout:
    """`a` in c0 to c2, `b` in c3, a table of two tiles in c4 and c5, `frozen` in c6."""
    specs = [
        TensorSpec("a", (40,)),
        TensorSpec("b", (8,)),
        TensorSpec("frozen", (16,), trainable=False),
        TensorSpec("table", (4, 8), tile_numel=16),
    ]
    return build_layout(specs, chunk_numel=CHUNK_NUMEL)


def touches(gradients: GradientUse, *, split: bool = False, updates: Collection[str] = ("a", "b", "table")) -> Touches:
    formats = SessionFormats(formats_of_16_bits("bf16") if split else FP32)
    return Touches(layout(), gradients=gradients, updates=updates.__contains__, formats=formats)


def used(rule: Touches, name: str, *, in_graph: bool = True) -> None:
    """As the binding counts."""
    for counts in (rule.uses, *([] if in_graph else [rule.apart])):
        counts[name] = counts.get(name, 0) + 1


def texts(found: Collection[Touch]) -> str:
    return " ".join(map(str, found))


def moments_of(rule: Touches, label: str) -> list[str]:
    return [texts(found) for _, found in rule.gradient(label)]


def test_a_gradient_that_is_kept_is_written_in_its_plane_chunk_by_chunk() -> None:
    assert moments_of(touches(GradientUse.CHUNK), "a") == ["c0.grad*", "c1.grad*", "c2.grad*"]


@pytest.mark.parametrize("split", [False, True])
def test_an_update_touches_the_same_when_a_gradient_arrives_and_at_the_step(split: bool) -> None:
    formats = formats_of_16_bits("bf16") if split else FP32
    now = moments_of(touches(GradientUse.UPDATE, split=split), "a")
    trace = step_trace(layout(), ["a"], formats=formats, in_plane=False)
    assert now == [texts(moment.touches) for moment in trace.moments]
    assert now[1] == "c0.weight* c1.exp_avg* c1.exp_avg_sq*" + (" c1.rest*" if split else "")


def test_a_gradient_waits_in_its_plane_where_it_is_not_the_whole_one_or_nobody_updates() -> None:
    rule = touches(GradientUse.UPDATE, updates=("a", "table"))
    assert moments_of(rule, "b") == ["c3.grad*"]
    used(rule, "a", in_graph=False)
    assert rule.updates_at_once("a")
    used(rule, "a")
    assert moments_of(rule, "a") == ["c0.grad*", "c1.grad*", "c2.grad*"]
    rule.begin_forward()
    assert rule.updates_at_once("a")
    used(rule, "table[0]")
    assert rule.updates_at_once("table[0]")
    used(rule, "table")
    assert not rule.updates_at_once("table[0]")


def test_the_step_has_a_moment_for_each_trained_chunk_and_the_norm_one_for_each_piece() -> None:
    names = layout().slices
    step = step_trace(layout(), names, formats=FP32, in_plane=True)
    assert [moment.label for moment in step.moments] == ["a", "a", "a", "b", "table", "table"]
    assert texts(step.moments[0].touches) == "c0.exp_avg* c0.exp_avg_sq* c0.grad c0.weight*"
    assert gradients_freed(step)[0] == (0, unit("c0.grad"))
    norm = norm_trace(layout(), names, formats=FP32)
    assert [texts(moment.touches) for moment in norm.moments] == [f"c{chunk}.grad" for chunk in range(6)]


def test_a_master_is_a_weight_and_its_rest() -> None:
    part = layout().parts("a")[1]
    assert texts(master_touches(part, layout(), is_split=True, writes=True)) == "c0.weight* c1.rest*"
    assert texts(master_touches(part, layout(), is_split=False, writes=False)) == "c0.weight"
