"""What autograd keeps: each trap gives wrong numbers without an error unless the binding deals with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from patrickstar.torch_private import top_saved_tensors_hooks
from tests.composed import Composed
from tests.parameters.toy import NoSlot, ToyOwner, compare

X = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))


class Tower(nn.Module):
    """Four linear layers of a chunk each, run through `inside`."""

    def __init__(self, inside=lambda run, x: run(x)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.inside = inside
        self.forwards = 0

    def run(self, x):
        self.forwards += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x):
        return self.inside(self.run, x).square().mean()


def on_cpu(run, x):
    with torch.autograd.graph.save_on_cpu():
        return run(x)


def checkpointed_on_cpu(run, x):
    with torch.autograd.graph.save_on_cpu():
        return checkpoint(run, x, use_reentrant=False)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_gradients_are_those_of_the_weights_that_the_forward_used(slots):
    compare(Tower, lambda model: model(X.clone().requires_grad_()), slots=slots, chunk_numel=2048)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_checkpointed_block_may_span_more_chunks_than_there_are_slots(reentrant, slots):
    build = lambda: Tower(lambda run, x: checkpoint(run, x, use_reentrant=reentrant))
    owner = compare(build, lambda model: model(X.clone().requires_grad_()), slots=slots, chunk_numel=2048)
    assert not owner.binding.access.held


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_users_checkpointing_still_recomputes(reentrant):
    model = Tower(lambda run, x: checkpoint(run, x, use_reentrant=reentrant))
    ToyOwner(model, slots=2, chunk_numel=2048)
    model(X.clone().requires_grad_()).backward()
    assert model.forwards == 2


@pytest.mark.parametrize("inside", [on_cpu, checkpointed_on_cpu])
def test_hooks_of_the_users_get_what_is_theirs(inside):
    compare(lambda: Tower(inside), lambda model: model(X.clone().requires_grad_()), slots=2, chunk_numel=2048)


def test_hooks_of_the_users_are_called_for_weights_too():
    """As in plain PyTorch: with the same values, and what they give back is what backward reads. A weight that they give back holds no slot."""

    def gradients(*, slots, pack):
        seen = []

        def inside(run, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.tolist()) or pack(t), lambda t: t):
                return run(x)

        torch.manual_seed(0)
        model = Tower(inside)
        if slots:
            ToyOwner(model, slots=slots, chunk_numel=2048)
        x = X.clone().requires_grad_()
        model(x).backward()
        return seen, x.grad.tolist()

    for pack in (lambda t: t, lambda t: t.bfloat16().float(), lambda t: t.detach()):
        assert gradients(slots=1, pack=pack) == gradients(slots=0, pack=pack)


def test_a_weight_changed_between_forward_and_backward_raises_as_in_pytorch():
    model = Tower()
    ToyOwner(model, slots=2, chunk_numel=2048)
    loss = model(X.clone().requires_grad_())
    with torch.no_grad():
        model.layers[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_changed_through_data_is_not_noticed_as_in_pytorch():
    owner = compare(Tower, run_and_change_through_data, slots=2, chunk_numel=2048, steps=1)
    assert owner.values("layers.2.weight").abs().max() == 0


def run_and_change_through_data(model):
    loss = model(X.clone().requires_grad_())
    model.layers[2].weight.data.mul_(0)
    return loss


def test_an_activation_changed_between_forward_and_backward_raises_as_in_pytorch():
    weight = nn.Linear(32, 32)
    ToyOwner(weight, slots=1, chunk_numel=2048)
    x = X.clone().requires_grad_() * 1
    y = weight(x).sum()
    x.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def three_linears():
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))


def test_a_view_that_outlives_its_moment_keeps_its_slot():
    def run(model, x):
        query = model.query.expand(2, 1024)[:, :32]
        return (model.layers(x) * query).sum()

    build = lambda: Composed(run, query=nn.Parameter(torch.randn(1, 1024)), layers=three_linears())
    compare(build, lambda model: model(X), slots=2, chunk_numel=2048)
    with pytest.raises(NoSlot):
        compare(build, lambda model: model(X), slots=1, chunk_numel=2048)


@pytest.mark.parametrize("for_its_input", [False, True])
def test_a_view_is_packed_when_an_operation_saves_it(for_its_input):
    """Held by the graph, the view would keep its slot until backward: with one slot, nothing else could be used."""

    def run(model, x):
        y = torch.nn.functional.linear(x, model.experts[2])
        return model.layers(x).sum() * y.sum()

    build = lambda: Composed(run, experts=nn.Parameter(torch.randn(4, 16, 32)), layers=three_linears())
    compare(build, lambda model: model(X.clone().requires_grad_(for_its_input)), slots=1, chunk_numel=2048)


def test_accumulators_that_fire_several_times_in_one_backward():
    def run(model, x):
        for _ in range(3):
            x = checkpoint(lambda x: torch.tanh(model.other(model.layer(x))), x, use_reentrant=True)
        return x.sum()

    build = lambda: Composed(run, layer=nn.Linear(32, 32), other=nn.Linear(32, 32))
    owner = compare(build, lambda model: model(X.clone().requires_grad_()), slots=1, chunk_numel=2048, steps=1)
    assert owner.firings["layer.weight"] == 3


def test_a_gradient_of_negative_zero_stays_negative():
    model = nn.Linear(32, 32, bias=False)
    owner = ToyOwner(model, slots=1, chunk_numel=2048)
    (model.weight * torch.tensor(-0.0)).sum().backward()
    assert torch.signbit(owner.gradients["weight"]).all()


def slope_of(model, x):
    """The gradient of what a model gives along its input, with a graph."""
    (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
    return slope


def penalty(model):
    return slope_of(model, X.clone().requires_grad_()).square().sum() * 1e3


@pytest.mark.parametrize("slots", [1, 2])
def test_a_graph_of_gradients_holds_no_weight(slots):
    compare(Tower, penalty, slots=slots, chunk_numel=2048)


def test_nor_does_a_graph_of_their_gradients():
    def loss_of(model):
        x = X.clone().requires_grad_()
        (curve,) = torch.autograd.grad(slope_of(model, x).square().sum() * 1e3, x, create_graph=True)
        return curve.square().sum() * 1e3

    compare(Tower, loss_of, slots=1, chunk_numel=2048)


def test_nor_does_one_of_blocks_that_are_computed_again():
    compare(lambda: Tower(lambda run, x: checkpoint(run, x, use_reentrant=False)), penalty, slots=1, chunk_numel=2048)


def test_convolutions_hold_none_either():
    def build():
        return nn.Sequential(*(part for _ in range(4) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())))

    image = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(2))

    def steep(model):
        return slope_of(lambda x: model(x).square().mean(), image.clone().requires_grad_()).square().sum() * 1e3

    compare(build, steep, slots=1, chunk_numel=640)


def test_hooks_of_the_users_around_a_backward_are_called_for_weights_too():
    def saved_in_backward(model):
        seen = []
        x = X.clone().requires_grad_()
        value = model(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.tolist()) or t, lambda t: t):
            torch.autograd.grad(value, x, create_graph=True)
        return seen

    model = Tower()
    everything = saved_in_backward(model)
    ToyOwner(model, slots=1, chunk_numel=2048)
    assert everything == saved_in_backward(model)


def test_a_backward_leaves_no_hook_behind_whether_it_fails_or_not():
    model = Tower()
    ToyOwner(model, slots=1, chunk_numel=2048)
    x = X.clone().requires_grad_()
    value = model(x)
    hooks = []
    x.register_hook(lambda _: hooks.append(top_saved_tensors_hooks()))  # in a node of its own, after those of weights
    torch.autograd.grad(value, x, create_graph=True)
    assert hooks == [None]
    assert top_saved_tensors_hooks() is None
    value = model(x)
    value.grad_fn.next_functions[0][0].register_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(value, x, create_graph=True)
    assert top_saved_tensors_hooks() is None


def test_where_hooks_are_forbidden_weights_are_held():
    def loss_of(model):
        x = X.clone().requires_grad_()
        value = model(x)
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return slope.square().sum() * 1e3

    compare(Tower, loss_of, slots=4, chunk_numel=2048, moves=False)
    with pytest.raises(NoSlot):
        compare(Tower, loss_of, slots=3, chunk_numel=2048)


@torch.library.custom_op("patrickstar_tests::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product whose backward, a function in Python, has hooks of its own around what it unpacks."""
    return x @ weight.t()


def product_backward(ctx, gradient):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        x, weight = ctx.saved_tensors
        assert top_saved_tensors_hooks()[0].__module__ == __name__
        along = gradient @ weight
    assert top_saved_tensors_hooks() is None
    return along, gradient.t() @ x


product.register_autograd(product_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def test_a_backward_in_python_finds_the_hooks_that_it_has_pushed():
    def run(model, x):
        for weight in model.weights:
            x = torch.tanh(product(x, weight))
        return x.square().mean()

    build = lambda: Composed(run, weights=nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(3)))
    compare(build, penalty, slots=3, chunk_numel=1024, moves=False)
    with pytest.raises(NoSlot):  # it holds weights
        compare(build, penalty, slots=2, chunk_numel=1024)


def test_an_exception_in_the_forward_leaves_no_lease():
    model = Tower()
    owner = ToyOwner(model, slots=1, chunk_numel=2048)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 31))
    assert not owner.binding.leases.held()
    assert not owner.binding.access.held
