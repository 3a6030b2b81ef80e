"""Uses outside the owning module, aliases, copies, gradients as PyTorch's users know them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from patrickstar.errors import StateError
from tests.composed import Composed
from tests.parameters.toy import ToyOwner, compare

X = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))


def tower():
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))


def managed(build=tower):
    torch.manual_seed(3)
    plain = build()
    model = copy.deepcopy(plain)
    return plain, model, ToyOwner(model, slots=1, chunk_numel=2048)


def test_identity_and_kind_stay():
    _, model, _ = managed()
    parameter = model[0].weight
    assert parameter is model[0].weight
    assert isinstance(parameter, nn.Parameter)
    assert parameter in set(model.parameters())


def test_what_needs_no_data_fetches_nothing():
    plain, model, owner = managed()
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "grad"):
            assert getattr(want, name) == getattr(got, name)
        for name in ("numel", "stride", "is_contiguous", "size", "element_size"):
            assert getattr(want, name)() == getattr(got, name)()
    assert owner.fetches == 0


def test_a_missed_use_cannot_read_the_placeholder():
    from patrickstar.torch_private import Plain

    _, model, _ = managed()
    with Plain(), pytest.raises(RuntimeError, match="placeholder|Storage that is invalid"):
        model[0].weight.sum()


def test_functional_use_of_another_modules_weight():
    def run(m, x):
        return torch.nn.functional.linear(m.a(x), m.b.weight * 2, m.a.bias).sum() + m.b.bias.pow(2).sum()

    build = lambda: Composed(run, a=nn.Linear(32, 32), b=nn.Linear(32, 32))
    compare(build, lambda model: model(X), slots=1, chunk_numel=2048, moves=False)


def test_gradients_by_autograd_grad_of_parameters():
    plain, model, owner = managed(lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)), nn.Linear(3, 3)))
    results = []
    for module in (plain, model):
        x = X.clone().requires_grad_()
        loss = checkpoint(module[:3], x, use_reentrant=False).square().sum()
        results.append(torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert not owner.gradients
    assert owner.fetches > 2


def test_backward_for_some_parameters_only():
    plain, model, owner = managed()
    for module in (plain, model):
        module(X).sum().backward(inputs=[module[1].weight, module[0].bias])
    assert set(owner.gradients) == {"1.weight", "0.bias"}
    assert torch.equal(plain[1].weight.grad, model[1].weight.grad)


def test_a_penalty_over_all_parameters():
    loss_of = lambda model: model(X).sum() + sum(p.square().sum() for p in model.parameters())
    compare(tower, loss_of, slots=1, chunk_numel=2048)


def test_inference_mode_leaves_slots_usable():
    plain, model, owner = managed()
    with torch.inference_mode():
        assert torch.equal(model(X), plain(X))
        assert torch.equal(model[0].weight + 1, plain[0].weight + 1)
    for module in (plain, model):
        module(X).sum().backward()
    assert torch.equal(plain[0].weight.grad, owner.gradients["0.weight"])


def test_deepcopy_keeps_ties():
    def build():
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        model[1].weight = model[0].weight
        return model

    _, model, _ = managed(build)
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight


def test_memory_handed_out_is_reported():
    _, model, owner = managed()
    array = model[0].weight.detach().numpy()
    assert owner.escapes == [owner.binding.by_name["0.weight"].ref]
    assert owner.binding.leases.held()
    del array
    assert not owner.binding.leases.held()


def test_repointing_is_refused():
    _, model, _ = managed()
    with pytest.raises(StateError, match=r"0\.weight.*session\.write"):
        model[0].weight.data = torch.zeros(16, 64)
    with pytest.raises(StateError):
        model.to(torch.float64)
    model.to("cpu")
    model.float()


def test_gradients_read_and_written_as_in_pytorch():
    plain, model, _ = managed()
    for module in (plain, model):
        module(X).sum().backward()
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(want.grad, got.grad)
    for module in (plain, model):
        module[0].weight.grad.mul_(2)
        module[1].weight.grad = torch.ones(32, 32)
        module[2].weight.grad = None
        module(X).sum().backward()
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(want.grad, got.grad)
    for module in (plain, model):
        module.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in module.parameters())
        module.zero_grad()
        assert all(p.grad is None for p in module.parameters())


def test_a_users_hook_sees_the_accumulated_gradient():
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    seen = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    ToyOwner(model, slots=1, chunk_numel=1024)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(seen[1], 2 * seen[0])


def test_unfreezing_and_freezing():
    plain, model, owner = managed()
    for module in (plain, model):
        module[1].requires_grad_(False)
        module(X).sum().backward()
        module[1].weight.requires_grad = True
        module[0].weight.requires_grad_(False)
        module(X).sum().backward()
    for name, parameter in plain.named_parameters():
        got = owner.gradients.get(name)
        assert (parameter.grad is None and got is None) or torch.equal(parameter.grad, got), name


def test_release_gives_ordinary_parameters():
    plain, model, owner = managed()
    owner.binding.release(lambda bound: owner.values(bound.name))
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert type(got) is nn.Parameter
        assert torch.equal(want, got)
        assert not got._post_accumulate_grad_hooks


def test_channels_last_parameters_keep_their_strides():
    def build():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)

    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    owner = compare(build, lambda model: model(image).sum(), slots=1, chunk_numel=1024, moves=False)
    assert owner.binding.by_name["1.weight"].parameter.stride() == build()[1].weight.stride()
