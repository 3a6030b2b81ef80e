"""Parameters that keep their bytes, with `step="in_backward"`: gradients are used as they come, and gone; nothing else is another than in PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar import StateError
from patrickstar.session.forecast import forecast
from tests.session.builders import adamw
from tests.session.test_whole import ROOMY, equal, stack

pytestmark = pytest.mark.whole


def batch(seed=0, rows=4):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def managed(model, optimizer=None, **machine):
    return patrickstar.manage(model, optimizer or adamw(model), step="in_backward", **machine)


class Twins:
    """A plain model and one under a session, which does the same."""

    def __init__(self, build, groups=nn.Module.parameters, **machine):
        self.plain = build()
        self.model = copy.deepcopy(self.plain)
        self.optimizer = patrickstar.AdamW(list(groups(self.plain)), lr=1e-2, weight_decay=0.1)
        given = patrickstar.AdamW(list(groups(self.model)), lr=1e-2, weight_decay=0.1)
        self.session = managed(self.model, given, **machine)

    def each(self, do):
        """What is done with both gives the same bits."""
        found = do(self.plain, self.optimizer), do(self.model, self.session.optimizer)
        assert equal(*found) if found[0] is not None else found[1] is None
        assert equal(list(self.plain.parameters()), list(self.model.parameters()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.session.close()


def train(model, optimizer, seed=0):
    loss = model(batch(seed)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("machine", [{}, ROOMY], ids=["unbounded", "bounded"])
def test_a_gradient_is_there_for_hooks_of_users_and_gone_before_the_next_one_comes(machine):
    with Twins(stack, **machine) as twins:
        last, there = twins.model[0].weight, []
        last.register_post_accumulate_grad_hook(
            lambda _: there.append([type(p.grad) is torch.Tensor for p in twins.model.parameters()])
        )

        def gradients(model, optimizer):
            seen = []
            handles = [
                p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())) for p in model.parameters()
            ]
            train(model, optimizer)
            for handle in handles:
                handle.remove()
            return seen

        for _ in range(2):
            twins.each(gradients)
        assert there == [[True] + [False] * 11] * 2
        assert twins.session.stats().binding == "whole"
        assert "grad" not in twins.session.stats().model_data


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
def test_a_gradient_waits_for_the_end_of_the_backward_where_it_must_and_nowhere_else(way):
    with Twins(lambda: Other(way)) as twins:
        waited = set()

        def step(model, optimizer):
            x = batch().requires_grad_()
            if model is twins.model:  # the gradient of the input is the last that comes
                named = model.named_parameters
                x.register_hook(lambda _: waited.update(name for name, p in named() if type(p.grad) is torch.Tensor))
            torch.manual_seed(0)
            loss = model(x * 1).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return [loss.detach(), x.grad]

        for _ in range(3):
            twins.each(step)
        everything = set(dict(twins.model.named_parameters())) if way.startswith("by") else set()
        assert waited == WAITS.get(way, everything)
        assert twins.session.stats().binding == "whole"


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
def test_a_backward_that_uses_what_it_has_updated_is_refused_and_waits_from_then_on(use, tmp_path):
    with Twins(lambda: Other("once")) as twins:

        def step(run):
            def do(model, optimizer):
                x = batch().requires_grad_()
                loss = run(model, x).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return [loss.detach(), x.grad]

            return do

        twins.each(step(lambda model, x: model(x)))
        twins.session.save_checkpoint(tmp_path)
        with pytest.raises(StateError, match="is used by a backward that has updated it already"):
            step(use)(twins.model, twins.session.optimizer)
        twins.session.load_checkpoint(tmp_path)
        for _ in range(2):
            twins.each(step(use))
        assert twins.session.stats().binding == "whole"


def test_code_that_sees_no_classes_reads_nothing_that_the_backward_has_updated():
    with Twins(lambda: Other("once")) as twins:
        loss = in_a_hook_unseen(twins.model, batch().requires_grad_()).sum()
        with pytest.raises(RuntimeError, match="Cannot access data pointer|was read"):
            loss.backward()


def test_after_the_backward_parameters_are_ordinary_ones_again():
    with Twins(lambda: Other("re-entrant")) as twins:
        twins.model(batch().requires_grad_()).square().sum().backward()
        assert [type(parameter) for parameter in twins.model.parameters()] == [nn.Parameter] * 8
        twins.session.optimizer.step()
        train(twins.plain, twins.optimizer)
        twins.session.optimizer.zero_grad()
        twins.each(train)


def test_views_that_anybody_holds_keep_their_values_until_the_backward_ends():
    with Twins(stack) as twins:

        def step(model, optimizer):
            x = batch().requires_grad_()
            # Whose backward is the last, and sees no change of a weight that was used through `.data`.
            loss = model(linear(x, model[0].weight.data)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return [loss.detach(), x.grad]

        for _ in range(3):
            twins.each(step)


def test_a_graph_that_is_kept_is_used_again_only_after_a_step_as_in_pytorch():
    with Twins(stack) as twins:

        def step(model, optimizer):
            loss = model(batch()).square().sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

        twins.each(step)


def test_parameters_of_no_group_and_those_trained_later_are_as_in_pytorch():
    with Twins(stack, lambda model: [*model.parameters()][2:], **ROOMY) as twins:
        for each in (twins.plain, twins.model):
            each[4].requires_grad_(False)
        for number in range(4):
            if number == 2:
                for each in (twins.plain, twins.model):
                    each[4].requires_grad_(True)
            twins.each(train)
            twins.each(lambda model, _: model[0].weight.grad)  # which nobody zeroes
        assert twins.session.stats().binding == "whole"


def zeroed_by_hand(model, _):
    for parameter in model.parameters():
        parameter.grad = None


ZEROED = {
    "by the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "with zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by the model": lambda model, optimizer: model.zero_grad(),
    "by hand": zeroed_by_hand,
}


@pytest.mark.parametrize("zero", ZEROED)
@pytest.mark.parametrize("first", [True, False], ids=["before the backward", "after the step"])
def test_gradients_are_zeroed_however_it_is_done(zero, first):
    with Twins(stack) as twins:

        def step(model, optimizer):
            loss = model(batch()).square().sum()
            if first:
                ZEROED[zero](model, optimizer)
            loss.backward()
            optimizer.step()
            if not first:
                ZEROED[zero](model, optimizer)
                if model is twins.model:
                    assert all(parameter.grad is None for parameter in model.parameters())

        for _ in range(3):
            twins.each(step)


USES = {
    "an operation": lambda model, session: model[0].weight.grad.sum(),
    "clipping": lambda model, session: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clipping in the session": lambda model, session: session.clip_grad_norm_(1.0),
    "all gradients": lambda model, session: list(session.gradients()),
    "zeros": lambda model, session: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("use", USES)
def test_a_gradient_that_was_used_cannot_be_used_again(use):
    with Twins(stack) as twins:
        twins.each(lambda model, optimizer: (model(batch()).square().sum().backward(), optimizer.step())[1])
        with pytest.raises(StateError, match="in_backward"):
            USES[use](twins.model, twins.session)
        twins.each(lambda _, optimizer: optimizer.zero_grad())
        twins.each(train)


def test_gradients_do_not_add_up():
    with Twins(stack) as twins:
        losses = [[model(batch(seed)).square().sum() for seed in range(2)] for model in (twins.plain, twins.model)]
        for first, _ in losses:
            first.backward()
        twins.optimizer.step()
        for refused in ("a second backward before", "step() again", "a backward after a step"):
            with pytest.raises(StateError, match=refused.replace("(", r"\(").replace(")", r"\)")):
                (twins.session.optimizer.step if "again" in refused else twins.model(batch()).sum().backward)()
            if refused.startswith("a second"):
                twins.session.optimizer.step()
            assert equal(list(twins.plain.parameters()), list(twins.model.parameters()))
        twins.each(lambda _, optimizer: optimizer.zero_grad())
        twins.each(train)


def test_a_gradient_assigned_after_the_backward_is_refused_at_the_step():
    with Twins(stack) as twins:
        twins.model(batch()).square().sum().backward()
        twins.model[2].bias.grad = torch.ones(32)
        with pytest.raises(StateError, match=r"\.grad of 2.bias was assigned a tensor after the backward"):
            twins.session.optimizer.step()
        twins.model[2].bias.grad = None
        twins.session.optimizer.step()
        train(twins.plain, twins.optimizer)
        twins.session.optimizer.zero_grad()
        twins.each(train)


def test_a_gradient_of_the_users_own_is_added_to_and_used_at_the_step_and_left():
    with Twins(stack) as twins:

        def step(model, optimizer):
            model[2].bias.grad = torch.ones(32)
            model(batch()).square().sum().backward()
            optimizer.step()
            left = model[2].bias.grad.clone()
            optimizer.zero_grad()
            return left

        for _ in range(2):
            twins.each(step)


def test_a_backward_that_raises_half_way_leaves_parameters_of_no_one_step(tmp_path):
    with Twins(stack) as twins:
        twins.each(train)
        twins.session.save_checkpoint(tmp_path)
        handle = twins.model[4].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            twins.model(batch()).square().sum().backward()
        handle.remove()
        for call in (
            lambda: twins.model(batch()),
            twins.session.optimizer.step,
            lambda: twins.session.save_checkpoint(tmp_path / "no"),
        ):
            with pytest.raises(StateError, match=r"after \d parameters had been updated .*load_checkpoint"):
                call()
        twins.session.load_checkpoint(tmp_path)
        assert all(parameter.grad is None for parameter in twins.model.parameters())
        twins.each(train)


@pytest.mark.parametrize(("way", "waiting_bytes"), [("once", 0), ("detached first", 4 * 32 * 32)])
def test_the_smallest_budget_at_which_they_keep_their_bytes_has_room_for_gradients_that_wait(way, waiting_bytes):
    with Twins(lambda: Other(way), **ROOMY) as twins:
        twins.each(train)
        stats, trace = twins.session.stats(), twins.session.trace
    needed = sum(stats.model_data.values()) + waiting_bytes + trace.peak
    for budget, expected in ((needed, True), (needed - 1, False)):
        with Twins(lambda: Other(way), **{**ROOMY, "device_memory": budget}) as twins:
            twins.each(train)
            stats = twins.session.stats()
            assert (stats.binding == "whole") is expected
            assert stats.peak["device"] <= budget


@pytest.mark.parametrize("way", ["once", "detached first", "re-entrant twice", "by chance"])
def test_what_a_forecast_says_of_the_peak_is_what_is_taken(way):
    class Loss(Other):
        def forward(self, x):
            return {"loss": super().forward(x).square().sum()}

    model = Loss(way)
    found = forecast(model, {"x": batch()}, host_memory="2GiB", step="in_backward")
    with managed(model, host_memory="2GiB") as session:
        for _ in range(3):
            model(batch())["loss"].backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
        assert session.stats().binding == "whole"
        assert session.stats().peak["host"] == found.peak["host"]


class Apart(nn.Module):
    """The same layers, none of which is a block."""

    def __init__(self):
        super().__init__()
        for number, layer in enumerate(stack()[::2]):
            self.add_module(f"layer{number}", layer)

    def forward(self, x):
        for layer in self.children():
            x = nn.functional.gelu(layer(x))
        return x


def test_from_the_first_forward_on_that_does_not_fit_gradients_are_used_as_ever():
    with Twins(Apart, **ROOMY) as twins:

        def step(rows):
            def do(model, optimizer):
                loss = model(batch(rows=rows)).square().sum()
                optimizer.zero_grad()  # of used gradients, which are those of before
                loss.backward()
                optimizer.step()
                return loss.detach()

            return do

        for rows, is_whole in ((4, True), (4, True), (96, False), (4, False)):
            twins.each(step(rows))
            assert (twins.session.stats().binding == "whole") is is_whole
        with pytest.raises(StateError, match="was used and released"):
            twins.model.layer0.weight.grad.sum()


def test_so_they_are_when_an_evaluation_comes_before_they_are_zeroed():
    with Twins(Apart, **ROOMY) as twins:
        twins.each(lambda model, optimizer: (model(batch()).square().sum().backward(), optimizer.step())[1])
        with torch.no_grad():
            twins.each(lambda model, _: model(batch(rows=600)))
        assert "by use" in twins.session.stats().binding
        with pytest.raises(StateError, match="a backward after a step"):
            twins.model(batch()).sum().backward()
        twins.each(lambda model, _: model.zero_grad())
        twins.each(train)


def test_a_refused_forward_leaves_used_gradients_what_they_are():
    with Twins(stack, **ROOMY) as twins:
        twins.each(lambda model, optimizer: (model(batch()).square().sum().backward(), optimizer.step())[1])
        views = [parameter.data for parameter in twins.model.parameters()]
        with pytest.raises(patrickstar.BudgetError, match="chunks of weights are held"):
            twins.model(batch(rows=96))
        del views
        with pytest.raises(StateError, match="was used and released"):
            twins.model[0].weight.grad.sum()
        with pytest.raises(StateError, match="a backward after a step"):
            twins.model(batch()).sum().backward()
        twins.each(lambda _, optimizer: optimizer.zero_grad())
        twins.each(train)
        assert twins.session.stats().binding == "whole"


def test_close_leaves_no_gradient_that_was_used():
    with Twins(stack) as twins:
        twins.each(lambda model, optimizer: (model(batch()).square().sum().backward(), optimizer.step())[1])
        twins.session.close()
        assert all(type(p) is nn.Parameter and p.grad is None for p in twins.model.parameters())
        twins.model(batch()).sum().backward()
