"""Forwards that change weights in place, as `nn.Embedding(max_norm=)` does: the bits of plain PyTorch, at the smallest budget that is accepted."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar import DeviceError, StateError
from patrickstar.core.planes import REST, WEIGHT
from patrickstar.core.trace import Moment, Phase, Trace
from tests.composed import Composed
from tests.faults import FaultyIO
from tests.session import changes
from tests.session.builders import (
    CHUNK,
    EMULATED,
    MACHINES,
    ROOMY,
    SLOT,
    MakePair,
    Pair,
    adamw,
    backward,
    batch,
    expect_bits,
    in_the_smallest,
    mlp,
    values,
)
from tests.session.masters import KINDS, in_kind, manage
from tests.session.script import Script
from tests.session.test_disk_tier import arm
from tests.session.test_simulation import expect_executed_as_simulated, expect_foreseen, watched

WORDS = 96
"""Rows of the table, which is a run of two chunks."""


def nothing() -> None:
    pass


MakeScript = Callable[..., Script]


class Changing(nn.Module):
    """Looks words up, and sends them through layers; on the way its own weights are changed.

    Attributes:
        told: is called after each change, which is when masters that are kept by hand take it over.
    """

    def __init__(self, change: str | Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind = nn.EmbeddingBag if change == "bag" else nn.Embedding
        self.words = kind(WORDS, 32, max_norm=1.5 if change in ("embedding", "bag") else None)
        self.layers = mlp()
        self.change = CHANGES[change] if isinstance(change, str) else change
        self.told: Callable[[], None] = nothing

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, :4].float().abs() * 40).long() % WORDS
        return self.change(self, x, ids)

    def look_up(self, ids: Tensor) -> Tensor:
        found: Tensor = self.words(ids)
        return found if found.ndim == 2 else found.mean(1)


def by_module(model: Changing, x: Tensor, ids: Tensor) -> Tensor:
    words = model.look_up(ids)
    model.told()
    return model.layers(words + x)


def by_function(model: Changing, x: Tensor, ids: Tensor) -> Tensor:
    words = F.embedding(ids, model.words.weight, max_norm=1.5, norm_type=1.0).mean(1)
    model.told()
    return model.layers(words + x)


def in_place(change: Callable[[Tensor], object]) -> Callable[..., Tensor]:
    """The table and a layer in the middle are changed before they are used."""

    def run(model: Changing, x: Tensor, ids: Tensor) -> Tensor:
        for weight in (model.words.weight, model.layers[6].weight):
            change(weight)
            model.told()
        return model.layers(model.look_up(ids) + x)

    return run


def by_view(model: Changing, x: Tensor, ids: Tensor) -> Tensor:
    """A view that was taken before other weights were used is written, with no use of the parameter itself."""
    with torch.no_grad():
        view = model.layers[6].weight.view(-1)
    hidden = model.layers[:4](model.look_up(ids) + x)
    with torch.no_grad():
        view.mul_(0.9)
    model.told()
    del view
    return model.layers[4:](hidden)


CHANGES: Mapping[str, Callable[..., Tensor]] = {
    "embedding": by_module,
    "bag": by_module,
    "functional": by_function,
    "view": by_view,
    **{name: in_place(change) for name, change in changes.CHANGES.items()},
}


def smallest(begin: Callable[..., Any], machine: Mapping[str, Any]) -> Any:
    """What `begin` gives with the smallest budget of the tier that computes for which it raises no BudgetError."""
    tier = "device_memory" if "device_memory" in machine else "host_memory"
    return in_the_smallest(lambda nbytes: begin(**{**machine, tier: nbytes}))[0]


def expect_planned(session: Any, steps: int) -> None:
    stats = session.stats()
    assert (stats.planned_steps, stats.reactive_steps) == (steps, 0), stats.reason
    assert sum(stats.moved.values()), "nothing moved, which shows nothing"


@pytest.fixture
def changing(make_script: MakeScript) -> MakeScript:
    """Makes scripts of models that change weights in their forward, of which masters that are kept by hand are told."""

    def make(*args: Any, **keywords: Any) -> Script:
        script = make_script(*args, **keywords)
        script.plain.model.told = script.plain.twin.carry
        return script

    return make


def cases() -> Iterator[Any]:
    """In those that are no campaigns every part is in another."""
    for change, kind, step, tiers in product(CHANGES, ("fp32", *KINDS), ("deferred", "in_backward"), MACHINES):
        if kind == "fp32":
            always = change in ("embedding", "view") or (step, tiers) == ("deferred", "cpu+disk")
            always |= (change, step) == ("clamp", "in_backward")
        elif step == "deferred":
            always = change == "embedding" or (tiers == "emulated" and (kind == "bf16" or change in ("clamp", "view")))
        elif kind.startswith("bf16") and change in ("embedding", "clamp") and tiers == "emulated":
            always = True
        else:
            continue
        marks = () if always else pytest.mark.campaign
        yield pytest.param(change, kind, step, tiers, marks=marks, id="-".join((change, kind, step, tiers)))


@pytest.fixture
def trained(changing: MakeScript) -> MakeScript:
    """Makes one that trains some steps with the smallest budget of the tier that computes for which no BudgetError is raised."""

    def train(
        kind: str, build: Callable[[], Any], *, steps: int = 4, machine: Mapping[str, Any] = EMULATED, **keywords: Any
    ) -> Script:
        def begin(**memory: Any) -> Script:
            script = changing(kind, build, **keywords, **memory)
            script.run("train")
            return script

        script: Script = smallest(begin, machine)
        script.run(f"train({steps - 1}) read")
        return script

    return train


@pytest.mark.parametrize(("change", "kind", "step", "tiers"), list(cases()))
def test_a_weight_that_the_forward_changes_has_the_bits_of_plain_pytorch(
    trained: MakeScript, tmp_path: Path, change: str, kind: str, step: str, tiers: str
) -> None:
    """Changed elements are their own masters, all others keep theirs; an evaluation changes them too."""
    script = trained(kind, partial(Changing, change), steps=3, step=step, machine=MACHINES[tiers](tmp_path / "disk"))
    script.run("evaluate train read")
    if change != "bag":  # what it leaves for backward takes 8 bytes more than on fake tensors
        expect_planned(script.session, 4)


# plans


class WithLoss(Changing):
    """A model that computes its loss itself, so that a forecast sees all of a step."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().square().mean()


