"""The table of keys: what is in it, and that each row is heard."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import ConfigError
from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.engine.read import Scan, read_config
from patrickstar.config.engine.table import IGNORED, OPAQUE, SECTIONS, TABLE
from patrickstar.config.settings import SCHEDULES
from patrickstar.errors import nearest

# The headings of DeepSpeed's page of keys; `tests/docs/test_original.py` has those of PatrickStar 0.4.6.
DEEPSPEED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler managed_gradient_accumulation
communication_data_type gradient_allreduce_op prescale_gradients gradient_predivide_factor sparse_gradients fp16 bf16 torch_autocast
amp gradient_clipping zero_optimization zero_optimization.offload_param zero_optimization.offload_optimizer aio tensor_parallel
hybrid_engine expert_parallel disable_python_gc steps_per_print wall_clock_breakdown dump_state autotuning flops_profiler
activation_checkpointing sparse_attention data_efficiency curriculum_learning tensorboard wandb comet csv_monitor elasticity
comms_logger compression_training.layer_reduction checkpoint compile data_types eigenvalue progressive_layer_drop pipeline
compression_training.weight_quantization.shared_parameters compression_training.head_pruning.shared_parameters nebula
zero_allow_untested_optimizer dataloader_drop_last zero_force_ds_cpu_optimizer quantize_training timers memory_breakdown
"""

POOL = (
    *(True, False, None, 0, 1, 2, 3, 7, 1e3, 5e8, 0.5, 0.25, -1, 10**12, 10**400, float("nan"), np.ones(2), object()),
    *("", "some text", "cpu", "none", "log", "linear", "Adam", "WarmupLR"),
    *([0.9, 0.99], (0.8, 0.95), [], [1, 2], ["a"], {}, {"x": 1}),
)
HONOURED = [path for path, key in TABLE.items() if key.kind]
REFUSED = [path for path, key in TABLE.items() if not key.kind]
TYPED = [path for path in HONOURED if not all(map(TABLE[path].kind.takes, POOL))]
# What may be given whatever else is: it says nothing that another key says, too.
ALONE = ("optimizer.params", "default_chunk_size", "steps_per_print")
FREE = [path for path in HONOURED if path.startswith(ALONE)]


def nested(*pairs):
    config = {}
    for path, value in pairs:
        *within, name = path.split(".")
        at = config
        for part in within:
            at = at.setdefault(part, {})
        at[name] = value
    return config


def scanned(*pairs):
    found = Scan()
    found.look_up(nested(*pairs))
    return found


def problems_of(*pairs):
    with pytest.raises(ConfigError) as refusal:
        read_config(nested(*pairs))
    return dict(problem.split(": ", 1) for problem in refusal.value.problems)


def misspelt(name):
    """One letter gone, doubled, changed, or two exchanged."""
    places = range(len(name))
    return st.one_of(
        st.sampled_from(places).map(lambda at: name[:at] + name[at + 1 :]),
        st.sampled_from(places).map(lambda at: name[:at] + name[at] + name[at:]),
        st.sampled_from(places).map(lambda at: f"{name[:at]}q{name[at + 1 :]}"),
        st.sampled_from(places).map(lambda at: name[:at] + name[at : at + 2][::-1] + name[at + 2 :]),
    )


def test_the_keys_of_deepspeed_are_there():
    assert not [path for path in DEEPSPEED.split() if path not in {*TABLE, *SECTIONS, *IGNORED}]
    assert (len(TABLE), len(IGNORED)) == (129, 328)


def test_the_arguments_of_manage_and_the_parameters_of_schedules_are_all_there():
    within = {path.split(".")[1] for path in TABLE if path.startswith("patrickstar.")}
    assert within == {field.name for field in dataclasses.fields(MemoryOptions)}
    parameters = {path.rpartition(".")[2] for path in HONOURED if path.startswith("scheduler.params.")}
    assert parameters == {param for parameters in SCHEDULES.values() for param in parameters}


@pytest.mark.parametrize("path", TYPED)
def test_a_value_of_another_kind_is_refused_with_its_path_and_what_is_allowed(path):
    kind = TABLE[path].kind
    for value in [value for value in POOL if not kind.takes(value)]:
        assert problems_of((path, value))[path].endswith(f": expected {kind.words}")
    assert path in scanned((path, next(value for value in POOL if kind.takes(value)))).values


