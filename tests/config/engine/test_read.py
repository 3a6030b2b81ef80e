import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest

from patrickstar import ConfigError, LossScale, Options
from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.engine.read import read_config
from patrickstar.config.engine.schedules import WarmupDecayLR, WarmupLR
from patrickstar.config.engine.settings import OptimizerSettings

README = {
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0, "use_hybrid_adam": True},
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 2**3,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "default_chunk_size": 64 * 1024 * 1024,
    "release_after_init": True,
    "use_cpu_embedding": False,
    "client": {"mem_tracer": {"use_async_mem_monitor": True}},
}


def problems_of(config, **given):
    with pytest.raises(ConfigError) as refusal:
        read_config(config, **given)
    return dict(problem.split(": ", 1) for problem in refusal.value.problems)


def told(settings, *, loud=None):
    return "\n".join(note.text for note in settings.notes if loud in (None, note.loud))


def test_nothing_is_adam_in_fp32_without_a_bound():
    empty = read_config({})
    assert empty == read_config(None)
    assert empty.optimizer == OptimizerSettings(
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=False
    )
    assert empty.memory == MemoryOptions(precision="fp32", options=Options(accumulate=1))
    assert (empty.schedule, empty.accumulate, empty.micro_batch_size, empty.chunk_hint) == (None, 1, None, None)
    assert (empty.device_share, empty.steps_per_print, empty.said, empty.notes) == (None, None, frozenset(), ())


def test_the_config_of_the_original_s_readme():
    settings = read_config(README)
    assert settings.optimizer == OptimizerSettings(lr=1e-3, eps=1e-6)
    assert settings.memory.precision == "fp16"
    # The original took the hysteresis for the factor.
    assert settings.memory.options.loss_scale == LossScale(initial=2.0**8, factor=2.0, hysteresis=2, window=1000)
    assert settings.chunk_hint == 64 * 2**20
    assert told(settings, loud=True) == ""
    for key in (
        "use_hybrid_adam",
        "release_after_init",
        "client.mem_tracer.use_async_mem_monitor",
    ):
        assert key in told(settings, loud=False)


def test_an_embedding_on_the_cpu_is_one_in_tiles_which_is_told():
    assert read_config(README).memory.options.tile_rows is None
    settings = read_config({**README, "use_cpu_embedding": True})
    assert settings.memory.options.tile_rows == 8192
    assert "use_cpu_embedding" in told(settings, loud=True)
    for rows in (100, None):
        own = {"patrickstar": {"options": {"tile_rows": rows}}}
        settings = read_config({**README, **own, "use_cpu_embedding": True})
        assert settings.memory.options.tile_rows == rows
        assert told(settings, loud=True) == ""


def test_a_config_is_not_changed_and_may_have_numbers_of_numpy():
    config = {
        "optimizer": {"params": {"lr": np.float32(0.5), "betas": np.array([0.5, 0.25]).tolist()}},
        "train_batch_size": np.int64(4),
    }
    settings = read_config(config)
    assert (settings.optimizer.lr, type(settings.optimizer.lr), settings.micro_batch_size) == (0.5, float, 4)
    assert list(config["optimizer"]["params"]) == ["lr", "betas"]


@pytest.mark.parametrize("config", [3, [("a", 1)], b"x.json", True])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(ConfigError, match="expected a dict, or the path of a JSON file"):
        read_config(config)


# the optimizer


@pytest.mark.parametrize(
    ("optimizer", "decoupled"),
    [
        ({}, False),
        ({"type": "Adam"}, False),
        ({"type": "adam", "params": {"adam_w_mode": True}}, True),
        ({"type": "AdamW"}, True),
        ({"type": "ADAMW", "params": {"adam_w_mode": False}}, False),
    ],
)
def test_how_weights_decay(optimizer, decoupled):
    assert read_config({"optimizer": optimizer}).optimizer.decoupled is decoupled


@pytest.mark.parametrize(
    ("optimizer", "warns"),
    [
        ({"type": "Adam", "params": {"lr": 1, "weight_decay": 0.1}}, True),
        ({"params": {"lr": 1, "weight_decay": 0.1}}, True),
        ({"type": "Adam", "params": {"lr": 1, "weight_decay": 0}}, False),
        ({"type": "Adam", "params": {"lr": 1, "weight_decay": 0.1, "adam_w_mode": False}}, False),
        ({"type": "AdamW", "params": {"lr": 1, "weight_decay": 0.1}}, False),
    ],
)
def test_where_deepspeed_and_the_original_differ_a_warning_says_which_it_is(optimizer, warns):
    assert ("has L2 decay" in told(read_config({"optimizer": optimizer}), loud=True)) is warns


