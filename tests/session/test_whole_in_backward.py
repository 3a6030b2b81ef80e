"""Parameters that keep their bytes, with `step="in_backward"`: gradients are used as they come, and gone; nothing else is another than in PyTorch."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar import StateError
from patrickstar.session.forecast import forecast
from tests.composed import Composed
from tests.session.builders import adamw, assert_same, backward, batch, finish, loss_of, mlp, options, train_step
from tests.session.test_whole import ROOMY

pytestmark = pytest.mark.whole


@pytest.fixture
def make(make_pair):
    """Makes pairs that use gradients as they come."""
    return partial(make_pair, step="in_backward")


def use_gradients(model, optimizer):
    backward(model)
    optimizer.step()


def zero(_, optimizer):
    optimizer.zero_grad()


@pytest.mark.parametrize("machine", [{}, ROOMY], ids=["unbounded", "bounded"])
def test_a_gradient_is_there_for_hooks_of_users_and_gone_before_the_next_one_comes(machine, make):
    pair = make(**machine)
    last, there = pair.model[0].weight, []
    last.register_post_accumulate_grad_hook(
        lambda _: there.append([type(p.grad) is torch.Tensor for p in pair.model.parameters()])
    )

    def gradients(model, optimizer, _):
        seen = []
        handles = [
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())) for p in model.parameters()
        ]
        train_step(model, optimizer)
        for handle in handles:
            handle.remove()
        return seen

    pair.train(2, by=gradients)
    assert there == [[True] + [False] * 11] * 2
    assert pair.session.stats().binding == "whole"
    assert "grad" not in pair.session.stats().model_data


class Other(nn.Module):
    """Linears, one of which is used in one of many ways."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.way = way
        if way == "tied":
            self.layers[2].weight = self.layers[0].weight

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = WAYS[self.way](self.layers, layer, x) if number == 1 else layer(x)
            x = x.tanh()
        return x


