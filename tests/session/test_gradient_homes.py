"""Where gradients rest that `step="in_backward"` cannot use as they arrive, with room for those and no others; and homes on several tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar import BudgetError, StateError
from patrickstar.core.machine import Tier
from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.plan.actions import is_copy
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.forecast import forecast
from tests.memory.stores import keep_log
from tests.parity.compare import same_bits
from tests.session.builders import (
    CHUNK,
    LAYERS,
    SLOT,
    TIGHT,
    WIDTH,
    Layers,
    MakePair,
    Pair,
    WithLoss,
    adamw,
    assert_same,
    batch,
    everything,
    expect_bits,
    finish,
    is_ordinary,
    managed,
    mlp,
    options,
    step_with_loss,
    store_of,
    values,
)
from tests.session.script import Script
from tests.session.test_budgets import expect_smallest

COMPUTES = TIGHT + SLOT
ON_HOST = 5 * SLOT
"""What rests on the host where there is a disk as well: the host has one slot more, to stage through."""

BELOW: Mapping[str, Callable[[int, Path], dict[str, Any]]] = {
    "emulated": lambda nbytes, disk: {"device": "emulated", "device_memory": COMPUTES, "host_memory": nbytes},
    "cpu+disk": lambda nbytes, disk: {"device": "cpu", "host_memory": COMPUTES, "disk": disk, "disk_memory": nbytes},
    "emulated+disk": lambda nbytes, disk: {
        "device": "emulated",
        "device_memory": COMPUTES,
        "host_memory": ON_HOST + SLOT,
        "disk": disk,
        "disk_memory": nbytes - ON_HOST,
    },
}
"""Machines on which so many bytes may rest below the tier that computes."""

PRECISIONS = {"fp32": 4, "bf16": 2}
"""Bytes of a gradient's element."""


def chunks(count: int, nbytes: int) -> int:
    """Bytes of so many chunks, at so many an element."""
    return count * CHUNK * nbytes


class Repeated(Layers):
    """Layers that are used again before all of them run once, each time recomputed in a graph of its own.

    Args:
        kept: of how many layers a call does that. hidden: of how many more, which no input shows.
    """

    def __init__(self, kept: int = 0) -> None:
        super().__init__()
        self.kept, self.hidden = kept, 0

    def forward(self, x: Tensor, kept: int | None = None) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers[: 2 * ((self.kept if kept is None else kept) + self.hidden) : 2]:
            for _ in range(2):
                x = checkpoint(layer, x, use_reentrant=True)
        return self.layers(x).float().square().mean()


class Tied(nn.Module):
    """A weight of two layers, of which one is recomputed in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(layers=LAYERS + 1)  # the last one's bias lies in the chunk before
        self.layers[2 * LAYERS].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layers[:2], x.clone().requires_grad_(), use_reentrant=True)
        return self.layers[2:](x).float().square().mean()


class Detached(Layers):
    """A weight that is also used without being told so: its bytes may be needed after its gradient has come."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        x = F.linear(self.layers(x), self.layers[4].weight.detach())
        return x.float().square().mean()


class Box:
    """An input that a trial run could change."""


class Branches(Layers):
    """What nobody can foresee without running it: it depends on a value."""

    def forward(self, x: Tensor, depends: bool = True, box: Box | None = None) -> Tensor:
        x = self.layers(x)
        if depends and x.sum() > 1e9:
            x = x * 2
        return x.float().square().mean()


KEPT: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    "none": (lambda: Repeated(0), 0),
    "one": (lambda: Repeated(1), 1),
    "three": (lambda: Repeated(3), 3),
    "tied": (Tied, 1),
    "detached": (Detached, 1),
}
"""Models, and how many of their six chunks have gradients that wait until the backward ends."""

SOME = [
    ("none", "fp32"),
    ("none", "bf16"),
    ("three", "fp32"),
    ("three", "bf16"),
    ("tied", "fp32"),
    ("detached", "fp32"),
]


