"""DeepSpeed's own configs, as its documentation and tutorials have them: each loads, or is refused with what to write instead."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from patrickstar import ConfigError, LossScale
from patrickstar.config.engine.read import read_config
from patrickstar.config.settings import Schedule
from patrickstar.runtime import initialize_engine

EXAMPLES = Path(__file__).parents[1] / "deepspeed"


def scheduled(name, **given):
    """The name of a schedule and all of its parameters."""
    return name, Schedule(name, given).parameters


LOADS = {
    "getting_started": {"micro": 8, "precision": "fp16", "lr": 0.00015, "scale": LossScale()},
    "image_classifier": {
        "micro": 16,
        "precision": "fp16",
        "clip": 1.0,
        "schedule": scheduled("WarmupLR", warmup_min_lr=0.0, warmup_max_lr=0.001, warmup_num_steps=1000),
        "scale": LossScale(initial=2.0**15, window=500),
    },
    "zero_stage_1": {"micro": 1},
    "zero_stage_2": {
        "micro": 8,
        "accumulate": 4,
        "clip": 1.0,
        "decoupled": True,
        "precision": "fp16",
        "scale": LossScale(initial=128.0, dynamic=False),
    },
    "zero_offload": {"micro": 8, "precision": "bf16", "decoupled": True},
    "zero_infinity_host": {"micro": 1},
    "zero_infinity_disk": {"micro": 2, "precision": "bf16", "disk": Path("local_nvme")},
    "one_cycle": {
        "micro": 4,
        "lr": 1e-4,
        "schedule": scheduled(
            "OneCycle",
            cycle_min_lr=1e-4,
            cycle_max_lr=1e-3,
            decay_lr_rate=1e-3,
            cycle_first_step_size=1000,
            cycle_second_step_size=1000,
            cycle_first_stair_count=500,
            cycle_second_stair_count=500,
            decay_step_size=1000,
            cycle_min_mom=0.85,
            cycle_max_mom=0.99,
        ),
    },
    "range_test": {
        "micro": 4,
        "decoupled": True,
        "schedule": scheduled(
            "LRRangeTest", lr_range_test_min_lr=1e-4, lr_range_test_step_size=200, lr_range_test_step_rate=5.0
        ),
    },
    "language_model": {
        "micro": 4,
        "accumulate": 16,
        "clip": 1.0,
        "precision": "bf16",
        "decoupled": True,
        "schedule": scheduled(
            "WarmupDecayLR", total_num_steps=10000, warmup_max_lr=6e-4, warmup_num_steps=200, warmup_type="linear"
        ),
    },
    "cosine": {
        "micro": 2,
        "decoupled": True,
        "schedule": scheduled(
            "WarmupCosineLR", total_num_steps=100, warmup_num_steps=10, warmup_min_ratio=0.1, cos_min_ratio=0.01
        ),
    },
    "monitoring": {"micro": 2, "named": "tensorboard.enabled, tensorboard.output_path, tensorboard.job_name, wandb"},
    "profiling": {"micro": 2, "named": "flops_profiler.enabled"},
    "checkpointing": {"micro": 2, "named": "activation_checkpointing.partition_activations"},
    "chat": {"micro": 8, "precision": "fp16", "clip": 1.0, "scale": LossScale(window=100)},
}

AUTO = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("fp16.enabled", *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay"))),
    *(f"scheduler.params.warmup_{name}" for name in ("min_lr", "max_lr", "num_steps")),
)


def other(*params):
    return {f"optimizer.params.{name}": "belongs to another optimizer" for name in params}


REFUSED = {
    "bert_pretraining": {
        "optimizer.params.max_grad_norm": "gradient_clipping",
        "optimizer.params.bias_correction": "leave",
    },
    "eight_gpus": {"train_batch_size": "4 x 1 x 1 rank"},
    "transformers_auto": dict.fromkeys(AUTO, "for the Trainer of transformers"),
    "onebit_adam": {"optimizer.type": 'expected "Adam" or "AdamW"', **other("freeze_step", "comm_backend_name")},
    "muon": {"optimizer.type": 'expected "Adam" or "AdamW"', **other("momentum", "muon_lr", "ns_method")},
    "apex": {"amp.enabled": "write bf16.enabled or fp16.enabled"},
    "autocast": {"torch_autocast.enabled": "use torch.autocast in the model"},
    "autotuning": {"autotuning.enabled": "patrickstar plan"},
    "elasticity": {"elasticity.enabled": "write train_batch_size"},
    "sparse_attention": {"sparse_attention": "attention is sparse"},
    "curriculum": {"curriculum_learning.enabled": "the data loader"},
    "data_efficiency": {"data_efficiency.enabled": "the data loader"},
    "compression": {"compression_training.weight_quantization.shared_parameters.enabled": "torch.ao"},
    "layer_drop": {"progressive_layer_drop.enabled": "layerdrop"},
    "tensor_parallel": {"tensor_parallel.autotp_size": "leave it out", "expert_parallel.enabled": "leave it out"},
    "rlhf": {"hybrid_engine.enabled": "engine.module.generate()", "compile.deepcompile": "leave it out"},
}


def test_every_example_has_a_verdict():
    assert {path.stem for path in EXAMPLES.glob("*.json")} == LOADS.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", LOADS)
def test_an_example_that_loads_says_this(name):
    settings = read_config(EXAMPLES / f"{name}.json")
    said = {
        "micro": settings.micro_batch_size,
        "accumulate": settings.accumulate,
        "precision": settings.memory.precision,
        "clip": settings.memory.max_grad_norm,
        "decoupled": settings.optimizer.decoupled,
        "schedule": settings.schedule and scheduled(settings.schedule.name, **settings.schedule.given),
        "scale": settings.memory.options.loss_scale,
        "disk": settings.memory.disk,
    }
    wanted = dict(LOADS[name])
    named, lr = wanted.pop("named", ""), wanted.pop("lr", settings.optimizer.lr)
    plain = {"accumulate": 1, "precision": "fp32", "clip": None, "decoupled": False, "schedule": None, "scale": None}
    assert said == {**plain, "disk": None, **wanted}
    assert settings.optimizer.lr == lr
    assert not named or named in settings.warnings[-1]


@pytest.mark.parametrize("name", LOADS)
def test_an_example_that_loads_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = json.loads((EXAMPLES / f"{name}.json").read_text())
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), config=config
    )
    for _ in range(engine.gradient_accumulation_steps()):
        assert optimizer.global_steps == 0
        optimizer.zero_grad()
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        optimizer.step()
    assert (optimizer.global_steps, engine.module[0].weight.dtype) == (1, engine.module[2].weight.dtype)
    engine.close()


@pytest.mark.parametrize("name", REFUSED)
def test_an_example_that_is_refused_says_what_to_write_instead(name):
    path = EXAMPLES / f"{name}.json"
    with pytest.raises(ConfigError) as refusal:
        read_config(path)
    found = dict(problem.split(": ", 1) for problem in refusal.value.problems)
    assert found.keys() == REFUSED[name].keys()
    for key, instead in REFUSED[name].items():
        assert instead in found[key]
    assert str(refusal.value).startswith(f"config {path}: ")
