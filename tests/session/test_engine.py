"""`initialize_engine`: the original's loop, DeepSpeed's, and plain PyTorch give the same bits."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import patrickstar
from patrickstar import BudgetError, ConfigError, LayoutError, StateError
from patrickstar.config.engine.read import read_config
from patrickstar.core.chunk_size import target_numel
from patrickstar.deferred.deferred_init import is_building
from patrickstar.engine.initialize import memory_for
from patrickstar.runtime import initialize_engine
from tests.parity.compare import compare_mappings
from tests.parity.oracle import Moments, clip, update

TIGHT = {
    "patrickstar": {"device": "emulated", "device_memory": "56KiB", "options": {"chunk_size": 2048, "poison": True}}
}


class Plain(nn.Module):
    """A model that gives its loss."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, data: Tensor) -> Tensor:
        x = data
        for layer in self.layers:
            x = layer(x).tanh()
        return (x - data).square().mean()


class Language(nn.Module):
    """A model of transformers that gives its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, data: Tensor) -> Tensor:
        return self.model(input_ids=data, labels=data).loss


def bert() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=99, max_position_embeddings=32, **sizes)
    return Language(transformers.BertForMaskedLM(config))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=99, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return Language(transformers.GPT2LMHeadModel(config))


def numbers(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(4, 32, generator=draw) for _ in range(count)]


def tokens(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(0, 99, (2, 16), generator=draw) for _ in range(count)]


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return make


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": params.pop("type", "Adam"), "params": {"lr": 1e-2, "eps": 1e-7, **params}}}


def trained_at(rates: list[float], batches: list[Tensor], betas: list[Any] | None = None) -> dict[str, Tensor]:
    """Weights after a step of plain PyTorch at each rate, with its share of the batches."""
    reference, share = Reference(seeded(Plain)), len(batches) // len(rates)
    for step, rate in enumerate(rates):
        reference.group["lr"] = rate
        if betas is not None:
            reference.group["betas"] = betas[step]
        reference.step(batches[step * share : (step + 1) * share])
    return reference.values()


class Reference:
    """The same loop in plain PyTorch, with the update written out."""

    def __init__(self, build: Callable[[], nn.Module], *, algorithm: str = "Adam", **hyper: Any) -> None:
        self.model = build().train()
        given = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-7, "weight_decay": 0.0, **hyper}
        self.group = {"params": [p for p in self.model.parameters() if p.requires_grad], **given}
        self.algorithm = algorithm
        self.moments: dict[str, Moments] = {}

    def step(self, batches: list[Tensor], *, max_norm: float | None = None) -> list[Tensor]:
        """One step over some micro-batches; gives their losses."""
        parameters = dict(self.model.named_parameters())
        losses = []
        for data in batches:
            loss = self.model(data)
            (loss / len(batches) if len(batches) > 1 else loss).backward()
            losses.append(loss.detach().clone())
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        if max_norm is not None:
            clip(gradients, max_norm)
        for name, parameter in parameters.items():
            if name in gradients:
                weight = parameter.detach()
                update(weight, gradients[name], self.moments, name, self.group, algorithm=self.algorithm)
            parameter.grad = None
        return losses

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def original_loop(model: Any, optimizer: Any, batches: list[Tensor]) -> list[Tensor]:
    """The loop of the original's README."""
    losses = []
    for data in batches:
        optimizer.zero_grad()
        loss = model(data)
        model.backward(loss)
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


def deepspeed_loop(model: Any, _: Any, batches: list[Tensor]) -> list[Tensor]:
    """DeepSpeed's loop."""
    losses = []
    for data in batches:
        loss = model(data)
        model.backward(loss)
        model.step()
        losses.append(loss.detach().clone())
    return losses


def zeroing_last(model: Any, optimizer: Any, batches: list[Tensor]) -> list[Tensor]:
    losses = []
    for data in batches:
        loss = model(data)
        model.backward(loss)
        optimizer.step()
        model.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def ended(engine: Any) -> dict[str, Tensor]:
    """The weights at the end; the engine is closed, so that what follows is no matter of its session's."""
    found = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return found


