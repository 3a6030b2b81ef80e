"""`initialize_engine`: the original's loop, DeepSpeed's, and plain PyTorch give the same bits."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patrickstar
from patrickstar import BudgetError, ConfigError, LayoutError, StateError
from patrickstar.config.engine.read import read_config
from patrickstar.core.chunk_size import target_numel
from patrickstar.deferred.deferred_init import is_building
from patrickstar.engine import memory_for
from patrickstar.runtime import initialize_engine
from tests.composed import Composed
from tests.parity.compare import compare_mappings
from tests.parity.oracle import clip
from tests.parity.zoo import CASES
from tests.session.builders import seeded, values

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


def language(name: str) -> Callable[[], nn.Module]:
    """A model of transformers that gives its loss."""
    run = lambda model, data: model.model(input_ids=data, labels=data).loss
    return lambda: Composed(run, model=CASES[name].make("none"))


def numbers(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(4, 32, generator=draw) for _ in range(count)]


def tokens(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(0, 99, (2, 8), generator=draw) for _ in range(count)]


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": params.pop("type", "Adam"), "params": {"lr": 1e-2, "eps": 1e-7, **params}}}


def expect_trained(
    weights: dict[str, Tensor],
    batches: list[Tensor],
    losses: list[Tensor] | None = None,
    *,
    rates: list[float] | None = None,
    cycle: list[Any] | None = None,
    build: Callable[[], nn.Module] = Plain,
    **hyper: Any,
) -> None:
    """Weights, and losses, are those of plain PyTorch: a step for each batch, or for each rate (and betas) with its share of the batches."""
    reference, steps = Reference(build, **hyper), len(rates or batches)
    share, found = len(batches) // steps, []
    for step in range(steps):
        reference.group |= {} if rates is None else {"lr": rates[step]}
        reference.group |= {} if cycle is None else {"betas": cycle[step]}
        found += reference.step(batches[step * share : (step + 1) * share])
    assert losses is None or losses == found
    assert not differ(reference.values(), weights)


class Reference:
    """The same loop in plain PyTorch."""

    def __init__(self, build: Callable[[], nn.Module], *, algorithm: str = "Adam", **hyper: Any) -> None:
        self.model = seeded(build)().train()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = getattr(patrickstar, algorithm)(trained, **{"lr": 1e-2, "eps": 1e-7, **hyper})
        (self.group,) = self.optimizer.param_groups

    def step(self, batches: list[Tensor], *, max_norm: float | None = None) -> list[Tensor]:
        """One step over some micro-batches; gives their losses."""
        losses = []
        for data in batches:
            loss = self.model(data)
            (loss / len(batches)).backward()
            losses.append(loss.detach().clone())
        if max_norm is not None:
            clip({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}, max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def values(self) -> dict[str, Tensor]:
        return values(self.model)


Engine = tuple[Any, Any]
MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Makes an engine and its optimizer from parts of a config; it is closed when the test is over."""
    made: list[Any] = []

    def make(*parts: dict[str, Any], build: Callable[[], nn.Module] = Plain, seed: int = 0, **more: Any) -> Engine:
        config = {key: value for part in (*parts, more) for key, value in part.items()}
        made.append(initialize_engine(seeded(build, seed), config=config))
        return made[-1]

    yield make
    for engine, _ in made:
        engine.close()


LOOPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "the original's": (lambda model, optimizer: optimizer.zero_grad(), lambda model, optimizer: optimizer.step()),
    "DeepSpeed's": (lambda model, optimizer: None, lambda model, optimizer: model.step()),
    "zeroing last": (lambda model, optimizer: None, lambda model, optimizer: (optimizer.step(), model.zero_grad())),
}
"""What comes before the forward and after the backward."""