def manage(model: nn.Module, precision: str = "fp32", **keywords: Any) -> patrickstar.Session:
    given = {} if precision == "fp32" else {"compute": precision}
    return patrickstar.manage(
        model, adamw(model), precision=precision, step="in_backward", options=options(**given), **keywords
    )


def step(model: nn.Module, session: patrickstar.Session, number: int, **keywords: Any) -> Tensor:
    return finish(model(batch(number), **keywords), session.optimizer)


@contextmanager
def refused(session: patrickstar.Session, match: str | None = None) -> Iterator[pytest.ExceptionInfo[BudgetError]]:
    """A budget is refused, and nothing has changed."""
    held, state = everything(session), torch.get_rng_state()
    with pytest.raises(BudgetError, match=match) as refusal:
        yield refusal
    assert torch.equal(state, torch.get_rng_state())
    expect_bits(held, everything(session))


Make = Callable[..., Script]


@pytest.fixture
def make(make_script: Make) -> Make:
    """Makes scripts of a model whose updates come in backward."""
    return lambda build, precision="fp32", **machine: make_script(precision, build, step="in_backward", **machine)


def resting(session: patrickstar.Session) -> int:
    """Bytes set aside below the tier that computes."""
    state = store_of(session).state
    return sum(state.unit_bytes(ref) for ref, tier in state.home.items() if tier is not state.compute)


def reserved(session: patrickstar.Session) -> list[int]:
    """The chunks whose gradients have a home."""
    return sorted(ref.chunk for ref in store_of(session).state.home if ref.plane == GRAD)


@pytest.fixture(params=BELOW)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], dict[str, Any]]:
    return lambda nbytes: BELOW[request.param](nbytes, tmp_path / "disk")


Machine = Callable[[int], dict[str, Any]]


# what is needed, to the byte


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KEPT)
def test_twelve_bytes_a_parameter_and_the_gradients_that_wait_are_enough(
    make: Make, kind: str, precision: str, machine: Machine
) -> None:
    build, kept = KEPT[kind]
    needed = chunks(LAYERS, 12) + chunks(kept, PRECISIONS[precision])
    script = make(build, precision, **machine(needed))
    assert resting(script.session) == chunks(LAYERS, 12)
    script.run("train(4) read")
    stats = script.session.stats()
    assert resting(script.session) == needed
    assert len(reserved(script.session)) == kept
    assert stats.planned_steps == 4, stats.reason
    assert sum(stats.moved.values())
    assert sum(stats.model_data.values()) == chunks(LAYERS, 12)
    assert stats.bytes_per_parameter == chunks(LAYERS, 12) / script.session.layout.model_numel


@pytest.mark.parametrize("precision", PRECISIONS)
def test_with_a_byte_less_than_twelve_a_parameter_below_one_unit_rests_where_it_computes(
    make: Make, precision: str, machine: Machine
) -> None:
    build, _ = KEPT["none"]
    script = make(build, precision, **machine(chunks(LAYERS, 12) - 1))
    state = store_of(script.session).state
    assert [ref.plane for ref, tier in state.home.items() if tier is state.compute] == ["weight"]
    script.run("train(2) read")


@pytest.mark.parametrize(("kind", "precision"), [kind for kind in SOME if kind[0] != "none"])
def test_a_byte_less_than_the_gradients_that_wait_is_refused_before_the_first_forward(
    kind: str, precision: str, machine: Machine
) -> None:
    build, kept = KEPT[kind]
    needed = chunks(LAYERS, 12) + chunks(kept, PRECISIONS[precision])
    model = build()
    with manage(model, precision, **machine(needed - 1)) as session:
        for _ in range(2):
            with refused(session, "gradients .* cannot be used as they arrive") as refusal:
                model(batch())
            assert refusal.value.smallest_bytes - refusal.value.available_bytes == 1
            assert refusal.value.tier == ("host" if "host_memory" not in machine(0) else refusal.value.tier)
        assert resting(session) == chunks(LAYERS, 12)
        assert session.stats().steps == 0
        with torch.no_grad():
            model(batch())  # nothing waits in an evaluation


