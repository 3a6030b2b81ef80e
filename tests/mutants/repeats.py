"""Faults of traces that are told: blocks taken for one kind that are not, and what is told of the wrong block or too early."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import drop, never, replace, returns, without

TESTS = "tests/tracing/test_repeats.py::test_a_model_has_the_trace_of_all_of_its_blocks"

REPEATS: tuple[Mutant, ...] = (
    Fault("blocks-of-other-shapes-are-of-one-kind", "tracing.block_kinds:_form").by(
        returns("tensor.dtype, tensor.device, more"), f"{TESTS}[another width-kept-use]"
    ),
    Fault("frozen-blocks-are-of-the-kind-of-others", "tracing.block_kinds:_member_at").by(
        replace("value.requires_grad", "True"), f"{TESTS}[one frozen-kept-use]"
    ),
    Fault("blocks-that-train-are-of-the-kind-of-others", "tracing.block_kinds:_member_at").by(
        replace("name != '_call_impl'", "name not in ('_call_impl', 'training')"), f"{TESTS}[one not training-kept-use]"
    ),
    Fault("attributes-are-no-part-of-a-kind", "tracing.block_kinds:Member.is_like").by(
        replace("[mine[1], theirs[1]] == numbers", "mine[1][:1] == theirs[1][:1]"),
        f"{TESTS}[another attribute-kept-use]",
    ),
    Fault("a-block-may-look-at-its-number", "tracing.alone:Alone._begin").by(
        drop("vars(twin.module.get_submodule(path))[name] = _Unseen()"), f"{TESTS}[its own number-kept-use]"
    ),
    Fault("inputs-of-all-shapes-are-alike", "tracing.repeats:Repeats._one_of").by(
        replace("(kind[0], likes, repr(given), signature(...))", "(kind[0], repr(given))"),
        f"{TESTS}[another shape-kept-use]",
    ),
    Fault("a-block-is-told-with-the-parameters-of-another", "tracing.repeats:_Telling._tell_one").by(
        replace("self.member.records", "self.alone._one.records"), f"{TESTS}[alike-kept-use]"
    ),
    Fault("what-a-told-block-saves-takes-no-memory", "tracing.repeats:_Telling.output").by(
        drop("owner.meter.add"), f"{TESTS}[alike-kept-use]"
    ),
    Fault("what-others-hold-too-dies-with-the-block", "tracing.repeats:_Telling.backward").by(
        replace("storage() is not None", "False"), f"{TESTS}[a shared table-kept-use]"
    ),
    Fault("a-told-block-holds-the-gradient-that-it-got", "tracing.repeats:_Telling.output").by(
        drop("register_prehook"), f"{TESTS}[alike-kept-use]"
    ),
    Fault("gradients-of-an-input-from-elsewhere-are-not-noticed", "tracing.repeats:Repeats.expect_apart").by(
        never("edges"), f"{TESTS}[around it-kept-use]"
    ),
    Fault("uses-of-a-told-blocks-parameters-are-not-noticed", "tracing.repeats:Repeats.expect_apart").by(
        never("uses.get"), f"{TESTS}[used elsewhere-kept-use]"
    ),
    Fault("a-block-that-keeps-what-it-has-made-is-told", "tracing.alone:Alone._forward").by(
        never("before"), f"{TESTS}[keeps, no gradients-kept-use]"
    ),
    Fault("a-recomputed-block-is-told", "tracing.repeats:Repeats._is_odd").by(
        without("top_saved_tensors_hooks() is not None"), f"{TESTS}[recomputed-kept-use]"
    ),
)
