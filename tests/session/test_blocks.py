"""While a block runs its parameters are ordinary ones: what PyTorch can do inside of a block it does under a budget, with the same bits."""

import copy
import pickle
import re
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from patrickstar import StateError
from tests.composed import Composed
from tests.sampling import only
from tests.session.blocks import MOVING, Block, Model, build, train_both
from tests.session.builders import WIDTH, batch, finish, is_ordinary, managed, options, seeded, step_with_loss

pytestmark = pytest.mark.blocks


class Seen(Block):
    """Notes what its parameters are while it runs."""

    seen: ClassVar = []

    def forward(self, x):
        self.seen.append([(type(p), p.detach().clone()) for p in self.parameters()])
        return super().forward(x)


def test_parameters_are_ordinary_while_a_block_runs_and_placeholders_in_between():
    Seen.seen.clear()
    model = build(Seen)
    with managed(model, **MOVING) as session:
        step_with_loss(model, session.optimizer)
        real = [entry for entry in Seen.seen if all(kind is nn.Parameter for kind, _ in entry)]
        assert len(real) == 6
        assert all(value.isfinite().all() for entry in real for _, value in entry)
        assert not any(type(parameter) is nn.Parameter for parameter in model.parameters())
        # What programs ask of a module that is watched (`if type(module) == nn.Linear`).
        assert [type(model.blocks[0]) == kind for kind in (Seen, Block)] == [True, False]  # noqa: E721
        assert {Seen: 1}[type(model.blocks[0])] == 1
        stats = session.stats()
        assert stats.binding.startswith("8 blocks, the rest by use: ")
        assert (stats.planned_steps, stats.reactive_steps) == (1, 0)
        assert stats.moved["H>D"]
        assert [moment.label for moment in session.trace.moments if moment.phase == "forward"] == [
            "first.weight",
            *(f"blocks.{number}.scale" for number in range(6)),
            "last.weight",
        ]
    assert type(model.blocks[0]) is Seen


class Waves(Block):
    """Its weight is used as complex numbers."""

    def forward(self, x):
        spectrum = torch.fft.rfft(self.up(x)) * torch.view_as_complex(self.down.weight.view(-1)[:66].view(33, 2)).conj()
        return x + torch.fft.irfft(spectrum, n=2 * WIDTH)[:, :WIDTH] * self.scale


class Ragged(Block):
    """Makes a jagged tensor of its input, whose operations switch the classes of parameters off."""

    def forward(self, x):
        ragged = torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)
        return super().forward(nn.functional.linear(ragged, self.up.weight).values()[:, :WIDTH])


class Checkpointed(Block):
    use_reentrant = False

    def inside(self, x):
        return self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x):
        return x + self.scale * checkpoint(self.inside, x, use_reentrant=self.use_reentrant)


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


def adapted(base):
    """A frozen linear, with an adapter beside it."""
    down, up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 2 * WIDTH, bias=False)
    return Composed(lambda m, x: m.base(x) + m.up(m.down(x)), base=base.requires_grad_(False), down=down, up=up)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