@pytest.mark.parametrize("kind", ["fp32", *KINDS])
@pytest.mark.parametrize("change", ["embedding", "clamp", "view"])
def test_what_the_forward_changes_is_foreseen_and_planned(change: str, kind: str) -> None:
    """A trial run finds every change, and every byte that it takes; the plan keeps all nine rules."""
    model = WithLoss(change)
    session: Any = patrickstar.manage(model, adamw(model), **EMULATED, **in_kind(kind, scale=2.0, chunk_size=CHUNK))
    with session, watched(session) as stretches:
        for number in range(2):
            loss = model(batch(number))
            session.scaler.scale(loss).backward()
            del loss  # a trial run has it until its backward is over
            session.scaler.step(session.optimizer)
            session.scaler.update()
            session.optimizer.zero_grad()
        expect_planned(session, 2)
        # What is made before the first use is part of its moment in a trace alone; a lookup makes more.
        expect_executed_as_simulated(session, stretches, bytes_are_foreseen=change == "embedding")
        (known,) = session._parts.stretches.known.kinds.values()
        expect_foreseen(known.offline, known.measured, exactly=True, at_most=True)
        writes = [
            moment for moment in session.trace.moments if moment.phase is Phase.FORWARD and writes_weights(moment)
        ]
        assert writes
        assert not any(map(writes_weights, trace_of_forward(mlp(), kind).moments)), "of a forward that changes nothing"


def writes_weights(moment: Moment) -> bool:
    return any(touch.writes and touch.ref.plane in (WEIGHT, REST) for touch in moment.touches)


def trace_of_forward(model: nn.Module, kind: str) -> Trace:
    session: Any = patrickstar.manage(model, adamw(model), **EMULATED, **in_kind(kind, scale=2.0, chunk_size=CHUNK))
    with session:
        model(batch()).float().square().mean().backward()
        return session.trace