def test_a_learning_rate_that_is_not_given_is_said():
    assert "optimizer.params.lr is not given: 0.001" in told(read_config({"optimizer": {"type": "Adam"}}), loud=True)


def test_parameters_of_another_optimizer_are_not_told_beside_the_optimizer_itself_but_mistakes_are():
    config = {"optimizer": {"type": "Lamb", "params": {"max_coeff": 0.3, "lr": "fast", "nonsense": 1}}}
    assert problems_of(config).keys() == {"optimizer.type", "optimizer.params.lr"}
    assert problems_of({"optimizer": {"params": {"max_coeff": 0.3}}}).keys() == {"optimizer.params.max_coeff"}


# the scheduler


def test_a_schedule_takes_its_own_parameters():
    config = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1e4, "warmup_type": "linear"}}}
    assert read_config(config).schedule == WarmupDecayLR(total_num_steps=10_000, warmup_type="linear")
    assert read_config({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": None}}}).schedule == WarmupLR()
    assert read_config({"scheduler": {}}).schedule is read_config({"scheduler": None}).schedule is None


@pytest.mark.parametrize(
    ("scheduler", "path", "why"),
    [
        ({"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps", "WarmupDecayLR needs it"),
        ({"params": {"warmup_num_steps": 3}}, "scheduler.type", "missing, beside params"),
        (
            {"type": "WarmupLR", "params": {"cycle_min_lr": 0}},
            "scheduler.params.cycle_min_lr",
            "not a parameter of WarmupLR",
        ),
        ({"type": "WarmupLR", "params": {"warmup_type": "exp"}}, "scheduler.params.warmup_type", '"log" or "linear"'),
        (
            {"type": "WarmupLR", "params": {"last_batch_iteration": 7}},
            "scheduler.params.last_batch_iteration",
            "checkpoint",
        ),
    ],
)
def test_a_schedule_that_cannot_be(scheduler, path, why):
    found = problems_of({"scheduler": scheduler})
    assert found.keys() == {path}
    assert why in found[path]


# batch sizes

BATCH, MICRO, ACCUMULATE = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("given", "world", "micro", "accumulate"),
    [
        ({}, 1, None, 1),
        ({BATCH: 32}, 1, 32, 1),
        ({BATCH: 32}, 4, 8, 1),
        ({MICRO: 4}, 1, 4, 1),
        ({ACCUMULATE: 4}, 1, None, 4),
        ({BATCH: 32, MICRO: 4}, 1, 4, 8),
        ({BATCH: 32, MICRO: 4}, 2, 4, 4),
        ({BATCH: 32, ACCUMULATE: 4}, 1, 8, 4),
        ({MICRO: 4, ACCUMULATE: 3}, 1, 4, 3),
        ({BATCH: 24, MICRO: 4, ACCUMULATE: 3}, 2, 4, 3),
    ],
)
def test_two_batch_sizes_give_the_third(given, world, micro, accumulate):
    settings = read_config(given, world_size=world)
    assert (settings.micro_batch_size, settings.accumulate) == (micro, accumulate)
    assert settings.memory.options.accumulate == accumulate


@pytest.mark.parametrize(
    ("given", "world", "why"),
    [
        (
            {BATCH: 32, MICRO: 4, ACCUMULATE: 1},
            1,
            "32 is not train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks = 4 x 1 x 1 rank: write 4",
        ),
        ({BATCH: 32, MICRO: 5}, 1, "5 x 6 x 1 rank: write 30"),
        ({BATCH: 32, ACCUMULATE: 5}, 1, "6 x 5 x 1 rank: write 30"),
        ({BATCH: 3}, 2, "1 x 1 x 2 ranks: write 2"),
        ({BATCH: 1}, 2, "0 x 0 x 2 ranks: write 2"),
        ({BATCH: 4, MICRO: 8}, 1, "8 x 0 x 1 rank: write 8"),
    ],
)
def test_batch_sizes_that_do_not_go_together(given, world, why):
    found = problems_of(given, world_size=world)
    assert found.keys() == {BATCH}
    assert why in found[BATCH]


# precision


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({}, "fp32"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"patrickstar": {"precision": "bf16"}}, "bf16"),
        ({"bf16": {"enabled": True}, "patrickstar": {"precision": "bf16"}}, "bf16"),
        ({"patrickstar": {"precision": None}}, None),
    ],
)
def test_the_precision(config, precision):
    assert read_config(config).memory.precision == precision


