import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import ConfigError, Options
from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.engine.key import Verdict
from patrickstar.config.engine.read import read_config
from patrickstar.config.engine.scan import scan
from patrickstar.config.engine.schedules import SCHEDULES
from patrickstar.config.engine.table import CHILDREN, SUBJECTS, TABLE
from tests.config.engine.values import FREE, bad_values, good_values, nested

# Of PatrickStar 0.4.6, its guide and its code.
ORIGINAL = (
    *("optimizer.type", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps"),
    *("optimizer.params.weight_decay", "optimizer.params.use_hybrid_adam", "fp16.enabled", "fp16.loss_scale"),
    *("fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis", "fp16.min_loss_scale"),
    *("gradient_clipping", "default_chunk_size", "release_after_init", "use_cpu_embedding", "use_fake_dist"),
    *(f"client.mem_tracer.{name}" for name in ("use_async_mem_monitor", "warmup_gpu_chunk_mem_ratio")),
    *(f"client.mem_tracer.{name}" for name in ("overall_gpu_mem_ratio", "overall_cpu_mem_ratio", "margin_use_ratio")),
    *(f"client.mem_tracer.{name}" for name in ("use_fake_dist", "with_static_partition")),
    *(f"client.opts.{name}" for name in ("with_mem_saving_comm", "with_mem_cache", "with_async_move")),
    "client.nvme_base_dir",
)
# The headings of DeepSpeed's page of keys, and what stands at its top level.
DEEPSPEED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler"),
    *("managed_gradient_accumulation", "communication_data_type", "gradient_allreduce_op", "prescale_gradients"),
    *("gradient_predivide_factor", "sparse_gradients", "fp16", "bf16", "torch_autocast", "amp", "gradient_clipping"),
    *("zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer", "aio"),
    *("tensor_parallel", "hybrid_engine", "expert_parallel", "disable_python_gc", "steps_per_print"),
    *("wall_clock_breakdown", "dump_state", "autotuning", "flops_profiler", "activation_checkpointing"),
    *("sparse_attention", "data_efficiency", "curriculum_learning", "tensorboard", "wandb", "comet", "csv_monitor"),
    *("elasticity", "comms_logger", "compression_training.layer_reduction", "checkpoint", "compile", "data_types"),
    *(f"compression_training.{kind}_quantization.shared_parameters" for kind in ("weight", "activation")),
    *(f"compression_training.{kind}_pruning.different_groups" for kind in ("sparse", "row", "head", "channel")),
    *("eigenvalue", "progressive_layer_drop", "pipeline", "zero_allow_untested_optimizer", "dataloader_drop_last"),
    *("zero_force_ds_cpu_optimizer", "nebula", "quantize_training", "timers", "memory_breakdown"),
)


def any_key(keys):
    """By number: the keys themselves are long to print."""
    return st.integers(0, len(keys) - 1).map(keys.__getitem__)


MISTAKABLE = tuple(key for key in FREE if bad_values(key))


def one_of(keys):
    return any_key(keys).flatmap(lambda key: st.tuples(st.just(key), st.sampled_from(good_values(key))))


def misspelt(name):
    """One letter gone, doubled, changed, or two exchanged."""
    places = range(len(name))
    return st.one_of(
        st.sampled_from(places).map(lambda at: name[:at] + name[at + 1 :]),
        st.sampled_from(places).map(lambda at: name[:at] + name[at] + name[at:]),
        st.sampled_from(places).map(lambda at: f"{name[:at]}q{name[at + 1 :]}"),
        st.sampled_from(places).map(lambda at: name[:at] + name[at : at + 2][::-1] + name[at + 2 :]),
    )


def problems_of(config):
    with pytest.raises(ConfigError) as refusal:
        read_config(config)
    return dict(problem.split(": ", 1) for problem in refusal.value.problems)


@pytest.mark.parametrize("path", [*ORIGINAL, *DEEPSPEED])
def test_every_key_of_both_projects_is_in_the_table(path):
    assert path in TABLE or path in CHILDREN


def test_a_key_stands_in_the_table_once():
    assert sum(map(len, SUBJECTS.values())) == len(TABLE) > 500


def test_every_key_says_what_becomes_of_it_and_takes_something():
    assert [key.path for key in TABLE.values() if not key.why or not key.kind.words] == []
    assert [path for path, key in TABLE.items() if not good_values(key) and not key.kind.choices] == []


def test_the_arguments_of_manage_and_the_parameters_of_schedules_are_all_there():
    assert set(CHILDREN["patrickstar"]) == {field.name for field in dataclasses.fields(MemoryOptions)}
    parameters = {field.name for kind in SCHEDULES.values() for field in dataclasses.fields(kind)}
    assert set(CHILDREN["scheduler.params"]) == parameters | {"last_batch_iteration"}


