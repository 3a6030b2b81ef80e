"""Faults of ranks: nothing hangs, nothing is silently wrong. Each ends in an error on every rank, before a weight is changed that another lacks."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import patrickstar
from patrickstar.comm.ranks import Ranks
from patrickstar.errors import BudgetError, ConfigError, DeviceError, RankError, StateError
from patrickstar.session.checks import expect_a_gpu_each
from patrickstar.step.stretches import Stretches
from tests.faults import Fails, FaultyIO
from tests.ranks import Ended, Team, all_well, kill_me
from tests.sampling import only
from tests.session.test_ranks import DEFAULTS, build, inputs, loss_of, mlp, plain

TORCH = torch.__version__
Act = Callable[[nn.Module, Any, int], object]


@contextmanager
def managed(name: str = "mlp", **arguments: Any) -> Iterator[tuple[nn.Module, Any]]:
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with patrickstar.manage(model, optimizer, **{**DEFAULTS, **arguments}) as session:
        yield model, session


def step(model: nn.Module, session: Any, rank: int, number: int) -> None:
    loss_of(model, rank, number).backward()
    session.optimizer.step()
    session.optimizer.zero_grad()


# one rank alone does something, in the second of three steps


class Mine(Exception):
    pass


def raises(*_: object) -> None:
    raise Mine


def hooked(
    model: nn.Module, session: Any, rank: int, register: Callable[..., object], hook: Callable[..., Any]
) -> None:
    register(hook)
    step(model, session, rank, 1)


def interrupt(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_as_it_waits(model: nn.Module, session: Any, rank: int) -> None:
    threading.Timer(0.3, interrupt).start()
    session.state_dict()["0.0.weight"]


ENDS: dict[str, tuple[type, Act]] = {
    "in_forward": (Mine, lambda m, s, r: hooked(m, s, r, m[2].register_forward_hook, raises)),
    "in_backward": (Mine, lambda m, s, r: hooked(m, s, r, m[2].register_full_backward_hook, raises)),
    "in_step": (Mine, lambda m, s, r: hooked(m, s, r, s.optimizer.register_step_pre_hook, raises)),
    "killed": (Ended, lambda m, s, r: hooked(m, s, r, m[2].register_forward_hook, lambda *_: kill_me())),
    "interrupted": (KeyboardInterrupt, lambda m, s, r: hooked(m, s, r, m[2].register_forward_hook, interrupt)),
    "interrupted_as_it_waits": (KeyboardInterrupt, interrupted_as_it_waits),
}


def alone(rank: int, act: str) -> None:
    with managed() as (model, session):
        step(model, session, rank, 0)
        if rank == 1:
            ENDS[act][1](model, session, rank)
        time.sleep(1.0 if act == "interrupted_as_it_waits" else 0.0)
        step(model, session, rank, 1)
        step(model, session, rank, 2)


@pytest.mark.parametrize("act", only(("in_backward", "killed"), ENDS))
def test_what_ends_one_rank_is_an_error_on_all(three: Team, act: str) -> None:
    answers, (raised, _) = three.run(alone, act), ENDS[act]
    assert isinstance(answers.pop(1), raised)
    for error in answers:
        assert isinstance(error, RankError), error
        if raised is Ended:
            assert error.ranks == (1,)
        elif act != "interrupted_as_it_waits":
            assert f"rank 1: agree close after {raised.__name__}" in str(error)


def full_disk(rank: int, disk: Path) -> None:
    io = FaultyIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patrickstar.memory.disk.FileIO", lambda: io)
        with managed(disk=disk, host_memory=3 * 320 << 10) as (model, session):
            for number in range(5):
                io.faults[:] = [Fails("pwritev", errno.ENOSPC, times=1 << 30)] if rank == 1 and number == 2 else []
                step(model, session, rank, number)


def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all(three: Team, tmp_path: Path) -> None:
    first, own, last = three.run(full_disk, tmp_path)
    assert isinstance(own, DeviceError), own
    for error in (first, last):
        assert isinstance(error, RankError), error
        assert "rank 1: agree close after DeviceError" in str(error)


def alike(rank: int) -> tuple[Tensor, Tensor]:
    with pytest.raises(Mine), managed() as (model, session):
        step(model, session, rank, 0)
        read = session.state_dict()["0.0.weight"].clone()
        raises()
    return read, model[0][0].weight.detach()


def test_an_exception_that_all_ranks_have_leaves_the_weights(two: Team) -> None:
    for read, left in all_well(two.run(alike)):
        assert torch.equal(read, left)


# what one rank does that the others do not


def evaluates_alone(model: nn.Module, session: Any, rank: int) -> None:
    with torch.no_grad():
        loss_of(model, rank, 1)


def calls_blocks(model: nn.Module, session: Any, rank: int, order: tuple[int, ...]) -> None:
    x = inputs(rank, 1, 0)
    for number in order:
        x = model[number](x)
    x.square().mean().backward()
    session.optimizer.step()


def keeps_its_gradients(model: nn.Module, session: Any, rank: int) -> None:
    with session.no_sync():
        loss_of(model, rank, 1).backward()


ODD: dict[str, tuple[str, int, Act]] = {
    "forward": ("", 0, lambda m, s, r: loss_of(m, r, 1)),
    "evaluation": ("", 0, evaluates_alone),
    "left_out": ("", 0, lambda m, s, r: calls_blocks(m, s, r, (0, 1, 3))),
    "swapped": ("", 0, lambda m, s, r: calls_blocks(m, s, r, (0, 2, 1, 3))),
    "twice": ("", 0, lambda m, s, r: calls_blocks(m, s, r, (0, 1, 2, 1, 3))),
    "reads_a_weight": ("for 0.0.weight outside of a forward", 0, lambda m, s, r: m[0][0].weight.sum().item()),
    "reads_the_state_dict": ("of 0.0.weight", 0, lambda m, s, r: s.state_dict()["0.0.weight"]),
    "reads_a_moment": ("of 0.0.weight", 0, lambda m, s, r: s.optimizer.state[m[0][0].weight]["exp_avg"].sum().item()),
    "keeps_its_gradients": ("", 0, keeps_its_gradients),
    "leaves": ("", 0, lambda m, s, r: s.close()),
    # As `if not torch.isfinite(loss): continue` does, and a scheduler that looks at this rank's loss.
    "skips_its_step": (
        "after step 1 by hyper-parameters",
        1,
        lambda m, s, r: setattr(s.optimizer, "step", lambda: None),
    ),
    "another_rate": ("after step 2 by hyper-parameters", 1, lambda m, s, r: s.optimizer.param_groups[0].update(lr=0.5)),
    "another_batch": ("", 2, lambda m, s, r: step(m, s, r, 1)),
}
"""What the error says, after how many steps at most, and what one rank does."""
FEW = ("forward", "swapped", "reads_a_weight", "skips_its_step", "another_batch")


def odd(rank: int, act: str) -> tuple[str, int]:
    """What the error says, and how many steps this rank has taken after the first one."""
    taken = 0
    try:
        with managed() as (model, session):
            step(model, session, rank, 0)
            if rank == 1:
                ODD[act][2](model, session, rank)
            try:
                for number in (1, 2):
                    step(model, session, rank, number)
                    taken += 1
            except RankError:
                with pytest.raises(RankError):  # only close() works
                    session.state_dict()["2.0.weight"]
                raise
    except RankError as error:
        with pytest.raises(StateError):
            session.stats()  # it is closed
        assert all(parameter.is_meta for parameter in model.parameters())
        return str(error), taken
    raise AssertionError("nobody has noticed")


@pytest.mark.parametrize("act", only(FEW, ODD))
def test_a_rank_that_does_something_else_is_an_error_on_all(two: Team, act: str) -> None:
    answers, (said, taken, _) = two.run(odd, act), ODD[act]
    for text, steps in all_well(answers):
        assert "ranks were about to do different things, and nothing was exchanged" in text
        assert "rank 1: " in text
        assert said in text
        assert steps <= taken


# what may differ, and what is right


def postpones_its_step(rank: int) -> dict[str, Tensor]:
    with managed() as (model, session):
        loss_of(model, rank, 0).backward()
        with session.no_sync(), pytest.raises(StateError, match=r"inside of session.no_sync\(\)"):
            session.optimizer.step()
        session.optimizer.step()
        session.optimizer.zero_grad()
        for number in (1, 2):
            step(model, session, rank, number)
        return weights_of(session)


def weights_of(session: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in session.state_dict().items()}


def test_a_step_while_gradients_are_not_averaged_is_refused_and_may_be_taken_later(two: Team) -> None:
    want = plain("mlp", 2)["weights"]
    for found in all_well(two.run(postpones_its_step)):
        assert all(torch.equal(found[name], value) for name, value in want.items())


def assigns(rank: int) -> dict[str, Tensor]:
    """Gradients that are assigned, which nobody averages; and those that are changed in place, on all ranks alike."""
    with managed() as (model, session):
        weight = model[0][0].weight
        with pytest.raises(StateError, match=r"0.0.weight.grad was assigned a tensor: over ranks.*\(p.grad.mul_"):
            weight.grad = torch.ones(120, 48)
        for number in range(3):
            loss_of(model, rank, number).backward()
            with pytest.raises(StateError, match="was assigned a tensor"):
                weight.grad = weight.grad * 2
            weight.grad *= 2
            weight.grad = None if number == 1 else weight.grad
            session.optimizer.step()
            session.optimizer.zero_grad()
        return weights_of(session)


def changed_in_place(size: int) -> nn.Module:
    """One process that does the same with the averages."""
    model = build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for number in range(3):
        average(model, [loss_of(model, rank, number) for rank in range(size)])
        model[0][0].weight.grad = None if number == 1 else model[0][0].weight.grad * 2
        optimizer.step()
    return model


def average(model: nn.Module, losses: list[Tensor]) -> None:
    give(model, [torch.autograd.grad(loss, list(model.parameters())) for loss in losses])


def give(model: nn.Module, gradients: list[tuple[Tensor, ...]]) -> None:
    for parameter, first, *others in zip(model.parameters(), *gradients, strict=True):
        parameter.grad = sum(others, first) * (1.0 / len(gradients))


def test_a_gradient_that_is_assigned_is_refused_and_may_be_changed_in_place(two: Team) -> None:
    want = changed_in_place(2).state_dict()
    for found in all_well(two.run(assigns)):
        assert all(torch.equal(found[name], value) for name, value in want.items())


def penalty(model: nn.Module, rank: int) -> Tensor:
    """A loss with the gradient of the output in it: a backward that makes a graph, and one through that."""
    x = inputs(rank, 0, 0).requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss: Tensor = out.square().mean() + gradient.square().mean()
    return loss


def differentiates_twice(rank: int) -> dict[str, Tensor]:
    with managed() as (model, session):
        penalty(model, rank).backward()
        session.optimizer.step()
        return weights_of(session)


def test_a_gradient_of_a_gradient_has_the_bits_of_one_process(three: Team) -> None:
    model = build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    average(model, [penalty(model, rank) for rank in range(3)])
    optimizer.step()
    for found in all_well(three.run(differentiates_twice)):
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Linear(48, 48))


def evaluates(rank: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Training and evaluation by turns; what each rank has evaluated, and its buffers."""
    model, outputs = normed(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with patrickstar.manage(model, optimizer, **DEFAULTS) as session:
        for number in range(2):
            step(model, session, rank, number)
            model.eval()
            for context in (torch.no_grad, torch.inference_mode, nullcontext):
                with context():
                    outputs.append(model(inputs(rank, 9, 0)).detach().clone())
            model.train()
        return weights_of(session), outputs


def test_evaluation_and_buffers_are_each_ranks_own(three: Team) -> None:
    models = [normed() for _ in range(3)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in models]
    outputs: list[list[Tensor]] = [[], [], []]
    for number in range(2):
        losses = [loss_of(model, rank, number) for rank, model in enumerate(models)]
        found = [
            torch.autograd.grad(loss, list(model.parameters())) for loss, model in zip(losses, models, strict=True)
        ]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            give(model, found)
            optimizer.step()
            outputs[rank] += [model.eval()(inputs(rank, 9, 0)).detach()] * 3
            model.train()
    answers = all_well(three.run(evaluates))
    for rank, (found, given) in enumerate(answers):
        for name, value in models[rank].state_dict().items():
            assert torch.equal(found[name], value), name
        assert all(map(torch.equal, given, outputs[rank]))
    assert not torch.equal(answers[0][0]["1.running_mean"], answers[1][0]["1.running_mean"])


def deferred(rank: int, seeds: tuple[int, ...]) -> dict[str, Tensor]:
    """A model without memory: each rank draws all of it, and keeps its part. Then each may draw its own numbers."""
    torch.manual_seed(seeds[rank])
    with patrickstar.deferred_init():
        model = mlp()
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with patrickstar.manage(model, optimizer, **DEFAULTS) as session:
        for number in range(3):
            step(model, session, rank, number)
        return weights_of(session)


def test_a_deferred_model_is_drawn_alike(three: Team) -> None:
    want = plain("mlp", 3)["weights"]
    for found in all_well(three.run(deferred, (0, 0, 0))):
        assert all(torch.equal(found[name], value) for name, value in want.items())
    for error in three.run(deferred, (0, 0, 1)):
        assert isinstance(error, RankError)
        assert "values of parameters differ between rank 0 and rank 2: call torch.manual_seed(0)" in str(error)


# what manage() refuses


def other(rank: int, what: str) -> None:
    """One rank of three gives `manage` something else. Its model and its optimizer stay as they are."""
    mine, arguments = rank == 1, dict(DEFAULTS)
    torch.manual_seed(7 if mine and what == "seed" else 0)
    model = nn.Sequential(*mlp(), *([nn.Linear(48, 48)] if mine and what == "model" else []))
    kind = torch.optim.Adam if mine and what == "optimizer" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2)
    if mine and what == "state":
        model(inputs(0, 0, 0)).sum().backward()
        with torch.no_grad():
            saved = [p.clone() for p in model.parameters()]
            optimizer.step()
            for p, value in zip(model.parameters(), saved, strict=True):
                p.copy_(value)
        optimizer.zero_grad()
    if mine and what == "gradients":
        model(inputs(0, 0, 0)).sum().backward()
    if mine and what == "version":
        torch.__version__ = "1.0"
    arguments |= {
        "option": {"options": patrickstar.Options(accumulate=2)},
        "clipping": {"max_grad_norm": 1.0},
        "budget": {"host_memory": "2GiB"},
        "small": {"host_memory": "64KiB"},
        "later": {"step": "in_backward"},
        "disk": {"disk": "/proc/missing"},
    }.get(what if mine else "", {})
    before = [(p, p.detach().clone(), p.grad) for p in model.parameters()]
    states = {p: dict(state) for p, state in optimizer.state.items()}
    version = torch.__version__
    try:
        patrickstar.manage(model, optimizer, **arguments)
    finally:
        torch.__version__ = TORCH
        assert version in (TORCH, "1.0")
        for now, (p, value, gradient) in zip(model.parameters(), before, strict=True):
            assert now is p
            assert type(p) is nn.Parameter
            assert torch.equal(p, value)
            assert p.grad is gradient
        assert {p: dict(state) for p, state in optimizer.state.items()} == states


