"""What the keys of a config come to together."""

import logging
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from patrickstar import ConfigError, LossScale, Options
from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.engine.read import read_config
from patrickstar.config.settings import OptimizerSettings, Schedule

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
BATCH, MICRO, ACCUMULATE = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
PARAMS = "scheduler.params"
OPTIMIZER_PATH, PARAM_PATH = (f"zero_optimization.offload_{name}.nvme_path" for name in ("optimizer", "param"))
FP16, ADAM, SCALE = {"enabled": True}, {"type": "Adam"}, "memory.options.loss_scale"


def problems_of(config):
    with pytest.raises(ConfigError) as refusal:
        read_config(config)
    return dict(problem.split(": ", 1) for problem in refusal.value.problems)


def offload(**sections):
    return {"zero_optimization": {f"offload_{name}": section for name, section in sections.items()}}


def own(**given):
    return {"patrickstar": given}


def fp16(**given):
    return {"fp16": {"enabled": True, **given}}


def scheduler(name, **params):
    return {"scheduler": {"type": name, "params": params}}


def nvme(path):
    return {"device": "nvme", "nvme_path": path}


def test_nothing_is_adam_in_fp32_without_a_bound():
    empty = read_config({})
    assert empty == read_config(None)
    plain = OptimizerSettings(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=False)
    assert empty.optimizer == plain
    assert empty.memory == MemoryOptions(precision="fp32", options=Options(accumulate=1))
    assert (empty.schedule, empty.accumulate, empty.micro_batch_size) == (None, 1, None)
    assert (empty.values, empty.warnings) == ({}, ())


def test_the_config_of_the_original_s_readme():
    settings = read_config(README)
    assert settings.optimizer == OptimizerSettings(lr=1e-3, eps=1e-6)
    assert settings.memory.precision == "fp16"
    # The original took the hysteresis for the factor.
    assert settings.memory.options.loss_scale == LossScale(initial=2.0**8, factor=2.0, hysteresis=2, window=1000)
    assert (settings.values["default_chunk_size"], settings.values["use_cpu_embedding"]) == (64 * 2**20, False)
    ignored = "optimizer.params.use_hybrid_adam, release_after_init, client.mem_tracer.use_async_mem_monitor"
    assert settings.warnings == (f"no effect here: {ignored}",)


def test_a_config_is_not_changed_and_may_have_numbers_of_numpy():
    params = {"lr": np.float32(0.5), "betas": np.array([0.5, 0.25]).tolist()}
    config = {"optimizer": {"params": params}, BATCH: np.int64(4)}
    settings = read_config(config)
    assert (settings.optimizer.lr, type(settings.optimizer.lr), settings.micro_batch_size) == (0.5, float, 4)
    assert list(config["optimizer"]["params"]) == ["lr", "betas"]


@pytest.mark.parametrize("config", [3, [("a", 1)], b"x.json", True])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(ConfigError, match="expected a dict, or the path of a JSON file"):
        read_config(config)