def differ(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> bool:
    return compare_mappings("weight", dict(want), dict(got)) != []


def same(want: Mapping[str, Tensor], engine: Any) -> None:
    """Whether an engine that goes on has these weights now."""
    assert compare_mappings("weight", dict(want), dict(engine.state_dict())) == []


# the original's README


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model_func", "dataloader"),
    [(bert, tokens(3)), (gpt2, tokens(3)), (Plain, numbers(3))],
    ids=["bert", "gpt2", "plain"],
)
@pytest.mark.parametrize("fp16", [True, False])
def test_the_original_s_readme_runs_as_it_is(model_func: Any, dataloader: Any, fp16: bool) -> None:
    config = {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0, "use_hybrid_adam": True}},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 2 ** 3, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "default_chunk_size": 64 * 1024 * 1024,
        "release_after_init": True,
        "use_cpu_embedding": False,
        "client": {"mem_tracer": {"use_async_mem_monitor": True}},
    }  # fmt: skip
    config["fp16"]["enabled"] = fp16
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model, optimizer = initialize_engine(model_func=model_func, local_rank=0, config=config)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    losses = []
    for data in dataloader:
        optimizer.zero_grad()
        loss = model(data)
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())

    assert isinstance(optimizer, torch.optim.Optimizer)
    assert model.training
    assert (model.module.training, optimizer.global_steps, optimizer.skipped_steps) == (True, 3, 0)
    assert model.session.scaler.get_scale() == (256.0 if fp16 else 1.0)
    assert model.session.layout.chunk_numel <= 64 * 1024 * 1024
    torch.set_rng_state(before)
    built = model_func().state_dict()
    assert not differ({name: built[name] for name in start}, start)
    moved = [name for name, value in model.state_dict().items() if not torch.equal(value, start[name])]
    assert moved
    assert all(torch.isfinite(torch.tensor(losses)))
    model.close()
    assert next(model.module.parameters()).dtype is torch.float32


# the arithmetic is plain PyTorch's


@pytest.mark.sampled
@pytest.mark.parametrize("loop", [original_loop, deepspeed_loop, zeroing_last])
@pytest.mark.parametrize(
    ("params", "algorithm"),
    [
        ({"weight_decay": 0.1}, "Adam"),
        ({"weight_decay": 0.1, "adam_w_mode": True}, "AdamW"),
        ({"weight_decay": 0.1, "type": "AdamW", "betas": [0.8, 0.95]}, "AdamW"),
        ({"weight_decay": 0.1, "type": "AdamW", "adam_w_mode": False}, "Adam"),
    ],
)
def test_each_optimizer_has_the_bits_of_plain_pytorch(loop: Any, params: dict[str, Any], algorithm: str) -> None:
    batches = numbers(4)
    engine, optimizer = initialize_engine(seeded(Plain), config={**adam(**params), **TIGHT})
    losses = loop(engine, optimizer, batches)
    assert engine.session.stats().moved["H>D"] > 0
    weights = ended(engine)
    hyper = {"weight_decay": 0.1, "betas": tuple(params.get("betas", (0.9, 0.999)))}
    reference = Reference(seeded(Plain), algorithm=algorithm, **hyper)
    assert losses == [loss for data in batches for loss in reference.step([data])]
    assert not differ(reference.values(), weights)


@pytest.mark.parametrize("loop", [original_loop, deepspeed_loop, zeroing_last])
def test_accumulation_and_clipping_take_effect(loop: Any) -> None:
    config = {**adam(), **TIGHT, "gradient_accumulation_steps": 3, "gradient_clipping": 0.01}
    batches = numbers(6)
    engine, optimizer = initialize_engine(seeded(Plain), config=config)
    losses = loop(engine, optimizer, batches)
    assert (engine.global_steps, engine.gradient_accumulation_steps()) == (2, 3)
    weights = ended(engine)
    reference = Reference(seeded(Plain))
    assert losses == [*reference.step(batches[:3], max_norm=0.01), *reference.step(batches[3:], max_norm=0.01)]
    assert not differ(reference.values(), weights)
    unclipped = Reference(seeded(Plain))
    unclipped.step(batches[:3])
    unclipped.step(batches[3:])
    assert differ(unclipped.values(), reference.values())