@settings(max_examples=200, deadline=None)
@given(st.lists(one_of(FREE), max_size=12, unique_by=lambda entry: entry[0].path))
def test_any_subset_of_keys_loads_and_each_is_heard_or_told(entries):
    found = read_config(nested((key.path, value) for key, value in entries))
    told = " ".join(note.text for note in found.notes)
    for key, _ in entries:
        if key.verdict is not Verdict.HONOURED:
            assert key.path.replace("*", "mine") in told


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_misspelling_is_refused_with_its_path_what_is_allowed_and_the_nearest(data):
    key, value = data.draw(one_of(FREE))
    within, _, name = key.path.rpartition(".")
    wrong = data.draw(misspelt(name))
    allowed = CHILDREN[within]
    if wrong in allowed or not wrong or TABLE.get(within, key).open:
        return
    shown = f"{within}.{wrong}".replace("*", "mine") if within else wrong
    found = problems_of(nested([(f"{within}.{wrong}" if within else wrong, value)]))
    assert found.keys() == {shown}
    assert found[shown].startswith("there is no such key")
    assert found[shown].endswith(", ".join(sorted(allowed)))
    if len(name) > 5:
        assert 'did you mean "' in found[shown]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_value_of_another_kind_is_refused_with_its_path_and_what_is_allowed(data):
    key = data.draw(any_key(MISTAKABLE))
    value = data.draw(st.sampled_from(bad_values(key)))
    found = problems_of(nested([(key.path, value)]))
    shown = key.path.replace("*", "mine")
    assert found.keys() == {shown}
    assert key.kind.words in found[shown] or key.kind.elsewhere


@settings(max_examples=50, deadline=None)
@given(st.lists(any_key(MISTAKABLE), max_size=8, unique_by=lambda key: key.path))
def test_all_problems_are_told_at_once(keys):
    if keys:
        config = nested((key.path, bad_values(key)[-1]) for key in keys)
        assert problems_of(config).keys() == {key.path.replace("*", "mine") for key in keys}


@pytest.mark.parametrize(
    "key", [key for key in TABLE.values() if key.verdict is Verdict.REFUSED], ids=lambda key: key.path
)
def test_a_refused_key_has_values_that_ask_for_nothing_and_others_that_are_refused(key):
    assert any(not key.kind.problem(value) for value in key.harmless)
    asking = [
        value for value in (True, False, 2, {"x": 1}, 0.5, "text") if not key.kind.problem(value) and key.refuses(value)
    ]
    assert asking
    found = scan(nested([(key.path, asking[0])]))
    assert found.problems[key.path.replace("*", "mine")].endswith(key.why)


@pytest.mark.parametrize(
    ("config", "path", "why"),
    [
        ({"optimizer": {"adam_w_mode": True}}, "optimizer.adam_w_mode", 'did you mean "optimizer.params.adam_w_mode"?'),
        ({"optimiser": {}}, "optimiser", 'did you mean "optimizer"?'),
        ({"optimizer": 3}, "optimizer", "expected an object with keys such as type, params"),
        ({"zero_optimization": 3}, "zero_optimization", "expected an object, or true or false"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "expected a whole number from 0 to 3"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage", "True: expected a whole number"),
        ({"zero_optimization": {"stage": 1.5}}, "zero_optimization.stage", "1.5: expected a whole number"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled", "'yes': expected true or false"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled", "1: expected true or false"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, "fp16.hysteresis", "expected a whole number of 1 or more"),
        ({"optimizer": {"type": "AdamV"}}, "optimizer.type", 'expected "Adam" or "AdamW"; did you mean "Adam'),
        ({"optimizer": {"type": "lamb"}}, "optimizer.type", 'write "AdamW" or "Adam"'),
        ({"optimizer": {"params": {"betas": [0.9, 1.0]}}}, "optimizer.params.betas", "each at least 0 and below 1"),
        ({"optimizer": {"params": {"betas": 0.9}}}, "optimizer.params.betas", "expected two numbers"),
        ({"optimizer": {"params": {"lr": "1e-3"}}}, "optimizer.params.lr", "'1e-3': expected a finite number"),
        ({"optimizer": {"params": {"lr": float("nan")}}}, "optimizer.params.lr", "nan: expected a finite number"),
        ({"optimizer": {"params": {"lr": -1}}}, "optimizer.params.lr", "expected a finite number of 0 or more"),
        ({"gradient_clipping": -0.5}, "gradient_clipping", "expected a finite number of 0 or more, or -1"),
        ({"scheduler": {"type": "CosineAnnealingLR"}}, "scheduler.type", "built on the optimizer"),
        ({"scheduler": {"type": "WarmupLr"}}, "scheduler.type", 'did you mean "WarmupLR"?'),
        (
            {"client": {"mem_tracer": {"overall_cpu_mem_ratio": 80}}},
            "client.mem_tracer.overall_cpu_mem_ratio",
            "at most 1",
        ),
        ({3: 4}, "3", "keys are text"),
        ({"optimizer": {"params": {"lr": np.ones(2)}}}, "optimizer.params.lr", "expected a finite number"),
        ({"autotuning": {"enabled": np.ones(2)}}, "autotuning.enabled", "expected true or false"),
        ({"fp16": {"enabled": True, "loss_scale": 1e39}}, "fp16.loss_scale", "from 0 to 1.70141e+38"),
    ],
)
def test_what_is_wrong_with_one_key(config, path, why):
    found = problems_of(config)
    assert found.keys() == {path}
    assert why in found[path]


def test_the_keys_of_apex_are_its_own():
    found = read_config({"amp": {"enabled": False, "opt_level": "O1", "whatever": {"x": 1}}})
    assert "amp.whatever" in " ".join(note.text for note in found.notes)


def test_an_options_field_has_its_own_path():
    assert problems_of({"patrickstar": {"options": {"chunk_size": 3}}}).keys() == {"patrickstar.options.chunk_size"}
    assert "tile_rows" in {field.name for field in dataclasses.fields(Options)}