class FromElsewhere(torch.autograd.Function):
    """Uses a weight again in its backward, which no graph shows."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x @ module.weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.module.weight.T, None


def by_chance(layers, layer, x):
    return layer(x) if torch.rand(()) < 2 else x


def by_value(layers, layer, x):
    return layer(x) if x.sum().item() < 1e9 else x


WAYS = {
    "once": lambda layers, layer, x: layer(x),
    "tied": lambda layers, layer, x: layer(x),
    "twice": lambda layers, layer, x: layer(layer(x)),
    "not at all": lambda layers, layer, x: x,
    "detached first": lambda layers, layer, x: layer(linear(x, layer.weight.detach())),
    "detached last": lambda layers, layer, x: linear(layer(x), layer.weight.detach()),
    "from elsewhere": lambda layers, layer, x: layer(FromElsewhere.apply(x, layer)),
    "checkpointed": lambda layers, layer, x: checkpoint(layer, x, use_reentrant=False),
    "checkpointed twice": lambda layers, layer, x: checkpoint(
        layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False
    ),
    "re-entrant": lambda layers, layer, x: checkpoint(layer, x, use_reentrant=True),
    "re-entrant twice": lambda layers, layer, x: checkpoint(
        layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True
    ),
    "by chance": by_chance,
    "by value": by_value,
}
WAITS = {
    "detached first": {"layers.1.weight"},
    "detached last": {"layers.1.weight"},
    "from elsewhere": {"layers.1.weight"},
    "re-entrant twice": {"layers.1.weight", "layers.1.bias"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_waits_for_the_end_of_the_backward_where_it_must_and_nowhere_else(way, make):
    pair, waited = make(lambda: Other(way)), set()

    def step(model, optimizer, _):
        x = batch().requires_grad_()
        if model is pair.model:  # the gradient of the input is the last that comes
            named = model.named_parameters
            x.register_hook(lambda _: waited.update(name for name, p in named() if type(p.grad) is torch.Tensor))
        torch.manual_seed(0)
        return [finish(model(x * 1).square().sum(), optimizer), x.grad]

    pair.train(3, by=step)
    everything = set(dict(pair.model.named_parameters())) if way.startswith("by") else set()
    assert waited == WAITS.get(way, everything)
    assert pair.session.stats().binding == "whole"


def changed(model, x):
    model.way = "from elsewhere"  # with which no trace was made
    return model(x * 1)


def before_the_model(model, x):
    return model(FromElsewhere.apply(x, model.layers[0]))


def in_a_hook(model, x):
    y = x * 1
    y.register_hook(lambda gradient: gradient * model.layers[0].weight.sum())
    return model(y)


def in_a_hook_unseen(model, x):
    y = x * 1

    def unseen(gradient):
        with torch._C.DisableTorchFunctionSubclass():
            return gradient * model.layers[0].weight.sum()

    y.register_hook(unseen)
    return model(y)


@pytest.mark.parametrize("use", [changed, before_the_model, in_a_hook])
def test_a_backward_that_uses_what_it_has_updated_is_refused_and_waits_from_then_on(use, tmp_path, make):
    def step(model, optimizer, run):
        x = batch().requires_grad_()
        return [finish(run(model, x).square().sum(), optimizer), x.grad]

    pair = make(lambda: Other("once"))
    pair.same(step, lambda model, x: model(x))
    pair.session.save_checkpoint(tmp_path)
    with pytest.raises(StateError, match="is used by a backward that has updated it already"):
        step(pair.model, pair.optimizer, use)
    pair.session.load_checkpoint(tmp_path)
    for _ in range(2):
        pair.same(step, use)
    assert pair.session.stats().binding == "whole"


def test_code_that_sees_no_classes_reads_nothing_that_the_backward_has_updated(make):
    loss = in_a_hook_unseen(make(lambda: Other("once")).model, batch().requires_grad_()).sum()
    with pytest.raises(RuntimeError, match="Cannot access data pointer|was read"):
        loss.backward()


def test_after_the_backward_parameters_are_ordinary_ones_again(make):
    pair = make(lambda: Other("re-entrant"))
    pair.model(batch().requires_grad_()).square().mean().backward()
    assert [type(parameter) for parameter in pair.model.parameters()] == [nn.Parameter] * 8
    pair.optimizer.step()
    train_step(pair.plain, pair.plain_optimizer)
    pair.optimizer.zero_grad()
    pair.same(train_step)


def test_views_that_anybody_holds_keep_their_values_until_the_backward_ends(make):
    def step(model, optimizer, _):
        x = batch().requires_grad_()
        # Whose backward is the last, and sees no change of a weight that was used through `.data`.
        return [finish(model(linear(x, model[0].weight.data)).square().sum(), optimizer), x.grad]

    pair = make()
    pair.train(3, by=step)


def test_a_graph_that_is_kept_is_used_again_only_after_a_step_as_in_pytorch(make):
    def step(model, optimizer):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    make().same(step)


def test_parameters_of_no_group_and_those_trained_later_are_as_in_pytorch(make):
    def some(model):
        return patrickstar.AdamW([*model.parameters()][2:], lr=1e-2, weight_decay=0.1)

    pair = make(make_optimizer=some, **ROOMY)
    for number in range(4):
        pair.each(lambda model, _: model[4].requires_grad_(number >= 2))
        pair.same(train_step)
        pair.same(lambda model, _: model[0].weight.grad)  # which nobody zeroes
    assert pair.session.stats().binding == "whole"


def zeroed_by_hand(model, _):
    for parameter in model.parameters():
        parameter.grad = None


ZEROED = {
    "by the optimizer": zero,
    "with zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by the model": lambda model, optimizer: model.zero_grad(),
    "by hand": zeroed_by_hand,
}


@pytest.mark.parametrize("how", ZEROED)
@pytest.mark.parametrize("first", [True, False], ids=["before the backward", "after the step"])
def test_gradients_are_zeroed_however_it_is_done(how, first, make):
    pair = make()

    def step(model, optimizer, _):
        loss = loss_of(model)
        if first:
            ZEROED[how](model, optimizer)
        loss.backward()
        optimizer.step()
        if not first:
            ZEROED[how](model, optimizer)
            if model is pair.model:
                assert all(parameter.grad is None for parameter in model.parameters())

    pair.train(3, by=step)


USES = {
    "an operation": lambda model, session: model[0].weight.grad.sum(),
    "clipping": lambda model, session: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clipping in the session": lambda model, session: session.clip_grad_norm_(1.0),
    "all gradients": lambda model, session: list(session.gradients()),
    "zeros": lambda model, session: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("use", USES)
def test_a_gradient_that_was_used_cannot_be_used_again(use, make):
    pair = make()
    pair.same(use_gradients)
    with pytest.raises(StateError, match="in_backward"):
        USES[use](pair.model, pair.session)
    pair.same(zero)
    pair.same(train_step)


def test_gradients_do_not_add_up(make):
    pair = make()
    losses = [[loss_of(model, number) for number in range(2)] for model in (pair.plain, pair.model)]
    for first, _ in losses:
        first.backward()
    pair.plain_optimizer.step()
    for refused in ("a second backward before", "step() again", "a backward after a step"):
        with pytest.raises(StateError, match=refused.replace("(", r"\(").replace(")", r"\)")):
            (pair.optimizer.step if "again" in refused else loss_of(pair.model).backward)()
        if refused.startswith("a second"):
            pair.optimizer.step()
        assert_same(pair.plain, pair.plain_optimizer, pair.session)
    pair.same(zero)
    pair.same(train_step)


def test_a_gradient_assigned_after_the_backward_is_refused_at_the_step(make):
    pair = make()
    backward(pair.model)
    pair.model[2].bias.grad = torch.ones(32)
    with pytest.raises(StateError, match=r"\.grad of 2.bias was assigned a tensor after the backward"):
        pair.optimizer.step()
    pair.model[2].bias.grad = None
    pair.optimizer.step()
    use_gradients(pair.plain, pair.plain_optimizer)
    pair.same(zero)
    pair.same(train_step)


def test_a_gradient_of_the_users_own_is_added_to_and_used_at_the_step_and_left(make):
    def step(model, optimizer, _):
        model[2].bias.grad = torch.ones(32)
        use_gradients(model, optimizer)
        left = model[2].bias.grad.clone()
        optimizer.zero_grad()
        return left

    pair = make()
    pair.train(2, by=step)


def test_a_backward_that_raises_half_way_leaves_parameters_of_no_one_step(tmp_path, make):
    pair = make()
    pair.same(train_step)
    pair.session.save_checkpoint(tmp_path)
    handle = pair.model[4].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(pair.model)
    handle.remove()
    for call in (
        lambda: pair.model(batch()),
        pair.optimizer.step,
        lambda: pair.session.save_checkpoint(tmp_path / "no"),
    ):
        with pytest.raises(StateError, match=r"after \d parameters had been updated .*load_checkpoint"):
            call()
    pair.session.load_checkpoint(tmp_path)
    assert all(parameter.grad is None for parameter in pair.model.parameters())
    pair.same(train_step)


@pytest.mark.parametrize(("way", "waiting_bytes"), [("once", 0), ("detached first", 4 * 32 * 32)])
def test_the_smallest_budget_at_which_they_keep_their_bytes_has_room_for_gradients_that_wait(way, waiting_bytes, make):
    pair = make(lambda: Other(way), **ROOMY)
    pair.same(train_step)
    needed = sum(pair.session.stats().model_data.values()) + waiting_bytes + pair.session.trace.peak
    for budget, expected in ((needed, True), (needed - 1, False)):
        pair = make(lambda: Other(way), **{**ROOMY, "device_memory": budget})
        pair.same(train_step)
        stats = pair.session.stats()
        assert (stats.binding == "whole") is expected
        assert stats.peak["device"] <= budget


IN_BACKWARD = ("once", "detached first", "re-entrant twice", "by chance")


@pytest.mark.parametrize(
    ("way", "step", "kind"),
    [*((way, "in_backward", "fp32") for way in IN_BACKWARD), ("once", "deferred", "fp32")]
    + [("once", step, "bf16") for step in ("in_backward", "deferred")],
)
def test_what_a_forecast_says_of_the_peak_is_what_is_taken(way, step, kind):
    class Loss(Other):
        def forward(self, x):
            return {"loss": super().forward(x).float().square().sum()}

    given = {"host_memory": "2GiB", "step": step, "precision": kind, "options": options(compute=kind)}
    found = forecast(model := Loss(way), {"x": batch()}, **given)
    with patrickstar.manage(model, adamw(model), **given) as session:
        for _ in range(3):
            finish(model(batch())["loss"], session.optimizer)
        assert session.stats().binding == "whole"
        assert session.stats().peak["host"] == found.peak["host"]


def apart():
    """The same layers, none of which is a block."""

    def run(model, x):
        for layer in model.children():
            x = nn.functional.gelu(layer(x))
        return x

    return Composed(run, **{f"layer{number}": layer for number, layer in enumerate(mlp()[::2])})


def test_from_the_first_forward_on_that_does_not_fit_gradients_are_used_as_ever(make):
    def step(model, optimizer, rows):
        loss = loss_of(model, rows=rows)
        optimizer.zero_grad()  # of used gradients, which are those of before
        loss.backward()
        optimizer.step()
        return loss.detach()

    pair = make(apart, **ROOMY)
    for rows, is_whole in ((4, True), (4, True), (96, False), (4, False)):
        pair.same(step, rows)
        assert (pair.session.stats().binding == "whole") is is_whole
    assert_same(pair.plain, pair.plain_optimizer, pair.session)
    with pytest.raises(StateError, match="was used and released"):
        pair.model.layer0.weight.grad.sum()


def test_so_they_are_when_an_evaluation_comes_before_they_are_zeroed(make):
    pair = make(apart, **ROOMY)
    pair.same(use_gradients)
    with torch.no_grad():
        pair.same(lambda model, _: loss_of(model, rows=600))
    assert "by use" in pair.session.stats().binding
    with pytest.raises(StateError, match="a backward after a step"):
        backward(pair.model)
    pair.each(lambda model, _: model.zero_grad())
    pair.same(train_step)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)


def test_a_refused_forward_leaves_used_gradients_what_they_are(make):
    pair = make(**ROOMY)
    pair.same(use_gradients)
    views = [parameter.data for parameter in pair.model.parameters()]
    with pytest.raises(patrickstar.BudgetError, match="chunks of weights are held"):
        loss_of(pair.model, rows=96)
    del views
    with pytest.raises(StateError, match="was used and released"):
        pair.model[0].weight.grad.sum()
    with pytest.raises(StateError, match="a backward after a step"):
        backward(pair.model)
    pair.same(zero)
    pair.same(train_step)
    assert pair.session.stats().binding == "whole"


def test_close_leaves_no_gradient_that_was_used(make):
    pair = make()
    pair.same(use_gradients)
    pair.close()
    assert all(p.grad is None for p in pair.model.parameters())
    backward(pair.model)
