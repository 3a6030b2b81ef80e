import json
from pathlib import Path

import pytest

from patrickstar import ConfigError
from patrickstar.cli.request import configure
from patrickstar.config.settings import Schedule

FLAGS = {
    "batch_size": 4,
    "accumulate": 1,
    "lr": 3e-4,
    "schedule": "cosine",
    "step": "deferred",
    **dict.fromkeys(("clip", "warmup", "device", "precision", "device_memory", "host_memory", "disk", "disk_memory")),
}


@pytest.fixture
def read(tmp_path):
    def configured(config, ranks=1, **flags):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return configure(path, {**FLAGS, **flags}, explicit=flags.keys(), ranks=ranks)

    return configured


# what a file says, and what it does not


def test_what_the_file_does_not_say_is_as_without_it(read):
    found = read({"gradient_clipping": 0.5})
    assert (found.optimizer, found.settings.schedule, found.memory.precision) == (None, None, None)
    assert found.flags == {"clip": 0.5, "accumulate": 1}
    assert read({}).flags == {"accumulate": 1}
    assert read({"fp16": {"enabled": False}}).memory.precision == "fp32"


def test_what_it_says_takes_the_place_of_the_defaults(read):
    found = read(
        {
            "train_batch_size": 24,
            "gradient_accumulation_steps": 3,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}},
            "patrickstar": {"host_memory": "1GiB", "disk": "spill"},
        }
    )
    assert found.flags == {"accumulate": 3, "batch_size": 8}
    assert (found.optimizer.lr, found.optimizer.decoupled) == (0.5, True)
    assert found.settings.schedule == Schedule("WarmupCosineLR", {"total_num_steps": 9})
    assert (found.memory.precision, found.memory.host_memory, found.memory.disk) == ("bf16", "1GiB", Path("spill"))
    assert found.memory.options.accumulate == 3


def test_a_micro_batch_is_one_ranks_and_the_batch_of_a_flag_that_of_all(read):
    whole = {"train_batch_size": 24, "gradient_accumulation_steps": 3}
    assert read(whole, ranks=2).flags == {"accumulate": 3, "batch_size": 8}
    assert read({"train_micro_batch_size_per_gpu": 4}, ranks=2).flags["batch_size"] == 8
    given = read({"train_micro_batch_size_per_gpu": 4}, ranks=2, batch_size=6)
    assert (given.flags["batch_size"], given.settings.micro_batch_size) == (6, 3)
    with pytest.raises(ConfigError, match="= 4 x 3 x 2 ranks: write 24"):
        read({**whole, "train_batch_size": 25}, ranks=2)


# flags that are given win


@pytest.mark.parametrize(
    ("config", "flags", "look", "wins"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, {"batch_size": 2}, lambda c: c.flags["batch_size"], 2),
        ({"gradient_accumulation_steps": 8}, {"accumulate": 2}, lambda c: c.flags["accumulate"], 2),
        ({"train_batch_size": 8}, {"batch_size": 2}, lambda c: c.flags["accumulate"], 4),
        ({"gradient_clipping": 8}, {"clip": 0.5}, lambda c: c.flags["clip"], 0.5),
        ({"optimizer": {"params": {"lr": "auto"}}}, {"lr": 0.5}, lambda c: c.optimizer.lr, 0.5),
        ({"optimizer": {}}, {"lr": 0.5}, lambda c: c.optimizer.lr, 0.5),
        ({"gradient_clipping": 1}, {"lr": 0.5}, lambda c: c.optimizer, None),
        ({"bf16": {"enabled": True}}, {"precision": "fp32"}, lambda c: c.memory.precision, "fp32"),
        ({"fp16": {"enabled": "auto"}}, {"precision": "bf16"}, lambda c: c.memory.precision, "bf16"),
        ({"patrickstar": {"precision": "bf16"}}, {"precision": "fp32"}, lambda c: c.memory.precision, "fp32"),
        ({"patrickstar": {"device": "cpu"}}, {"device": "emulated"}, lambda c: c.memory.device, "emulated"),
        ({"patrickstar": {"step": "in_backward"}}, {"step": "deferred"}, lambda c: c.memory.step, "deferred"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "a"}}},
            {"disk": Path("b")},
            lambda c: c.memory.disk,
            Path("b"),
        ),
        ({"scheduler": {"type": "OneCycle"}}, {"schedule": "constant"}, lambda c: c.settings.schedule, None),
        ({"scheduler": {"type": "OneCycle"}}, {"warmup": 3}, lambda c: c.settings.schedule, None),
        (
            {"scheduler": {"type": "WarmupLR"}, "optimizer": {"params": {"lr": 1}}},
            {"lr": 0.5},
            lambda c: (c.optimizer.lr, c.settings.schedule),
            (0.5, Schedule("WarmupLR", {})),
        ),
    ],
)
def test_a_flag_on_the_command_line_stands_in_the_place_of_its_key(read, config, flags, look, wins):
    assert look(read(config, **flags)) == wins


@pytest.mark.parametrize(
    ("config", "flags", "why"),
    [
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1}}}, {"lr": 0.5}, "--lr with config"),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, {"batch_size": 3}, "train_batch_size: 8 is not"),
        ({"patrickstar": {"step": "in_backward"}}, {"accumulate": 2}, "gradient_accumulation_steps"),
        ({"patrickstar": {"weights": "w"}}, {}, "--model DIR starts from weights"),
        ({"patrickstar": 3}, {"device": "cpu"}, "expected an object"),
        ({"optimiser": {}}, {}, 'config.json: optimiser: there is no such key; did you mean "optimizer"?'),
    ],
)
def test_what_does_not_go_together_is_refused(read, config, flags, why):
    with pytest.raises(ConfigError) as refusal:
        read(config, **flags)
    assert why in str(refusal.value)