def test_the_gradients_that_a_deferred_step_keeps_have_homes_from_the_start(machine: Machine) -> None:
    model = mlp()
    keywords = machine(chunks(LAYERS, 16))
    with managed(model, **keywords) as session:
        assert resting(session) == chunks(LAYERS, 16)
        assert reserved(session) == list(range(LAYERS))


def test_gradients_that_wait_are_written_to_their_homes_and_come_back(make: Make, machine: Machine) -> None:
    """The tier that computes has room for two thirds of what waits, and of what updates one chunk."""
    script = make(lambda: Repeated(6), **machine(chunks(LAYERS, 16)))
    store = keep_log(store_of(script.session))
    script.run("train(3) read")
    moved = [action for action in store.log if is_copy(action) and action.of.plane == GRAD]
    compute = store.state.compute
    assert {action.work.tier is compute for action in moved} == {True, False}
    assert script.session.stats().planned_steps == 3, script.session.stats().reason


# what cannot be traced


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_cannot_be_traced_has_room_for_every_gradient_before_the_first_step(
    make: Make, precision: str, machine: Machine
) -> None:
    needed = chunks(LAYERS, 12 + PRECISIONS[precision])
    script = make(Branches, precision, **machine(needed))
    script.run("train(4) read")
    assert reserved(script.session) == list(range(LAYERS))
    assert resting(script.session) == needed
    assert script.session.stats().reactive_steps == 1
    assert sum(script.session.stats().model_data.values()) == chunks(LAYERS, 12)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_cannot_be_traced_is_refused_before_anything_has_changed(
    make: Make, precision: str, machine: Machine
) -> None:
    needed = chunks(LAYERS, 12 + PRECISIONS[precision])
    script = make(Branches, precision, **machine(needed - 1))
    for _ in range(2):
        with refused(script.session, r"(?s)cannot be traced.*gradients .* KiB") as refusal:
            script.model(batch())
        assert refusal.value.smallest_bytes - refusal.value.available_bytes == 1
    assert reserved(script.session) == []
    with torch.no_grad():
        script.model(batch())  # no gradient comes of it
    script.run("train(2)", depends=False)  # and this one can be traced
    script.run("read")


def test_a_forward_that_is_never_traced_has_room_for_every_gradient(make: Make, machine: Machine) -> None:
    script = make(Branches, **machine(chunks(LAYERS, 16) - 1))
    with pytest.raises(BudgetError, match=r"cannot be traced.*a fake-tensor trace could change"):
        script.model(batch(), depends=False, box=Box())
    script = make(Branches, **machine(chunks(LAYERS, 16)))
    script.run("train(3) read", depends=False, box=Box())
    assert script.session.stats().reactive_steps == 3


# a session learns of more


def test_a_later_forward_that_keeps_more_gets_room_or_is_refused_before_it_runs(make: Make, machine: Machine) -> None:
    script = make(Repeated, **machine(chunks(LAYERS, 12) + chunks(2, 4)))
    script.run("train(2)")
    assert reserved(script.session) == []
    script.run("train(2)", kept=1)
    assert reserved(script.session) == [0]
    with refused(script.session) as refusal:
        script.model(batch(), kept=3)
    assert refusal.value.smallest_bytes - refusal.value.available_bytes == chunks(1, 4)
    assert reserved(script.session) == [0]
    script.run("train(2)", kept=2)
    script.run("train(2)")
    assert reserved(script.session) == [0, 1]
    script.run("read")
    assert script.session.stats().planned_steps == 8, script.session.stats().reason


