import pytest
import torch

from patrickstar.errors import CheckpointError, ConfigError
from patrickstar.optim.user_optimizer import State, restore_groups, unpack


def trained(kind=torch.optim.AdamW, **options):
    """An optimizer with two groups, one parameter never updated; and the names of its parameters."""
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((2, 3), (4,), (5,))]
    groups = [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}]
    optimizer = kind(groups, **options)
    for _ in range(3):
        for parameter in (parameters[0], parameters[2]):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer, {id(parameter): f"p{index}" for index, parameter in enumerate(parameters)}


def assert_same(got, want):
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, list):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    else:
        assert got == want


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_what_is_unpacked_is_the_state_that_torch_has(kind):
    optimizer, names = trained(kind)
    want = optimizer.state_dict()
    states = unpack(want, optimizer.param_groups, names)
    assert {name: state.step for name, state in states.items()} == {"p0": 3, "p2": 3}
    assert states["p0"].exp_avg is want["state"][0]["exp_avg"], "nothing is copied"
    assert_same(
        {name: state.to_torch() for name, state in states.items()}, {"p0": want["state"][0], "p2": want["state"][2]}
    )


def test_numbers_of_a_file_are_places_not_names():
    optimizer, names = trained()
    state_dict = optimizer.state_dict()
    entries = state_dict["state"]
    renumbered = {
        "state": {number + 10: entry for number, entry in entries.items()},
        "param_groups": [
            {**group, "params": [number + 10 for number in group["params"]]} for group in state_dict["param_groups"]
        ],
    }
    states = unpack(renumbered, optimizer.param_groups, names)
    assert_same({name: state.to_torch() for name, state in states.items()}, {"p0": entries[0], "p2": entries[2]})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda saved: saved["param_groups"].pop(), r"groups of \[2\] parameters, the optimizer's have \[2, 1\]"),
        (lambda saved: saved["param_groups"][0]["params"].pop(), r"groups of \[1, 1\]"),
        (lambda saved: saved["state"][0].pop("exp_avg_sq"), "p0 has no exp_avg_sq"),
        (lambda saved: saved["state"].update({2: {"momentum_buffer": torch.zeros(5)}}), "p2 has no step, exp_avg"),
        (lambda saved: saved["state"][0].update(exp_avg=torch.zeros(3, 2)), r"exp_avg has shape \(3, 2\)"),
        (lambda saved: saved["state"][0].update(step=torch.tensor(1.5)), "step is 1.5"),
        (lambda saved: saved["state"][0].update(step=-1), "step is -1"),
        (lambda saved: saved["state"][0].update(step=float("nan")), "step is nan"),
        (lambda saved: saved.pop("state"), "has `state` and `param_groups`"),
        (lambda saved: saved["param_groups"][1].pop("params"), "has `state` and `param_groups`"),
    ],
)
def test_a_state_of_something_else_is_refused(spoil, message):
    optimizer, names = trained()
    state_dict = optimizer.state_dict()
    spoil(state_dict)
    with pytest.raises(CheckpointError, match=message):
        unpack(state_dict, optimizer.param_groups, names)


def test_a_file_that_asks_for_another_update_is_refused():
    optimizer, names = trained()
    state_dict = trained(amsgrad=True)[0].state_dict()
    with pytest.raises(ConfigError, match="amsgrad"):
        unpack(state_dict, optimizer.param_groups, names)


def test_hyper_parameters_go_into_the_same_dicts():
    optimizer, _ = trained()
    groups, parameters = list(optimizer.param_groups), [group["params"] for group in optimizer.param_groups]
    saved = trained(lr=0.25, weight_decay=0.75, betas=(0.5, 0.5))[0].state_dict()
    saved["param_groups"][1]["lr"] = rate = torch.tensor(0.125)
    restore_groups(optimizer.param_groups, saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.5)] * 2
    assert all(group is other for group, other in zip(optimizer.param_groups, groups, strict=True))
    assert all(group["params"] is own for group, own in zip(groups, parameters, strict=True))
    rate.fill_(9)
    assert optimizer.param_groups[1]["lr"] == 0.125, "a tensor of the file is not shared"


def test_a_count_of_steps_may_be_a_number():
    entry = State(step=7, exp_avg=torch.ones(2), exp_avg_sq=torch.zeros(2)).to_torch()
    assert State.from_torch({**entry, "step": 7}, (2,), name="p").step == 7  # as old torch wrote it