@pytest.mark.parametrize("path", REFUSED)
def test_a_refused_key_has_values_that_ask_for_nothing_and_others_that_are_refused(path):
    key = TABLE[path]
    if not path.startswith("patrickstar.options."):
        for value in (None, *key.harmless):
            assert scanned((path, value)) == Scan()
    asking = next(value for value in (True, False, 2) if value not in key.harmless)
    assert problems_of((path, asking))[path].endswith(f"refused here: {key.text}")


@pytest.mark.parametrize("value", [True, "auto", None, 3, [1]])
def test_names_without_effect_are_named_once_whatever_their_values(value):
    for name in IGNORED - OPAQUE - {"enabled", "type", "zero_optimization", "pipeline"}:
        assert scanned((name, value)) == Scan(ignored=[name]), name
    config = {
        "tensorboard": {"enabled": value},
        "checkpoint": {"writer": {"type": value}},
        "zero_optimization": {"stage": value},
    }
    config |= {"optimizer": {"params": {"fused": value, "lr": 1}}, "amp": {"whatever": {"it": value}}, "aio": {}}
    (note,) = read_config(config).warnings
    named = (
        "tensorboard.enabled, checkpoint.writer.type, zero_optimization.stage, optimizer.params.fused, amp.whatever.it"
    )
    assert note == f"no effect here: {named}"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_misspelling_is_refused_with_the_nearest(data):
    path = data.draw(st.sampled_from(sorted({*TABLE, *IGNORED} - {"patrickstar.options"})))
    within, _, name = path.rpartition(".")
    wrong = data.draw(misspelt(name))
    paths = {*TABLE, *SECTIONS}
    if (
        not wrong
        or within in OPAQUE
        or wrong in IGNORED
        or f"{within}.{wrong}".strip(".") in paths
        or "options" in within
    ):
        return
    shown = f"{within}.{wrong}".strip(".")
    found = problems_of((shown, True))
    assert found.keys() == {shown}
    assert found[shown].startswith("there is no such key")
    if nearest(wrong, [name]):
        assert 'did you mean "' in found[shown]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(FREE), max_size=8, unique=True))
def test_all_problems_are_told_at_once(paths):
    assert not paths or problems_of(*((path, object()) for path in paths)).keys() == set(paths)


@pytest.mark.parametrize(
    ("config", "path", "why"),
    [
        ({"optimizer": {"adam_w_mode": True}}, "optimizer.adam_w_mode", 'did you mean "optimizer.params.adam_w_mode"?'),
        ({"optimiser": {}}, "optimiser", 'did you mean "optimizer"?'),
        ({"fp16": {"hysteresys": 2}}, "fp16.hysteresys", 'did you mean "hysteresis"?'),
        ({"aio": {"queue_dept": 2}}, "aio.queue_dept", 'did you mean "queue_depth"?'),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type", '\'Lamb\': expected "Adam" or "AdamW"'),
        ({"scheduler": {"type": "StepLR"}}, "scheduler.type", 'expected "LRRangeTest"'),
        ({"optimizer": 3}, "optimizer", "3: expected an object"),
        ({"zero_optimization": {"enabled": True}}, "zero_optimization.enabled", "there is no such key"),
        ({"type": "Adam"}, "type", 'did you mean "optimizer.type"?'),
        ({"fp16": {"qqq": 1}}, "fp16.qqq", "the keys with a meaning here are consecutive_hysteresis, enabled, "),
        ({3: 4}, "3", "there is no such key"),
        ({"zero_optimization": {"zenflow": {}}}, "zero_optimization.zenflow", "leave it out"),
        ({"train_batch_size": "auto"}, "train_batch_size", "for the Trainer of transformers to fill in"),
        ({"optimizer": {"params": {"lr": "x" * 99}}}, "optimizer.params.lr", f"'{'x' * 71}: expected a finite number"),
    ],
)
def test_what_is_wrong_with_one_key(config, path, why):
    with pytest.raises(ConfigError) as refusal:
        read_config(config)
    (problem,) = refusal.value.problems
    assert problem.startswith(f"{path}: ")
    assert why in problem


def test_objects_may_be_null_or_empty_and_stage_1_was_a_flag():
    config = {"optimizer": None, "scheduler": {}, "aio": {}, "zero_optimization": True, "fp16": None}
    assert read_config(config).warnings == ("no effect here: zero_optimization",)