@pytest.mark.parametrize(
    ("what", "said", "its_own"),
    [
        ("seed", "the values of parameters differ between rank 0 and rank 1: call torch.manual_seed(0)", RankError),
        ("model", "the parameters differ between rank 0 and rank 1: build the same model", RankError),
        ("optimizer", "the optimizer differ between rank 0 and rank 1: give all ranks the same optimizer", RankError),
        ("state", "the optimizer's state differ between rank 0 and rank 1: load the same one", RankError),
        ("option", "the options differ between rank 0 and rank 1: give manage() the same arguments", RankError),
        ("clipping", "the options differ", RankError),
        ("budget", "the options differ", RankError),
        ("version", "the version of torch differ", RankError),
        ("small", "rank 1: manage() has ended with BudgetError: host memory is", BudgetError),
        (
            "later",
            'manage() has ended with ConfigError: manage: step="in_backward" over 3 ranks comes later',
            ConfigError,
        ),
        ("disk", "rank 1: manage() has ended with DeviceError", DeviceError),
        ("gradients", "rank 1: manage() has ended with ConfigError: manage: there are gradients", ConfigError),
    ],
)
def test_ranks_that_are_not_alike_are_refused_before_anything_is_changed(
    three: Team, what: str, said: str, its_own: type[Exception]
) -> None:
    answers = three.run(other, what)
    assert isinstance(answers[1], its_own), answers[1]
    for error in (answers[0], answers[2]):
        assert isinstance(error, RankError), error
        assert said in str(error)
        assert error.ranks == (1,)