def test_both_types_at_once_are_refused():
    assert problems_of({"fp16": {"enabled": True}, "bf16": {"enabled": True}}) == {
        "bf16.enabled": "true, and so is fp16.enabled: a run has one type; write false for the other"
    }
    assert problems_of({"fp16": {"enabled": True}, "patrickstar": {"precision": "fp32"}}).keys() == {
        "patrickstar.precision"
    }


@pytest.mark.parametrize(
    ("fp16", "scale"),
    [
        ({}, LossScale(initial=2.0**16, dynamic=True, window=1000, hysteresis=2, minimum=1.0)),
        ({"loss_scale": 0, "initial_scale_power": 8}, LossScale(initial=256.0)),
        ({"loss_scale": 128}, LossScale(initial=128.0, dynamic=False)),
        ({"loss_scale": 0.5, "min_loss_scale": 4}, LossScale(initial=0.5, dynamic=False, minimum=4.0)),
        (
            {"consecutive_hysteresis": True, "hysteresis": 1, "loss_scale_window": 5},
            LossScale(consecutive_hysteresis=True, hysteresis=1, window=5),
        ),
    ],
)
def test_the_loss_scale_is_deepspeed_s(fp16, scale):
    assert read_config({"fp16": {"enabled": True, **fp16}}).memory.options.loss_scale == scale


def test_a_scale_that_begins_below_its_least_is_refused():
    assert problems_of({"fp16": {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 2}}) == {
        "fp16.min_loss_scale": "2 is above 2 ** fp16.initial_scale_power = 1"
    }


def test_a_loss_scale_without_fp16_is_said_to_have_no_effect():
    settings = read_config({"fp16": {"loss_scale": 4}})
    assert settings.memory.options.loss_scale is None
    assert "no effect: fp16.loss_scale (fp16.enabled is not true)" in told(settings)


# clipping and memory


@pytest.mark.parametrize(("given", "norm"), [(1, 1.0), (0.5, 0.5), (0, None), (0.0, None), (-1, None), (-1.0, None)])
def test_zero_and_minus_one_clip_nothing(given, norm):
    assert read_config({"gradient_clipping": given}).memory.max_grad_norm == norm


def test_memory_options_have_the_names_of_manage():
    own = {"device": "emulated", "device_memory": "6GiB", "host_memory": "24GiB", "disk": "spill", "disk_memory": 10**9}
    own |= {"weights": "w.safetensors", "options": {"chunk_size": 2048, "keep_fp32": ["norm"], "eviction": "lru"}}
    memory = read_config({"patrickstar": own}).memory
    assert dataclasses.asdict(memory) == dataclasses.asdict(
        MemoryOptions(
            precision="fp32",
            **{**own, "disk": Path("spill"), "weights": Path("w.safetensors")}
            | {"options": Options(chunk_size=2048, keep_fp32=("norm",), eviction="lru", accumulate=1)},
        )
    )


def test_what_manage_refuses_is_told_with_the_path_of_its_key():
    own = {"device": "cpu", "device_memory": "6GiB", "host_memory": "2 gigs", "options": {"chunk_size": 7, "chunk": 1}}
    found = problems_of({"patrickstar": own, "fp16": {"enabled": "x"}})
    assert found.keys() == {
        *("fp16.enabled", "patrickstar.host_memory", "patrickstar.device_memory", "patrickstar.options"),
    }
    assert found["patrickstar.host_memory"].startswith("'2 gigs'")


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"gradient_clipping": 1}, "gradient_clipping"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}, "gradient_accumulation_steps"),
        ({"fp16": {"enabled": True}}, "patrickstar.precision"),
    ],
)
def test_updates_in_backward_go_with_neither_clipping_nor_accumulation_nor_fp16(extra, path):
    found = problems_of({"patrickstar": {"step": "in_backward"}, **extra})
    assert found.keys() == {path}
    assert "deferred" in found[path]