def run(model: Any, optimizer: Any, batches: list[Tensor], loop: str = "the original's") -> list[Tensor]:
    """Steps of a loop; gives their losses."""
    begin, end = LOOPS[loop]
    losses = []
    for data in batches:
        begin(model, optimizer)
        loss = model(data)
        model.backward(loss)
        end(model, optimizer)
        losses.append(loss.detach().clone())
    return losses


def ended(engine: Any) -> dict[str, Tensor]:
    """The weights at the end; the engine is closed, so that what follows is no matter of its session's."""
    found = values(engine)
    engine.close()
    return found


def differ(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> bool:
    return compare_mappings("weight", dict(want), dict(got)) != []


def same(want: Mapping[str, Tensor], engine: Any) -> None:
    """Whether an engine that goes on has these weights now."""
    assert compare_mappings("weight", dict(want), dict(engine.state_dict())) == []


# the original's README


@pytest.mark.parametrize(
    ("model_func", "dataloader"),
    [(language("bert"), tokens(3)), (language("gpt2"), tokens(3)), (Plain, numbers(3))],
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
    start = values(model)
    losses = run(model, optimizer, dataloader)
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
    assert torch.isfinite(torch.stack(losses)).all()
    model.close()
    assert next(model.module.parameters()).dtype is torch.float32


# the arithmetic is plain PyTorch's


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("params", "algorithm"),
    [
        ({"weight_decay": 0.1}, "Adam"),
        ({"weight_decay": 0.1, "adam_w_mode": True}, "AdamW"),
        ({"weight_decay": 0.1, "type": "AdamW", "betas": [0.8, 0.95]}, "AdamW"),
        ({"weight_decay": 0.1, "type": "AdamW", "adam_w_mode": False}, "Adam"),
    ],
)
def test_each_optimizer_has_the_bits_of_plain_pytorch(
    make_engine: MakeEngine, loop: str, params: dict[str, Any], algorithm: str
) -> None:
    batches = numbers(4)
    engine, optimizer = make_engine(adam(**params), TIGHT)
    losses = run(engine, optimizer, batches, loop)
    assert engine.session.stats().moved["H>D"] > 0
    hyper = {"weight_decay": 0.1, "betas": tuple(params.get("betas", (0.9, 0.999)))}
    expect_trained(ended(engine), batches, losses, algorithm=algorithm, **hyper)


@pytest.mark.parametrize("loop", LOOPS)
def test_accumulation_and_clipping_take_effect(make_engine: MakeEngine, loop: str) -> None:
    batches = numbers(6)
    engine, optimizer = make_engine(adam(), TIGHT, gradient_accumulation_steps=3, gradient_clipping=0.01)
    losses = run(engine, optimizer, batches, loop)
    assert (engine.global_steps, engine.gradient_accumulation_steps()) == (2, 3)
    weights = ended(engine)
    reference, unclipped = Reference(Plain), Reference(Plain)
    assert losses == [*reference.step(batches[:3], max_norm=0.01), *reference.step(batches[3:], max_norm=0.01)]
    assert not differ(reference.values(), weights)
    unclipped.step(batches[:3])
    unclipped.step(batches[3:])
    assert differ(unclipped.values(), reference.values())


def test_between_boundaries_step_and_zero_grad_do_nothing(make_engine: MakeEngine) -> None:
    engine, optimizer = make_engine(adam(), gradient_accumulation_steps=2)
    start = values(engine)
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


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "by a scheduler of torch"])
def test_a_learning_rate_that_is_changed_takes_effect(make_engine: MakeEngine, by_hand: bool) -> None:
    rates = [1e-2, 5e-3, 2.5e-3, 1.25e-3]
    engine, optimizer = make_engine(adam())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for rate, data in zip(rates, numbers(4), strict=True):
        if by_hand:
            optimizer.param_groups[0]["lr"] = rate
        assert engine.get_lr() == [rate]
        run(engine, optimizer, [data])
        if not by_hand:
            scheduler.step()
    expect_trained(ended(engine), numbers(4), rates=rates)


