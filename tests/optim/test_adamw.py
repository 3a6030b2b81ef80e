import copy
import inspect
import io

import pytest
import torch

from patrickstar.core.strides import dense_strides
from patrickstar.errors import ConfigError
from patrickstar.optim import adamw as adamw_module
from patrickstar.optim.adamw import Adam, AdamW, flat_or_copy
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.masters import join, split
from tests.optim.oracle import different, update
from tests.optim.test_state import assert_same

SHAPES = ((3, 17), (16,), (1,), (2, 3, 4, 5))
TENSORS = {
    "contiguous": lambda: torch.arange(24.0).view(2, 3, 4),
    "channels last": lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.arange(12.0).view(3, 4).T,
    "a slice with an offset": lambda: torch.arange(24.0).view(6, 4)[2:5],
    "one element wide": lambda: torch.arange(4.0).view(4, 1, 1),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(3, 0, 2),
}


def parameters(*shapes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes or SHAPES]


def give_gradients(params, *, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def hyper_of(optimizer):
    hyper = Hyper.from_group(optimizer.param_groups[0])
    return {field: getattr(hyper, field) for field in ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled")}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (AdamW, {}),
        (AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}),
        (AdamW, {"lr": torch.tensor(1e-2)}),
        (AdamW, {"betas": (torch.tensor(0.5), torch.tensor(0.75))}),
        (Adam, {}),
        (Adam, {"weight_decay": 0.3}),
        (Adam, {"weight_decay": 0.3, "decoupled_weight_decay": True}),
        (AdamW, {"fused": True}),
        (AdamW, {"foreach": True}),
    ],
)
def test_five_steps_are_the_definition(kind, options):
    params = parameters((3, 7), (5,))
    want = [[p.detach().flatten().clone(), None, torch.zeros(p.numel()), torch.zeros(p.numel())] for p in params]
    optimizer = kind(params, **options)
    for step in range(1, 6):
        give_gradients(params, seed=step)
        optimizer.step()
        for parameter, planes in zip(params, want, strict=True):
            planes[1] = parameter.grad.flatten()
            planes[0], planes[2], planes[3] = update(planes, step=step, **hyper_of(optimizer))
            state = optimizer.state[parameter]
            got = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
            assert [different(a.flatten(), planes[b]) for a, b in zip(got, (0, 2, 3), strict=True)] == [0, 0, 0]
            assert state["step"] == step


def test_the_update_follows_the_groups():
    params = parameters()
    optimizer = AdamW([{"params": params[:2], "lr": 0.5}, {"params": params[2:], "weight_decay": 0.0, "lr": 0.0}])
    before = [parameter.detach().clone() for parameter in params]
    give_gradients(params, seed=1)
    optimizer.step()
    is_kept = [torch.equal(parameter, old) for parameter, old in zip(params, before, strict=True)]
    assert is_kept == [False, False, True, True]
    moved = before[0] - params[0].detach()
    assert moved.abs().max() > 0.4  # the first step is lr, towards the gradient
    optimizer.param_groups[0]["lr"] = 0.0
    middle = params[0].detach().clone()
    optimizer.step()
    assert torch.equal(params[0], middle)


def test_a_parameter_without_gradient_is_untouched_and_one_with_zeros_is_not():
    params = parameters((4,), (4,))
    optimizer = AdamW(params, weight_decay=0.1)
    before = [parameter.detach().clone() for parameter in params]
    params[1].grad = torch.zeros(4)
    optimizer.step()
    assert torch.equal(params[0], before[0])
    assert params[0] not in optimizer.state
    assert not torch.equal(params[1], before[1])
    assert optimizer.state[params[1]]["step"] == 1


def test_steps_are_counted_per_tensor():
    params = parameters((4,), (4,))
    optimizer = AdamW(params)
    for step in range(3):
        give_gradients(params, seed=step)
        if step == 1:
            params[0].grad = None
        optimizer.step()
    assert [optimizer.state[parameter]["step"].item() for parameter in params] == [2, 3]


@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_construction_looks_like_torch(kind):
    of_torch = getattr(torch.optim, kind.__name__)
    ours, theirs = inspect.signature(kind).parameters, inspect.signature(of_torch).parameters
    assert list(ours) == [*theirs, "states"]
    assert [ours[name].default for name in theirs] == [parameter.default for parameter in theirs.values()]
    assert issubclass(kind, of_torch)
    assert kind(parameters()).param_groups[0].keys() == of_torch(parameters()).param_groups[0].keys()