class Fused(torch.autograd.Function):
    """Keeps a weight outside of what autograd saves."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight, gradient.T @ gradient[:, :WIDTH]


class Keeping(Block):
    def forward(self, x):
        return x + self.scale * self.down(Fused.apply(x, self.up.weight))


class Clamped(Block):
    """Changes its weights in place."""

    def forward(self, x):
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Repointed(Block):
    """Gives a weight other memory."""

    def forward(self, x):
        self.scale.data = self.scale.data * 0.99
        return super().forward(x)


class Saved(Block):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


class Detached(Block):
    def forward(self, x):
        return x + nn.functional.linear(super().forward(x), self.up.weight.detach()[:WIDTH])


class Sampled(Block):
    """Transforms with `vmap` in its forward."""

    def forward(self, x):
        return x + torch.vmap(lambda row: self.scale * self.down(nn.functional.gelu(self.up(row))))(x)


class ReadsItsGradient(Block):
    """Reads its gradient, which is there where they add up."""

    def forward(self, x):
        had = self.scale.grad
        return super().forward(x) * (1.0 if had is None else 1.0 + had.sum().detach())


BLOCKS = {
    "views as complex": Waves,
    "jagged tensors": Ragged,
    "checkpointed inside": Checkpointed,
    "checkpointed inside, re-entrant": CheckpointedReentrant,
    "a function that keeps its weight": Keeping,
    "changes in place": Clamped,
    "saved on the cpu": Saved,
    "a detached weight": Detached,
    "vmap": Sampled,
    "parametrized": lambda: changed(lambda block: register_parametrization(block.up, "weight", Doubled())),
    "spectral norm": lambda: changed(lambda block: parametrizations.spectral_norm(block.up)),
    "weight norm": lambda: changed(lambda block: parametrizations.weight_norm(block.up)),
    "the old spectral norm": lambda: changed(lambda block: spectral_norm(block.up)),
    "the old weight norm": lambda: changed(lambda block: weight_norm(block.up)),
    "an adapter": lambda: changed(lambda block: setattr(block, "up", adapted(block.up))),
    "pruned": lambda: changed(lambda block: prune.l1_unstructured(block.up, "weight", 0.5)),
}


def changed(change):
    block = Block()
    change(block)
    return block


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("step", ["deferred", pytest.param("in_backward", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("kind", only([kind for kind in BLOCKS if "norm" not in kind], BLOCKS))
def test_what_torch_does_inside_of_a_block_has_the_same_bits(kind, step):
    stats = train_both(build(BLOCKS[kind]), build(BLOCKS[kind]), step=step)
    assert stats.binding.startswith("8 blocks, the rest by use: ")
    assert stats.moved["H>D"]


def test_a_model_whose_blocks_do_what_only_uses_show_is_bound_by_use():
    stats = train_both(build(Repointed), build(Repointed))
    assert stats.binding.startswith("by use: ")


@pytest.mark.parametrize("step", ["deferred", "in_backward"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_that_are_computed_again_have_the_same_bits(use_reentrant, step):
    class Outside(Model):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return self.last(x).square().mean()

    stats = train_both(build(model=Outside), build(model=Outside), step=step)
    assert (stats.planned_steps, stats.reactive_steps) == (4, 0)


def test_gradients_add_up_and_can_be_read_in_a_block(make_pair):
    def one_more(model, _, number):
        loss = model(batch(number))
        loss.backward()
        return loss.detach()

    pair = make_pair(lambda: build(ReadsItsGradient), **MOVING)
    for _ in range(2):
        pair.train(3, by=one_more)
        pair.step()
    pair.close()


LARGER = {"options": options(chunk_size=8192)}
"""Chunks that have room for a block and more."""


def test_gradients_that_come_one_after_the_other_into_a_chunk_in_a_block_are_one_moment():
    model = build()
    with managed(model, **{**MOVING, **LARGER}) as session:
        step_with_loss(model, session.optimizer)
        touches = [touch for moment in session.trace.moments for touch in moment.touches]
        arrivals = sum(touch.writes and touch.ref.plane == "grad" for touch in touches)
        assert arrivals < 24  # of 34 gradients
        assert (session.stats().planned_steps, session.stats().reactive_steps) == (1, 0)
    assert train_both(build(), build(), **LARGER).reactive_steps == 0


@pytest.mark.parametrize("what", ["read", "let go of"])
def test_gradients_that_are_used_between_two_of_a_block_have_the_same_bits(what):
    def use(model):
        for parameter in model.parameters():
            if what == "let go of":
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.add_(parameter.grad)

    plain, model = build(), build()
    for each in (plain, model):
        for parameter in each.blocks[3].parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, each=each: use(each))
    train_both(plain, model, **LARGER)


def test_layers_that_are_dropped_called_twice_or_shared_have_the_same_bits():
    class Odd(Model):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.blocks[4] = self.blocks[1]
            self.steps = 0

        def forward(self, x):
            x = self.first(x)
            for number, block in enumerate(self.blocks):
                if number != 2 or self.steps % 2:
                    x = block(x)
                if number == 3:
                    x = block(x)
            self.steps += 1
            return self.last(x).square().mean()

    train_both(build(model=Odd), build(model=Odd))


def test_operations_are_counted_once():
    counts = []
    for begin in (nullcontext, lambda: managed(model, **MOVING)):
        model = build()
        with begin(), FlopCounterMode(display=False) as counter:
            model(batch()).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_blocks_that_do_not_fit_are_bound_by_what_is_inside_of_them():
    def nested():
        return Composed(lambda model, x: model.parts(x), parts=nn.Sequential(*(Block() for _ in range(3))))

    bindings = []
    for memory in ("120KiB", "60KiB", "40KiB"):
        given = {"device": "emulated", "device_memory": memory, "options": options(chunk_size=1024)}
        stats = train_both(build(nested, layers=2), build(nested, layers=2), **given)
        bindings.append(stats.binding.partition(":")[0])
    assert bindings == [f"{blocks} blocks, the rest by use" for blocks in (4, 8, 14)]


def test_what_holds_more_than_fits_is_bound_by_use():
    def run(model, x):
        for weight in model.weights:
            x = torch.tanh(x @ weight)
        return x

    def raw():
        return Composed(run, weights=nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(12)))

    stats = train_both(build(raw, layers=2), build(raw, layers=2), device_memory="48KiB")
    assert stats.binding.startswith("2 blocks, the rest by use: ")  # the first and the last layer


@pytest.mark.parametrize(("step_mode", "kind"), [("deferred", "vmap"), ("in_backward", "a detached weight")])
def test_a_forecast_is_the_plan(step_mode, kind):
    from patrickstar.session.forecast import forecast

    class Loss(Model):
        def forward(self, x):
            return {"loss": super().forward(x)}

    model = build(BLOCKS[kind], Loss)
    machine = {**MOVING, "options": options(), "device_memory": "300KiB", "step": step_mode}
    found = forecast(model, {"x": batch()}, **machine)
    with managed(model, **machine) as session:
        for number in range(3):
            finish(model(x=batch(number))["loss"], session.optimizer)
        assert session.trace == found.traces[0]
        assert session.stats().peak["device"] <= found.peak["device"]


def profile(model):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        model(batch()).backward()
    computing = ("aten::addmm", "aten::mm", "aten::gelu", "aten::gelu_backward")
    return Counter(event.name for event in profiled.events() if event.name in computing)


def test_a_profile_has_the_operations_of_the_same_model_without_us(tmp_path):
    model = build()
    with managed(model, host_memory="1GiB", disk=tmp_path):  # a meter would call each once more
        assert profile(model) == profile(model) == profile(build())


def dual(model):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(batch(), torch.ones(4, WIDTH)))).tangent


COPIES = {
    "deepcopy": lambda m: copy.deepcopy(m)(batch()),
    "pickle": lambda m: pickle.loads(pickle.dumps(m))(batch()),
    "forward AD": dual,
    "DataParallel": lambda m: nn.DataParallel(m)(batch()),
}


@pytest.mark.parametrize("kind", COPIES)
def test_what_needs_the_whole_model_and_can_have_it_has_the_same_bits(kind, make_pair):
    pair = make_pair(build, **MOVING)
    for number in range(2):
        pair.same(step_with_loss, number)
        pair.same(lambda model, _: COPIES[kind](model))
    copied = copy.deepcopy(pair.model)
    assert type(copied.blocks[0]) is Block
    assert is_ordinary(copied)


REFUSED = {
    "grad": lambda m: torch.func.grad(lambda x: m(x))(batch()),
    "jvp": lambda m: torch.func.jvp(m, (batch(),), (batch(),)),
    "hessian": lambda m: torch.func.hessian(m)(batch()),
    "vmap": lambda m: torch.vmap(m)(batch()),
    "functional_call": lambda m: torch.func.functional_call(m, dict(build().named_parameters()), batch()),
    "export": lambda m: torch.export.export(m, (batch(),)),
    "jit.trace": lambda m: torch.jit.trace(m, batch()),
}


@pytest.mark.whole
@pytest.mark.parametrize("kind", REFUSED)
def test_what_transforms_or_traces_the_whole_model_is_refused_before_the_first_block(kind):
    model = build()
    with managed(model, **MOVING) as session:
        step_with_loss(model, session.optimizer)
        calls = [block.calls for block in model.blocks]
        with pytest.raises(StateError, match="in which all model states fit") as refused:
            REFUSED[kind](model)
        assert calls == [block.calls for block in model.blocks]
    memory = re.search(r"give a budget of ([\d.]+) KiB or more", str(refused.value))[1]
    with managed(model, **{**MOVING, "device_memory": f"{memory}KiB"}) as session:
        step_with_loss(model, session.optimizer)
        assert session.stats().binding == "whole"


def test_an_input_of_another_class_goes_through_blocks(make_pair):
    def rows():
        parts = {"norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 64), "down": nn.Linear(64, WIDTH)}
        return Composed(lambda m, x: x + m.down(nn.functional.gelu(m.up(m.norm(x)))), **parts)

    def step(model, optimizer, lengths):
        rows = torch.nested.nested_tensor([batch(rows=length) for length in lengths], layout=torch.jagged)
        return finish(model(rows).values().square().mean(), optimizer)

    pair = make_pair(
        seeded(lambda: nn.Sequential(*(rows() for _ in range(4)))), **{**MOVING, "device_memory": "160KiB"}
    )
    for lengths in [(3, 1), (2, 2), (1, 4)]:
        pair.same(step, lengths)
    assert pair.session.stats().moved["H>D"]
    pair.close()


def test_a_graph_that_is_let_go_of_is_freed():
    class Exponential(Block):
        def forward(self, x):
            return super().forward(x).exp().tanh()

    model = build(Exponential)
    with managed(model, **MOVING) as session:
        step_with_loss(model, session.optimizer)
        x = batch()
        for block in model.blocks:
            x = block(x)
        kept = weakref.ref(x.untyped_storage())
        del x
        assert kept() is None


def test_what_a_block_only_passes_on_does_not_begin_its_backward(make_pair):
    class Passing(Block):
        def forward(self, x, bias):
            return super().forward(x) + bias, bias

    class Biased(Model):
        def forward(self, x):
            x = self.first(x)
            bias = x.mean(0, keepdim=True)
            for block in self.blocks:
                x, bias = block(x, bias)
            return (self.last(x) * bias).square().mean()

    pair = make_pair(lambda: build(Passing, Biased), **MOVING)
    pair.train(2, by=step_with_loss)
    weights = [
        moment.label
        for moment in pair.session.trace.moments
        if moment.phase == "backward" and any(touch.ref.plane == "weight" for touch in moment.touches)
    ]
    assert weights[0] == "first.weight"  # whose chunk the last layer is in
    assert weights[1:] == [f"blocks.{number}.scale" for number in reversed(range(6))]


@dataclass
class Output:
    value: torch.Tensor
    aside: torch.Tensor | None = None


def test_a_block_whose_output_is_a_dataclass_is_open_in_its_backward():
    class Unseen(Fused):
        @staticmethod
        def backward(ctx, gradient):
            with torch._C.DisableTorchFunctionSubclass():
                return gradient @ ctx.weight, gradient.T @ gradient[:, :WIDTH]

    class Returns(Block):
        def forward(self, x):
            return Output(x + self.scale * self.down(Unseen.apply(x, self.up.weight)))

    class Reads(Model):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x).value
            return self.last(x).square().mean()

    train_both(build(Returns, Reads), build(Returns, Reads))


def test_blocks_whose_backward_uses_a_weight_after_its_gradient_are_bound_by_use():
    class Late(torch.autograd.Function):
        """Uses a weight in its backward that it was not given."""

        @staticmethod
        def forward(ctx, x, keeper):
            ctx.keeper = keeper
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient + ctx.keeper.scale.detach(), None

    class Keeper(Block):
        def forward(self, x):
            return super().forward(Late.apply(x, self))

    stats = train_both(build(Keeper), build(Keeper), step="in_backward")
    assert stats.binding.startswith("by use: ")


def test_blocks_whose_gradients_come_in_parts_are_bound_by_use():
    class InParts(Block):
        """The first tensor of each operation is frozen."""

        def __init__(self):
            super().__init__()
            for parameter in (self.scale, self.up.weight, self.down.weight):
                parameter.requires_grad_(False)

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(super().forward, x, use_reentrant=True)
            return x

    stats = train_both(build(InParts), build(InParts), step="in_backward")
    assert stats.binding.startswith("by use: ")