class Sometimes(Changing):
    """Shortens rows in every other forward, as no signature of its inputs can tell: it uses the same weights in the same order."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.words.max_norm = 1.5 if self.forwards % 2 else None
        return super().forward(x)


@pytest.mark.parametrize("first", [0, 1], ids=["foreseen and not done", "done and not foreseen"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16-fp32"])
def test_a_change_that_depends_on_more_than_shapes(trained: MakeScript, kind: str, first: int) -> None:
    """Where a forward does not do as its trace, the rest of the step is decided on the spot."""

    def build() -> Sometimes:
        model = Sometimes("embedding")
        model.forwards = first
        return model

    stats = trained(kind, build, steps=6).session.stats()
    assert stats.reactive_steps >= 2
    assert sum(stats.moved.values())


def asking(model: Changing, x: Tensor, ids: Tensor) -> Tensor:
    """Asks for a value before it changes a weight: a trial run has none."""
    with torch.no_grad():
        if float(model.words.weight.abs().max()) > 0.5:
            model.words.weight.clamp_(-0.5, 0.5)
            model.told()
    return model.layers(model.look_up(ids) + x)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_a_forward_that_cannot_be_traced_is_measured_with_its_changes(changing: MakeScript, kind: str) -> None:
    script = changing(kind, partial(Changing, asking), device="emulated", device_memory=9 * SLOT)
    script.run("train(6) read")
    stats = script.session.stats()
    assert stats.planned_steps >= 2, stats.reason
    assert stats.reactive_steps >= 1
    (known,) = script.session._parts.stretches.known.kinds.values()
    assert any(map(writes_weights, known.measured.moments[:4]))


# recomputation


def checkpointed(reentrant: bool) -> Changing:
    """The middle layers, of which one shrinks at each run, are computed again in backward."""

    def block(model: Changing, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.layers[4].weight.mul_(0.9)
        model.told()
        return model.layers[2:8](x)

    def run(model: Changing, x: Tensor, ids: Tensor) -> Tensor:
        hidden = model.layers[:2](model.look_up(ids) + x)
        return model.layers[8:](checkpoint(block, model, hidden, use_reentrant=reentrant))

    return Changing(run)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", ["fp32", *KINDS])
def test_a_block_that_is_computed_again_changes_its_weights_again(
    trained: MakeScript, kind: str, reentrant: bool
) -> None:
    """And its backward reads what that has left, as in PyTorch."""
    expect_planned(trained(kind, partial(checkpointed, reentrant)).session, 4)


def test_a_weight_changed_by_hand_before_a_checkpointed_block_is_computed_again_is_an_error(
    make_pair: MakePair,
) -> None:
    pair = make_pair(partial(checkpointed, False), precision="fp32", **ROOMY)
    loss = pair.model(batch()).square().mean()
    changes.clamp(pair.model.layers[6].weight)
    with pytest.raises(StateError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_that_is_changed_after_it_was_saved_is_an_error_as_in_pytorch(make_pair: MakePair) -> None:
    def twice(model: Changing, x: Tensor, _: Tensor) -> Tensor:
        hidden = model.layers(x)
        changes.clamp(model.layers[6].weight)
        return model.layers(hidden)

    pair = make_pair(partial(Changing, twice), precision="fp32", **ROOMY)
    for model in (pair.plain, pair.model):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(model)


# tiles and tables


@pytest.mark.parametrize("kind", ["fp32", *KINDS])
@pytest.mark.parametrize("change", ["embedding", "by_index"])
def test_tables_in_tiles_that_the_forward_changes(trained: MakeScript, change: str, kind: str) -> None:
    """The table, which alone has more rows than a tile, is put together as a whole to be changed."""
    session = trained(kind, partial(Changing, change), given={"tile_rows": 40}).session
    assert session.layout.slices["words.weight"].tiles
    assert session.stats().planned_steps >= 3, session.stats().reason


# operations of whose names nothing tells that they write


def averaging(model: Changing, x: Tensor, ids: Tensor) -> Tensor:
    """A parameter is what batch norm averages into, which torch does not count as a change."""
    hidden = model.layers[:6](model.look_up(ids) + x)
    with torch.no_grad():
        F.batch_norm(hidden, model.layers[6].bias, torch.ones(32, dtype=x.dtype), training=True)
    model.told()
    return model.layers[6:](hidden)


@pytest.mark.parametrize("kind", ["fp32", *KINDS])
def test_a_parameter_that_batch_norm_averages_into(trained: MakeScript, kind: str) -> None:
    expect_planned(trained(kind, partial(Changing, averaging)).session, 4)


def test_a_change_that_could_not_be_carried_into_a_master_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here by an operation of which it is forgotten that it writes, as it would be of one that torch adds one day."""
    monkeypatch.setattr("patrickstar.parameters.functions._RENORMALISE", ())
    model = Changing("embedding")
    before = values(model)
    with manage(model, "bf16", **ROOMY) as session:
        with pytest.raises(StateError, match=r"embedding\(\) changed words\.weight in place") as refusal:
            model(batch().bfloat16())
        assert 'Options(compute="fp32")' in str(refusal.value)
        expect_bits(before, dict(session.state_dict()))
    with manage(model, "bf16-fp32", **ROOMY):
        model(batch())


@pytest.fixture(scope="module")
def shrink() -> Any:
    """An operation of the user's own that says what it writes."""

    @torch.library.custom_op("patrickstar_tests::shrink", mutates_args=("weight",))
    def shrink(weight: Tensor, factor: float) -> None:
        weight.mul_(factor)

    return shrink