def test_a_gradient_that_must_wait_although_its_trace_had_not_shown_it_gets_room(make: Make, machine: Machine) -> None:
    script = make(Repeated, **machine(chunks(LAYERS, 12) + chunks(2, 4)))
    script.run("train(2)")
    script.plain.model.hidden = script.model.hidden = 2
    script.run("train(4) read")
    assert reserved(script.session) == [0, 1]
    stats = script.session.stats()
    assert 1 <= stats.reactive_steps <= 3, "the third goes by what the second has shown"
    assert stats.planned_steps + stats.reactive_steps == 6


def test_where_there_is_no_room_for_it_that_is_said_at_that_moment(
    make: Make, machine: Machine, tmp_path: Path
) -> None:
    script = make(Repeated, **machine(chunks(LAYERS, 12) + chunks(1, 4)))
    script.run("train(2)")
    script.session.save_checkpoint(tmp_path / "checkpoint")
    script.model.hidden = 2
    loss = script.model(batch(2))
    with pytest.raises(BudgetError, match=r"gradient of layers\.0\.\w+ cannot be used as it arrives") as refusal:
        loss.backward()
    assert refusal.value.smallest_bytes - refusal.value.available_bytes == chunks(1, 4)
    del loss
    script.model.hidden = 0
    with pytest.raises(StateError, match="load_checkpoint"):
        script.model(batch(2))
    script.session.load_checkpoint(tmp_path / "checkpoint")
    script.run("train(2) read")


def with_gradient() -> nn.Module:
    model = Repeated()
    model.layers[4].weight.grad = torch.full((WIDTH, WIDTH), 0.125)
    return model


@pytest.mark.parametrize("first", ["", "zero "], ids=["used", "forgotten"])
def test_gradients_from_before_manage_have_room_and_no_others(make: Make, machine: Machine, first: str) -> None:
    model = with_gradient()
    needed = chunks(LAYERS, 12) + chunks(1, 4)
    with pytest.raises(BudgetError, match=r"gradient of layers\.4\.weight cannot be used as it arrives"):
        manage(model, **machine(needed - 1))
    assert is_ordinary(model)
    assert same_bits(model.layers[4].weight.grad, torch.full((WIDTH, WIDTH), 0.125))
    script = make(with_gradient, **machine(needed))
    assert reserved(script.session) == [2]
    assert same_bits(script.model.layers[4].weight.grad, torch.full((WIDTH, WIDTH), 0.125))
    assert script.model.layers[2].weight.grad is None
    script.run(f"{first}train(3) read")


def but_one(model: nn.Module) -> patrickstar.AdamW:
    return patrickstar.AdamW([p for name, p in model.named_parameters() if not name.startswith("layers.2.")], lr=1e-2)


WHOLE, APART = UpdateChoice(), UpdateChoice(apart=True)


@pytest.mark.parametrize(
    ("precision", "choice"),
    [("fp32", WHOLE), ("bf16", WHOLE), ("bf16", APART)],
    ids=["fp32", "bf16, whole", "bf16, one by one"],
)
def test_a_gradient_that_no_optimizer_takes_has_room_in_fp32_and_the_others_have_none(
    make_pair: MakePair, machine: Machine, precision: str, choice: UpdateChoice
) -> None:
    """It adds up from step to step, as in PyTorch: nobody has asked for it to be forgotten. In bf16 it is widened by the second."""
    needed, given = chunks(LAYERS, 12) + chunks(1, 4), {"compute": precision}
    way = {"step": "in_backward", "precision": precision, "choice": choice, "with_options": given}
    pair = make_pair(Repeated, make_optimizer=but_one, **way, **machine(needed))
    if precision == "fp32":
        pair.train(3, by=step_with_loss)
        assert_same(pair.plain, pair.plain_optimizer, pair.session)
        assert same_bits(pair.plain.layers[2].weight.grad, pair.model.layers[2].weight.grad)
    else:
        for number in range(3):
            step(pair.model, pair.session, number)
    assert reserved(pair.session) == [1]
    assert resting(pair.session) == needed


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layer_that_is_trained_after_all_takes_twelve_bytes_a_parameter(precision: str, machine: Machine) -> None:
    def build() -> nn.Module:
        model = Repeated()
        model.layers[0].requires_grad_(False)
        return model

    model = build()
    with manage(model, precision, **machine(chunks(LAYERS, 12))) as session:
        assert resting(session) == chunks(LAYERS - 1, 12) + chunks(1, PRECISIONS[precision])
        step(model, session, 0)
        model.layers[0].requires_grad_(True)
        assert resting(session) == chunks(LAYERS, 12)
        for number in range(1, 3):
            step(model, session, number)
        assert sum(session.stats().model_data.values()) == chunks(LAYERS, 12)


