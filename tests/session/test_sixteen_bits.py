"""Weights of 16 bits: what plain PyTorch does with narrow parameters and fp32 masters beside them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar import BudgetError
from patrickstar.core.planes import REST
from tests.parity.oracle import Types
from tests.session.builders import (
    CHUNK,
    LAYERS,
    MACHINES,
    SLOT,
    TIGHT,
    Layers,
    adamw,
    batch,
    expect_bits,
    managed,
    mlp,
    store_of,
    train,
    values,
)
from tests.session.masters import KINDS, manage
from tests.session.script import Script
from tests.session.test_hand_changes import BY_NAME

MakeScript = Callable[..., Script]


@pytest.fixture(params=[*KINDS, "fp16-host", "fp16-fp32-host"])  # where the host computes, fp16 masters are kept alone
def script(request: pytest.FixtureRequest, make_script: MakeScript, tmp_path: Path) -> Script:
    kind = request.param.removesuffix("-host")
    machine = {} if kind == request.param else MACHINES["cpu+disk"](tmp_path / "disk")
    made = make_script(kind, **machine)
    assert (REST in {ref.plane for ref in store_of(made.session).state.home}) is (not machine)
    return made


@pytest.mark.parametrize(("given", "gradient"), [({}, 2), ({"accumulate": 3}, 4)])
@pytest.mark.parametrize("machine", [{"device": "emulated", "device_memory": "64MiB"}, {"host_memory": "1GiB"}])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_parameter(kind: str, machine: dict[str, str], given: dict[str, Any], gradient: int) -> None:
    """bf16 weights and what completes them have 2 each; fp16 masters have 4, and weights beside them, where a device computes, 2."""
    is_fp16, has_device = kind.startswith("fp16"), "device" in machine
    model = mlp()
    with manage(model, kind, given=given, **machine) as session:
        model(batch()).sum().backward()
        session.optimizer.step()
        stats = session.stats()
        wanted = (6 if is_fp16 and has_device else 4) + 8 + gradient
        assert sum(stats.model_data.values()) == wanted * session.layout.n_chunks * session.layout.chunk_numel
        assert (REST in stats.model_data) is (not is_fp16 or has_device)


def test_a_second_backward_makes_room_for_gradients_in_fp32(script: Script) -> None:
    """What had come is widened; from then on nothing is rounded."""
    script.run("forward backward forward backward step")
    plane, model_data = script.session.layout.n_chunks * CHUNK, script.session.stats().model_data
    assert model_data["grad"] == 4 * plane
    assert sum(model_data.values()) == (18 if model_data.get(REST) == model_data["grad"] else 16) * plane
    script.run("zero read train(3) read")
    assert script.session.stats().planned_steps >= 3


@pytest.mark.parametrize("machine", ["cpu+disk", "emulated+disk"])
def test_a_second_backward_makes_room_on_disk(machine: str, make_script: MakeScript, tmp_path: Path) -> None:
    script = make_script("bf16", **MACHINES[machine](tmp_path / "disk"))
    script.run("2[3[forward backward] step zero] read")
    assert len(list((tmp_path / "disk").glob("*.grad"))) <= 1, "the file of narrow gradients is gone"


def test_a_second_backward_that_does_not_fit_is_refused_before_anything_has_changed(make_script: MakeScript) -> None:
    host = 14 * CHUNK * LAYERS + SLOT  # 14 bytes a parameter, and little more
    script = make_script("bf16", device="emulated", device_memory=TIGHT, host_memory=host)
    script.run("forward backward")
    with pytest.raises(BudgetError, match="host memory") as refusal:
        script.model(batch(1)).float().square().mean().backward()
    assert refusal.value.smallest_bytes == 16 * script.session.layout.n_chunks * CHUNK
    script.run("step zero read")


def a_few(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.view(-1)[3:7] = 0.3
        p.grad.clamp_(-0.01, 0.01)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "a third": lambda model: [p.grad.mul_(1 / 3) for p in model.parameters()],
    "a few": a_few,
    "foreach": lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], 0.7),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_shown_rounded_and_what_is_changed_is_widened(
    kind: str, backwards: int, change: str, make_script: MakeScript
) -> None:
    """What the first change wrote is fp32, where that computes: from then on gradients are kept in it, and none is rounded."""
    given = {"accumulate": 2} if backwards == 2 else {}
    script = make_script(kind, given=given, device="emulated", device_memory=8 * TIGHT)
    for _ in range(2):
        script.run(f"{backwards}[forward backward]")
        script.gradients(CHANGES[change], changes=True)
        script.run("read step zero")
    script.run("read")


def test_what_sets_every_element_sets_those_that_are_shown_as_they_become_too() -> None:
    """Gradients too small for fp16 are shown as zeros; `zero_()` makes them zeros."""
    model = mlp()
    with manage(model, "fp16", given={"accumulate": 2}) as session:
        model(batch()).float().sum().backward()
        session.scaler.training.multiply(torch.tensor(2.0**-40))
        weight = model[0].weight
        assert weight.grad is not None
        assert dict(session.gradients())["0.weight"].any()
        assert not weight.grad.any()
        model.zero_grad(set_to_none=False)
        assert not dict(session.gradients())["0.weight"].any()


@pytest.mark.parametrize(("spoil", "updates"), [(float("inf"), 0), (1.0, 1)])
def test_an_overflow_is_found_as_gradients_are_when_the_scaler_looks(
    spoil: float, updates: int, make_script: MakeScript
) -> None:
    script = make_script("fp16")
    script.run("forward backward")
    script.model[2].bias.grad[3] = float("inf")
    script.model[2].bias.grad[3] = spoil
    script.managed.step()
    assert len(script.session.optimizer.state) == 12 * updates


@pytest.mark.parametrize(
    "change", ["clamp", "by_init", "by_index", "by_data", "by_flag", "by_lookup", "by_out", "foreach"]
)
def test_a_change_by_hand_is_carried_into_the_master(script: Script, change: str) -> None:
    """What it changes has its new weight for a master; everything else keeps its own, down to the last bit."""
    script.run("train")
    script.weights(BY_NAME[change])
    script.run("read train read")


class Reentrant(Layers):
    """All of it is one checkpointed block, which goes through every layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        twice = lambda x: self.layers(self.layers(x))
        return checkpoint(twice, x.clone().requires_grad_(), use_reentrant=True)