@pytest.mark.parametrize("kind", [AdamW, Adam])
@pytest.mark.parametrize("flag", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_another_update_is_refused(kind, flag):
    with pytest.raises(ConfigError, match=f"{flag}=True"):
        kind(parameters(), **{flag: True})
    optimizer = kind(parameters())
    optimizer.param_groups[0][flag] = True
    with pytest.raises(ConfigError, match=f"{flag}=True"):
        optimizer.step()


@pytest.mark.parametrize(
    ("states", "message"),
    [("compact", "later version"), ("exakt", 'did you mean "exact"'), (None, "states=None: expected 'exact'")],
)
def test_other_states_are_refused(states, message):
    with pytest.raises(ConfigError, match=message):
        AdamW(parameters(), states=states)


def test_sparse_gradients_are_refused_as_in_torch_before_anything_is_updated():
    dense, table = parameters((4,), (3, 2))
    optimizer = AdamW([dense, table])
    before = dense.detach().clone()
    dense.grad = torch.ones(4)
    table.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert torch.equal(dense, before)
    assert not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64])
def test_parameters_of_other_types_are_refused_when_they_would_be_updated(dtype):
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = AdamW([parameter])
    optimizer.step()  # without a gradient nothing is asked of it
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ConfigError, match=str(dtype)):
        optimizer.step()


def test_a_closure_is_called_once_with_gradients_enabled():
    (parameter,) = parameters((4,))
    optimizer = AdamW([parameter])
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() > 0
    assert optimizer.state[parameter]["step"] == 1


@pytest.mark.parametrize("layout", ["channels last", "transposed", "with holes"])
def test_strided_parameters_have_the_bits_of_contiguous_ones(layout):
    (plain,) = parameters((4, 3, 6, 5))
    values = plain.detach().clone()
    strided = {
        "channels last": values.to(memory_format=torch.channels_last),
        "transposed": values.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        "with holes": torch.empty(4, 3, 6, 10)[..., ::2].copy_(values),
    }[layout]
    other = torch.nn.Parameter(strided)
    assert other.stride() != plain.stride()
    optimizers = [AdamW([parameter], weight_decay=0.1) for parameter in (plain, other)]
    for step in range(3):
        give_gradients([plain], seed=step)
        # a gradient in the parameter's strides, and one in others
        other.grad = torch.empty_like(other).copy_(plain.grad) if step else plain.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(plain, other)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizers[0].state[plain][name], optimizers[1].state[other][name])
    # moments that come from a file lie as they lay there
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    give_gradients([plain], seed=9)
    other.grad = plain.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(plain, other)
    assert torch.equal(optimizers[0].state[plain]["exp_avg"], optimizers[1].state[other]["exp_avg"])


def test_parameters_of_no_elements_and_of_no_dimensions_are_updated():
    params = parameters((), (0, 3))
    optimizer = AdamW(params)
    give_gradients(params, seed=1)
    before = params[0].item()
    optimizer.step()
    assert params[0].item() != before
    assert [optimizer.state[parameter]["step"].item() for parameter in params] == [1, 1]


def trained(kind, *, steps, params, options=None):
    optimizer = kind(params, **(options or {}))
    for step in range(steps):
        give_gradients(params, seed=step)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_state_goes_from_torch_to_ours_and_back(name):
    ours, of_torch = getattr(adamw_module, name), getattr(torch.optim, name)
    mine, theirs = parameters(), parameters()
    of_ours = trained(ours, steps=2, params=mine)
    of_theirs = trained(of_torch, steps=2, params=theirs, options={"fused": True})
    for optimizer, cls in ((of_ours, of_torch), (of_theirs, ours)):
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        loaded = cls(parameters())
        loaded.load_state_dict(torch.load(saved, weights_only=True))
        assert_same(loaded.state_dict(), optimizer.state_dict())


