"""`session.optimizer.state` is torch's mapping from parameters to their state, with bytes only while an operation uses them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patrickstar import StateError
from tests.parity.compare import same_bits
from tests.session.builders import EMULATED, MACHINES, SLOT, MakePair, Pair, assert_same, backward, mlp, train_step

FIELDS = ("step", "exp_avg", "exp_avg_sq")


def test_it_is_empty_before_the_first_step_as_in_torch(pair: Pair) -> None:
    def look(model: nn.Module, optimizer: Any) -> list[Any]:
        weight = model[0].weight
        return [
            len(optimizer.state),
            list(optimizer.state),
            weight in optimizer.state,
            optimizer.state.get(weight),
            len(optimizer.state.get(weight, {})),
            [len(entry) for entry in optimizer.state.values()],
            optimizer.state is optimizer.state,
        ]

    pair.same(look)
    assert dict(pair.optimizer.state[pair.model[0].weight]) == {}


def test_after_a_step_it_has_torchs_keys_order_and_bits(moving: Pair) -> None:
    moving.train(2)
    ours, theirs = moving.optimizer.state, moving.plain_optimizer.state
    assert [id(p) for p in ours] == [id(p) for p in moving.model.parameters()]
    assert len(ours) == len(theirs)
    for p, q in zip(moving.model.parameters(), moving.plain.parameters(), strict=True):
        assert p in ours
        assert set(ours[p]) == set(theirs[q]) == set(FIELDS)
        for key in FIELDS:
            assert (ours[p][key].shape, ours[p][key].dtype) == (theirs[q][key].shape, theirs[q][key].dtype)
            assert ours[p][key] is ours[p][key]
            assert same_bits(theirs[q][key], ours[p][key].clone())
    assert moving.session._parts.binding.taken_bytes() == 0
    assert torch.equal(ours[p]["step"], torch.tensor(2.0))


def change(model: nn.Module, optimizer: Any) -> None:
    weight, bias = model[0].weight, model[2].bias
    optimizer.state[weight]["exp_avg"].mul_(0.5)
    optimizer.state[weight]["exp_avg_sq"] *= 2
    optimizer.state[bias]["exp_avg"] = torch.full_like(bias, 0.25).detach()
    optimizer.state[bias]["step"] += 3
    optimizer.state[model[2].weight]["step"].fill_(7)
    optimizer.state[model[4].weight]["exp_avg"].view(-1)[::3] = 0.125
    optimizer.state[model[4].bias] = {
        "step": torch.tensor(4.0),
        "exp_avg": torch.full((32,), 0.1),
        "exp_avg_sq": torch.full((32,), 0.2),
    }
    del optimizer.state[model[6].weight]
    averages = [optimizer.state[p]["exp_avg"] for p in model[8].parameters()]
    torch._foreach_lerp_(averages, [torch.ones_like(average) for average in averages], 0.5)
    popped = optimizer.state.pop(model[10].bias)
    assert set(popped) == set(FIELDS)


def move(_: nn.Module, optimizer: Any) -> None:
    """As Lightning and others move state to a device."""
    for p, entry in optimizer.state.items():
        optimizer.state[p] = {key: value.to("cpu") for key, value in entry.items()}
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                entry[key] = value.cpu()


def rebuild(_: nn.Module, optimizer: Any) -> None:
    """As code does that maps a function over containers."""
    for p, entry in list(optimizer.state.items()):
        halves = {key: value.clone() * 0.5 for key, value in entry.items() if key != "step"}
        optimizer.state[p] = type(entry)({"step": entry["step"]} | halves)


ACTS: dict[str, Callable[[nn.Module, Any], object]] = {
    "changed": change,
    "moved to where it is": move,
    "rebuilt": rebuild,
    "forgotten": lambda _, optimizer: optimizer.state.clear(),
    "replaced": lambda _, optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "assigned to itself": lambda _, optimizer: setattr(optimizer, "state", optimizer.state),
}


@pytest.mark.parametrize("where", [*MACHINES, "without a bound", "in_backward"])
@pytest.mark.parametrize("act", ACTS)
def test_what_is_done_there_is_what_the_next_step_goes_on_from(
    make_pair: MakePair, tmp_path: Path, act: str, where: str
) -> None:
    memory = MACHINES[where](tmp_path / "disk") if where in MACHINES else {"device": "cpu"}
    pair = make_pair(**({"step": "in_backward", **EMULATED} if where == "in_backward" else memory))
    if act == "moved to where it is":
        pair.each(move)  # before there is any
    pair.train(2)
    pair.each(ACTS[act])
    pair.train(2, first=2)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)


def test_a_state_kept_over_a_step_shows_what_the_step_made_of_it(make_pair: MakePair) -> None:
    def keep(model: nn.Module, optimizer: Any) -> list[Tensor]:
        entry = optimizer.state[model[0].weight]
        average, view, count = entry["exp_avg"], optimizer.state[model[2].weight]["exp_avg_sq"][3], entry["step"]
        held = average[3]  # what was put together for it is there when the whole is asked for
        backward(model, number=1)
        optimizer.step()
        return [average.clone(), held.clone(), view.clone(), count.clone()]

    pair = make_pair(device="emulated", device_memory=8 * SLOT)
    pair.train(1)
    pair.same(keep)


# what is refused


WRONG: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "shape": (lambda entry, _: entry.__setitem__("exp_avg", torch.zeros(3)), r"\(3,\).*\(32, 32\)"),
    "type": (lambda entry, _: entry.__setitem__("exp_avg", torch.zeros(32, 32).double()), "float64.*float32"),
    "device": (lambda entry, _: entry.__setitem__("exp_avg", torch.zeros(32, 32, device="meta")), "meta.*cpu"),
    "no tensor": (lambda entry, _: entry.__setitem__("exp_avg", 3), "int.*tensor"),
    "another's": (lambda entry, other: entry.__setitem__("exp_avg", other["exp_avg"]), r"2\.weight.*clone"),
    "field": (
        lambda entry, _: entry.__setitem__("max_exp_avg_sq", torch.zeros(32, 32)),
        "max_exp_avg_sq.*step, exp_avg, exp_avg_sq",
    ),
    "count": (lambda entry, _: entry.__setitem__("step", torch.tensor(0.5)), "0.5.*whole number"),
    "count in place": (lambda entry, _: entry["step"].sub_(7), "-6.*whole number"),
    "part": (lambda entry, _: entry.__delitem__("step"), "by itself"),
    "memory": (lambda entry, _: entry["exp_avg"].numpy(), r"0\.weight.*exp_avg.*clone"),
    "pickle": (lambda entry, _: copy.deepcopy(entry), r"state_dict\(\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_state_is_refused_in_words_and_changes_nothing(make_pair: MakePair, wrong: str) -> None:
    act, message = WRONG[wrong]
    pair = make_pair()
    pair.train(1)
    state = pair.optimizer.state
    with pytest.raises(StateError, match=message):
        act(state[pair.model[0].weight], state[pair.model[2].weight])
    pair.train_same(1, first=1)


@pytest.mark.parametrize(
    "entry",
    [
        {"step": torch.tensor(1.0)},
        {"step": torch.tensor(1.5), "exp_avg": torch.zeros(32, 32), "exp_avg_sq": torch.zeros(32, 32)},
        {"step": torch.tensor(1.0), "exp_avg": torch.zeros(32, 32), "exp_avg_sq": torch.zeros(32)},
    ],
)
def test_a_whole_entry_that_is_wrong_is_refused_before_any_of_it_is_written(
    trained: Pair, entry: Mapping[str, Tensor]
) -> None:
    with pytest.raises(StateError, match=r"0\.weight"):
        trained.optimizer.state[trained.model[0].weight] = entry
    trained.train_same(1, first=1)


def test_state_before_the_first_update_is_assigned_as_a_whole(pair: Pair) -> None:
    def begin(model: nn.Module, optimizer: Any) -> None:
        weight = model[0].weight
        optimizer.state[weight] = {
            "step": torch.tensor(5.0),
            "exp_avg": torch.ones(32, 32),
            "exp_avg_sq": torch.ones(32, 32),
        }

    with pytest.raises(StateError, match="before the first update"):
        pair.optimizer.state[pair.model[0].weight]["exp_avg"] = torch.ones(32, 32)
    pair.each(begin)
    assert len(pair.optimizer.state) == 1
    pair.train_same(2)


def test_a_stranger_has_no_state(trained: Pair) -> None:
    stranger = mlp()[0].weight
    assert stranger not in trained.optimizer.state
    with pytest.raises(KeyError, match="no parameter"):
        _ = trained.optimizer.state[stranger]
    with pytest.raises(KeyError, match="no parameter"):
        trained.optimizer.state[stranger] = {}


LETS_GO: list[Callable[[Any, Tensor], None]] = [
    lambda optimizer, _: optimizer.state.clear(),
    lambda optimizer, parameter: optimizer.state.__delitem__(parameter),
    lambda optimizer, _: optimizer.load_state_dict({**optimizer.state_dict(), "state": {}}),
]


@pytest.mark.parametrize("let_go", LETS_GO)
def test_a_state_that_was_let_go_is_refused_by_name(make_pair: MakePair, let_go: Callable[[Any, Tensor], None]) -> None:
    pair = make_pair(device="cpu", host_memory="64MiB")
    train_step(pair.model, pair.optimizer)
    weight = pair.model[0].weight
    average, count = pair.optimizer.state[weight]["exp_avg"], pair.optimizer.state[weight]["step"]
    let_go(pair.optimizer, weight)
    train_step(pair.model, pair.optimizer, 1)
    for stale in (average, count):
        with pytest.raises(StateError, match=r"0\.weight.*released.*clone"):
            stale.mul_(2)
        with pytest.raises(StateError, match=r"0\.weight.*released"):
            pair.optimizer.state[weight]["exp_avg"] = stale


def test_a_state_kept_over_a_checkpoint_that_is_loaded_shows_that(trained: Pair, tmp_path: Any) -> None:
    weight = trained.model[0].weight
    average = trained.optimizer.state[weight]["exp_avg"]
    want = average.clone()
    trained.session.save_checkpoint(tmp_path)
    trained.train(1, first=1)
    assert not same_bits(want, average.clone())
    trained.session.load_checkpoint(tmp_path)
    assert same_bits(want, average.clone())
    assert trained.optimizer.state[weight]["step"].item() == 1
