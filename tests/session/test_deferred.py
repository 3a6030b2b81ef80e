"""A model built under `deferred_init()` is managed as any other, without ever having been in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import patrickstar
from patrickstar import BudgetError, LayoutError, StateError
from patrickstar.deferred.deferred_init import deferred_by
from patrickstar.deferred.recording import DeferredRecorder
from patrickstar.step.values import Weights
from tests.parameters.toy import initial_value
from tests.parity.compare import same_bits
from tests.session.builders import MACHINES, Pair, adamw, assert_same, expect_bits, managed, mlp, options, train, values
from tests.session.deferred_child import MIB, in_child


def deferred(build: Callable[[], nn.Module] = mlp) -> nn.Module:
    with patrickstar.deferred_init():
        return build()


class Alternating:
    """Builds in memory first, as `Pair` builds the plain one first, and then without."""

    def __init__(self) -> None:
        self.built = 0

    def __call__(self) -> nn.Module:
        self.built += 1
        return mlp() if self.built == 1 else deferred()


def is_deferred(model: nn.Module) -> bool:
    return all(deferred_by(parameter) is not None for parameter in model.parameters())


def made(model: nn.Module) -> dict[str, Tensor]:
    return {name: initial_value(parameter).clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("place", ["unbounded", *MACHINES])
def test_training_has_the_bits_of_a_model_built_in_memory(place: str, make_pair: Any, tmp_path: Path) -> None:
    machine = {"device": "cpu"} if place == "unbounded" else MACHINES[place](tmp_path / "disk")
    pair: Pair = make_pair(Alternating(), **machine)
    pair.train()
    assert_same(pair.plain, pair.plain_optimizer, pair.session)
    pair.close()


def test_in_sixteen_bits_the_masters_are_those_of_a_model_built_in_memory(tmp_path: Path) -> None:
    found = []
    for model in (mlp(), deferred()):
        with managed(model, precision="bf16", host_memory="1MiB", disk=tmp_path) as session:
            losses = train(model, session.optimizer)
            found.append({"losses": losses, **values(session)})
    expect_bits(*found)


def test_weights_alone_can_be_managed_and_the_random_state_is_left_alone(on_disk: dict[str, Any]) -> None:
    want, model, state = values(mlp()), deferred(), torch.get_rng_state()
    with patrickstar.manage(model, options=options(), **on_disk) as session:
        assert torch.equal(state, torch.get_rng_state())
        expect_bits(want, dict(session.state_dict()))


def test_parameters_in_memory_and_without_can_be_in_one_model(on_disk: dict[str, Any]) -> None:
    plain, model = nn.Sequential(mlp(), mlp()), nn.Sequential(deferred(), mlp())
    with managed(model, **on_disk) as session:
        assert same_bits(train(plain, adamw(plain)), train(model, session.optimizer))


def test_a_refusal_leaves_the_model_without_memory_and_a_larger_budget_works(on_disk: dict[str, Any]) -> None:
    model = deferred()
    with pytest.raises(BudgetError):
        managed(model, **{**on_disk, "host_memory": "4KiB"})
    assert is_deferred(model)
    with managed(model, **on_disk) as session:
        expect_bits(values(mlp()), dict(session.state_dict()))


def test_a_failure_in_the_middle_leaves_all_of_it_as_before(
    on_disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deferred()
    want, fill, calls = made(model), Weights.fill_made, []

    def failing(self: Any, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 4:
            raise OSError("the fourth one fails")
        fill(self, *args)

    monkeypatch.setattr(Weights, "fill_made", failing)
    with pytest.raises(OSError, match="the fourth"):
        managed(model, **on_disk)
    assert is_deferred(model)
    expect_bits(want, made(model))


def test_values_from_files_are_not_made(
    on_disk: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = mlp()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    save_file(values(other), tmp_path / "model.safetensors")
    for making in ("value", "make_in"):
        monkeypatch.setattr(DeferredRecorder, making, lambda *_: pytest.fail("a value was made"))
    with patrickstar.manage(
        deferred(), options=options(), weights=tmp_path / "model.safetensors", **on_disk
    ) as session:
        expect_bits(values(other), dict(session.state_dict()))


def test_manage_inside_of_the_context_is_refused() -> None:
    with patrickstar.deferred_init():
        model = mlp()
        with pytest.raises(StateError, match="after the `with patrickstar.deferred_init"):
            patrickstar.manage(model)


def test_a_step_before_manage_is_refused() -> None:
    model = deferred()
    optimizer = adamw(model)
    with pytest.raises(StateError, match=r"Linear\.weight.*manage"):
        train(model, optimizer)


def test_a_parameter_that_takes_nearly_all_the_memory_is_made_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeferredRecorder, "value", lambda *_: pytest.fail("it was made elsewhere first"))

    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.EmbeddingBag(1000, 256)  # 1,000 KiB of weights

    with patrickstar.manage(deferred(build), host_memory="1200KiB", disk=tmp_path) as session:
        expect_bits(values(build()), dict(session.state_dict()))


def test_two_parameters_over_the_same_memory_are_refused() -> None:
    def build() -> nn.Module:
        layers: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        layers[1].weight = nn.Parameter(layers[0].weight.data)
        return layers

    with pytest.raises(LayoutError, match=r"0\.weight and 1\.weight share memory"):
        patrickstar.manage(deferred(build))


def expect_within(run: dict[str, Any]) -> None:
    promised = run["budget"] * 101 // 100 + 48 * MIB
    over = {name: round(grown / MIB) for name, grown in run["parts"].items() if grown > promised}
    assert not over, f"budget {run['budget'] / MIB:.0f} MiB: {over} of {run['parts']}"


LAYERS = {"n_embd": 512, "n_head": 8, "vocab_size": 2048, "n_positions": 64}


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "mib"), [(16, 0), pytest.param(84, 1000, marks=pytest.mark.campaign)])
def test_a_model_of_four_times_the_memory_is_built_trained_and_checked_within_it(
    layers: int, mib: int, tmp_path: Path
) -> None:
    run = in_child(config={"n_layer": layers, **LAYERS}, share=0.25, disk=str(tmp_path))
    assert run["weights"] >= max(4 * run["budget"] - 4, mib * MIB)
    assert run["wrong"] == []
    assert run["unchanged"] == []
    expect_within(run)


@pytest.mark.campaign
def test_the_check_fails_where_the_model_is_built_in_memory(tmp_path: Path) -> None:
    run = in_child(config={"n_layer": 16, **LAYERS}, share=0.25, disk=str(tmp_path), deferred=False)
    with pytest.raises(AssertionError, match="build"):
        expect_within(run)