def test_keys_that_stand_elsewhere_are_refused_in_the_options():
    config = {"patrickstar": {"options": {"loss_scale": 4, "accumulate": 2}, "max_grad_norm": 1.0}}
    assert problems_of(config) == {
        "patrickstar.max_grad_norm": "1.0 is refused here: write gradient_clipping",
        "patrickstar.options.loss_scale": "refused here: write fp16",
        "patrickstar.options.accumulate": "refused here: write gradient_accumulation_steps",
    }


def offload(**sections):
    return {"zero_optimization": {f"offload_{name}": section for name, section in sections.items()}}


@pytest.mark.parametrize(
    ("config", "disk"),
    [
        (offload(param={"device": "nvme", "nvme_path": "a"}), Path("a")),
        (offload(optimizer={"device": "nvme", "nvme_path": "a"}), Path("a")),
        (
            offload(optimizer={"device": "nvme", "nvme_path": "a"}, param={"device": "nvme", "nvme_path": "a/"}),
            Path("a"),
        ),
        (offload(optimizer={"device": "cpu"}, param={"device": "none"}), None),
        (
            {
                **offload(param={"device": "nvme", "nvme_path": "a"}),
                "patrickstar": {"disk": "a", "disk_memory": "1GiB"},
            },
            Path("a"),
        ),
        ({"client": {"nvme_base_dir": "b"}}, Path("b")),
    ],
)
def test_offloading_to_nvme_is_the_disk_tier(config, disk):
    assert read_config(config).memory.disk == disk


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (offload(param={"device": "nvme"}), "zero_optimization.offload_param.nvme_path"),
        (offload(param={"device": "nvme", "nvme_path": None}), "zero_optimization.offload_param.nvme_path"),
        (
            offload(optimizer={"device": "nvme", "nvme_path": "a"}, param={"device": "nvme", "nvme_path": "b"}),
            "zero_optimization.offload_optimizer.nvme_path",
        ),
        ({**offload(param={"device": "nvme", "nvme_path": "a"}), "patrickstar": {"disk": "b"}}, "patrickstar.disk"),
    ],
)
def test_there_is_one_disk_and_it_has_a_directory(config, path):
    assert problems_of(config).keys() == {path}


def test_a_path_without_nvme_is_said_to_have_no_effect():
    settings = read_config(offload(param={"device": "cpu", "nvme_path": "a"}))
    assert settings.memory.disk is None
    assert 'offload_param.nvme_path (zero_optimization.offload_param.device is not "nvme")' in told(settings)


def test_shares_of_memory_are_budgets():
    settings = read_config({"client": {"mem_tracer": {"overall_cpu_mem_ratio": 0.8, "overall_gpu_mem_ratio": 0.35}}})
    assert (settings.memory.host_memory, settings.device_share) == ("80%", "35%")
    config = {"client": {"mem_tracer": {"overall_cpu_mem_ratio": 0.8}}, "patrickstar": {"host_memory": "1GiB"}}
    assert problems_of(config).keys() == {"patrickstar.host_memory"}


# what is told


def test_keys_without_effect_are_told_once_by_reason_and_aloud_where_something_asked_for_does_not_happen(caplog):
    config = {
        "aio": {"block_size": 1, "queue_depth": 2},
        "tensorboard": {"enabled": True, "job_name": "x"},
        "wandb": {"enabled": False, "project": "x"},
        "zero_optimization": {"overlap_comm": "auto"},
    }
    with caplog.at_level(logging.INFO, "patrickstar"):
        read_config(config).tell(logging.getLogger("patrickstar"))
    told = {record.getMessage(): record.levelname for record in caplog.records}
    assert len(told) == 4
    assert [level for message, level in told.items() if "aio.block_size, aio.queue_depth (" in message] == ["INFO"]
    assert [level for message, level in told.items() if "tensorboard.enabled, tensorboard.job_name (" in message] == [
        "WARNING"
    ]
    assert [level for message, level in told.items() if "wandb.enabled, wandb.project (" in message] == ["INFO"]
    assert [level for message, level in told.items() if "zero_optimization.overlap_comm (" in message] == ["INFO"]


def test_what_a_config_speaks_of_is_known():
    assert read_config(
        {"optimizer": {}, "gradient_clipping": 1, "aio": {"queue_depth": 1}, "bf16": {"enabled": False}}
    ).said == {
        *("optimizer", "gradient_clipping", "aio", "bf16", "bf16.enabled"),
    }