# whole runs


@pytest.fixture
def train(runs):
    """`patrickstar train --config`, with no flag that a config may say but those of the test."""

    def run(config, *arguments, log="log.jsonl", steps=4):
        from patrickstar.cli.main import main

        path = runs.home / "engine.json"
        path.write_text(json.dumps(config))
        common = ["--model", runs.model, "--data", runs.text, "--seq-len", 16, "--steps", steps]
        common += ["--config", path, "--log-json", runs.home / log]
        return main([str(word) for word in ("train", *common, *arguments)])

    return run


ADAM = {"type": "Adam", "params": {"lr": 3e-3, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}}
CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2}}
BF16 = {"bf16": {"enabled": True}, "patrickstar": {"options": {"compute": "bf16"}}}
OVERFLOWS = {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}
ON_A_DEVICE = {"patrickstar": {"device": "emulated", "device_memory": "900KiB"}}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2}}


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": ADAM, "gradient_clipping": 0.1, "gradient_accumulation_steps": 2},
        pytest.param({"optimizer": {**ADAM, "type": "AdamW"}, "scheduler": CYCLE}, marks=pytest.mark.campaign),
        pytest.param({"optimizer": ADAM, "scheduler": COSINE, **BF16}, marks=pytest.mark.campaign),
        {"scheduler": COSINE, "default_chunk_size": 5000, **ON_A_DEVICE},
        {"optimizer": ADAM, "scheduler": COSINE, "gradient_clipping": 0.1, "fp16": OVERFLOWS},
    ],
    ids=["l2", "cycle", "bf16", "device", "fp16"],
)
def test_plain_pytorch_gives_the_same_bits(train, runs, capsys, config):
    config = {"train_micro_batch_size_per_gpu": 2, **config}
    assert train(config, "--compare-plain") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "plain PyTorch gives the same bits: every loss and all 17 tensors" in shown
    assert ("a step was skipped" in shown) == ("fp16" in config)
    said = runs.rows(event="start")[0]["config"]
    assert (said["batch_size"], said["accumulate"]) == (2, config.get("gradient_accumulation_steps", 1))
    assert said["lr"] == (3e-3 if "optimizer" in config else 3e-4)
    assert said["schedule"] == config.get("scheduler", {"type": "cosine"})["type"]
    assert said["config"].endswith("engine.json")


@pytest.mark.parametrize(
    "fp16", [{"enabled": False}, {"enabled": True, "initial_scale_power": 127, "hysteresis": 1}], ids=["fp32", "fp16"]
)
def test_the_same_config_gives_the_bits_of_an_engine(train, runs, fp16):
    """What `train` does with a config, `initialize_engine` does too."""
    import torch

    from patrickstar.cli.batches import VALIDATION_BATCHES, Batches, prepare_data
    from patrickstar.cli.display import Display
    from patrickstar.cli.models import ModelSource
    from patrickstar.runtime import initialize_engine

    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    config |= {"optimizer": ADAM, "scheduler": COSINE, "fp16": fp16}
    assert train(config) == 0
    source = ModelSource.find(str(runs.model))
    data = prepare_data([str(runs.text)], vocab_size=512, own_tokenizer=source.tokenizer, display=Display())
    batches = Batches(data.train, batch_size=2, seq_len=16, seed=0)
    validation = batches.held_out(data.held_out, most=VALIDATION_BATCHES)
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(source.build, config=config)
    engine.eval()
    with torch.no_grad():
        for batch in validation:
            engine(**batch)
    engine.train()
    losses = []
    for _ in range(4):
        of_step = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = engine(**batches.next()).loss
            engine.backward(loss)
            optimizer.step()
            of_step.append(loss.item())
        losses.append((sum(of_step) / 2).hex())
    assert (engine.skipped_steps > 0) is fp16["enabled"]
    engine.close()
    assert losses == list(runs.losses().values())


def test_a_run_in_fp16_scales_its_loss_and_goes_on_where_it_stopped(train, runs, capsys):
    config = {"train_batch_size": 2, "optimizer": ADAM, "gradient_clipping": 0.1, "scheduler": COSINE}
    config["fp16"] = OVERFLOWS
    assert train(config, steps=6, log="whole.jsonl") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert 0 < shown.count("a step was skipped: gradients overflowed at loss scale") < 4
    assert train(config, "--checkpoint-dir", runs.checkpoints, steps=3) == 0
    assert train(config, "--checkpoint-dir", runs.checkpoints, "--resume", steps=6) == 0
    assert runs.losses() == runs.losses("whole.jsonl")


def test_what_a_config_cannot_have_ends_with_status_2(train, capsys):
    assert train({"optimizer": {"type": "Lamb"}, "gradient_clipping": -7}) == 2
    error = capsys.readouterr().err
    assert "optimizer.type: 'Lamb'" in error
    assert "gradient_clipping: -7: expected a finite number of 0 or more, or -1" in error
    assert train({}, "--config", "nothing.json") == 2
    assert "config nothing.json: No such file or directory" in capsys.readouterr().err


def test_keys_without_effect_are_shown(train, capsys):
    config = {"train_batch_size": 2, "aio": {"queue_depth": 8}, "tensorboard": {"enabled": True}, "steps_per_print": 1}
    assert train(config, steps=1) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no effect here: aio.queue_depth, tensorboard.enabled, steps_per_print (" in shown