WARM_UP = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.04, "warmup_num_steps": 4, "warmup_type": "linear"}}
}
CYCLE = {
    "scheduler": {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.03, "cycle_first_step_size": 2},
    }
}


@pytest.mark.parametrize(
    ("given", "rates", "betas"),
    [
        (WARM_UP, [0.0, 0.0, 0.01, 0.02], None),
        ({**WARM_UP, "gradient_accumulation_steps": 2}, [0.0, 0.0, 0.01, 0.02], None),
        (CYCLE, [0.01, 0.02, 0.03, 0.02], [(beta, 0.99) for beta in 2 * (0.8, 0.9 - (0.9 - 0.8) * 0.5)]),
        ({"patrickstar": {"step": "in_backward"}}, [1e-2] * 3, None),
    ],
    ids=["warm-up", "accumulating", "cycle", "in backward"],
)
def test_the_schedule_of_the_config_advances_at_boundaries(
    make_engine: MakeEngine, given: dict[str, Any], rates: list[float], betas: list[Any] | None
) -> None:
    engine, optimizer = make_engine(adam(), given)
    accumulate = engine.gradient_accumulation_steps()
    batches = numbers(len(rates) * accumulate)
    for number, data in enumerate(batches):
        assert engine.get_lr() == pytest.approx([rates[number // accumulate]])
        run(engine, optimizer, [data])
    expect_trained(ended(engine), batches, rates=rates, cycle=betas)


def frozen(layer: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Plain()
        model.layers[layer].requires_grad_(False)
        return model

    return build


def test_frozen_parameters_stay_and_the_others_have_the_bits_of_plain_pytorch(make_engine: MakeEngine) -> None:
    engine, optimizer = make_engine(adam(weight_decay=0.1), TIGHT, build=frozen(1))
    run(engine, optimizer, numbers(3))
    assert len(optimizer.param_groups[0]["params"]) == 6
    expect_trained(ended(engine), numbers(3), build=frozen(1), weight_decay=0.1)


# fp16


def overflowing(engine: Any, optimizer: Any, data: Tensor) -> None:
    optimizer.zero_grad()
    engine.backward(engine(data) * torch.tensor(1e30))
    optimizer.step()


def test_a_step_that_overflows_is_skipped_and_the_schedule_waits(make_engine: MakeEngine) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2}
    engine, optimizer = make_engine(adam(), WARM_UP, fp16=fp16)
    first, second, third = numbers(3)
    run(engine, optimizer, [first])
    run(engine, optimizer, [second])
    before, rate = values(engine), engine.get_lr()
    for _ in range(2):
        overflowing(engine, optimizer, third)
        same(before, engine)
        assert engine.get_lr() == rate
    # The hysteresis is the number of overflows until the scale backs off, and no factor.
    assert engine.session.scaler.get_scale() == 128.0
    assert (optimizer.global_steps, optimizer.skipped_steps) == (4, 2)
    run(engine, optimizer, [third])
    assert engine.get_lr() != rate
    assert differ(before, engine.state_dict())


def test_a_static_scale_stays(make_engine: MakeEngine) -> None:
    engine, optimizer = make_engine(adam(), fp16={"enabled": True, "loss_scale": 32})
    overflowing(engine, optimizer, numbers(1)[0])
    overflowing(engine, optimizer, numbers(1)[0])
    assert engine.session.scaler.get_scale() == 32.0
    assert optimizer.skipped_steps == 2


def test_what_is_clipped_in_fp16_is_the_gradient_not_its_scaled_form(make_engine: MakeEngine) -> None:
    fp16 = {"enabled": True, "loss_scale": 1024}
    ends = []
    for norm in (0, 1e3):
        engine, optimizer = make_engine(adam(), fp16=fp16, gradient_clipping=norm, gradient_accumulation_steps=2)
        run(engine, optimizer, numbers(4))
        ends.append(ended(engine))
    assert not differ(*ends)


# what is passed


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
        ({"local_rank": -2}, "local_rank=-2: expected 0, or -1"),
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


def test_a_model_that_cannot_be_built_without_memory_may_be_built_before() -> None:
    def build() -> nn.Module:
        model = Plain()
        model.layers[0].weight.data.copy_(torch.from_numpy(model.layers[0].weight.detach().numpy() * 2))
        return model

    with pytest.raises(LayoutError, match=r"initialize_engine\(model, \.\.\.\)"):
        initialize_engine(build)
    model = build()
    engine, optimizer = initialize_engine(model)
    assert engine.module is model
    run(engine, optimizer, numbers(1))
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


def test_a_table_for_the_cpu_goes_in_tiles_below_its_own_size_and_no_bit_changes(make_engine: MakeEngine) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 4000, (2, 8), generator=generator) for _ in range(3)]
    own = {"device": "emulated", "device_memory": "240KiB", "options": {"chunk_size": 2048}}
    assert Words().table.weight.nbytes > 240 * 1024
    with pytest.raises(BudgetError):
        run(*make_engine(adam(), build=Words, patrickstar=own), batches)
    engine, optimizer = make_engine(adam(), build=Words, patrickstar=own, use_cpu_embedding=True)
    run(engine, optimizer, batches)
    assert engine.session.stats().moved["H>D"] > 0
    in_tiles = {name: len(where.tiles) for name, where in engine.session.layout.slices.items() if where.tiles}
    assert in_tiles == {"table.weight": 7}
    expect_trained(ended(engine), batches, build=Words)


@pytest.mark.parametrize(
    ("tied", "options", "rows"), [(False, {}, 600), (True, {}, None), (False, {"tile_rows": 50}, 50)]
)
def test_tiles_have_as_many_rows_as_the_largest_linear_unless_it_shares_the_table(
    tied: bool, options: dict[str, Any], rows: int | None
) -> None:
    settings = read_config({"use_cpu_embedding": True, "patrickstar": {"options": {"chunk_size": 1024, **options}}})
    assert memory_for(Words(tied), settings.memory, settings).options.tile_rows == rows


def test_keys_without_effect_and_progress_are_told(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "patrickstar"):
        ignored = {"aio": {"queue_depth": 8}, "client": {"mem_tracer": {"overall_gpu_mem_ratio": 0.8}}}
        run(*make_engine(adam(), ignored, steps_per_print=2), numbers(5))
    told = [record.getMessage() for record in caplog.records]
    assert any("no effect here: aio.queue_depth" in message for message in told)
    assert any("overall_gpu_mem_ratio" in message for message in told)
    assert [message for message in told if message.startswith("step=")] == [
        f"step={step}, skipped=0, lr=[0.01], mom=[(0.9, 0.999)]" for step in (2, 4)
    ]


# the engine


def test_keys_that_do_not_match_are_said_or_refused(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    start = values(engine)
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


def test_weights_and_the_optimizer_s_state_have_torch_s_format(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, optimizer = make_engine(adam(), TIGHT)
    run(engine, optimizer, numbers(2))
    torch.save(engine.state_dict(), tmp_path / "weights.pt")
    saved, state = torch.load(tmp_path / "weights.pt", weights_only=True), optimizer.state_dict()
    model = Plain()
    model.load_state_dict(saved)
    plain = torch.optim.Adam(model.parameters())
    plain.load_state_dict(state)
    assert plain.param_groups[0]["lr"] == 1e-2
    other, others = make_engine(adam(lr=1.0), seed=1)
    assert other.load_state_dict(saved) == ([], [])
    same(saved, other)
    others.load_state_dict(copy.deepcopy(state))
    for each in ((engine, optimizer), (other, others)):
        run(*each, numbers(3)[2:])
    same(dict(engine.state_dict()), other)


def test_stopping_and_going_on_gives_the_bits_of_not_stopping(make_engine: MakeEngine, tmp_path: Path) -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_max_lr": 0.01}}
    config = {
        **adam(),
        "scheduler": schedule,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "loss_scale_window": 2},
    }
    batches = numbers(8)
    engine, optimizer = make_engine(config)
    run(engine, optimizer, batches[:4])
    written = engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    run(engine, optimizer, batches[4:])
    other, others = make_engine(config, seed=1)
    assert other.load_checkpoint(tmp_path) == (tmp_path, {"epoch": 3})
    assert (others.global_steps, written.name) == (2, "step-00000002")
    run(other, others, batches[4:])
    same(dict(engine.state_dict()), other)
    assert (engine.get_lr(), others.global_steps) == (other.get_lr(), 4)
    assert engine.session.scaler.get_scale() == other.session.scaler.get_scale() > 2**16


def test_a_checkpoint_is_saved_at_a_boundary_and_has_no_tag(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, optimizer = make_engine(gradient_accumulation_steps=2)
    run(engine, optimizer, numbers(1))
    with pytest.raises(StateError, match="after 1 of 2 micro-batches"):
        engine.save_checkpoint(tmp_path)
    run(engine, optimizer, numbers(1))
    with pytest.raises(ConfigError, match="tag='a'"):
        engine.save_checkpoint(tmp_path, "a")
    engine.save_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="tag='a'"):
        engine.load_checkpoint(tmp_path, tag="a")


def test_training_and_evaluation_are_the_module_s(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(build=lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    assert engine.train() is engine
    engine.eval()
    assert not engine.module[1].training
    with torch.no_grad():
        assert torch.equal(engine(torch.ones(2, 8)), engine(torch.ones(2, 8)))
    assert [id(p) for p in engine.parameters()] == [id(p) for p in engine.module.parameters()]


def test_hooks_of_the_optimizer_run_with_updates(make_engine: MakeEngine) -> None:
    engine, optimizer = make_engine(adam(), gradient_accumulation_steps=2)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    run(engine, optimizer, numbers(4))
    assert seen == ["before", "after"] * 2


def test_a_closure_is_run_where_a_step_has_one_backward(make_engine: MakeEngine) -> None:
    engine, optimizer = make_engine(adam())
    data = numbers(1)[0]

    def closure() -> float:
        optimizer.zero_grad()
        loss = engine(data)
        engine.backward(loss)
        return float(loss.item())

    loss = optimizer.step(closure)
    expect_trained(ended(engine), [data], [torch.tensor(loss)])
    engine, optimizer = make_engine(gradient_accumulation_steps=2)
    with pytest.raises(StateError, match="closure"):
        optimizer.step(closure)


def test_a_group_may_be_added(make_engine: MakeEngine) -> None:
    engine, optimizer = make_engine(adam(), build=frozen(0))
    engine.module.layers[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(engine.module.layers[0].parameters()), "lr": 0.5})
    start = engine.state_dict()["layers.0.weight"].clone()
    run(engine, optimizer, numbers(1))
    assert not torch.equal(start, engine.state_dict()["layers.0.weight"])
    assert engine.get_lr() == [1e-2, 0.5]


def test_neither_engine_nor_optimizer_can_be_copied(make_engine: MakeEngine) -> None:
    engine, optimizer = make_engine()
    for thing in (engine, optimizer):
        with pytest.raises(StateError, match="cannot be copied"):
            copy.deepcopy(thing)
    assert len(optimizer.state) == 0
    engine.close()
    with pytest.raises(StateError, match="closed"):
        optimizer.step()


def test_an_engine_need_not_be_closed_as_in_the_original(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    with patrickstar.manage(Plain()) as session:
        assert session.unclosed.alive  # it would warn when it is gone, at exit at the latest
    assert not engine.session.unclosed.alive


def test_the_engine_is_public_where_the_original_had_it() -> None:
    assert patrickstar.runtime.initialize_engine is initialize_engine