# where they go


def test_where_everything_fits_the_tier_that_computes_gradients_may_be_kept_there(make: Make) -> None:
    """The host has no room for them; the device has, whatever happens."""
    machine = {"device": "emulated", "host_memory": chunks(LAYERS, 12)}
    script = make(Branches, device_memory=chunks(LAYERS, 16) - 1, **machine)
    with pytest.raises(BudgetError) as refusal:
        script.model(batch())
    assert refusal.value.tier == "host"
    script = make(Branches, device_memory=chunks(LAYERS, 16), **machine)
    script.run("train(3) read")
    homes = store_of(script.session).state.home
    assert {homes[PlaneRef(chunk, GRAD)] for chunk in range(LAYERS)} == {Tier.DEVICE}
    assert resting(script.session) == chunks(LAYERS, 12)


def test_a_disk_that_nothing_rests_on_yet_takes_gradients(make: Make, tmp_path: Path) -> None:
    machine = {
        "device": "emulated",
        "device_memory": COMPUTES,
        "host_memory": chunks(LAYERS, 12) + 2 * SLOT,
        "disk": tmp_path / "disk",
        "disk_memory": 2 * SLOT,
    }
    script = make(lambda: Repeated(3), **machine)
    script.run("train(3) read")
    homes = store_of(script.session).state.home
    # One slot of the host is to stage through.
    assert [homes[PlaneRef(chunk, GRAD)] for chunk in range(3)] == [Tier.HOST, Tier.DISK, Tier.DISK]
    stats = script.session.stats()
    assert stats.planned_steps == 3, stats.reason
    assert (stats.peak["host"], stats.peak["disk"]) == (chunks(LAYERS, 12) + 2 * SLOT, 2 * SLOT)
    script.session.close()
    assert not list(tmp_path.rglob("patrickstar-*"))


# the host alone


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KEPT)
def test_the_host_alone_takes_twelve_bytes_a_parameter_the_gradients_that_wait_and_activations(
    make: Make, kind: str, precision: str
) -> None:
    build, kept = KEPT[kind]
    needed = chunks(LAYERS, 12) + chunks(kept, PRECISIONS[precision])
    with pytest.raises(BudgetError) as refusal:
        manage(build(), precision, device="cpu", host_memory=chunks(LAYERS, 12) - 1)
    assert refusal.value.smallest_bytes == chunks(LAYERS, 12)
    if kept:
        model = build()
        with manage(model, precision, device="cpu", host_memory=needed - 1) as session:
            with refused(session) as refusal:
                model(batch())
            assert refusal.value.smallest_bytes >= needed
    activations = 24 * 1024
    script = make(build, precision, device="cpu", host_memory=needed + activations)
    script.run("train(3) read")
    assert needed <= script.session.stats().peak["host"] <= needed + activations
    assert sum(script.session.stats().model_data.values()) == chunks(LAYERS, 12)


