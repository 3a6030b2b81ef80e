"""`Options(tile_rows=)`: weights that need not be resident as a whole, with the bits of plain PyTorch that multiplies with as many rows at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import patrickstar
from patrickstar.errors import LayoutError, StateError
from patrickstar.session.forecast import forecast
from patrickstar.step.gradients import Gradients
from tests.parity.compare import same_bits
from tests.parity.tiles import tiled_products
from tests.session.builders import expect_bits, finish, values

ROWS = 7
VOCABULARY, WIDTH = 50, 24


class Language(nn.Module):
    """A table that is also the last linear, and two linears of more rows than a tile."""

    def __init__(self, vocabulary: int = VOCABULARY, *, tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, WIDTH, padding_idx=3)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.table(ids)
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return F.cross_entropy(self.head(hidden).flatten(0, -2), targets.flatten())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, targets = (torch.randint(0, VOCABULARY, (4, 9), generator=generator) for _ in range(2))
    return ids, targets


def built(seed: int = 0) -> Language:
    torch.manual_seed(seed)
    return Language()


def managed(model: nn.Module, *, rows: int = ROWS, lr: float = 1e-2, **memory: Any) -> Any:
    options = patrickstar.Options(tile_rows=rows, poison=True, chunk_size=1024, **memory.pop("options", {}))
    given = {"device": "emulated", "precision": "fp32", **memory}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    return patrickstar.manage(model, optimizer, options=options, **given)


def gradients_of(session: Any) -> dict[str, Tensor]:
    return {name: gradient.clone() for name, gradient in session.gradients()}


def plain_gradients(model: Language, loss: Callable[[Language], Tensor]) -> dict[str, Tensor]:
    with tiled_products(model, ROWS):
        loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train_both(session: Any, model: nn.Module, plain: nn.Module, loss_of: Callable[..., Tensor]) -> None:
    """Some steps of each, which have the same losses and weights."""
    theirs = patrickstar.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        losses = []
        for module, optimizer in ((model, session.optimizer), (plain, theirs)):
            with tiled_products(plain, ROWS) if module is plain else nullcontext():
                losses.append(loss_of(module, *batch(step)))
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0].item().hex() == losses[1].item().hex()
    expect_bits(dict(session.state_dict()), plain.state_dict())


def test_the_smallest_budget_is_no_longer_that_of_the_largest_matrix():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8192, bias=False), nn.Flatten(0, -1))
    inputs = {"input": torch.randn(1, 64)}
    chunk = {"device": "emulated", "precision": "fp32", "step": "in_backward"}
    least = {
        rows: forecast(model, inputs, options=patrickstar.Options(tile_rows=rows, chunk_size=16384), **chunk).minimum
        for rows in (None, 256)
    }
    assert least[None]["device"] > 4 * 8192 * 64
    assert least[256]["device"] < 4 * 8192 * 64 / 4


def test_a_lookup_has_the_bits_of_an_ordinary_one_and_its_padding_no_gradient():
    model, plain = built(), built()
    ids = torch.tensor([[3, 0, 49, 7, 7, 6], [3, 3, 48, 14, 13, 7]])
    with managed(model) as session:
        found = model.table(ids)
        assert same_bits(found.detach().clone(), plain.table(ids).detach())
        (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
        expected = plain.table(ids)
        (expected * torch.linspace(-1, 1, expected.numel()).view_as(expected)).sum().backward()
        ours = gradients_of(session)
        assert list(ours) == ["table.weight"]
        assert same_bits(ours["table.weight"], plain.table.weight.grad)
        assert not ours["table.weight"][3].any()


@pytest.mark.parametrize("padding", [None, 3, -1])
def test_the_function_takes_its_padding_as_torch_does(padding):
    model, plain = built(), built()
    ids = torch.tensor([3, 49, 0, 49])
    with managed(model) as session:
        F.embedding(ids, model.table.weight, padding).sum().backward()
        F.embedding(ids, plain.table.weight, padding).sum().backward()
        assert same_bits(gradients_of(session)["table.weight"], plain.table.weight.grad)


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_an_id_outside_of_the_table_is_an_index_error_as_in_torch(wrong):
    model = built()
    with managed(model), pytest.raises(IndexError, match="out of range"):
        model.table(torch.tensor([1, wrong]))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_uses_see_the_whole_and_their_gradient_adds_up_with_the_tiles(precision):
    model, plain = built(), built()
    if precision == "bf16":
        plain.bfloat16()

    def loss(model: Language) -> Tensor:
        return model(*batch(0)) + model.up.weight.norm() + (model.down.weight.t() @ model.up.weight.t()).square().mean()

    with managed(model, precision=precision, options={"compute": precision}) as session:
        loss(model).backward()
        ours = gradients_of(session)
    theirs = plain_gradients(plain, loss)
    if precision == "fp32":
        expect_bits(ours, theirs)
    else:  # two sums in bf16 that plain PyTorch may take in another order
        assert list(ours) == list(theirs)
        for name in ours:
            torch.testing.assert_close(ours[name].float(), theirs[name].float(), rtol=0.02, atol=1e-3)


def test_other_uses_in_backward_update_each_parameter_once():
    model, plain = built(), built()
    with managed(model, step="in_backward") as session:
        train_both(session, model, plain, lambda m, ids, targets: m(ids, targets) + m.up.weight.norm())


def test_a_write_between_forward_and_backward_is_told():
    model = built()
    with managed(model) as session:
        loss = model(*batch(0))
        session.write("up.weight", torch.ones(4 * WIDTH, WIDTH))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-fp32"])
@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(2.0),
        lambda weight: weight[3].zero_(),
        lambda weight: weight.detach().add_(1.0),
        lambda weight: torch.nn.init.ones_(weight),
    ],
    ids=["in place", "a view", "detached", "init"],
)
def test_a_change_in_place_between_forward_and_backward_is_told(change, precision):
    kept, _, compute = precision.partition("-")
    model, plain = built(), built()
    with managed(model, precision=kept, options={"compute": compute or kept}):
        for each in (model, plain):
            loss = each(*batch(0))
            with torch.no_grad():
                change(each.up.weight)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_a_backward_that_fails_between_tiles_leaves_no_half_gradient(monkeypatch):
    model = built()
    add = Gradients.add

    def fails_once(self: Gradients, bound: Any, gradient: Tensor, **rest: Any) -> None:
        if bound.name == "up.weight[5]":  # the last ones come first
            monkeypatch.undo()
            raise ZeroDivisionError
        add(self, bound, gradient, **rest)

    with managed(model) as session:
        monkeypatch.setattr(Gradients, "add", fails_once)
        with pytest.raises(ZeroDivisionError):
            model(*batch(1)).backward()
        before = gradients_of(session)
        assert "up.weight" not in before
        for name in before:
            model.get_parameter(name).grad = None
        model(*batch(0)).backward()
        expect_bits(gradients_of(session), plain_gradients(built(), lambda plain: plain(*batch(0))))


def test_hooks_on_a_tiled_parameter_are_refused_before_and_after_manage():
    model = built()
    model.up.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(LayoutError, match=r"up\.weight has hooks.*never exists as one tensor"):
        managed(model)
    model = built()
    with managed(model):
        for register in ("register_hook", "register_post_accumulate_grad_hook"):
            with pytest.raises(StateError, match=r"up\.weight.*never exists as one tensor"):
                getattr(model.up.weight, register)(print)
        model.up.bias.register_hook(lambda gradient: gradient)


def test_a_gradient_asked_of_autograd_is_refused_and_one_of_inputs_goes_to_tiles():
    model, plain = built(), built()
    with managed(model) as session:
        with pytest.raises(StateError, match=r"session\.gradients\(\)"):
            torch.autograd.grad(model(*batch(0)), [model.up.weight])
        alias = model.up.weight.detach().requires_grad_()  # a leaf of its own
        (gradient,) = torch.autograd.grad(alias.square().sum(), [alias])
        assert same_bits(gradient, 2 * plain.up.weight.detach())
        model(*batch(0)).backward(inputs=[model.up.weight])
        ours = gradients_of(session)
        with tiled_products(plain, ROWS):
            plain(*batch(0)).backward(inputs=[plain.up.weight])
        assert list(ours) == ["up.weight"]
        assert same_bits(ours["up.weight"], plain.up.weight.grad)


def test_copies_pickles_and_shapes_are_those_of_the_whole(tmp_path: Path):
    model, plain = built(), built()
    with managed(model):
        copied = copy.deepcopy(model)
        assert type(copied.up.weight) is nn.Parameter
        expect_bits(copied.state_dict(), plain.state_dict())
        assert model.up.weight.shape == (4 * WIDTH, WIDTH)
        assert model.up.weight.stride() == (WIDTH, 1)
        torch.save(model.up.weight, tmp_path / "weight.pt")
        assert same_bits(torch.load(tmp_path / "weight.pt").detach(), plain.up.weight.detach())
    expect_bits(model.state_dict(), plain.state_dict())


def test_checkpoints_and_exports_know_nothing_of_tiles(tmp_path: Path):
    model = built()
    with managed(model) as session:
        finish(model(*batch(0)), session.optimizer)
        session.save_checkpoint(tmp_path / "checkpoint")
        session.export(tmp_path / "export")
        expected = values(session)
        moments = session.optimizer.state_dict()["state"]
    whole = built(1)
    with managed(whole, rows=10_000) as session:
        session.load_checkpoint(tmp_path / "checkpoint")
        expect_bits(dict(session.state_dict()), expected)
        again = session.optimizer.state_dict()["state"]
        assert all(same_bits(again[index]["exp_avg"], moments[index]["exp_avg"]) for index in moments)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert same_bits(exported["up.weight"], expected["up.weight"])
    tiled = built(2)
    with managed(tiled, weights=tmp_path / "export") as session:
        expect_bits(dict(session.state_dict()), expected)


def test_a_model_built_without_memory_is_filled_tile_by_tile():
    torch.manual_seed(5)
    with patrickstar.deferred_init():
        model = Language()
    with managed(model) as session:
        expect_bits(dict(session.state_dict()), built(5).state_dict())


def test_the_first_forward_is_planned_and_its_trace_names_tiles():
    model = built()
    with managed(model) as session:
        model(*batch(0)).backward()
        assert session.stats().reactive_steps == 0
        labels = {moment.label for moment in session.trace.moments}
        assert {"up.weight[0]", "up.weight[13]", "table.weight[7]"} <= labels
        assert "up.weight" not in labels