@pytest.mark.parametrize("kind", ["fp32", *KINDS])
def test_an_operation_that_declares_what_it_writes_is_known(
    trained: MakeScript, kind: str, shrink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_shrink = in_place(torch.no_grad()(lambda weight: shrink(weight, 0.9)))
    monkeypatch.setitem(CHANGES, "own", with_shrink)
    expect_planned(trained(kind, partial(Changing, "own")).session, 4)


class Encoder(nn.TransformerEncoderLayer):
    """In evaluation torch computes it in one go, for which its parameters are ordinary ones."""

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            self.linear1.weight.mul_(0.9)
        return super().forward(src, *args, **kwargs)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Encoder(32, 2, 32, dropout=0.0, batch_first=True) for _ in range(3))).eval()


def evaluate(model: nn.Module, _: Any, number: int) -> Tensor:
    with torch.no_grad():
        return model(batch(number, rows=6)[None])


def test_a_module_that_is_one_use_may_change_its_weights(make_pair: MakePair) -> None:
    def begin(**machine: Any) -> Pair:
        pair = make_pair(encoder, precision="fp32", **machine)
        pair.same(evaluate, 0)
        return pair

    pair = smallest(begin, EMULATED)
    pair.train(3, first=1, by=evaluate)
    expect_bits(pair.plain.state_dict(), dict(pair.session.state_dict()))
    assert pair.session.stats().moved["H>D"] > 0


def test_a_module_that_is_one_use_may_not_change_split_masters() -> None:
    model = encoder()
    with manage(model, "bf16", **ROOMY), torch.no_grad():
        with pytest.raises(StateError, match=r"Encoder\(\) changed 0\.linear1\.weight in place"):
            model(batch(rows=6)[None].bfloat16())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("root", [False, True])
def test_an_encoder_is_computed_in_one_go_where_plain_pytorch_does_that(
    root: bool, masked: bool, autocast: bool, make_pair: MakePair
) -> None:
    """Which has other bits under autocast, and where tokens are masked."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
        around = Composed(lambda m, x, **given: m.last(m.first(x, **given)), first=layer, last=nn.Linear(32, 32))
        return (layer if root else around).eval()

    def evaluate(model: nn.Module, _: Any, number: int) -> Tensor:
        mask = torch.tensor([[False] * 5 + [True]]) if masked else None
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(batch(number, rows=6)[None], src_key_padding_mask=mask)  # type: ignore[no-any-return]

    pair = make_pair(build, precision="fp32", device="cpu")
    pair.train(2, by=evaluate)
    copied = copy.deepcopy(pair.model)
    pair.session.close()
    kinds = {type(module) for model in (copied, pair.model) for module in model.modules()}
    assert kinds == {type(module) for module in pair.plain.modules()}
    pair.same(evaluate, 4)


# failures


def test_a_change_by_hand_whose_master_cannot_be_reached_is_no_change(
    make_script: MakeScript, faulty: FaultyIO, on_disk: dict[str, Any]
) -> None:
    """A disk that fails at any read that the change asks for: of the weight, or of what completes its master."""
    script = make_script("bf16", **on_disk)
    script.run("train(2) read")
    weight, failed = script.model[0].weight, 0
    while True:
        with torch.no_grad():
            script.model(batch(rows=6).bfloat16())  # takes the place of what the last change has read
        arm(faulty, "preadv", errno.EIO, after=failed)
        try:
            with torch.no_grad():
                weight.clamp_(-0.01, 0.01)
        except DeviceError:
            failed += 1
        else:
            break
        faulty.faults.clear()
        script.run("read")
    faulty.faults.clear()
    assert failed


@pytest.mark.parametrize(
    ("kind", "apart"),
    [*(pytest.param(kind, 1, marks=pytest.mark.campaign) for kind in ("fp32", "bf16", "bf16-fp32")), ("bf16-fp32", 5)],
)
def test_a_change_whose_master_cannot_be_reached_is_no_change(
    changing: MakeScript, faulty: FaultyIO, on_disk: dict[str, Any], kind: str, apart: int
) -> None:
    """A disk that fails at any transfer of a forward and backward: the same step can be done again. `apart`: transfers between two tries."""
    failed = 0
    while True:
        script = changing(kind, partial(Changing, "clamp"), **on_disk)
        script.run("train(2)")
        arm(faulty, "preadv", errno.EIO, after=apart * failed)
        try:
            script.model(batch(2).to(script.plain.compute)).square().mean().backward()
        except DeviceError:
            failed += 1
        else:
            break
        faulty.faults.clear()
        script.session.optimizer.zero_grad()
        script.run("train read")
        script.session.close()
    faulty.faults.clear()
    assert failed >= 3