def test_the_host_alone_counts_the_gradients_that_wait_at_once_and_not_those_of_other_forwards(make: Make) -> None:
    script = make(Repeated, device="cpu", host_memory=chunks(LAYERS, 12) + chunks(2, 4) + 24 * 1024)
    script.run("train(2)", kept=2)
    with pytest.raises(BudgetError, match="cannot be used as they arrive"):
        script.model(batch(), kept=6)
    script.run("train(2)", kept=1)
    script.run("train(2)", kept=2)
    script.run("train(1) read")
    script.model.hidden = 6
    with pytest.raises(BudgetError, match=r"gradient of layers\.\d+\.\w+ cannot be used as it arrives"):
        script.model(batch(7)).backward()


def test_the_host_alone_refuses_what_cannot_be_traced_unless_every_gradient_has_room(make: Make) -> None:
    script = make(Branches, device="cpu", host_memory=chunks(LAYERS, 16) - 1)
    with refused(script.session, "cannot be traced") as refusal:
        script.model(batch())
    assert refusal.value.smallest_bytes == chunks(LAYERS, 16)
    script = make(Branches, device="cpu", host_memory=chunks(LAYERS, 16) + 24 * 1024)
    script.run("train(3) read")


# forecasts


@pytest.mark.parametrize(("kind", "precision"), SOME)
def test_a_forecast_has_the_peaks_and_the_moves_of_a_run(kind: str, precision: str, machine: Machine) -> None:
    build, kept = KEPT[kind]
    needed = chunks(LAYERS, 12) + chunks(kept, PRECISIONS[precision])
    given = {} if precision == "fp32" else {"compute": precision}
    arguments = {"precision": precision, "step": "in_backward", "options": options(**given), **machine(needed)}
    foreseen = forecast(build(), {"x": batch()}, **arguments)
    assert foreseen.fits, foreseen.refusal
    assert foreseen.model_data_bytes == 12 * foreseen.parameters
    model = build()
    with manage(model, precision, **machine(needed)) as session:
        for number in range(6):
            before = session.stats()
            step(model, session, number)
        after = session.stats()
        compute = store_of(session).state.compute.label
        for tier, nbytes in foreseen.peak.items():
            assert nbytes <= after.peak[tier] <= (COMPUTES if tier == compute else nbytes), tier
        assert {link: after.moved[link] - before.moved[link] for link in after.moved} == foreseen.moved
    less = forecast(build(), {"x": batch()}, **{**arguments, **machine(needed - 1)})
    assert less.fits == (not kept)  # a weight may rest where it computes instead
    assert less.fits or "short for the model states kept there" in less.refusal


@pytest.mark.parametrize("kind", KEPT)
def test_the_smallest_budget_that_a_forecast_names_runs_and_a_byte_less_does_not(kind: str) -> None:
    for device, tier in (("cpu", "host"), ("emulated", "device")):
        expect_smallest(KEPT[kind][0], tier, device=device, step="in_backward")


# model data that no tier could hold alone


def homes(pair: Pair) -> dict[str, int]:
    """Units by the tier they rest on."""
    return dict(Counter(tier.label for tier in store_of(pair.session).state.home.values()))


@pytest.mark.parametrize(("step", "planes"), [("in_backward", 3), ("deferred", 4)])
def test_what_a_parameter_takes_trains_with_two_thirds_of_it_on_each_of_two_tiers(
    step: str, planes: int, make_pair: MakePair
) -> None:
    host = device = planes * LAYERS * SLOT * 2 // 3
    pair = make_pair(step=step, device="emulated", device_memory=device, host_memory=host)
    pair.train(4)
    found = homes(pair)
    assert found["device"] > 0 < found["host"]
    stats = pair.session.stats()
    assert stats.planned_steps == 4, stats.reason
    assert stats.peak["device"] <= device
    assert stats.peak["host"] <= host
    assert sum(stats.moved.values()) > 0
    pair.expect_same()


