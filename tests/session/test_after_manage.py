"""Calls at the wrong time, and parameters that are changed under a session: a StateError that says what to do instead."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from patrickstar import StateError
from patrickstar.tracing.seen_operations import shown_to
from tests.parity.compare import same_bits
from tests.session.builders import (
    EMULATED,
    ROOMY,
    Pair,
    adamw,
    backward,
    batch,
    expect_bits,
    is_ordinary,
    loss_of,
    managed,
    mlp,
    store_of,
    tiny_gpt2,
    train,
    values,
)


def replace_one(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.ones(32, 32))


REPLACED: dict[str, Callable[[nn.Module], Any]] = {
    "a parameter": replace_one,
    "a layer": lambda model: model.__setitem__(4, nn.Linear(32, 32)),
    "one more": lambda model: model.append(nn.Linear(32, 32)),
    "one less": lambda model: model.__delitem__(10),
    "no bias": lambda model: model[2].register_parameter("bias", None),
    "tied": lambda model: setattr(model[8], "weight", model[2].weight),
    "moved to meta": lambda model: model.to("meta"),  # where another kind of tensor takes the place of each
    "loaded by assignment": lambda model: model.load_state_dict(mlp(9).state_dict(), assign=True),
}


@pytest.mark.parametrize("change", REPLACED)
def test_parameters_that_are_replaced_are_found_by_the_next_forward(trained: Pair, change: str) -> None:
    with pytest.raises(StateError, match=r"manage it again|session\.close|[Cc]lose the session"):
        REPLACED[change](trained.model)
        trained.model(batch())


def test_a_checkpoint_of_what_is_no_longer_the_models_is_refused(trained: Pair, tmp_path: Any) -> None:
    """What the model shows is not what the session keeps: to save one as the other would be wrong."""
    replace_one(trained.model)
    with pytest.raises(StateError, match="replaced"):
        trained.session.save_checkpoint(tmp_path)


def test_a_replaced_parameter_that_is_put_back_is_as_before(trained: Pair) -> None:
    original = trained.model[0].weight
    replace_one(trained.model)
    with pytest.raises(StateError, match=r"0\.weight"):
        trained.model(batch())
    trained.model[0].weight = original
    trained.train_same(2, first=1)


def test_closing_after_a_replacement_gives_the_others_back(trained: Pair) -> None:
    replace_one(trained.model)
    trained.session.close()
    assert is_ordinary(trained.model)
    want = values(trained.plain) | {"0.weight": torch.ones(32, 32)}
    expect_bits(want, values(trained.model))


def assigning(value: torch.Tensor) -> Callable[[nn.Module], None]:
    return lambda model: setattr(model[0].weight, "data", value)


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a parametrization": (lambda model: nn.utils.parametrizations.weight_norm(model[2]), "Parameter"),
    "bf16": (lambda model: model.to(torch.bfloat16), r"manage\(\)"),
    "fp64": (lambda model: model.double(), r"manage\(\)"),
    "fp16": (lambda model: model.half(), r"manage\(\)"),
    "one layer": (lambda model: model[2].to(torch.float64), r"manage\(\)"),
    "a swap": (lambda model: torch.utils.swap_tensors(model[0].weight, mlp()[0].weight), "swap|session"),
    "data of another shape": (assigning(torch.ones(8, 8)), r"session\.write"),
    "data of another type": (assigning(torch.ones(32, 32, dtype=torch.float64)), r"session\.write"),
    "data on another device": (assigning(torch.ones(32, 32, device="meta")), r"session\.write"),
    "data of another": (lambda model: setattr(model[0].weight, "data", model[2].weight.data), "view of managed memory"),
    "its own data, turned round": (lambda model: setattr(model[0].weight, "data", model[0].weight.data.t()), "view of"),
    "shared memory": (lambda model: model.share_memory(), "share_memory_"),
}


@pytest.mark.parametrize(("change", "says"), REFUSED.values(), ids=REFUSED)
def test_what_a_session_cannot_keep_is_refused_and_all_is_as_before(
    trained: Pair, change: Callable[[nn.Module], Any], says: str
) -> None:
    with pytest.raises((StateError, RuntimeError), match=says):
        change(trained.model)
    trained.train_same(1, first=1)


def test_resized_embeddings_of_transformers_are_refused() -> None:
    model = tiny_gpt2()
    with managed(model, **ROOMY):
        with pytest.raises(StateError, match="resize_token_embeddings|session"):
            model.resize_token_embeddings(70)
            model(torch.ones(1, 4, dtype=torch.long))


# after close

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "stats": lambda session, tmp: session.stats(),
    "clip_grad_norm_": lambda session, tmp: session.clip_grad_norm_(1.0),
    "gradients": lambda session, tmp: list(session.gradients()),
    "write": lambda session, tmp: session.write("0.weight", torch.ones(32, 32)),
    "state_dict": lambda session, tmp: session.state_dict(),
    "load_state_dict": lambda session, tmp: session.load_state_dict(mlp().state_dict()),
    "save_checkpoint": lambda session, tmp: session.save_checkpoint(tmp),
    "load_checkpoint": lambda session, tmp: session.load_checkpoint(tmp),
    "optimizer.step": lambda session, tmp: session.optimizer.step(),
    "optimizer.zero_grad": lambda session, tmp: session.optimizer.zero_grad(),
    "optimizer.state_dict": lambda session, tmp: session.optimizer.state_dict(),
    "optimizer.load_state_dict": lambda session, tmp: session.optimizer.load_state_dict(adamw(mlp()).state_dict()),
    "optimizer.add_param_group": lambda session, tmp: session.optimizer.add_param_group({"params": []}),
    "with": lambda session, tmp: session.__enter__(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_after_close_is_a_state_error(trained: Pair, call: str, tmp_path: Any) -> None:
    trained.session.close()
    before = values(trained.model)
    with pytest.raises(StateError, match="closed"):
        CALLS[call](trained.session, tmp_path / "checkpoint")
    expect_bits(before, values(trained.model))


KEPT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a lazy state dict": (lambda pair: pair.session.state_dict(), lambda kept: kept["0.weight"]),
    "a gradient": (lambda pair: pair.model[0].weight.grad, torch.sum),
    "the optimizer": (lambda pair: pair.optimizer, lambda kept: kept.state),
    "its state": (lambda pair: pair.optimizer.state, len),
    "an average": (lambda pair: pair.optimizer.state[pair.model[0].weight]["exp_avg"], torch.sum),
}


@pytest.mark.parametrize(("keep", "use"), KEPT.values(), ids=KEPT)
def test_what_outlives_the_session_is_a_state_error_when_it_is_used(trained: Pair, keep: Any, use: Any) -> None:
    backward(trained.model)
    kept = keep(trained)
    trained.session.close()
    with pytest.raises(StateError, match="closed"):
        use(kept)


def test_closing_twice_does_nothing(trained: Pair) -> None:
    trained.session.close()
    with torch.no_grad():
        trained.model[0].weight.zero_()
    trained.session.close()
    assert not trained.model[0].weight.any()


# close


@pytest.mark.parametrize("pending", ["nothing", "step", "gradients"])
def test_close_gives_back_ordinary_parameters_with_the_current_weights(pair: Pair, pending: str) -> None:
    pair.train(2)
    identities = [id(p) for p in pair.model.parameters()]
    if pending != "nothing":
        pair.each(backward, 2)
    if pending == "step":
        pair.each(lambda model, optimizer: optimizer.step())
    pair.close()
    assert identities == [id(p) for p in pair.model.parameters()]

    for want, got in zip(pair.plain.parameters(), pair.model.parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None)
        assert want.grad is None or same_bits(want.grad, got.grad)
        assert got.requires_grad
    assert not pair.model._forward_pre_hooks
    assert not pair.model._forward_hooks
    assert not pair.original._optimizer_step_pre_hooks
    assert all(not p._post_accumulate_grad_hooks for p in pair.model.parameters())


def test_after_close_the_model_is_managed_again(pair: Pair) -> None:
    pair.train(2)
    pair.session.close()
    oracle = adamw(pair.plain)
    with managed(pair.model, **EMULATED) as session:
        assert same_bits(train(pair.plain, oracle, 2), train(pair.model, session.optimizer, 2))


def test_aliases_that_outlive_the_session_go_on_as_in_pytorch(trained: Pair) -> None:
    alias, view = trained.model[0].weight.detach(), trained.model[2].weight.detach().numpy()
    trained.session.close()
    assert same_bits(alias, trained.plain[0].weight.detach())
    assert (view == trained.plain[2].weight.detach().numpy()).all(), (
        "it keeps its memory, of which the model has a copy"
    )
    with torch.no_grad():
        trained.model[0].weight.add_(1)
    assert same_bits(alias, trained.model[0].weight.detach())


@pytest.mark.parametrize("done", ["nothing", "a forward", "a backward", "a step"])
def test_a_session_that_is_dropped_with_its_model_leaves_nothing(
    machine: dict[str, Any], done: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train_a_little() -> weakref.ref[Any]:
        model = mlp()
        session = managed(model, **machine)
        if done != "nothing":
            loss = model(batch()).sum()
        if done in ("a backward", "a step"):
            loss.backward()
        if done == "a step":
            session.optimizer.step()
        return weakref.ref(store_of(session))

    store = train_a_little()
    gc.collect()
    assert store() is None
    assert not shown_to()
    assert "was never closed" in caplog.text


@pytest.mark.parametrize("of", [loss_of, backward], ids=["after a forward", "after a backward"])
def test_an_exception_inside_of_the_with_block_closes_with_the_weights_of_the_last_step(of: Callable[..., Any]) -> None:
    plain, model = mlp(), mlp()
    train(plain, adamw(plain), 2)
    with pytest.raises(ZeroDivisionError):
        with managed(model) as session:
            train(model, session.optimizer, 2)
            loss = of(model, number=2)
            raise ZeroDivisionError
    assert is_ordinary(model)
    assert loss.isfinite()
    expect_bits(values(plain), values(model))


def test_weights_that_do_not_fit_become_meta_with_one_warning_that_names_what_keeps_them(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    session = managed(model, device="cpu", host_memory="36KiB", disk=tmp_path / "disk")
    train(model, session.optimizer, 1)
    want = values(session)
    session.save_checkpoint(tmp_path / "checkpoint")
    caplog.clear()
    session.close()
    assert all(p.is_meta and type(p) is nn.Parameter for p in model.parameters())
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "export" in warning.getMessage()
    assert "save_checkpoint" in warning.getMessage()
    other = mlp(3)
    with managed(other) as session:
        session.load_checkpoint(tmp_path / "checkpoint")
    expect_bits(want, values(other))


def test_weights_that_nobody_wants_are_not_given_back(trained: Pair, caplog: pytest.LogCaptureFixture) -> None:
    trained.session.close(keep_weights=False)
    assert is_ordinary(trained.model)
    assert all(parameter.is_meta for parameter in trained.model.parameters())
    assert not caplog.records
    with pytest.raises(StateError, match="closed"):
        trained.session.stats()