WAITING = {"device": "emulated", "device_memory": TIGHT + 4 * SLOT}
"""Where fp32 computes, gradients of all layers wait for the end of a backward."""


@pytest.mark.parametrize("backwards", [1, 2, None], ids=["1", "2", "2, which was not said"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_which_only_a_backward_inside_of_another_tells(
    kind: str, backwards: int | None, make_script: MakeScript
) -> None:
    """They add up within one backward, and are kept, or widened, when the outer one ends."""
    script = make_script(kind, Reentrant, given={"accumulate": backwards} if backwards else {}, **WAITING)
    script.run(3 * f"{backwards or 2}[forward backward] step zero read ")


@pytest.mark.parametrize("kind", KINDS)
def test_batch_norm_stays_fp32_whole(kind: str) -> None:
    """So do modules that are named; other norms are cast as the rest is."""
    norms = nn.BatchNorm1d(32), nn.LayerNorm(32), nn.InstanceNorm1d(4, affine=True)
    model = nn.Sequential(nn.Linear(32, 32), *norms, nn.Linear(32, 32))
    with manage(model, kind, given={"keep_fp32": ("4",)}):
        assert {tensor.dtype for tensor in (*norms[0].parameters(), norms[0].running_mean)} == {torch.float32}
        assert model[4].weight.dtype is torch.float32
        assert {p.dtype for index in (0, 2, 3) for p in model[index].parameters()} == {Types.of(kind).compute}


@pytest.mark.parametrize(("kept", "fast"), [("bf16", "computes_bf16"), ("fp16", "computes_fp16")])
@pytest.mark.parametrize("is_fast", [False, True])
def test_weights_compute_in_their_own_type_where_the_processor_is_fast_in_it(
    kept: str, fast: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"patrickstar.step.resources.{fast}", lambda: is_fast)
    model = mlp()
    with patrickstar.manage(model, adamw(model), precision=kept):
        own = {"bf16": torch.bfloat16, "fp16": torch.float16}[kept]
        assert {parameter.dtype for parameter in model.parameters()} == {own if is_fast else torch.float32}


class Products(Layers):
    """Uses several weights in one operation, beside an activation that may grow."""

    extra = 16

    def forward(self, x: Tensor) -> Tensor:
        extra = torch.ones(self.extra)
        for first in (0, 2, 4):
            x = x @ torch.linalg.multi_dot([self.layers[first + more].weight for more in (0, 2, 6)])
        return x.square().mean() + 0 * extra.sum()


def test_no_unit_leaves_while_copies_of_several_are_made(make_script: MakeScript) -> None:
    """Copies may be what no longer fits: what they are still to be made from stays, whatever else leaves."""
    went_on = refused = 0
    for extra in range(8_000, 12_000, 250):
        script = make_script("bf16-fp32", Products, device="emulated", device_memory=10 * SLOT)
        script.run("train(2)")
        script.model.extra = extra
        try:
            script.run("train")
        except BudgetError:
            refused += 1
        else:
            went_on += 1
        script.session.close()
    assert went_on
    assert refused


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_fp32_goes_on_in_16_bits_and_back(kind: str, tmp_path: Path) -> None:
    model, other, last = mlp(), mlp(5), mlp(6)
    with managed(model, device="cpu") as session:
        train(model, session.optimizer, 1)
        session.save_checkpoint(tmp_path / "first")
        want = values(session)
    with manage(other, kind) as session:
        session.load_checkpoint(tmp_path / "first")
        expect_bits(want, dict(session.state_dict()))
        session.save_checkpoint(tmp_path / "second")
    with managed(last, device="cpu") as session:
        session.load_checkpoint(tmp_path / "second")
        expect_bits(want, dict(session.state_dict()))
