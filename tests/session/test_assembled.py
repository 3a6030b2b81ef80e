"""Gradients in chunks, read and written as `p.grad`, have the bits of plain PyTorch and bytes only while an operation uses them."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patrickstar
from patrickstar import BudgetError, StateError
from tests.parity.compare import same_bits
from tests.session.builders import CHUNK, SLOT, MakePair, Pair, backward, batch, loss_of, seeded

SMALLEST = {"device": "emulated", "device_memory": 4 * SLOT}
"""An update of one chunk fills the device."""


def gradients(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


def norms_by_hand(model: nn.Module, _: Any) -> Tensor:
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(torch.clamp(1e-3 / (norm + 1e-6), max=1.0))
    return norm


def grad_scaler(model: nn.Module, optimizer: Any) -> Tensor:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, 1)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)
    scaler.update()
    return norm


def noise(model: nn.Module, _: Any) -> None:
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)


def augmented(model: nn.Module, _: Any) -> None:
    for p in model.parameters():
        p.grad *= 0.5
        p.grad += 1e-3
        p.grad.data.mul_(3)
        p.grad.detach().sub_(1e-4)
        p.grad = p.grad


def views(model: nn.Module, _: Any) -> None:
    for p in model.parameters():
        p.grad.view(-1)[::2] = 0.25
        p.grad[0] = 1.0
        torch.mul(p.grad, 2, out=p.grad)
        p.grad.t().clamp_(-1, 1)


def foreach(model: nn.Module, _: Any) -> Tensor:
    held = gradients(model)
    torch._foreach_mul_(held, [float(index) for index in range(len(held))])
    torch._foreach_add_(held, torch._foreach_abs(held), alpha=0.5)
    torch._foreach_addcmul_(held, held, held, torch.linspace(0, 1, len(held)))
    torch._foreach_mul_(held, torch.tensor(0.5))
    return torch.stack(torch._foreach_norm(held))


def amp_foreach(model: nn.Module, _: Any) -> Tensor:
    found, scale = torch.zeros(1), torch.tensor([0.125])
    torch._amp_foreach_non_finite_check_and_unscale_(gradients(model), found, scale)
    return found


CHANGES = {
    "clip": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clip, one by one": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=False),
    "clip, foreach": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=True),
    "clip, 1-norm": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=1.0),
    "clip, largest": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=float("inf")),
    "clip values": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1e-4),
    "total norm": lambda model, _: nn.utils.get_total_norm(gradients(model)),
    "norms": norms_by_hand,
    "GradScaler": grad_scaler,
    "noise": noise,
    "augmented": augmented,
    "views": views,
    "foreach": foreach,
    "amp foreach": amp_foreach,
    "zeroed": lambda model, _: model.zero_grad(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_loop_over_gradients_has_torchs_bits(moving: Pair, change: str) -> None:
    for number in range(2):
        moving.each(backward, number)
        moving.same(CHANGES[change])
        moving.expect_same_gradients()
        moving.step()
    moving.expect_same()


@pytest.mark.parametrize("change", ["clip", "norms", "foreach", "GradScaler", "zeroed"])
def test_the_smallest_budget_of_an_update_is_enough(make_pair: MakePair, change: str) -> None:
    pair = make_pair(**SMALLEST)
    pair.each(backward)
    pair.same(CHANGES[change])
    pair.step()
    pair.expect_same()


def test_a_gradient_that_lies_in_several_chunks_is_put_together(make_pair: MakePair, on_disk: dict[str, Any]) -> None:
    wide = seeded(lambda: nn.Sequential(nn.Linear(32, 200), nn.Tanh(), nn.Linear(200, 32)))
    pair = make_pair(wide, **{**on_disk, "host_memory": 12 * SLOT})
    for number in range(2):
        pair.each(backward, number)
        pair.same(CHANGES["clip"])
        pair.each(views)
        pair.step()
    pair.expect_same()


def test_a_channels_last_filters_gradient_has_its_strides(make_pair: MakePair, on_disk: dict[str, Any]) -> None:
    def filters() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(288, 4))

    def step(model: nn.Module, optimizer: Any) -> tuple[Any, Tensor]:
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        model(images).square().mean().backward()
        gradient = model[0].weight.grad
        strides, values = gradient.stride(), gradient[1:3, 0].clone()
        gradient[0, 1] = 2.0
        optimizer.step()
        return strides, values

    pair = make_pair(seeded(filters), **{**on_disk, "host_memory": "1MiB"})
    (want_strides, want), (got_strides, got) = pair.each(step)
    assert want_strides == got_strides
    assert same_bits(want, got)
    assert same_bits(pair.plain[0].weight, pair.session.state_dict()["0.weight"])


# what reading gives


def test_a_list_of_all_gradients_holds_no_bytes(moving: Pair) -> None:
    moving.each(backward)
    held = gradients(moving.model)
    assert moving.session._parts.binding.taken_bytes() == 0
    assert all(isinstance(gradient, Tensor) for gradient in held)
    for want, got in zip(moving.plain.parameters(), held, strict=True):
        assert same_bits(want.grad, got.clone())
    moving.step()
    moving.train_same(1, first=1)
    assert moving.session.stats().planned_steps == 2, moving.session.stats().reason


def test_what_is_no_use_moves_nothing(pair: Pair) -> None:
    pair.each(backward)
    before = dict(pair.session.stats().moved)
    for p in pair.model.parameters():
        gradient = p.grad
        assert gradient is p.grad
        assert (gradient.shape, gradient.dtype, gradient.device) == (p.shape, p.dtype, p.device)
        assert gradient.stride() == torch.empty(p.shape).stride()
        assert gradient.is_contiguous()
        assert not gradient.requires_grad
        assert gradient.detach().shape == p.shape
        assert gradient.grad is None
    assert dict(pair.session.stats().moved) == before


def test_a_held_gradient_shows_what_another_backward_adds(make_pair: MakePair, machine: dict[str, Any]) -> None:
    def accumulate(model: nn.Module, optimizer: Any) -> list[Tensor]:
        backward(model, number=0)
        held, view = model[0].weight.grad, model[2].weight.grad.view(-1)
        shown = [held.clone(), view.clone()]
        backward(model, number=1)
        shown += [held.clone(), view.clone()]
        view.mul_(2)
        shown += [model[2].weight.grad.clone()]
        optimizer.step()
        return [*shown, held.clone(), view.clone()]

    pair = make_pair(
        **{**machine, **({"device_memory": 8 * SLOT} if "device_memory" in machine else {"host_memory": 9 * SLOT})}
    )
    pair.same(accumulate)
    pair.expect_same()


def outlived(model: nn.Module, optimizer: Any) -> list[Tensor]:
    view = model[0].weight.grad[3]
    optimizer.step()
    optimizer.zero_grad()
    backward(model, number=1)
    view.add_(1)
    return [view.clone(), torch.stack([view, view]), model[0].weight.grad.clone()]


def assigned(model: nn.Module, _: Any) -> None:
    weight, other = model[0].weight, model[2].weight
    weight.grad = weight.grad.view(32, 32)
    weight.grad.mul_(0.5)
    other.grad = other.grad.clone().mul_(3)


def saved(model: nn.Module, _: Any) -> Tensor:
    scale = torch.full((32, 32), 2.0, requires_grad=True)
    (model[0].weight.grad * scale).sum().backward()
    return scale.grad


def changed_after_it_was_saved(model: nn.Module, _: Any) -> None:
    scale = torch.full((32, 32), 2.0, requires_grad=True)
    product = (model[0].weight.grad * scale).sum()
    model[0].weight.grad.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def inferred(model: nn.Module, _: Any) -> float:
    with torch.no_grad():
        model[0].weight.grad.mul_(2)
    with torch.inference_mode():
        norm = model[2].weight.grad.norm().clone()
        model[2].weight.grad.mul_(3)
    return float(norm.item())


def mixed(model: nn.Module, _: Any) -> list[Tensor]:
    """A foreach operation over managed and ordinary tensors."""
    own = [torch.ones(3), torch.ones(2)]
    torch._foreach_mul_([own[0], model[0].weight.grad, model[0].bias.grad, own[1]], 2)
    torch._foreach_mul_([own[1], model[2].weight.grad], 2)
    return own


def on_another_thread(model: nn.Module, _: Any) -> Tensor:
    norms: list[Tensor] = []

    def read() -> None:
        for p in model.parameters():
            norms.append(p.grad.norm())
            p.grad.mul_(0.5)

    worker = threading.Thread(target=read)
    worker.start()
    worker.join()
    return torch.stack(norms)


@pytest.mark.parametrize(
    "act",
    [outlived, assigned, saved, changed_after_it_was_saved, inferred, mixed, on_another_thread],
    ids=lambda act: act.__name__,
)
def test_what_is_done_with_gradients_gives_what_it_gives_in_pytorch(pair: Pair, act: Callable[..., Any]) -> None:
    pair.each(backward)
    pair.same(act)
    pair.expect_same_gradients()
    pair.step()
    pair.train_same(2, first=2)


def test_copies_are_ordinary_tensors(pair: Pair) -> None:
    pair.each(backward)
    want, gradient = pair.plain[0].weight.grad, pair.model[0].weight.grad
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    for copied in (copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient)), torch.load(file), gradient.clone()):
        assert type(copied) is Tensor
        assert same_bits(want, copied)
    assert same_bits(want.double(), gradient.to(torch.float64))
    assert bool(torch.isfinite(gradient).all())
    assert gradient.to("cpu") is gradient
    assert want[0].tolist() == gradient[0].tolist()
    assert repr(want) == repr(gradient)


def test_the_sessions_clipping_shows_in_gradients(pair: Pair) -> None:
    pair.each(backward)
    view = pair.model[0].weight.grad.view(-1)
    pair.session.clip_grad_norm_(1e-3)
    read = dict(pair.session.gradients())
    for name, p in pair.model.named_parameters():
        assert same_bits(read[name], p.grad.clone())
    assert same_bits(read["0.weight"].view(-1), view.clone())
    pair.model[0].weight.grad.add_(1)
    assert same_bits(read["0.weight"] + 1, dict(pair.session.gradients())["0.weight"])


# what cannot be given


@pytest.mark.parametrize(
    "let_go",
    [
        lambda pair: pair.optimizer.zero_grad(),
        lambda pair: pair.model.zero_grad(),
        lambda pair: setattr(pair.model[0].weight, "grad", None),
        lambda pair: setattr(pair.model[0].weight, "grad", torch.ones(32, 32)),
    ],
    ids=["zero_grad", "model", "None", "another"],
)
def test_a_gradient_that_was_let_go_is_refused_by_name(pair: Pair, let_go: Callable[[Pair], None]) -> None:
    backward(pair.model)
    held, detached = pair.model[0].weight.grad, pair.model[0].weight.grad.detach()
    let_go(pair)
    backward(pair.model, number=1)
    for stale in (held, detached):
        for use in (
            torch.norm,
            lambda g: g.mul_(2),
            lambda g: g.clone(),
            lambda g: torch._foreach_mul_([g, torch.ones(1)], 2),
        ):
            with pytest.raises(StateError, match=r"0\.weight\.grad.*released.*clone"):
                use(stale)
        with pytest.raises(StateError, match=r"0\.weight\.grad.*released"):
            pair.model[0].weight.grad = stale
    assert held.shape == (32, 32)


OUTLIVES, ELSEWHERE = r"0\.weight\.grad.*clone", r"weight\.grad.*chunks"
IMPOSSIBLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "numpy": (lambda model: model[0].weight.grad.numpy(), OUTLIVES),
    "data_ptr": (lambda model: model[0].weight.grad.data_ptr(), OUTLIVES),
    "storage": (lambda model: model[0].weight.grad.untyped_storage(), OUTLIVES),
    "numpy of a view": (lambda model: model[0].weight.grad.view(-1).numpy(), OUTLIVES),
    "dlpack": (lambda model: torch.from_dlpack(model[0].weight.grad), OUTLIVES),
    "another's": (lambda model: setattr(model[0].weight, "grad", model[2].weight.grad), ELSEWHERE),
    "data": (lambda model: setattr(model[0].weight.grad, "data", torch.ones(32, 32)), ELSEWHERE),
    "t_": (lambda model: model[0].weight.grad.t_(), ELSEWHERE),
    "resize_": (lambda model: model[0].weight.grad.resize_(3), ELSEWHERE),
}


@pytest.mark.parametrize(("act", "says"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_memory_that_outlives_the_use_or_lies_elsewhere_is_refused_by_name(
    pair: Pair, act: Callable[[nn.Module], Any], says: str
) -> None:
    pair.each(backward)
    with pytest.raises(StateError, match=says):
        act(pair.model)
    pair.expect_same_gradients()


def test_a_foreach_operation_over_two_sessions_gradients(make_pair: MakePair) -> None:
    first, second = make_pair(), make_pair()
    for pair in (first, second):
        pair.each(backward)
    want = nn.utils.clip_grad_norm_([*first.plain.parameters(), *second.plain.parameters()], 1e-3)
    got = nn.utils.clip_grad_norm_([*first.model.parameters(), *second.model.parameters()], 1e-3)
    assert same_bits(want, got)
    for pair in (first, second):
        pair.expect_same_gradients()


def test_lists_of_other_lengths_are_refused_by_torch_before_anything_changes(pair: Pair) -> None:
    pair.each(backward)
    with pytest.raises(RuntimeError, match="same number of elements"):
        torch._foreach_add_(gradients(pair.model), gradients(pair.model)[1:])
    pair.expect_same_gradients()


def test_many_whole_gradients_at_once_are_refused_in_numbers(make_pair: MakePair) -> None:
    pair = make_pair(**SMALLEST)
    pair.each(backward)
    with pytest.raises(BudgetError, match=r"session\.clip_grad_norm_") as refusal:
        torch.cat([gradient.view(-1) for gradient in gradients(pair.model)])
    assert refusal.value.needed_bytes > refusal.value.available_bytes == SMALLEST["device_memory"]
    assert refusal.value.smallest_bytes == refusal.value.needed_bytes
    del refusal
    pair.step()
    pair.expect_same()


def test_one_whole_gradient_that_does_not_fit_is_refused_before_the_first_is_changed() -> None:
    """A matrix in tiles, of which a tile fits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32 * 16, bias=False))
    optimizer = patrickstar.AdamW(model.parameters())
    options = patrickstar.Options(chunk_size=CHUNK, poison=True, tile_rows=64)
    with patrickstar.manage(model, optimizer, device="emulated", device_memory=7 * SLOT, options=options) as session:
        model(batch()).square().mean().backward()
        before = {name: gradient.clone() for name, gradient in session.gradients()}
        for use in (
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
            lambda: torch._foreach_mul_(gradients(model), 0.5),
            lambda: model[1].weight.grad.norm(),
        ):
            with pytest.raises(
                BudgetError, match=r"short to put 1\.weight\.grad together(.|\n)*session\.clip_grad_norm_"
            ):
                use()
        assert all(same_bits(before[name], gradient) for name, gradient in session.gradients())
        session.clip_grad_norm_(1e-3)
        session.optimizer.step()


def test_held_views_count_against_the_budget_and_are_said(make_pair: MakePair) -> None:
    pair = make_pair(**SMALLEST)
    pair.each(backward)
    held = [pair.model[0].weight.grad.view(-1)]
    assert pair.session._parts.binding.taken_bytes() == 32 * 32 * 4
    with pytest.raises(BudgetError, match=r"held"):
        held.extend(p.grad.view(-1) for p in pair.model.parameters())
    held.clear()
    assert pair.session._parts.binding.taken_bytes() == 0
    pair.step()
    pair.train_same(1, first=1)