@pytest.mark.parametrize(
    ("slots", "found"),
    [
        ({"host": 20, "disk": 12}, {"host": 12, "disk": 12}),
        # A slot of the host is for what passes through it.
        ({"device": 14, "host": 8, "disk": 9}, {"device": 8, "host": 7, "disk": 9}),
    ],
    ids=["two tiers", "three"],
)
def test_a_disk_that_is_too_small_holds_what_it_can(
    make_pair: MakePair, tmp_path: Path, slots: dict[str, int], found: dict[str, int]
) -> None:
    budgets = {f"{tier}_memory": count * SLOT for tier, count in slots.items()}
    pair = make_pair(device="emulated" if "device" in slots else "cpu", disk=tmp_path, **budgets)
    pair.train_same(3)
    assert homes(pair) == found
    stats = pair.session.stats()
    assert stats.planned_steps == 3
    assert all(stats.peak[tier] <= count * SLOT for tier, count in slots.items())


def test_values_are_read_and_set_wherever_they_rest(make_script: Callable[..., Script]) -> None:
    script = make_script(device="emulated", device_memory=12 * SLOT, host_memory=16 * SLOT)
    script.run("train keep train(2) read back read weight(3)*=.5 write(8)=.1 train(2) read")


def test_as_little_as_can_be_rests_where_it_computes(make_pair: MakePair) -> None:
    for host, here in ((24, 0), (23, 1), (20, 4)):
        pair = make_pair(device="emulated", device_memory=TIGHT + 4 * SLOT, host_memory=host * SLOT)
        assert homes(pair).get("device", 0) == here
        on_device = {ref.plane for ref, tier in store_of(pair.session).state.home.items() if tier is Tier.DEVICE}
        assert on_device <= {"weight"}
        pair.train_same(1)
        pair.session.close()


@pytest.mark.parametrize("device", [40 * SLOT, SLOT // 2])
def test_a_host_through_which_no_unit_passes_is_refused_with_what_would_do(device: int, tmp_path: Path) -> None:
    """The smallest budgets are each with the other as it is, where that is enough; else both are needed."""
    below = {"device": "emulated", "precision": "fp32", "disk": tmp_path, "disk_memory": "1MiB", "options": options()}
    found = forecast(WithLoss(), {"x": batch()}, device_memory=device, host_memory=SLOT - 1, **below)
    assert not found.fits
    assert "staging of one unit" in found.refusal
    assert ("and device_memory >= " in found.refusal) is (device < SLOT)
    assert found.minimum["host"] == SLOT
    for less, fits in ((0, True), (1, False)):
        given = {"device_memory": found.minimum["device"] - less, "host_memory": SLOT, **below}
        assert forecast(WithLoss(), {"x": batch()}, **given).fits is fits
    model = WithLoss()
    budgets = {"device_memory": found.minimum["device"], "host_memory": SLOT}
    with patrickstar.manage(model, adamw(model), **budgets, **below) as session:
        for number in range(2):
            step_with_loss(model, session.optimizer, number)
        assert session.stats().peak["host"] <= SLOT


@pytest.mark.parametrize("disk", [False, True])
def test_reading_and_saving_bring_nothing_to_the_device(disk: bool, make_pair: MakePair, tmp_path: Path) -> None:
    below = {"disk": tmp_path / "disk", "host_memory": 12 * SLOT} if disk else {}
    pair = make_pair(device="emulated", device_memory=TIGHT, **below)
    pair.train(2)
    pair.session.state_dict()["0.weight"]  # so that no update is pending
    before = pair.session.stats().moved
    held = values(pair.session)
    pair.session.save_checkpoint(tmp_path / "saved")
    after = pair.session.stats().moved
    assert (after["H>D"], after["D>H"]) == (before["H>D"], before["D>H"])
    pair.train(1, first=2)
    pair.session.state_dict()["0.weight"]
    before = pair.session.stats().moved
    pair.session.load_checkpoint(tmp_path / "saved")
    after = pair.session.stats().moved
    assert after["H>D"] == before["H>D"]
    expect_bits(held, dict(pair.session.state_dict()))
