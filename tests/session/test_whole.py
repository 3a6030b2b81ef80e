"""Where all model states fit, parameters are ordinary ones: whatever PyTorch can do with the model it does under `manage`, with the same bits."""

import copy
import io
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import cached, register_parametrization
from torch.utils.flop_counter import FlopCounterMode

import patrickstar
from patrickstar import StateError
from tests.forked import in_forked_child
from tests.memory.stores import keep_log
from tests.session.builders import (
    adamw,
    alike,
    assert_same,
    backward,
    batch,
    expect_bits,
    finish,
    is_ordinary,
    loss_of,
    managed,
    mlp,
    options,
    seeded,
    store_of,
    train,
    train_step,
    values,
)

pytestmark = pytest.mark.whole


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


class Model(nn.Module):
    """Two linears, a weight that is used as complex numbers, and one that is shared by name of a module."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.waves = nn.Parameter(torch.randn(3, 2))
        self.calls = 0

    def forward(self, x):
        spectrum = torch.fft.rfft(self.first(x))[..., :3] * torch.view_as_complex(self.waves)
        return self.second(torch.fft.irfft(spectrum, n=8)).tanh()


def build():
    torch.manual_seed(0)
    return Model()


def inputs(seed=1):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def one_step(model, optimizer, number):
    loss = model(inputs(number)).square().sum()
    model.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def loss_by_call(model):
    return lambda values, x: functional_call(model, values, (x,)).square().sum()


def dual(model):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(inputs(), torch.ones(4, 8)))).tangent


def through_a_fused_loss(model):
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            with torch._C.DisableTorchFunctionSubclass():
                return (x @ weight.T).sum()

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient * weight.sum(0).expand_as(x), gradient * x.sum(0).expand_as(weight)

    Fused.apply(model.first(inputs()), model.second.weight).backward()
    return [model.first.weight.grad.clone(), model.second.weight.grad.clone()]


def jagged(model):
    ragged = torch.nested.nested_tensor([inputs()[:3], inputs()[:1]], layout=torch.jagged)
    nn.functional.linear(ragged, model.second.weight).values().sum().backward()
    return model.second.weight.grad.clone()


def flops(model):
    with FlopCounterMode(display=False) as counter:
        model(inputs()).sum().backward()
    return torch.tensor(counter.get_total_flops())


def exported(model):
    model.zero_grad()  # fake tensors are made of gradients too
    return torch.export.export(model.eval(), (inputs(),)).module()(inputs())


KINDS = {
    "grad": lambda m: grad(lambda x: m(x).sum())(inputs()),
    "grad of the values": lambda m: list(grad(loss_by_call(m))(values(m), inputs()).values()),
    "vjp": lambda m: vjp(m, inputs())[1](torch.ones(4, 8))[0],
    "jvp": lambda m: jvp(m, (inputs(),), (torch.ones(4, 8),))[1],
    "jacrev": lambda m: jacrev(m)(inputs()[0]),
    "hessian": lambda m: hessian(lambda x: m(x).sum())(inputs()[0]),
    "gradients of each sample": lambda m: list(vmap(grad(loss_by_call(m)), (None, 0))(values(m), inputs()).values()),
    "functional_call": lambda m: functional_call(m, {"first.weight": torch.eye(8)}, (inputs(),)),
    "forward AD": dual,
    "a fused loss": through_a_fused_loss,
    "jagged": jagged,
    "flops": flops,
    "deepcopy": lambda m: copy.deepcopy(m)(inputs()),
    "pickle": lambda m: pickle.loads(pickle.dumps(m))(inputs()),
    "torch.save": lambda m: torch.tensor(saved_bytes(m.state_dict())),
    "export": exported,
    "jit.trace": lambda m: torch.jit.trace(m.eval(), inputs())(inputs()),
    "compile": lambda m: torch.compile(m, backend="eager", fullgraph=True)(inputs()),
    "DataParallel": lambda m: nn.DataParallel(m)(inputs()),
    "a gradient of a gradient": lambda m: torch.autograd.grad(penalty(m), m.first.weight)[0],
}


def penalty(model):
    x = inputs().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().sum()


def saved_bytes(state):
    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getvalue())


HAS_BACKWARD = {"a fused loss", "jagged", "flops"}
"""Kinds that bring gradients of parameters, which `step="in_backward"` uses as they come."""
WAYS = [*((kind, "deferred") for kind in KINDS), *((kind, "in_backward") for kind in KINDS if kind not in HAS_BACKWARD)]


@pytest.mark.parametrize(("kind", "step"), WAYS)
def test_whatever_torch_does_with_the_model_in_the_middle_of_a_training_has_the_same_bits(kind, step, make_pair):
    pair = make_pair(build, step=step, device="cpu")
    assert is_ordinary(pair.model)
    pair.train(2, by=one_step)
    pair.same(lambda model, _: KINDS[kind](model))
    pair.each(lambda model, _: model.train().zero_grad())
    pair.train(2, by=one_step)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def biased():
    """Layers that call a function of their own."""

    @torch.jit.script
    def bias_gelu(bias, x):
        x = bias + x
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    class Biased(nn.Linear):
        def forward(self, x):
            return bias_gelu(self.bias, nn.functional.linear(x, self.weight))

    return nn.Sequential(Biased(8, 16), Biased(16, 8), Biased(8, 8), Biased(8, 4))


LEARNS = {
    "a script": lambda: nn.Sequential(*(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(3))),
    "a function that is a script": biased,
    "cached parametrizations": lambda: register_parametrization(nn.Linear(8, 8), "weight", Symmetric()),
}


@pytest.mark.parametrize("kind", LEARNS)
def test_what_remembers_its_runs_remembers_no_trial_run(kind, make_pair):
    """A script has other bits from its second run on; a cached weight is found by the module that was copied."""

    def act(model, optimizer):
        with cached() if "cached" in kind else nullcontext():
            return [one_step(model, optimizer, number) for number in range(3)]

    # What torch has compiled for one script it keeps for others like it: the first of a process may have other bits.
    first = seeded(LEARNS[kind])()
    act(first, torch.optim.AdamW(first.parameters(), fused=True))
    make_pair(seeded(LEARNS[kind]), device="cpu").same(act)


CHANGES = {
    "compiled before": (lambda m: torch.compile(m, backend="aot_eager")),
    "parametrized": lambda m: register_parametrization(m.first, "weight", Doubled()),
    "spectral norm": lambda m: parametrizations.spectral_norm(m.first),
    "weight norm": lambda m: parametrizations.weight_norm(m.first),
    "pruned": lambda m: prune.l1_unstructured(m.first, "weight", 0.5),
}


@pytest.mark.parametrize("step", ["deferred", "in_backward"])
@pytest.mark.parametrize("change", CHANGES)
def test_models_that_were_changed_before_train_with_the_same_bits(change, step, make_pair):
    def changed():
        model = build()
        made = CHANGES[change](model)
        return made if isinstance(made, torch._dynamo.OptimizedModule) else model

    make_pair(changed, step=step, device="cpu").train(3, by=one_step)


def test_a_parameter_has_a_storage_of_its_own_that_does_not_move():
    with patrickstar.manage(model := build(), torch.optim.AdamW(model.parameters())) as session:
        before = [parameter.data_ptr() for parameter in model.parameters()]
        assert [parameter.untyped_storage().nbytes() for parameter in model.parameters()] == [
            parameter.nbytes for parameter in model.parameters()
        ]
        one_step(model, session.optimizer, 0)
        assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_values_given_by_hand_are_taken_over_at_a_forward_at_a_step_and_on_reading():
    model = build()
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)) as session:
        weight, address = model.first.weight, model.first.weight.data_ptr()
        for number, read in enumerate([lambda: model(inputs()), session.optimizer.step, session.state_dict], start=1):
            given = torch.full((8, 8), float(number))
            weight.data = given
            read()
            assert session.state_dict()["first.weight"][0, 0] == number == weight[0, 0]
            assert weight.data_ptr() == address
        weight.data = torch.zeros(3, 3)
        with pytest.raises(StateError, match=r"first.weight.data was assigned a tensor \(3, 3\)"):
            model(inputs())
        weight.data = torch.zeros(8, 8)
        model(inputs())


def keep(model):
    model.kept = model.first.weight.data
    model.first.weight.data = torch.ones(8, 8)


NOT_TAKEN = {
    "something still has what it had": keep,
    "a view of managed memory": lambda m: setattr(m.first.weight, "data", m.second.weight.data),
    "a view": lambda m: setattr(m.first.weight, "data", m.first.weight.data.t()),
    r"\(2, 8\)": lambda m: setattr(m.first.weight, "data", m.first.weight.data[:2]),
    "in memory that processes share": lambda m: m.share_memory(),
}


@pytest.mark.parametrize("says", NOT_TAKEN)
def test_memory_that_cannot_be_taken_over_is_refused_before_anything_is_computed(says):
    with patrickstar.manage(model := build(), adamw(model)) as session:
        one_step(model, session.optimizer, 1)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        data = {name: parameter.data for name, parameter in model.named_parameters()}
        NOT_TAKEN[says](model)
        for act in (lambda: model(inputs()), session.optimizer.step, lambda: dict(session.state_dict())):
            with pytest.raises(StateError, match=says):
                act()
        model.kept = None
        for name, parameter in model.named_parameters():
            parameter.data = data.pop(name).clone()
        assert all(torch.equal(value, session.state_dict()[name]) for name, value in values.items())


def test_a_parameter_without_elements_is_an_ordinary_one(make_pair):
    build = seeded(lambda: nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 4)))
    pair = make_pair(build, device="cpu")
    for _ in range(2):
        pair.same(lambda model, optimizer: finish(model(torch.ones(2, 4)).square().sum(), optimizer))
        pair.each(lambda model, _: setattr(model[0].weight, "data", torch.empty(4, 0).t()))


def test_a_view_that_outlives_the_session_keeps_its_values():
    model = build()
    session = patrickstar.manage(model, torch.optim.AdamW(model.parameters()))
    view, values = model.first.weight.detach()[2:4], model.first.weight.detach().clone()
    session.close()
    assert torch.equal(view, values[2:4])
    assert type(model.first.weight) is nn.Parameter


def test_a_sparse_gradient_is_refused_before_anything_changes():
    with patrickstar.manage(model := build(), torch.optim.AdamW(model.parameters())) as session:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model.waves.grad = torch.ones(3, 2).to_sparse()
        with pytest.raises(StateError, match="sparse gradients"):
            session.optimizer.step()
        assert alike(before, list(model.parameters()))


def test_a_second_session_over_the_model_or_a_part_of_it_is_refused():
    with patrickstar.manage(model := build(), torch.optim.AdamW(model.parameters())):
        for part in (model, nn.Sequential(model), model.first):
            with pytest.raises(StateError, match="managed already, by <Session of Model"):
                patrickstar.manage(part, torch.optim.AdamW(part.parameters()))


ROOMY = {"device": "emulated", "device_memory": "256KiB", "host_memory": "8MiB"}
"""Room for the model states of a `mlp` (of which each layer takes 8 KiB a plane), and for the activations of small batches beside them."""


@pytest.mark.parametrize("machine", [ROOMY, {"host_memory": "2GiB"}], ids=["emulated", "host"])
def test_under_a_budget_that_holds_all_model_states_parameters_keep_their_bytes(machine, make_pair):
    pair = make_pair(**machine)
    pair.train(3)
    stats = pair.session.stats()
    assert (stats.binding, stats.planned_steps, stats.reactive_steps) == ("whole", 3, 0)
    assert is_ordinary(pair.model)
    pair.close()


def test_from_the_first_forward_on_that_does_not_fit_they_are_bound_by_use(caplog, make_pair):
    caplog.set_level("INFO", logger="patrickstar")
    pair = make_pair(**ROOMY)
    for number, rows in enumerate([4, 4, 80, 80, 4, 4], start=1):
        if number == 3:  # gradients of the user's own stay what they are
            pair.plain[0].weight.grad, pair.model[0].weight.grad = torch.ones(32, 32), torch.ones(32, 32)
        pair.same(train_step, rows=rows)
        assert ("whole" if number < 3 else "the rest by use: beside") in pair.session.stats().binding
    assert pair.session.stats().peak["device"] <= 256 * 1024
    pair.close()
    assert sum("bound by use from now on" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("held", ["a graph", "a view"])
def test_a_forward_for_which_they_would_have_to_move_is_refused_while_they_are_held(held, make_pair):
    pair = make_pair(**ROOMY)
    model, session = pair.model, pair.session
    kept = loss_of(model) if held == "a graph" else [p.data for p in model.parameters()]
    before = values(model)
    with pytest.raises(patrickstar.BudgetError, match="chunks of weights are held"):
        loss_of(model, rows=80)
    expect_bits(before, values(model))
    assert session.stats().binding == "whole"
    assert is_ordinary(model)
    if held == "a graph":
        backward(pair.plain)
        kept.backward()
        pair.step()
    del kept
    pair.same(lambda model, _: loss_of(model, rows=80))
    assert_same(pair.plain, pair.plain_optimizer, session)


def test_a_parameter_that_is_trained_later_gets_its_averages(make_pair):
    pair = make_pair(before=lambda model, _: model[0].requires_grad_(False), **ROOMY)
    pair.train(2)
    pair.each(lambda model, _: model[0].requires_grad_(True))
    pair.train(2, first=2)
    assert pair.session.stats().binding == "whole"


def test_a_checkpoint_is_taken_and_loaded_where_parameters_lie(tmp_path):
    with managed(model := mlp(), **ROOMY) as session:
        train(model, session.optimizer, 1)
        session.save_checkpoint(tmp_path)
        expected = train(model, session.optimizer, 2)
        after, address = values(model), model[0].weight.data_ptr()
        session.load_checkpoint(tmp_path)
        assert torch.equal(expected, train(model, session.optimizer, 2))
        expect_bits(after, values(model))
        assert model[0].weight.data_ptr() == address


def test_a_step_that_changes_a_weight_between_forward_and_backward_is_an_error_of_torchs():
    with managed(model := mlp(), device="cpu") as session:
        loss = loss_of(model)
        train_step(model, session.optimizer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_forked_child_has_the_weights_of_the_time_of_the_fork():
    with managed(model := mlp(), device="cpu") as session:
        train_step(model, session.optimizer)
        expected = loss_of(model).item()

        def use() -> str:
            with torch.no_grad():
                found = loss_of(model).item()
                model[0].weight.zero_()
            return repr(found)

        assert in_forked_child(use) == repr(expected)
        assert model[0].weight.any()
        train_step(model, session.optimizer)


@pytest.mark.parametrize("machine", [{"device": "cpu"}, ROOMY], ids=["unbounded", "bounded"])
def test_gradients_from_before_are_used_and_left(machine, make_pair):
    pair = make_pair(before=backward, **machine)
    pair.same(lambda _, optimizer: optimizer.step())
    pair.close()
    assert alike([p.grad for p in pair.plain.parameters()], [p.grad for p in pair.model.parameters()])


def test_weights_alone_are_ordinary_parameters_too():
    plain, model = mlp(), mlp()
    with patrickstar.manage(model) as session:
        assert torch.equal(loss_of(plain), loss_of(model))
        assert session.stats().binding == "whole"
        assert is_ordinary(model)


def test_encoder_layers_take_torchs_fused_path_and_keep_their_class():
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2).eval()
    model = copy.deepcopy(plain)
    with patrickstar.manage(model), torch.no_grad():
        assert torch.equal(plain(torch.ones(1, 3, 16)), model(torch.ones(1, 3, 16)))
        assert all(type(one) is type(other) for one, other in zip(plain.modules(), model.modules(), strict=True))


def test_clipping_accumulating_and_freezing_mean_what_they_mean_in_pytorch(make_pair):
    def act(model, optimizer, number):
        for rows in (2, 3):
            backward(model, rows=rows)
        if number == 1:
            model[2].requires_grad_(False)
        if number == 2:
            model[4].weight.grad = None
        if number == 3:
            model[6].bias.grad.mul_(2)
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)

    pair = make_pair(**ROOMY)
    pair.train(4, by=act)
    assert pair.session.stats().planned_steps == 4


def state_bytes(model, session):
    """Bytes of all model states, once there are some: three planes of chunks, and gradients as tensors."""
    return sum(session.stats().model_data.values()) + sum(parameter.nbytes for parameter in model.parameters())


def test_the_smallest_budget_at_which_they_keep_their_bytes_holds_all_of_it():
    with managed(model := mlp(), **ROOMY) as session:
        train_step(model, session.optimizer)
        states, beside = state_bytes(model, session), session.trace.peak
    for budget, at_first, then in (
        (states - 1, "by use", "by use"),
        (states + beside - 1, "whole", "by use"),
        (states + beside, "whole", "whole"),
    ):
        with managed(model := mlp(), **{**ROOMY, "device_memory": budget}) as session:
            assert at_first in session.stats().binding
            train_step(model, session.optimizer)
            stats = session.stats()
            assert then in stats.binding
            assert stats.peak["device"] <= budget


def test_averages_that_left_for_what_nobody_foresaw_come_back_for_their_step_and_weights_stay(make_pair):
    pair = make_pair(**ROOMY)
    store = keep_log(store_of(pair.session))
    addresses = [parameter.data_ptr() for parameter in pair.model.parameters()]

    def step(model, optimizer, number):
        loss, more = loss_of(model, number), torch.ones(160 * 256)  # lies there until the backward has ended
        (loss * more.mean()).backward()
        del more
        optimizer.step()
        optimizer.zero_grad()

    pair.train(3, by=step)
    left = [str(action) for action in store.log if "D!" in str(action)]
    assert any("exp_avg" in action for action in left)
    assert not any("weight" in action for action in left)
    assert [parameter.data_ptr() for parameter in pair.model.parameters()] == addresses


def test_what_was_changed_by_hand_is_written_back_when_they_are_let_go():
    plain, model = mlp(), mlp()
    with (
        patrickstar.manage(model, device="emulated", device_memory="56KiB", options=options()) as session,
        torch.no_grad(),
    ):
        for each in (plain, model):
            loss_of(each)
            each[0].weight.data.add_(1)
        for _ in range(2):
            assert torch.equal(loss_of(plain, rows=64), loss_of(model, rows=64))
        assert "the rest by use" in session.stats().binding


def test_a_part_of_a_unit_is_found_where_it_lies():
    with managed(model := mlp(), device="cpu") as session:
        binding = session._parts.binding
        for name, parameter in model.named_parameters():
            bound = binding.by_name[name]
            assert binding.leases.locate(parameter) == (bound.ref, 4 * bound.offset)
            assert binding.leases.locate(parameter[1:]).offset_bytes == 4 * bound.offset + parameter[0].nbytes


@pytest.mark.parametrize(
    ("inputs", "outputs", "numel"),
    [(5, 3, 2048), (64, 64, 1024)],
    ids=["no multiple of a vector", "longer than a chunk"],
)
def test_a_tensor_of_any_length_is_updated_wholly(inputs, outputs, numel, make_pair):
    def act(model, optimizer, _):
        model(batch(width=inputs)).square().sum().backward()
        optimizer.step()

    pair = make_pair(seeded(lambda: nn.Linear(inputs, outputs)), with_options={"chunk_size": numel}, device="cpu")
    before = values(pair.model)
    pair.train(2, by=act)
    assert all((now != before[name]).all() for name, now in pair.model.named_parameters())


def test_a_step_updates_the_values_that_were_given_by_hand(make_pair):
    def act(model, optimizer):
        backward(model)
        model[0].weight.data = torch.full((32, 32), 2.0)
        optimizer.step()

    make_pair(device="cpu").same(act)


def test_where_the_process_has_grown_past_its_bound_the_next_forward_is_bound_by_use(monkeypatch, make_pair):
    pair = make_pair(host_memory="2GiB")
    for expected in ("whole", "whole", "by use: beside"):
        pair.same(train_step)
        assert expected in pair.session.stats().binding
        monkeypatch.setattr("patrickstar.step.room.HostRoom.is_exceeded_by", lambda *_: True)
    assert "takes more than" in pair.session.stats().binding
    pair.close()