def test_between_boundaries_step_and_zero_grad_do_nothing() -> None:
    engine, optimizer = initialize_engine(seeded(Plain), config={**adam(), "gradient_accumulation_steps": 2})
    start = {name: value.clone() for name, value in engine.state_dict().items()}
    first, second = numbers(2)
    assert not engine.is_gradient_accumulation_boundary()
    engine.backward(engine(first))
    optimizer.step()
    optimizer.zero_grad()
    same(start, engine)
    assert len(dict(engine.session.gradients())) == 8
    assert engine.is_gradient_accumulation_boundary()
    engine.backward(engine(second))
    optimizer.step()
    assert differ(start, engine.state_dict())
    optimizer.zero_grad()
    assert dict(engine.session.gradients()) == {}
    assert not engine.is_gradient_accumulation_boundary()
    engine.close()


def test_a_learning_rate_that_is_changed_takes_effect() -> None:
    rates = [1e-2, 5e-3, 2e-2, 0.0]
    engine, optimizer = initialize_engine(seeded(Plain), config=adam())
    for rate, data in zip(rates, numbers(4), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        assert engine.get_lr() == [rate]
        original_loop(engine, optimizer, [data])
    weights = ended(engine)
    assert not differ(trained_at(rates, numbers(4)), weights)


def test_a_scheduler_of_torch_is_built_on_the_optimizer() -> None:
    engine, optimizer = initialize_engine(seeded(Plain), config=adam())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for data in numbers(3):
        original_loop(engine, optimizer, [data])
        scheduler.step()
    weights = ended(engine)
    assert not differ(trained_at([1e-2, 5e-3, 2.5e-3], numbers(3)), weights)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_schedule_of_the_config_advances_at_boundaries(accumulate: int) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.04, "warmup_num_steps": 4, "warmup_type": "linear"}}
    config = {**adam(), "scheduler": schedule, "gradient_accumulation_steps": accumulate}
    engine, optimizer = initialize_engine(seeded(Plain), config=config)
    rates, batches = [0.0, 0.0, 0.01, 0.02], numbers(4 * accumulate)
    for number, data in enumerate(batches):
        assert engine.get_lr() == [rates[number // accumulate]]
        original_loop(engine, optimizer, [data])
    weights = ended(engine)
    assert not differ(trained_at(rates, batches), weights)


def test_a_cycle_of_rates_and_betas_takes_effect() -> None:
    schedule = {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.03, "cycle_first_step_size": 2}}
    engine, optimizer = initialize_engine(seeded(Plain), config={**adam(), "scheduler": schedule})
    original_loop(engine, optimizer, numbers(4))
    weights = ended(engine)
    betas = [(beta, 0.99) for beta in (0.8, 0.9 - (0.9 - 0.8) * 0.5, 0.8, 0.9 - (0.9 - 0.8) * 0.5)]
    assert not differ(trained_at([0.01, 0.02, 0.03, 0.02], numbers(4), betas), weights)


def test_frozen_parameters_stay_and_the_others_have_the_bits_of_plain_pytorch() -> None:
    def build() -> nn.Module:
        model = Plain()
        model.layers[1].requires_grad_(False)
        return model

    batches = numbers(3)
    engine, optimizer = initialize_engine(seeded(build), config={**adam(weight_decay=0.1), **TIGHT})
    original_loop(engine, optimizer, batches)
    assert len(optimizer.param_groups[0]["params"]) == 6
    weights = ended(engine)
    reference = Reference(seeded(build), weight_decay=0.1)
    for data in batches:
        reference.step([data])
    assert not differ(reference.values(), weights)


def test_updates_may_come_in_backward() -> None:
    batches = numbers(3)
    own = {"patrickstar": {"step": "in_backward"}}
    engine, optimizer = initialize_engine(seeded(Plain), config={**adam(), **own})
    original_loop(engine, optimizer, batches)
    weights = ended(engine)
    assert not differ(trained_at([1e-2] * 3, batches), weights)


def test_bf16_trains_with_masters() -> None:
    engine, optimizer = initialize_engine(seeded(Plain), config={**adam(), "bf16": {"enabled": True}})
    original_loop(engine, optimizer, numbers(2))
    assert engine.module.layers[0].weight.dtype in (torch.bfloat16, torch.float32)
    assert engine.state_dict()["layers.0.weight"].dtype is torch.float32
    engine.close()


# fp16


def overflowing(engine: Any, optimizer: Any, data: Tensor) -> None:
    optimizer.zero_grad()
    engine.backward(engine(data) * torch.tensor(1e30))
    optimizer.step()


def test_a_step_that_overflows_is_skipped_and_the_schedule_waits() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}}
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2}
    engine, optimizer = initialize_engine(seeded(Plain), config={**adam(), "scheduler": schedule, "fp16": fp16})
    first, second, third = numbers(3)
    original_loop(engine, optimizer, [first])
    original_loop(engine, optimizer, [second])
    before, rate = {name: value.clone() for name, value in engine.state_dict().items()}, engine.get_lr()
    for _ in range(2):
        overflowing(engine, optimizer, third)
        same(before, engine)
        assert engine.get_lr() == rate
    # The hysteresis is the number of overflows until the scale backs off, and no factor.
    assert engine.session.scaler.get_scale() == 128.0
    assert (optimizer.global_steps, optimizer.skipped_steps) == (4, 2)
    original_loop(engine, optimizer, [third])
    assert engine.get_lr() != rate
    assert differ(before, engine.state_dict())
    engine.close()


