"""Where gradients rest that `step="in_backward"` cannot use as they arrive: room for those, and for no others."""

from __future__ import annotations

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
from patrickstar.testing.inside import manage_inside
from tests.parity.compare import same_bits
from tests.session.builders import (
    CHUNK,
    LAYERS,
    SLOT,
    TIGHT,
    WIDTH,
    adamw,
    assert_same,
    batch,
    everything,
    expect_bits,
    is_ordinary,
    mlp,
    options,
    step_with_loss,
    store_of,
)
from tests.session.masters import Twin

COMPUTES = TIGHT + SLOT
ON_HOST = 5 * SLOT
"""What rests on the host where there is a disk as well: the host has one slot more, to stage through."""

BELOW: Mapping[str, Callable[[int, Path], dict[str, Any]]] = {
    "emulated": lambda nbytes, disk: {"device": "emulated", "device_memory": COMPUTES, "host_memory": nbytes},
    "cpu+disk": lambda nbytes, disk: {
        "device": "cpu",
        "host_memory": COMPUTES,
        "disk": disk,
        "disk_memory": nbytes,
    },
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


class Repeated(nn.Module):
    """Layers that are used again before all of them run once, each time recomputed in a graph of its own.

    Args:
        kept: of how many layers a call does that. hidden: of how many more, which no input shows.
    """

    def __init__(self, kept: int = 0) -> None:
        super().__init__()
        self.layers = mlp()
        self.kept, self.hidden = kept, 0

    def forward(self, x: Tensor, kept: int | None = None) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers[: 2 * ((self.kept if kept is None else kept) + self.hidden) : 2]:
            for _ in range(2):
                x = checkpoint(layer, x, use_reentrant=True)
        loss: Tensor = self.layers(x).float().square().mean()
        return loss


class Tied(nn.Module):
    """A weight of two layers, of which one is recomputed in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(layers=LAYERS + 1)  # the last one's bias lies in the chunk before
        self.layers[2 * LAYERS].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layers[:2], x.clone().requires_grad_(), use_reentrant=True)
        loss: Tensor = self.layers[2:](x).float().square().mean()
        return loss


class Detached(nn.Module):
    """A weight that is also used without being told so: its bytes may be needed after its gradient has come."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        x = F.linear(self.layers(x), self.layers[4].weight.detach())
        loss: Tensor = x.float().square().mean()
        return loss


class Box:
    """An input that a trial run could change."""


class Branches(nn.Module):
    """What nobody can foresee without running it: it depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor, depends: bool = True, box: Box | None = None) -> Tensor:
        x = self.layers(x)
        if depends and x.sum() > 1e9:
            x = x * 2
        loss: Tensor = x.float().square().mean()
        return loss


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


class Plain(Twin):
    """The same in plain PyTorch, of a model that gives its loss: in bf16 with masters kept by hand, which take gradients as they arrive."""

    def __init__(self, build: Callable[[], nn.Module], precision: str = "fp32") -> None:
        super().__init__(precision, build)

    def train_step(self, number: int, **keywords: Any) -> Tensor:
        loss: Tensor = self.model(batch(number).to(self.compute), **keywords)
        self.backward_of(loss)
        self.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def expect_same(self, session: patrickstar.Session) -> None:
        assert_same(self.masters, self.optimizer, session)


def step(model: nn.Module, session: patrickstar.Session, number: int, **keywords: Any) -> Tensor:
    loss: Tensor = model(batch(number), **keywords)
    loss.backward()
    assert session.optimizer is not None
    session.optimizer.step()
    session.optimizer.zero_grad()
    return loss.detach()


def train(plain: Plain, model: nn.Module, session: patrickstar.Session, steps: range, **keywords: Any) -> None:
    """Some steps of both; every loss must be the same."""
    for number in steps:
        want, got = plain.train_step(number, **keywords), step(model, session, number, **keywords)
        assert same_bits(want, got), f"step {number}: {got.item()}, plain PyTorch has {want.item()}"


@contextmanager
def refused(session: patrickstar.Session, match: str | None = None) -> Iterator[pytest.ExceptionInfo[BudgetError]]:
    """A budget is refused, and nothing has changed."""
    held, state = everything(session), torch.get_rng_state()
    with pytest.raises(BudgetError, match=match) as refusal:
        yield refusal
    assert torch.equal(state, torch.get_rng_state())
    expect_bits(held, everything(session))


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


@pytest.mark.sampled
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KEPT)
def test_twelve_bytes_a_parameter_and_the_gradients_that_wait_are_enough(
    kind: str, precision: str, machine: Machine
) -> None:
    build, kept = KEPT[kind]
    needed = chunks(LAYERS, 12) + chunks(kept, PRECISIONS[precision])
    plain, model = Plain(build, precision), build()
    with manage(model, precision, **machine(needed)) as session:
        assert resting(session) == chunks(LAYERS, 12)
        train(plain, model, session, range(4))
        plain.expect_same(session)
        stats = session.stats()
        assert resting(session) == needed
        assert len(reserved(session)) == kept
        assert stats.planned_steps == 4, stats.reason
        assert sum(stats.moved.values())
        assert sum(stats.model_data.values()) == chunks(LAYERS, 12)
        assert stats.bytes_per_parameter == chunks(LAYERS, 12) / session.layout.model_numel


@pytest.mark.parametrize("precision", PRECISIONS)
def test_with_a_byte_less_than_twelve_a_parameter_below_one_unit_rests_where_it_computes(
    precision: str, machine: Machine
) -> None:
    build, _ = KEPT["none"]
    plain, model = Plain(build, precision), build()
    with manage(model, precision, **machine(chunks(LAYERS, 12) - 1)) as session:
        state = store_of(session).state
        assert [ref.plane for ref, tier in state.home.items() if tier is state.compute] == ["weight"]
        train(plain, model, session, range(2))
        plain.expect_same(session)


@pytest.mark.sampled
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
    with patrickstar.manage(model, adamw(model), options=options(), **keywords) as session:
        assert resting(session) == chunks(LAYERS, 16)
        assert reserved(session) == list(range(LAYERS))


def test_gradients_that_wait_are_written_to_their_homes_and_come_back(machine: Machine) -> None:
    """The tier that computes has room for two thirds of what waits, and of what updates one chunk."""
    plain, model = Plain(lambda: Repeated(6)), Repeated(6)
    with manage(model, **machine(chunks(LAYERS, 16))) as session:
        store = store_of(session)
        store.keep_log = True
        train(plain, model, session, range(3))
        plain.expect_same(session)
        moved = [action for action in store.log if is_copy(action) and action.of.plane == GRAD]
        compute = store.state.compute
        assert {action.work.tier is compute for action in moved} == {True, False}
        assert session.stats().planned_steps == 3, session.stats().reason


# what cannot be traced


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_cannot_be_traced_has_room_for_every_gradient_before_the_first_step(
    precision: str, machine: Machine
) -> None:
    needed = chunks(LAYERS, 12 + PRECISIONS[precision])
    plain, model = Plain(Branches, precision), Branches()
    with manage(model, precision, **machine(needed)) as session:
        train(plain, model, session, range(4))
        plain.expect_same(session)
        assert reserved(session) == list(range(LAYERS))
        assert resting(session) == needed
        assert session.stats().reactive_steps == 1
        assert sum(session.stats().model_data.values()) == chunks(LAYERS, 12)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_cannot_be_traced_is_refused_before_anything_has_changed(precision: str, machine: Machine) -> None:
    needed = chunks(LAYERS, 12 + PRECISIONS[precision])
    plain, model = Plain(Branches, precision), Branches()
    with manage(model, precision, **machine(needed - 1)) as session:
        for _ in range(2):
            with refused(session, r"(?s)cannot be traced.*gradients .* KiB") as refusal:
                model(batch())
            assert refusal.value.smallest_bytes - refusal.value.available_bytes == 1
        assert reserved(session) == []
        with torch.no_grad():
            model(batch())  # no gradient comes of it
        train(plain, model, session, range(2), depends=False)  # and this one can be traced
        plain.expect_same(session)


def test_a_forward_that_is_never_traced_has_room_for_every_gradient(machine: Machine) -> None:
    plain, model = Plain(Branches), Branches()
    with manage(model, **machine(chunks(LAYERS, 16) - 1)) as session:
        with pytest.raises(BudgetError, match=r"cannot be traced.*a fake-tensor trace could change"):
            model(batch(), depends=False, box=Box())
    with manage(model, **machine(chunks(LAYERS, 16))) as session:
        train(plain, model, session, range(3), depends=False, box=Box())
        plain.expect_same(session)
        assert session.stats().reactive_steps == 3


# a session learns of more


def test_a_later_forward_that_keeps_more_gets_room_or_is_refused_before_it_runs(machine: Machine) -> None:
    plain, model = Plain(Repeated), Repeated()
    with manage(model, **machine(chunks(LAYERS, 12) + chunks(2, 4))) as session:
        train(plain, model, session, range(2))
        assert reserved(session) == []
        train(plain, model, session, range(2, 4), kept=1)
        assert reserved(session) == [0]
        with refused(session) as refusal:
            model(batch(), kept=3)
        assert refusal.value.smallest_bytes - refusal.value.available_bytes == chunks(1, 4)
        assert reserved(session) == [0]
        train(plain, model, session, range(4, 6), kept=2)
        train(plain, model, session, range(6, 8))
        assert reserved(session) == [0, 1]
        plain.expect_same(session)
        assert session.stats().planned_steps == 8, session.stats().reason


def test_a_gradient_that_must_wait_although_its_trace_had_not_shown_it_gets_room(machine: Machine) -> None:
    plain, model = Plain(Repeated), Repeated()
    with manage(model, **machine(chunks(LAYERS, 12) + chunks(2, 4))) as session:
        train(plain, model, session, range(2))
        plain.model.hidden = model.hidden = 2
        train(plain, model, session, range(2, 6))
        plain.expect_same(session)
        assert reserved(session) == [0, 1]
        stats = session.stats()
        assert 1 <= stats.reactive_steps <= 3, "the third goes by what the second has shown"
        assert stats.planned_steps + stats.reactive_steps == 6


def test_where_there_is_no_room_for_it_that_is_said_at_that_moment(machine: Machine, tmp_path: Path) -> None:
    plain, model = Plain(Repeated), Repeated()
    with manage(model, **machine(chunks(LAYERS, 12) + chunks(1, 4))) as session:
        train(plain, model, session, range(2))
        session.save_checkpoint(tmp_path / "checkpoint")
        model.hidden = 2
        loss = model(batch(2))
        with pytest.raises(BudgetError, match=r"gradient of layers\.0\.\w+ cannot be used as it arrives") as refusal:
            loss.backward()
        assert refusal.value.smallest_bytes - refusal.value.available_bytes == chunks(1, 4)
        del loss
        model.hidden = 0
        with pytest.raises(StateError, match="load_checkpoint"):
            model(batch(2))
        session.load_checkpoint(tmp_path / "checkpoint")
        train(plain, model, session, range(2, 4))
        plain.expect_same(session)


def test_gradients_from_before_manage_have_room_and_no_others(machine: Machine) -> None:
    def before(model: nn.Module) -> None:
        model.layers[4].weight.grad = torch.full((WIDTH, WIDTH), 0.125)

    plain, model = Plain(Repeated), Repeated()
    before(plain.model)
    before(model)
    needed = chunks(LAYERS, 12) + chunks(1, 4)
    with pytest.raises(BudgetError, match=r"gradient of layers\.4\.weight cannot be used as it arrives"):
        manage(model, **machine(needed - 1))
    assert is_ordinary(model)
    assert same_bits(model.layers[4].weight.grad, torch.full((WIDTH, WIDTH), 0.125))
    with manage(model, **machine(needed)) as session:
        assert reserved(session) == [2]
        train(plain, model, session, range(3))
        plain.expect_same(session)


def test_a_gradient_from_before_manage_can_be_read_and_forgotten(machine: Machine) -> None:
    plain, model = Plain(Repeated), Repeated()
    model.layers[4].weight.grad = torch.full((WIDTH, WIDTH), 0.125)
    with manage(model, **machine(chunks(LAYERS, 12) + chunks(1, 4))) as session:
        assert same_bits(model.layers[4].weight.grad, torch.full((WIDTH, WIDTH), 0.125))
        assert model.layers[2].weight.grad is None
        session.optimizer.zero_grad()  # type: ignore[union-attr]
        train(plain, model, session, range(3))
        plain.expect_same(session)


def test_a_gradient_that_no_optimizer_takes_has_room(machine: Machine) -> None:
    """It adds up from step to step, as in PyTorch: nobody has asked for it to be forgotten."""
    plain, model = Repeated(), Repeated()
    both = []
    for each in (plain, model):
        trained = [p for name, p in each.named_parameters() if not name.startswith("layers.2.")]
        both.append(patrickstar.AdamW(trained, lr=1e-2))
    keywords = machine(chunks(LAYERS, 12) + chunks(1, 4))
    with patrickstar.manage(model, both[1], step="in_backward", options=options(), **keywords) as session:
        for number in range(3):
            want, got = (
                step_with_loss(each, optimizer, number)
                for each, optimizer in ((plain, both[0]), (model, session.optimizer))
            )
            assert same_bits(want, got)
        assert reserved(session) == [1]
        assert_same(plain, both[0], session)
        assert same_bits(plain.layers[2].weight.grad, model.layers[2].weight.grad)


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


@pytest.mark.parametrize("choice", [UpdateChoice(), UpdateChoice(apart=True)], ids=["whole", "one by one"])
def test_gradients_in_bf16_are_widened_where_they_add_up_and_the_others_have_no_room(
    machine: Machine, choice: UpdateChoice
) -> None:
    """A gradient that no optimizer takes adds up in fp32 from the second backward on: 4 bytes for its chunk."""
    model = Repeated()
    trained = [p for name, p in model.named_parameters() if not name.startswith("layers.2.")]
    keywords = machine(chunks(LAYERS, 12) + chunks(1, 4))
    with manage_inside(
        model,
        patrickstar.AdamW(trained, lr=1e-2),
        choice=choice,
        precision="bf16",
        step="in_backward",
        options=options(compute="bf16"),
        **keywords,
    ) as session:
        for number in range(3):
            step(model, session, number)
        assert reserved(session) == [1]
        assert resting(session) == chunks(LAYERS, 12) + chunks(1, 4)


# where they go


def test_where_everything_fits_the_tier_that_computes_gradients_may_be_kept_there() -> None:
    """The host has no room for them; the device has, whatever happens."""
    plain, model = Plain(Branches), Branches()
    machine = {"device": "emulated", "host_memory": chunks(LAYERS, 12)}
    with manage(model, device_memory=chunks(LAYERS, 16) - 1, **machine) as session:
        with pytest.raises(BudgetError) as refusal:
            model(batch())
        assert refusal.value.tier == "host"
    with manage(model, device_memory=chunks(LAYERS, 16), **machine) as session:
        train(plain, model, session, range(3))
        plain.expect_same(session)
        homes = store_of(session).state.home
        assert {homes[PlaneRef(chunk, GRAD)] for chunk in range(LAYERS)} == {Tier.DEVICE}
        assert resting(session) == chunks(LAYERS, 12)


def test_a_disk_that_nothing_rests_on_yet_takes_gradients(tmp_path: Path) -> None:
    plain, model = Plain(lambda: Repeated(3)), Repeated(3)
    machine = {
        "device": "emulated",
        "device_memory": COMPUTES,
        "host_memory": chunks(LAYERS, 12) + 2 * SLOT,
        "disk": tmp_path / "disk",
        "disk_memory": 2 * SLOT,
    }
    with manage(model, **machine) as session:
        train(plain, model, session, range(3))
        plain.expect_same(session)
        homes = store_of(session).state.home
        # One slot of the host is to stage through.
        assert [homes[PlaneRef(chunk, GRAD)] for chunk in range(3)] == [Tier.HOST, Tier.DISK, Tier.DISK]
        stats = session.stats()
        assert stats.planned_steps == 3, stats.reason
        assert (stats.peak["host"], stats.peak["disk"]) == (chunks(LAYERS, 12) + 2 * SLOT, 2 * SLOT)
    assert not list(tmp_path.rglob("patrickstar-*"))


# the host alone


@pytest.mark.sampled
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KEPT)
def test_the_host_alone_takes_twelve_bytes_a_parameter_the_gradients_that_wait_and_activations(
    kind: str, precision: str
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
    plain, model = Plain(build, precision), build()
    activations = 24 * 1024
    with manage(model, precision, device="cpu", host_memory=needed + activations) as session:
        train(plain, model, session, range(3))
        plain.expect_same(session)
        assert needed <= session.stats().peak["host"] <= needed + activations
        assert sum(session.stats().model_data.values()) == chunks(LAYERS, 12)


def test_the_host_alone_counts_the_gradients_that_wait_at_once_and_not_those_of_other_forwards() -> None:
    plain, model = Plain(Repeated), Repeated()
    with manage(model, device="cpu", host_memory=chunks(LAYERS, 12) + chunks(2, 4) + 24 * 1024) as session:
        train(plain, model, session, range(2), kept=2)
        with pytest.raises(BudgetError, match="cannot be used as they arrive"):
            model(batch(), kept=6)
        train(plain, model, session, range(2, 4), kept=1)
        train(plain, model, session, range(4, 6), kept=2)
        train(plain, model, session, range(6, 7))
        plain.expect_same(session)
        model.hidden = 6
        with pytest.raises(BudgetError, match=r"gradient of layers\.\d+\.\w+ cannot be used as it arrives"):
            model(batch(7)).backward()


def test_the_host_alone_refuses_what_cannot_be_traced_unless_every_gradient_has_room() -> None:
    plain, model = Plain(Branches), Branches()
    with manage(model, device="cpu", host_memory=chunks(LAYERS, 16) - 1) as session:
        with refused(session, "cannot be traced") as refusal:
            model(batch())
        assert refusal.value.smallest_bytes == chunks(LAYERS, 16)
    with manage(model, device="cpu", host_memory=chunks(LAYERS, 16) + 24 * 1024) as session:
        train(plain, model, session, range(3))
        plain.expect_same(session)


# forecasts


@pytest.mark.sampled
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
    build, _ = KEPT[kind]
    for machine, tier in (({"device": "cpu"}, "host"), ({"device": "emulated"}, "device")):
        arguments = {"step": "in_backward", "options": options(), **machine}
        smallest = forecast(build(), {"x": batch()}, **arguments, **{f"{tier}_memory": 4096}).minimum[tier]
        model = build()
        with manage(model, **machine, **{f"{tier}_memory": smallest}) as session:
            for number in range(3):
                step(model, session, number)
            assert session.stats().peak[tier] <= smallest
        model = build()
        with pytest.raises(BudgetError):
            with manage(model, **machine, **{f"{tier}_memory": smallest - 1}) as session:
                for number in range(3):
                    step(model, session, number)