@pytest.mark.parametrize(
    ("config", "what", "wanted"),
    [
        ({"optimizer": ADAM}, "optimizer.decoupled", False),
        ({"optimizer": {"type": "adam", "params": {"adam_w_mode": True}}}, "optimizer.decoupled", True),
        ({"optimizer": {"type": "AdamW"}}, "optimizer.decoupled", True),
        ({"optimizer": {"type": "ADAMW", "params": {"adam_w_mode": False}}}, "optimizer.decoupled", False),
        (scheduler("WarmupLR", warmup_max_lr=None), "schedule", Schedule("WarmupLR", {"warmup_max_lr": None})),
        (
            scheduler("WarmupDecayLR", total_num_steps=1e4),
            "schedule",
            Schedule("WarmupDecayLR", {"total_num_steps": 10**4}),
        ),
        ({"scheduler": {}}, "schedule", None),
        ({}, "memory.precision", "fp32"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "memory.precision", "fp32"),
        ({"fp16": FP16}, "memory.precision", "fp16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "memory.precision", "bf16"),
        ({"bfloat16": {"enabled": True}}, "memory.precision", "bf16"),
        (own(precision="bf16"), "memory.precision", "bf16"),
        ({"bf16": {"enabled": True}, **own(precision="bf16")}, "memory.precision", "bf16"),
        (own(precision=None), "memory.precision", None),
        (fp16(), SCALE, LossScale(initial=2.0**16, dynamic=True, window=1000, hysteresis=2, minimum=1.0)),
        (fp16(loss_scale=0, initial_scale_power=8), SCALE, LossScale(initial=256.0)),
        (fp16(loss_scale=128), SCALE, LossScale(initial=128.0, dynamic=False)),
        (fp16(loss_scale=0.5, min_loss_scale=4), SCALE, LossScale(initial=0.5, dynamic=False, minimum=4.0)),
        (
            fp16(consecutive_hysteresis=True, hysteresis=1, loss_scale_window=5),
            SCALE,
            LossScale(consecutive_hysteresis=True, hysteresis=1, window=5),
        ),
        ({"gradient_clipping": 0.5}, "memory.max_grad_norm", 0.5),
        ({"gradient_clipping": 0}, "memory.max_grad_norm", None),
        (offload(param=nvme("a")), "memory.disk", Path("a")),
        (offload(optimizer=nvme("a")), "memory.disk", Path("a")),
        (offload(optimizer=nvme("a"), param=nvme("a/")), "memory.disk", Path("a")),
        (offload(optimizer={"device": "cpu"}, param={"device": "none"}), "memory.disk", None),
        ({**offload(param=nvme("a")), **own(disk="a", disk_memory="1GiB")}, "memory.disk", Path("a")),
        ({"client": {"nvme_base_dir": "b"}}, "memory.disk", Path("b")),
        ({"client": {"mem_tracer": {"overall_cpu_mem_ratio": 0.8}}}, "memory.host_memory", "80%"),
    ],
)
def test_what_keys_come_to(config, what, wanted):
    assert attrgetter(what)(read_config(config)) == wanted


@pytest.mark.parametrize(
    ("given", "micro", "accumulate"),
    [
        ({}, None, 1),
        ({BATCH: 32}, 32, 1),
        ({MICRO: 4}, 4, 1),
        ({ACCUMULATE: 4}, None, 4),
        ({BATCH: 32, MICRO: 4}, 4, 8),
        ({BATCH: 32, ACCUMULATE: 4}, 8, 4),
        ({MICRO: 4, ACCUMULATE: 3}, 4, 3),
        ({BATCH: 12, MICRO: 4, ACCUMULATE: 3}, 4, 3),
    ],
)
def test_two_batch_sizes_give_the_third(given, micro, accumulate):
    settings = read_config(given)
    assert (settings.micro_batch_size, settings.accumulate) == (micro, accumulate)
    assert settings.memory.options.accumulate == accumulate


def test_memory_options_have_the_names_of_manage():
    given = {"device": "emulated", "device_memory": "6GiB", "host_memory": "24GiB", "disk": "spill"}
    given |= {
        "disk_memory": 10**9,
        "weights": "w.safetensors",
        "options": {"chunk_size": 2048, "keep_fp32": ["norm"], "eviction": "lru"},
    }
    wanted = given | {"disk": Path("spill"), "weights": Path("w.safetensors")}
    wanted["options"] = Options(chunk_size=2048, keep_fp32=("norm",), eviction="lru", accumulate=1)
    assert read_config(own(**given)).memory == MemoryOptions(precision="fp32", **wanted)


@pytest.mark.parametrize(
    ("config", "path", "why"),
    [
        (scheduler("WarmupDecayLR"), "scheduler.params.total_num_steps", "WarmupDecayLR needs it"),
        (scheduler("WarmupLR", cycle_min_lr=0), f"{PARAMS}.cycle_min_lr", "not a parameter of WarmupLR, which takes"),
        (scheduler("WarmupDecayLR", total_num_steps=-1), "scheduler.params.total_num_steps", "expected a whole number"),
        ({"scheduler": {"params": {"warmup_num_steps": 3}}}, "scheduler.type", "missing, beside params"),
        (
            {BATCH: 32, MICRO: 4, ACCUMULATE: 1},
            BATCH,
            f"32 is not {MICRO} x {ACCUMULATE} x ranks = 4 x 1 x 1 rank: write 4",
        ),
        ({BATCH: 32, MICRO: 5}, BATCH, "5 x 6 x 1 rank: write 30"),
        ({BATCH: 4, MICRO: 8}, BATCH, "8 x 0 x 1 rank: write 8"),
        ({BATCH: 32, MICRO: "x"}, MICRO, "expected a whole number"),
        ({"fp16": FP16, "bf16": FP16}, "bf16.enabled", "true, and so is fp16.enabled"),
        ({"fp16": FP16, **own(precision="fp32")}, "patrickstar.precision", "fp16.enabled is true"),
        (fp16(initial_scale_power=0, min_loss_scale=2), "fp16.initial_scale_power", "1.0 is less than minimum=2.0"),
        ({**own(step="in_backward"), "gradient_clipping": 1}, "gradient_clipping", "deferred"),
        ({**own(step="in_backward"), ACCUMULATE: 2}, ACCUMULATE, "deferred"),
        ({**own(step="in_backward"), "fp16": FP16}, "patrickstar.precision", "deferred"),
        (own(max_grad_norm=1.0), "patrickstar.max_grad_norm", "write gradient_clipping"),
        (own(options={"loss_scale": 4}), "patrickstar.options.loss_scale", "write fp16"),
        (own(options={"accumulate": 2}), "patrickstar.options.accumulate", f"write {ACCUMULATE}"),
        (
            own(options={"embedding_rows": True}),
            "patrickstar.options.embedding_rows",
            "write use_cpu_embedding, or options.tile_rows",
        ),
        (own(options={"chunk_size": 7}), "patrickstar.options.chunk_size", "7: expected a multiple of 1024"),
        (own(options={"chunk": 1, "make": 2}), "patrickstar.options", "there is no argument 'chunk'"),
        (own(options={3: 1}), "patrickstar.options", "there is no argument '3'"),
        (own(host_memory="2 gigs"), "patrickstar.host_memory", "'2 gigs'"),
        (offload(param={"device": "nvme"}), PARAM_PATH, "missing"),
        (offload(optimizer=nvme("a"), param=nvme("b")), OPTIMIZER_PATH, "there is one disk"),
        ({**offload(param=nvme("a")), **own(disk="b")}, PARAM_PATH, "there is one disk"),
        (
            {"client": {"mem_tracer": {"overall_cpu_mem_ratio": 0.8}}, **own(host_memory="1GiB")},
            "patrickstar.host_memory",
            "overall_cpu_mem_ratio says it too",
        ),
    ],
)
def test_what_cannot_be(config, path, why):
    found = problems_of(config)
    assert found.keys() == {path}
    assert why in found[path]


def test_problems_of_keys_and_of_what_they_come_to_are_told_together():
    given = {"device": "cpu", "device_memory": "6GiB", "host_memory": "2 gigs", "options": {"chunk_size": 7}}
    assert problems_of({**own(**given), "fp16": {"enabled": "x"}, "optimizer": {"params": {"lr": -1}}}).keys() == {
        *("fp16.enabled", "patrickstar.host_memory", "patrickstar.device_memory", "patrickstar.options.chunk_size"),
        "optimizer.params.lr",
    }


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"optimizer": {**ADAM, "params": {"lr": 1, "weight_decay": 0.1}}}, "has L2 decay"),
        ({"optimizer": {**ADAM, "params": {"lr": 1, "weight_decay": 0}}}, None),
        ({"optimizer": {**ADAM, "params": {"lr": 1, "weight_decay": 0.1, "adam_w_mode": False}}}, None),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1, "weight_decay": 0.1}}}, None),
        ({"optimizer": ADAM}, "optimizer.params.lr is not given: 0.001"),
        ({"fp16": {"loss_scale": 4}}, "no effect here: fp16.loss_scale (fp16.enabled is not true)"),
        (
            offload(param={"device": "cpu", "nvme_path": "a"}),
            'offload_param.nvme_path (zero_optimization.offload_param.device is not "nvme")',
        ),
        (
            {"default_chunk_size": 9, **own(options={"chunk_size": 2048})},
            "default_chunk_size (patrickstar.options.chunk_size says it)",
        ),
    ],
)
def test_what_a_user_should_know_is_said_in_a_warning(config, told, caplog):
    with caplog.at_level(logging.INFO, "patrickstar"):
        read_config(config).tell(logging.getLogger("patrickstar"))
    records = caplog.records
    assert [record.levelname for record in records] == ([] if told is None else ["WARNING"])
    assert told is None or told in records[0].getMessage()