def test_a_static_scale_stays() -> None:
    engine, optimizer = initialize_engine(seeded(Plain), config={**adam(), "fp16": {"enabled": True, "loss_scale": 32}})
    overflowing(engine, optimizer, numbers(1)[0])
    overflowing(engine, optimizer, numbers(1)[0])
    assert engine.session.scaler.get_scale() == 32.0
    assert optimizer.skipped_steps == 2
    engine.close()


def test_what_is_clipped_in_fp16_is_the_gradient_not_its_scaled_form() -> None:
    fp16 = {"enabled": True, "loss_scale": 1024}
    ends = []
    for norm in (0, 1e3):
        config = {**adam(), "fp16": fp16, "gradient_clipping": norm, "gradient_accumulation_steps": 2}
        engine, optimizer = initialize_engine(seeded(Plain), config=config)
        original_loop(engine, optimizer, numbers(4))
        ends.append({name: value.clone() for name, value in engine.state_dict().items()})
        engine.close()
    assert not differ(*ends)


# what is passed


def test_a_model_that_is_built_already_is_taken() -> None:
    model = seeded(Plain)()
    engine, optimizer = initialize_engine(model)
    assert engine.module is model
    original_loop(engine, optimizer, numbers(1))
    engine.close()


def test_the_function_runs_without_memory_for_parameters_and_a_config_is_looked_at_first(tmp_path: Path) -> None:
    seen = []

    def build() -> nn.Module:
        seen.append(is_building())
        return Plain()

    with pytest.raises(ConfigError):
        initialize_engine(build, config={"no": "key"})
    assert seen == []
    path = tmp_path / "config.json"
    path.write_text(json.dumps(adam(lr=0.5)))
    engine, optimizer = initialize_engine(build, config=path)
    assert (seen, optimizer.param_groups[0]["lr"]) == ([True], 0.5)
    engine.close()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"client": object()}, 'budgets are under "patrickstar" in the config'),
        ({"local_rank": 1}, "local_rank=1: expected 0, or -1"),
        ({"local_rank": True}, "local_rank=True"),
        ({"model_func": 3}, "model_func is a int"),
        ({"model_func": lambda: "model"}, "model_func gave a str"),
        ({"model_func": lambda: nn.Linear(2, 2).requires_grad_(False)}, "there is nothing to train"),
        ({"config": {"optimizer": {"type": "Lamb"}}}, "optimizer.type"),
    ],
)
def test_what_cannot_be_taken(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        initialize_engine(**{"model_func": Plain, **given})
    assert why in str(refusal.value)


def test_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="a process group of 2 ranks"):
        initialize_engine(Plain)