def too_large(rank: int, host_memory: int, rows: tuple[int, ...]) -> tuple[int, bool]:
    """The smallest budget of the machine in which a batch fits that is refused; whether a smaller one trains in the same session."""
    with managed(host_memory=host_memory) as (model, session):
        step(model, session, rank, 0)
        before = weights_of(session)
        try:
            model(torch.ones(rows[rank], 48)).square().mean().backward()
        except BudgetError as refusal:
            assert all(torch.equal(before[name], value) for name, value in weights_of(session).items())
            step(model, session, rank, 1)
            return refusal.smallest_bytes, not torch.equal(before["0.0.weight"], weights_of(session)["0.0.weight"])
        session.optimizer.step()
        return 0, True


def norm_too_large(rank: int, refused: tuple[int, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch, managed() as (model, session):
        model(torch.ones(4, 48)).square().mean().backward()
        if rank in refused:
            refusal = BudgetError("", tier="host", smallest_bytes=rank + 5)
            patch.setattr(Stretches, "begin_norm", Mock(side_effect=refusal))
        session.clip_grad_norm_(1.0)


def test_a_norm_without_room_is_refused_on_all_ranks_or_ends_the_others(two: Team) -> None:
    for refused in ((0, 1), (1,)):
        other, own = two.run(norm_too_large, refused)
        assert own.smallest_bytes == 12  # of the machine: as much as either needs, twice
        assert type(other) is (BudgetError if 0 in refused else RankError), other
    assert "rank 1: agree on nothing: it does not fit" in str(other)


def test_a_budget_refused_on_all_ranks_says_which_is_enough(two: Team) -> None:
    rows = (8192,) * 2
    answers = all_well(two.run(too_large, 2 << 20, rows))
    smallest = {nbytes for nbytes, _ in answers}
    assert len(smallest) == 1
    assert all(goes_on for _, goes_on in answers)
    assert min(smallest) > 2 << 20
    assert all_well(two.run(too_large, min(smallest), rows)) == [(0, True)] * 2


@pytest.mark.campaign
def test_a_budget_refused_on_one_rank_is_refused_on_all(three: Team) -> None:
    first, own, last = three.run(too_large, 3 << 20, (4, 8192, 4))
    for error in (first, last):
        assert isinstance(error, RankError), error
        assert "rank 1: agree on nothing: it does not fit" in str(error)
    assert isinstance(own, RankError), own


def on_one_gpu(rank: int) -> None:
    ranks = Ranks.of_group()
    for well in (["A", "B", "C"], ["", "", ""]):
        expect_a_gpu_each(well, ranks)
    with pytest.raises(
        RankError, match="ranks 0, 2 compute on the same GPU, A, and NCCL takes one rank on each"
    ) as told:
        expect_a_gpu_each(["A", "B", "A"], ranks)
    assert told.value.ranks == (0, 2)


def test_ranks_on_one_gpu_are_refused_where_nccl_is_used(three: Team) -> None:
    all_well(three.run(on_one_gpu))
