"""Chunks that a backward updates whole, as the last of their gradients lands, beside the rest of it: the bits are those of plain PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import BudgetError, DeviceError, StateError
from patrickstar.core.formats import FP32
from patrickstar.core.layout import TensorSpec, build_layout
from patrickstar.core.machine import Tier
from patrickstar.core.planes import GRAD, STEP, WEIGHT, PlaneRef
from patrickstar.optim.hyper import Hyper
from patrickstar.plan.actions import Issue
from patrickstar.plan.touches import step_trace
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.step.pending_step import PendingStep
from tests.composed import Composed
from tests.faults import FaultyIO
from tests.lanes import LANES
from tests.manual_lane import ManualLane
from tests.memory.stores import keep_log
from tests.parity.zoo import CASES
from tests.session.builders import (
    LAYERS,
    SLOT,
    TIGHT,
    WIDTH,
    Layers,
    MakePair,
    Pair,
    assert_same,
    backward,
    batch,
    everything,
    expect_bits,
    finish,
    in_the_smallest,
    loss_of,
    store_of,
    train,
    train_step,
    update_moments,
    values,
)
from tests.session.test_disk_tier import arm
from tests.session.test_exceptions import Fragile, breaks, trip_in_backward
from tests.session.test_pending_steps import LOOKS as LOOKS_BETWEEN

APART = UpdateChoice(apart=True)
ON_DEVICE = UpdateChoice(tier=lambda chunk: Tier.DEVICE)
"""Parameter by parameter."""
ROOM = 8 * SLOT
"""Bytes of a device on which every chunk can be updated whole, and must move."""


@pytest.fixture
def whole(make_pair: MakePair) -> MakePair:
    """Makes pairs that update in backward, on a device with room for gradients, and note what they do."""

    def make(*args: Any, **keywords: Any) -> Pair:
        given = {"step": "in_backward", "precision": "fp32", "device": "emulated", "device_memory": ROOM}
        if "disk" in keywords:
            del given["device_memory"]
        pair = make_pair(*args, **{**given, **keywords})
        keep_log(store_of(pair.session))
        return pair

    return make


def updated(pair: Pair) -> list[int]:
    """The chunks whose update was begun since this was last asked, in order; the others were updated parameter by parameter."""
    log = store_of(pair.session).log
    found = [action.of.chunk for action in log if isinstance(action, Issue) and action.of.plane == STEP]
    log.clear()
    return found


def open_gradients(pair: Pair) -> list[Any]:
    """Units of gradients that the session has now."""
    return [ref for ref in store_of(pair.session).state.home if ref.plane == GRAD]


def alike(
    whole: MakePair,
    act: Callable[[Pair], torch.Tensor],
    *build: Any,
    kind: str = "fp32",
    choices: Sequence[UpdateChoice | None] = (None,),
    **keywords: Any,
) -> tuple[Pair, list[int]]:
    """What is done to a session has the same losses, and leaves the same bits, as where parameters are updated one by one.

    Gives the pair of the last choice, and the chunks that it has updated.
    """
    found: list[Any] = []
    for choice in (APART, *choices):
        pair = whole(*build, choice=choice, precision=kind, **keywords)
        losses, chunks = act(pair), updated(pair)
        assert bool(chunks) == (choice is not APART)
        found.append((losses, everything(pair.session)))
        assert torch.equal(found[0][0], losses)
        expect_bits(found[0][1], found[-1][1])
    return pair, chunks


ALL = list(reversed(range(LAYERS)))


def test_a_step_that_is_closed_is_about_what_has_come_alone() -> None:
    """Also where a parameter has come in another chunk, or in another tile of it."""
    layout = build_layout([TensorSpec("a", (20,)), TensorSpec("b", (60,)), TensorSpec("c", (20,))], chunk_numel=96)
    (chunk,) = {part.chunk for name in ("a", "b") for part in layout.parts(name)}
    updates = step_trace(layout, layout.slices, formats=FP32, in_plane=True)
    hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0, decoupled=True)
    nobody: Any = None  # does it
    order = PendingStep(nobody, dict.fromkeys(layout.slices, (1, hyper, ())), updates, arrivals={chunk: 2})
    (part,) = layout.parts("b")
    assert order.takes(part)
    assert order.take(part) is None
    assert (list(order.waiting), order.is_done) == ([chunk + 1], False)
    order.close()
    assert sorted(order.waiting) == [chunk, chunk + 1]
    assert [piece.name for piece in order.pieces(layout, chunk)] == ["b"]
    assert [piece.name for piece in order.pieces(layout, chunk + 1)] == ["c"]
    assert not order.takes(part)


# where there is room


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_chunks_are_updated_whole_in_the_order_in_which_their_last_gradients_come(
    lanes: str, kind: str, whole: MakePair
) -> None:
    given = {"make_lane": LANES[lanes](1), "with_options": {"compute": kind}}
    pair, chunks = alike(whole, lambda pair: train(pair.model, pair.optimizer, 4), kind=kind, **given)
    assert chunks == 4 * ALL
    stats = pair.session.stats()
    assert (stats.planned_steps, stats.reactive_steps) == (4, 0), stats.reason
    assert not open_gradients(pair), "no gradient has a home"


def test_an_update_goes_on_beside_the_backward_until_something_needs_it(whole: MakePair) -> None:
    pair = whole(make_lane=lambda src, dst: ManualLane(), choice=ON_DEVICE)
    pair.train(3)
    begins, ends = update_moments(pair.session.plan)
    assert begins.keys() == ends.keys() == set(range(LAYERS))
    assert all(ends[chunk] > begins[chunk] + 1 for chunk in range(2, LAYERS)), "a moment of the backward was beside it"
    frees = {ref.chunk: index for index, ref in pair.session.plan.frees}
    assert all(frees[chunk] == begins[chunk - 1] for chunk in range(1, LAYERS)), "until the next chunk is updated"
    pair.expect_same()


@pytest.mark.parametrize("slots", [5, 6, 7, 8, 24])
def test_no_room_for_gradients_means_parameter_by_parameter_and_the_bits_are_the_same(
    slots: int, whole: MakePair
) -> None:
    pair = whole(device_memory=slots * SLOT + 4096)
    pair.train(3)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)
    assert pair.session.stats().planned_steps == 3
    whole_ones = Counter(updated(pair))
    assert set(whole_ones.values()) <= {3}, "one decision, for every step"
    assert len(whole_ones) == (LAYERS if slots > 6 else len(whole_ones))


def test_the_smallest_budget_is_that_of_the_other_way(whole: MakePair) -> None:
    with pytest.raises(BudgetError) as refusal:
        whole(device_memory=4096).model(batch())
    smallest = refusal.value.smallest_bytes
    with pytest.raises(BudgetError) as other:
        whole(device_memory=4096, choice=APART).model(batch())
    assert other.value.smallest_bytes == smallest

    def begin(nbytes: int) -> Pair:
        pair = whole(device_memory=nbytes)
        pair.model(batch())  # activations are not known before
        return pair

    pair, _ = in_the_smallest(begin, smallest)
    pair.train_same(3)
    assert not updated(pair)


@pytest.mark.parametrize("choice", [None, APART], ids=["whole", "apart"])
@pytest.mark.parametrize("numel", [1024, 2048, 4096])
@pytest.mark.parametrize("name", ["tied", "branches", "adapted", "thawed", "scalars"])
def test_every_kind_of_parameter_has_the_bits_of_plain_pytorch(
    name: str, numel: int, choice: UpdateChoice | None, whole: MakePair
) -> None:
    """Tied, frozen, of no group, left out by a batch or by all; several to a chunk, or in several."""
    case = CASES[name]
    batches = case.batches(seed=0, count=6)

    def step(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
        case.before_step(model, number + 1)
        return finish(case.loss_of(model, batches[number]), optimizer)

    def optimizer_of(model: nn.Module) -> patrickstar.AdamW:
        return patrickstar.AdamW(case.groups(model), lr=1e-2)

    room = {"with_options": {"chunk_size": numel}, "device_memory": 7 * 4 * numel + 96 * 1024}
    pair = whole(case.build, make_optimizer=optimizer_of, choice=choice, **room)
    pair.train_same(6, by=step)
    assert bool(updated(pair)) == (choice is None)


# what the plan did not have


def test_a_gradient_that_does_not_come_leaves_its_chunk_to_those_that_have(whole: MakePair) -> None:
    pair = whole()

    def step(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
        model[4].bias.requires_grad_(number not in (2, 3))
        model[0].bias.requires_grad_(number not in (2, 5))  # the last of all
        loss = train_step(model, optimizer, number)
        model[4].bias.requires_grad_(True)
        model[0].bias.requires_grad_(True)
        return loss

    pair.train_same(7, by=step)
    # The first that is missing is not foreseen: a forward with other frozen parameters has a trace of its own.
    pair.train(3, first=7, by=_for_some)
    pair.train_same(2, first=10)


def _for_some(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    loss = loss_of(model, number)
    loss.backward(inputs=[model[2].weight, model[6].bias, model[6].weight, model[10].weight])
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_a_backward_for_some_parameters_updates_these_alone_and_loses_none(whole: MakePair) -> None:
    pair = whole()
    pair.train(2)
    updated(pair)
    pair.same(_for_some, 2)
    assert set(updated(pair)) <= {1, 3, 5}
    assert pair.session.stats().reactive_steps == 1
    pair.expect_same()
    pair.train_same(3, first=3)


class Looks(Layers):
    """Something that looks at the session in the middle of the backward."""

    at = 6
    look: Callable[[], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[: self.at](x)
        if self.look is not None and hidden.requires_grad:
            look = self.look
            hidden.register_hook(lambda gradient: look() and None)
        return self.layers[self.at :](hidden)


LOOKS: dict[str, Callable[[Pair, Any], Any]] = {
    "a weight": lambda pair, _: pair.model.layers[8].weight.sum().item(),
    "a weight of before": lambda pair, _: pair.model.layers[0].weight.sum().item(),
    "a state dict": lambda pair, _: pair.session.state_dict()["layers.10.weight"].sum(),
    "a moment": lambda pair, _: pair.optimizer.state[pair.model.layers[8].weight]["exp_avg"].sum(),
    "an evaluation": lambda pair, _: pair.model.layers[10](batch()).sum(),
    "stats": lambda pair, _: pair.session.stats(),
    "zeroing": lambda pair, _: pair.optimizer.zero_grad(set_to_none=False),
    "memory": lambda pair, _: pair.model.layers[8].weight.detach().numpy().sum(),
}


@pytest.mark.parametrize("budget", [TIGHT, ROOM, 24 * SLOT])
@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_in_the_middle_of_a_backward_changes_no_bit(look: str, budget: int, whole: MakePair) -> None:
    pair = whole(Looks, device_memory=budget)
    pair.train(2)
    for number in range(2, 5):
        pair.model.look = (lambda: LOOKS[look](pair, None)) if number != 3 else None
        pair.same(train_step, number)
    pair.model.look = None
    pair.train(2, first=5)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)


class Keeps(Looks):
    """Keeps a view of what a layer computes with."""

    kept: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = self.layers[8].weight.view(-1)
        if self.kept is not None:
            self.kept.append(view)
        return super().forward(x)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("build", [Keeps, Looks])
def test_a_copy_that_is_held_while_its_gradient_arrives_shows_the_update(
    build: type[Looks], kind: str, whole: MakePair
) -> None:
    """What computes in fp32 sees copies of 16-bit weights; one that is held is the one that the next use sees."""

    def act(pair: Pair) -> torch.Tensor:
        held: list[torch.Tensor] = []
        losses = [train(pair.model, pair.optimizer, 2)]
        if build is Keeps:
            pair.model.kept = held
        else:
            pair.model.look = torch.no_grad()(lambda: held.append(pair.model.layers[8].weight.view(-1)))
        losses.append(train(pair.model, pair.optimizer, 1, first=2))
        pair.model.look = pair.model.kept = None
        with torch.no_grad():
            assert torch.equal(held[0].clone(), pair.model.layers[8].weight.reshape(-1).clone())
        losses.append(train(pair.model, pair.optimizer, 1, first=3))
        held.clear()
        return torch.cat([*losses, train(pair.model, pair.optimizer, 2, first=4)])

    alike(whole, act, build, kind=kind, choices=(None, ON_DEVICE), with_options={"compute": "fp32"})


@pytest.mark.parametrize("chunk", range(LAYERS))
@pytest.mark.parametrize("at", [4, 6, 8, 10])
@pytest.mark.parametrize("budget", [ROOM, 10 * SLOT])
def test_a_plan_that_is_left_because_a_unit_is_held_loses_no_gradient(
    chunk: int, at: int, budget: int, whole: MakePair
) -> None:
    """Also at the very moment at which a gradient goes into its chunk."""
    pair = whole(Looks, device_memory=budget)
    pair.train(2)
    held: list[torch.Tensor] = []
    unit, store = PlaneRef(chunk, WEIGHT), store_of(pair.session)

    def hold() -> None:
        state = store.state
        if not held and state.is_newest(unit, state.compute) and not state.updates_of(unit):
            held.append(store.leases.take(unit))

    pair.plain.at = pair.model.at = at
    pair.model.look = hold
    pair.train(1, first=2)
    pair.model.look = None
    held.clear()
    pair.train_same(2, first=3)


def test_a_parameter_that_leaves_its_group_is_updated_no_more(whole: MakePair) -> None:
    pair = whole()
    pair.train(2)
    for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.model, pair.original)):
        gone = model[4].weight
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if p is not gone]
    before = pair.session.state_dict()["4.weight"].clone()
    pair.each(backward, 2)
    assert torch.equal(pair.model[4].weight.grad.clone(), pair.plain[4].weight.grad), "nobody else has used it"
    pair.step()
    assert torch.equal(before, pair.session.state_dict()["4.weight"])
    expect_bits(dict(pair.plain.state_dict()), dict(pair.session.state_dict()))


# errors


@pytest.mark.usefixtures("disarmed")
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize(
    ("build", "updated", "not_yet"),
    [(Fragile, r"layers\.10\.weight", "layers.0.weight"), (breaks, r"second\.weight", "first.weight")],
    ids=["between chunks", "within a chunk"],
)
def test_a_backward_that_raises_asks_for_a_checkpoint_and_has_nothing_half_done(
    build: type[nn.Module], updated: str, not_yet: str, look: bool, whole: MakePair, tmp_path: Any
) -> None:
    """Between two chunks, or while a chunk waits for its last gradient."""
    found = []
    for choice in (APART, None):
        pair = whole(build, choice=choice)
        pair.train(2)
        pair.session.save_checkpoint(tmp_path / str(choice))
        trip_in_backward(pair.model, None)
        if choice is None and build is breaks:
            assert pair.session._parts.executor.pending, "the second layer's gradients wait for the first's"
        for call in (
            lambda: pair.model(batch()),
            lambda: pair.optimizer.step(),
            lambda: pair.session.save_checkpoint(tmp_path / "no"),
        ):
            with pytest.raises(StateError, match=rf"{updated}.*load_checkpoint") as refusal:
                call()
            assert not_yet not in str(refusal.value)
        if look:
            found.append(values(pair.session))
        pair.session.load_checkpoint(tmp_path / str(choice))
        pair.train_same(3, first=2)
        assert not open_gradients(pair)
    if look:
        expect_bits(*found)  # every gradient that has come is used, and no other


def test_what_waits_is_used_before_the_first_moment_that_the_plan_did_not_have(whole: MakePair) -> None:
    pair = whole(breaks)
    pair.train(2)
    seen = []

    def look(gradient: torch.Tensor) -> None:
        seen.append(pair.session._parts.executor.pending)
        pair.model.rest[4].weight.sum()
        seen.append(pair.session._parts.executor.pending)

    handle = pair.model.first.register_forward_hook(lambda module, args, out: out.register_hook(look) and None)
    want, got = pair.each(train_step, 2)
    handle.remove()
    assert torch.equal(want, got)
    assert seen[0] is not None, "gradients of the second layer wait for those of the first"
    assert seen[1] is None
    pair.train_same(2, first=3)


@pytest.mark.parametrize("keep", [False, True], ids=["of another loss", "of a graph that is kept"])
def test_a_second_backward_before_the_step_is_refused(keep: bool, whole: MakePair) -> None:
    pair = whole()
    pair.train(1)
    train_step(pair.plain, pair.plain_optimizer, 1)
    loss = loss_of(pair.model, 1)
    loss.backward(retain_graph=keep)
    loss = loss if keep else loss_of(pair.model, 2)
    with pytest.raises(StateError, match=r"optimizer\.step\(\) after each backward|modified by an inplace operation"):
        loss.backward()
    del loss
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.train_same(2, first=3)


@pytest.mark.parametrize("look", ["nothing", "close", *LOOKS_BETWEEN])
def test_whoever_looks_between_backward_and_step_finds_the_model_updated(
    look: str, whole: MakePair, tmp_path: Any
) -> None:
    pair = whole()
    pair.train(2)
    pair.each(backward, 2)
    pair.plain_optimizer.step()
    if look == "close":
        pair.close()
        return
    if look != "nothing":
        LOOKS_BETWEEN[look](pair, tmp_path)
        expect_bits(dict(pair.plain.state_dict()), dict(pair.session.state_dict()))
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.plain_optimizer.zero_grad()
    pair.train_same(2, first=3)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("after", range(0, 24, 4))
def test_a_transfer_that_fails_in_the_backward_leaves_no_update_half_done(
    after: int, call: str, whole: MakePair, faulty: FaultyIO, tmp_path: Any
) -> None:
    pair = whole(device="cpu", host_memory=ROOM + SLOT, disk=tmp_path / "disk")
    pair.train(3)
    pair.session.save_checkpoint(tmp_path / "saved")
    loss = loss_of(pair.model, 3)
    arm(faulty, call, 5, after=after)
    try:
        loss.backward()
    except DeviceError:
        faulty.faults.clear()
        with pytest.raises(StateError, match="load_checkpoint"):
            pair.model(batch())
        pair.session.load_checkpoint(tmp_path / "saved")
    else:
        faulty.faults.clear()
        pair.optimizer.step()
        pair.session.load_checkpoint(tmp_path / "saved")
    del loss
    pair.train_same(2, first=3)


def test_an_update_that_is_under_way_ends_whole_when_the_user_interrupts(
    whole: MakePair, interrupt: Callable[[Pair], Any], tmp_path: Any
) -> None:
    pair = whole(device="cpu", host_memory=ROOM + SLOT, disk=tmp_path / "disk")
    pair.train(2)
    pair.session.save_checkpoint(tmp_path / "saved")
    before = everything(pair.session)
    with interrupt(pair), pytest.raises(KeyboardInterrupt):
        backward(pair.model, number=2)
    assert not store_of(pair.session).state.updates
    with pytest.raises(StateError, match=r"10\.weight.*load_checkpoint"):
        pair.model(batch())
    found = values(pair.session)
    pair.session.load_checkpoint(tmp_path / "saved")
    expect_bits(before, everything(pair.session))
    pair.train_same(1, first=2)
    want = pair.session.state_dict()
    assert torch.equal(found["10.weight"], want["10.weight"]), "it has been updated, wholly"
    assert torch.equal(found["10.bias"], want["10.bias"])
    assert torch.equal(found["0.weight"], before["0.weight"]), "and what had not come was not"


@pytest.mark.parametrize("choice", [None, ON_DEVICE], ids=["as planned", "on the device"])
def test_a_kernel_that_raises_leaves_weights_of_no_one_step_which_is_said(
    choice: UpdateChoice | None, whole: MakePair, failing_update: Callable[..., Any], tmp_path: Any
) -> None:
    pair = whole(choice=choice)
    pair.train(2)
    pair.session.save_checkpoint(tmp_path)
    with failing_update(pair, 2), pytest.raises(MemoryError):
        backward(pair.model, number=2)
    for _ in range(2):
        with pytest.raises(StateError, match="load_checkpoint"):
            pair.model(batch())
    pair.session.load_checkpoint(tmp_path)
    pair.train_same(2, first=2)
    assert not open_gradients(pair)


def between() -> nn.Module:
    """The gradient of one chunk has to wait, and comes between those of another, which is updated whole."""

    def run(model: Any, x: torch.Tensor) -> Any:
        x = model.first(x)
        with torch.no_grad():
            model.between(x)
        x = model.between(x)
        if model.looks:
            x.register_hook(lambda _: [model.first.bias.detach().sum()].clear())
        return model.last(x)

    torch.manual_seed(0)
    ends = {"first": nn.Linear(WIDTH, 24), "last": nn.Linear(24, WIDTH)}
    return Composed(run, **ends, between=nn.Linear(24, 24), looks=False)


def step_for_inputs(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor | None:
    """A step, and the gradient of its inputs: whoever asks for that is measured."""
    x = batch(number).requires_grad_()
    finish(model(x).square().mean(), optimizer)
    return x.grad


def on_the_host(whole: MakePair) -> Pair:
    pair = whole(between, device="cpu", device_memory=None)
    assert [part.chunk for name in ("first.bias", "last.bias") for part in pair.session.layout.parts(name)] == [0, 0]
    return pair


def test_a_gradient_that_waits_as_planned_between_those_of_a_chunk_leaves_no_plan(whole: MakePair) -> None:
    pair = on_the_host(whole)
    pair.train(3, by=step_for_inputs)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)
    stats = pair.session.stats()
    assert (stats.planned_steps, stats.reason) == (3, "")
    assert updated(pair) == [0, 1] * 3


def test_a_plan_that_is_left_before_a_gradient_that_waits_teaches_nothing_of_chunks_updated_whole(
    whole: MakePair,
) -> None:
    pair = on_the_host(whole)
    pair.plain.looks = pair.model.looks = True
    pair.train(4, by=step_for_inputs)
    pair.plain.looks = pair.model.looks = False
    pair.train(4, first=4, by=step_for_inputs)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)
    assert pair.session.stats().reactive_steps > 0