def test_a_model_that_cannot_be_built_without_memory_may_be_built_before() -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        model.weight.data.copy_(torch.from_numpy(model.weight.detach().numpy() * 2))
        return model

    with pytest.raises(LayoutError, match=r"initialize_engine\(model, \.\.\.\)"):
        initialize_engine(build)
    engine, _ = initialize_engine(build())
    engine.close()


def test_a_chunk_size_is_an_upper_bound_and_never_more_than_the_model_needs() -> None:
    def chunk(hint: int | None, **own: Any) -> int:
        config = {**({} if hint is None else {"default_chunk_size": hint}), "patrickstar": {"options": own}}
        engine, _ = initialize_engine(lambda: Plain(width=128, layers=32), config=config)
        found: int = engine.session.layout.chunk_numel
        engine.close()
        return found

    free = chunk(None)
    assert target_numel(32 * 128 * 129) > 2048 + 500
    assert chunk(64 * 2**20) == free
    assert chunk(2048 + 500) == 2048
    assert chunk(3) == 2048
    assert chunk(3, chunk_size=4096) == 4096


class Words(nn.Module):
    """A table of many rows before linears, of which one may share it."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, 16)
        self.mix = nn.Linear(16, 600)
        self.head = nn.Linear(16, 4000, bias=False) if tied else nn.Linear(600, 4)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, data: Tensor) -> Tensor:
        hidden = self.table(data).mean(1)
        return self.head(torch.tanh(self.mix(hidden))).square().mean()


def test_a_table_for_the_cpu_goes_in_tiles_below_its_own_size_and_no_bit_changes() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 4000, (2, 8), generator=generator) for _ in range(3)]
    own = {"device": "emulated", "device_memory": "240KiB", "options": {"chunk_size": 2048}}
    assert Words().table.weight.nbytes > 240 * 1024
    with pytest.raises(BudgetError):
        original_loop(*initialize_engine(seeded(Words), config={**adam(), "patrickstar": own}), batches)
    engine, optimizer = initialize_engine(
        seeded(Words), config={**adam(), "use_cpu_embedding": True, "patrickstar": own}
    )
    original_loop(engine, optimizer, batches)
    assert engine.session.stats().moved["H>D"] > 0
    in_tiles = {name: len(where.tiles) for name, where in engine.session.layout.slices.items() if where.tiles}
    assert in_tiles == {"table.weight": 7}
    weights = ended(engine)
    reference = Reference(seeded(Words))
    for data in batches:
        reference.step([data])
    assert not differ(reference.values(), weights)


@pytest.mark.parametrize(
    ("tied", "options", "rows"), [(False, {}, 600), (True, {}, None), (False, {"tile_rows": 50}, 50)]
)
def test_tiles_have_as_many_rows_as_the_largest_linear_unless_it_shares_the_table(
    tied: bool, options: dict[str, Any], rows: int | None
) -> None:
    settings = read_config({"use_cpu_embedding": True, "patrickstar": {"options": {"chunk_size": 1024, **options}}})
    assert memory_for(Words(tied), settings.memory, settings).options.tile_rows == rows


def test_keys_without_effect_and_progress_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "patrickstar"):
        config = {**adam(), "steps_per_print": 2, "aio": {"queue_depth": 8}}
        config["client"] = {"mem_tracer": {"overall_gpu_mem_ratio": 0.8}}
        engine, optimizer = initialize_engine(Plain, config=config)
        original_loop(engine, optimizer, numbers(5))
    told = [record.getMessage() for record in caplog.records]
    assert any("no effect here: aio.queue_depth" in message for message in told)
    assert any("overall_gpu_mem_ratio" in message for message in told)
    assert [message for message in told if message.startswith("step=")] == [
        f"step={step}, skipped=0, lr=[0.01], mom=[(0.9, 0.999)]" for step in (2, 4)
    ]
    engine.close()


# the engine


def test_weights_come_and_go_by_the_model_s_own_names(tmp_path: Path) -> None:
    engine, optimizer = initialize_engine(seeded(Plain), config=TIGHT)
    original_loop(engine, optimizer, numbers(2))
    torch.save(engine.state_dict(), tmp_path / "weights.pt")
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    plain = Plain()
    assert plain.load_state_dict(saved) is not None
    other, _ = initialize_engine(Plain, config=TIGHT)
    assert other.load_state_dict(saved) == ([], [])
    same(saved, other)
    engine.close()
    other.close()


def test_keys_that_do_not_match_are_said_or_refused() -> None:
    engine, _ = initialize_engine(seeded(Plain))
    start = {name: value.clone() for name, value in engine.state_dict().items()}
    given = {"layers.0.bias": torch.ones(32), "stranger": torch.ones(1)}
    with pytest.raises(ConfigError, match="stranger"):
        engine.load_state_dict(given, strict=True)
    same(start, engine)
    left_out = engine.load_state_dict(given)
    assert left_out.unexpected_keys == ["stranger"]
    assert sorted(left_out.missing_keys) == sorted(start.keys() - {"layers.0.bias"})
    same({**start, "layers.0.bias": torch.ones(32)}, engine)
    with pytest.raises(ConfigError, match=r"layers\.0\.bias has shape \(3,\)"):
        engine.load_state_dict({"layers.0.bias": torch.ones(3)})
    engine.close()


def test_the_optimizer_s_state_has_torch_s_format() -> None:
    engine, optimizer = initialize_engine(seeded(Plain), config=adam())
    original_loop(engine, optimizer, numbers(2))
    state = optimizer.state_dict()
    model = Plain()
    plain = torch.optim.Adam(model.parameters())
    plain.load_state_dict(state)
    assert plain.param_groups[0]["lr"] == 1e-2
    other, others = initialize_engine(Plain, config=adam(lr=1.0))
    other.load_state_dict(engine.state_dict())
    others.load_state_dict(copy.deepcopy(state))
    for each in ((engine, optimizer), (other, others)):
        original_loop(*each, numbers(3)[2:])
    same(dict(engine.state_dict()), other)
    engine.close()
    other.close()


def test_stopping_and_going_on_gives_the_bits_of_not_stopping(tmp_path: Path) -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_max_lr": 0.01}}
    config = {
        **adam(),
        "scheduler": schedule,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "loss_scale_window": 2},
    }
    batches = numbers(8)
    engine, optimizer = initialize_engine(seeded(Plain), config=config)
    original_loop(engine, optimizer, batches[:4])
    written = engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    original_loop(engine, optimizer, batches[4:])
    other, others = initialize_engine(Plain, config=config)
    assert other.load_checkpoint(tmp_path) == (tmp_path, {"epoch": 3})
    assert (others.global_steps, written.name) == (2, "step-00000002")
    original_loop(other, others, batches[4:])
    same(dict(engine.state_dict()), other)
    assert (engine.get_lr(), others.global_steps) == (other.get_lr(), 4)
    assert engine.session.scaler.get_scale() == other.session.scaler.get_scale() > 2**16
    engine.close()
    other.close()


def test_a_checkpoint_is_saved_at_a_boundary_and_has_no_tag(tmp_path: Path) -> None:
    engine, optimizer = initialize_engine(seeded(Plain), config={"gradient_accumulation_steps": 2})
    original_loop(engine, optimizer, numbers(1))
    with pytest.raises(StateError, match="after 1 of 2 micro-batches"):
        engine.save_checkpoint(tmp_path)
    original_loop(engine, optimizer, numbers(1))
    with pytest.raises(ConfigError, match="tag='a'"):
        engine.save_checkpoint(tmp_path, "a")
    engine.save_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="tag='a'"):
        engine.load_checkpoint(tmp_path, tag="a")
    engine.close()


def test_training_and_evaluation_are_the_module_s() -> None:
    engine, _ = initialize_engine(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    assert engine.train() is engine
    engine.eval()
    assert not engine.module[1].training
    with torch.no_grad():
        assert torch.equal(engine(torch.ones(2, 8)), engine(torch.ones(2, 8)))
    assert [id(p) for p in engine.parameters()] == [id(p) for p in engine.module.parameters()]
    engine.close()


def test_hooks_of_the_optimizer_run_with_updates() -> None:
    engine, optimizer = initialize_engine(seeded(Plain), config={**adam(), "gradient_accumulation_steps": 2})
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    original_loop(engine, optimizer, numbers(4))
    assert seen == ["before", "after"] * 2
    engine.close()


def test_a_closure_is_run_where_a_step_has_one_backward() -> None:
    engine, optimizer = initialize_engine(seeded(Plain), config=adam())
    data = numbers(1)[0]

    def closure() -> float:
        optimizer.zero_grad()
        loss = engine(data)
        engine.backward(loss)
        return float(loss.item())

    loss, weights = optimizer.step(closure), ended(engine)
    reference = Reference(seeded(Plain))
    assert loss == reference.step([data])[0].item()
    assert not differ(reference.values(), weights)
    engine, optimizer = initialize_engine(Plain, config={"gradient_accumulation_steps": 2})
    with pytest.raises(StateError, match="closure"):
        optimizer.step(closure)
    engine.close()


def test_a_group_may_be_added() -> None:
    def build() -> nn.Module:
        model = Plain()
        model.layers[0].requires_grad_(False)
        return model

    engine, optimizer = initialize_engine(seeded(build), config=adam())
    engine.module.layers[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(engine.module.layers[0].parameters()), "lr": 0.5})
    start = engine.state_dict()["layers.0.weight"].clone()
    original_loop(engine, optimizer, numbers(1))
    assert not torch.equal(start, engine.state_dict()["layers.0.weight"])
    assert engine.get_lr() == [1e-2, 0.5]
    engine.close()


def test_neither_engine_nor_optimizer_can_be_copied() -> None:
    engine, optimizer = initialize_engine(Plain)
    for thing in (engine, optimizer):
        with pytest.raises(StateError, match="cannot be copied"):
            copy.deepcopy(thing)
    assert len(optimizer.state) == 0
    engine.close()
    with pytest.raises(StateError, match="closed"):
        optimizer.step()


def test_an_engine_need_not_be_closed_as_in_the_original() -> None:
    engine, _ = initialize_engine(Plain)
    with patrickstar.manage(Plain()) as session:
        assert session.unclosed.alive  # it would warn when it is gone, at exit at the latest
    assert not engine.session.unclosed.alive
    engine.close()


def test_two_engines_live_side_by_side() -> None:
    pairs = [initialize_engine(seeded(Plain), config={**adam(lr=rate), **TIGHT}) for rate in (1e-2, 1e-3)]
    batches = numbers(3)
    for data in batches:
        for engine, optimizer in pairs:
            original_loop(engine, optimizer, [data])
    weights = [ended(engine) for engine, _ in pairs]
    for found, rate in zip(weights, (1e-2, 1e-3), strict=True):
        assert not differ(trained_at([rate] * 3, batches), found)


def test_the_engine_is_public_where_the_original_had_it() -> None:
    assert patrickstar.runtime.initialize_engine is initialize_engine