def test_a_gradient_scaler_unscales_before_our_step():
    params, plain = parameters((4,)), parameters((4,))
    optimizer, expected = AdamW(params, fused=True), AdamW(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step, bad in enumerate((False, True, False)):
        give_gradients(params, seed=step, scale=float("nan") if bad else 1.0)
        give_gradients(plain, seed=step)
        scaled = scaler.scale(torch.ones(()))
        params[0].grad *= scaled
        scaler.step(optimizer)
        scaler.update()
        if not bad:
            expected.step()
    assert torch.equal(params[0], plain[0])
    assert optimizer.state[params[0]]["step"] == 2


def test_the_kernel_is_the_one_the_environment_asks_for(monkeypatch):
    params = parameters((4,))
    give_gradients(params, seed=1)
    monkeypatch.setenv("PATRICKSTAR_ISA", "avx512")
    optimizer = AdamW(params)
    with pytest.raises(ConfigError, match="later version"):
        optimizer.step()


def test_copies_and_pickles_go_on_from_the_same_state():
    params = parameters((4,))
    optimizer = trained(AdamW, steps=2, params=params)
    twin_params, twin = copy.deepcopy((params, optimizer))
    for one, other in ((params, optimizer), (twin_params, twin)):
        give_gradients(one, seed=7)
        other.step()
    assert torch.equal(params[0], twin_params[0])
    assert twin.state[twin_params[0]]["step"] == 3


def test_a_step_that_has_nothing_to_update_chooses_no_kernel(monkeypatch):
    """As under a session, which has its own: choosing one takes memory that no plan counts."""

    def choose_kernels(device):
        raise AssertionError("a kernel is chosen")

    monkeypatch.setattr(adamw_module, "choose_kernels", choose_kernels)
    AdamW(parameters()).step()


def halves(masters):
    """bf16 parameters that are the upper halves of these values, and the lower halves."""
    weights = [torch.empty_like(value, dtype=torch.bfloat16) for value in masters]
    rests = [torch.empty_like(value, dtype=torch.int16) for value in masters]
    for value, weight, rest in zip(masters, weights, rests, strict=True):
        split(value.detach(), weight, rest)
    return [torch.nn.Parameter(weight) for weight in weights], rests


def masters_of(optimizer, params):
    found = [torch.empty_like(parameter, dtype=torch.float32) for parameter in params]
    for parameter, master in zip(params, found, strict=True):
        join(parameter.detach(), optimizer.state[parameter]["rest"], master)
    return found


def give_the_same_gradients(params, masters, *, seed):
    give_gradients(masters, seed=seed)
    for parameter, master in zip(params, masters, strict=True):
        master.grad = master.grad.bfloat16().float()
        parameter.grad = master.grad.bfloat16()


@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_bf16_parameters_step_as_their_masters_in_fp32(kind):
    params, _ = halves(parameters())
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in params]
    optimizer, expected = kind(params, lr=1e-4, weight_decay=0.1), kind(masters, lr=1e-4, weight_decay=0.1)
    for step in range(5):
        give_the_same_gradients(params, masters, seed=step)
        optimizer.step()
        expected.step()
    for parameter, master, found in zip(params, masters, masters_of(optimizer, params), strict=True):
        assert torch.equal(found, master)
        assert torch.equal(parameter, halves([master])[0][0])
        state = optimizer.state[parameter]
        types = dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), torch.float32)
        assert {key: state[key].dtype for key in state} == {**types, "rest": torch.int16}
        assert torch.equal(state["exp_avg"], expected.state[master]["exp_avg"])
    moved = [bool((a.float() != b).any()) for a, b in zip(params, masters, strict=True)]
    assert any(moved), "or the lower halves would never matter"


@pytest.mark.parametrize("saved_model_first", [True, False])
def test_bf16_parameters_go_on_from_what_was_saved(saved_model_first):
    params, _ = halves(parameters())
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in params]
    optimizer = AdamW(params)
    for step in range(2):
        give_the_same_gradients(params, masters, seed=step)
        optimizer.step()
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), [parameter.detach().clone() for parameter in params]), file)
    file.seek(0)
    states, weights = torch.load(file)
    again = [torch.nn.Parameter(torch.zeros_like(parameter)) for parameter in params]
    resumed = AdamW(again)

    def load_weights():
        with torch.no_grad():
            for parameter, weight in zip(again, weights, strict=True):
                parameter.copy_(weight)

    for load in (load_weights, lambda: resumed.load_state_dict(states))[:: 1 if saved_model_first else -1]:
        load()
    for params_of, who in ((params, optimizer), (again, resumed)):
        give_the_same_gradients(params_of, masters, seed=9)
        who.step()
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))
    assert all(
        torch.equal(a, b) for a, b in zip(masters_of(optimizer, params), masters_of(resumed, again), strict=True)
    )


def test_a_state_is_loaded_as_the_users_hooks_leave_it():
    params, _ = halves(parameters((4,)))
    optimizer = AdamW(params)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    saved = optimizer.state_dict()

    def halved(_, state_dict):
        state = {0: {**state_dict["state"][0], "exp_avg": torch.full((4,), 1 + 2.0**-20)}}
        return {**state_dict, "state": state}

    optimizer.register_load_state_dict_pre_hook(halved)
    optimizer.load_state_dict(saved)
    assert optimizer.state[params[0]]["exp_avg"].tolist() == [1 + 2.0**-20] * 4
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1, "ours is gone"


def test_a_state_of_torch_for_bf16_parameters_goes_on_from_the_weights_as_they_are():
    params, _ = halves(parameters((4,)))
    theirs = torch.optim.AdamW(params)
    params[0].grad = torch.ones(4, dtype=torch.bfloat16)
    theirs.step()
    ours = AdamW(params)
    ours.load_state_dict(theirs.state_dict())
    assert "rest" not in ours.state[params[0]]
    ours.step()
    state = ours.state[params[0]]
    assert (state["exp_avg"].dtype, state["rest"].dtype, state["step"].item()) == (torch.float32, torch.int16, 2)


@pytest.mark.parametrize("build", TENSORS.values(), ids=TENSORS)
def test_a_dense_tensor_is_viewed_without_a_copy(build):
    tensor = build()
    flat = flat_or_copy(tensor, dense_strides(tensor.shape, tensor.stride()))
    assert flat.shape == (tensor.numel(),)
    assert flat.is_contiguous()
    assert flat.data_ptr() == tensor.data_ptr()
    assert sorted(flat.tolist()) == sorted(tensor.flatten().tolist())
    flat += 1  # reaches every element of the tensor once
    assert torch.equal(tensor, build() + 1)
