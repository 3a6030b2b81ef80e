import copy

import pytest
import torch
from torch import nn

from patrickstar.config.settings import OptimizerSettings
from patrickstar.optim.hyper import Scheduler, build_optimizer
from tests.optim.test_schedules import scheduled

CYCLE = scheduled(
    "OneCycle", cycle_min_lr=1.0, cycle_max_lr=3.0, cycle_first_step_size=2, cycle_min_mom=0.5, cycle_max_mom=0.75
)


def optimizer(*rates):
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates or (0.5,)]
    for group in groups:
        group["params"][0].grad = torch.ones(2)
    return torch.optim.AdamW(groups)


def go(stepped, scheduler, steps):
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in stepped.param_groups])
        stepped.step()
        scheduler.step()
    return found


def test_every_group_is_its_own_base():
    stepped = optimizer(0.5, 2.0)
    schedule = scheduled("WarmupCosineLR", total_num_steps=6, warmup_num_steps=2)
    found = go(stepped, Scheduler(stepped, schedule), 4)
    assert found == [[schedule.lr(done, 0.5), schedule.lr(done, 2.0)] for done in range(4)]
    assert found[3][1] == 4 * found[3][0] > 0


def test_betas_are_set_where_the_schedule_has_some():
    stepped = optimizer()
    scheduler = Scheduler(stepped, CYCLE)
    assert stepped.param_groups[0]["betas"] == (0.5, 0.99)
    stepped.step()
    scheduler.step()
    assert stepped.param_groups[0]["betas"] == (0.625, 0.99)
    other = optimizer()
    Scheduler(other, scheduled("WarmupLR"))
    assert other.param_groups[0]["betas"] == (0.9, 0.999)


def test_it_goes_on_from_its_state():
    stepped = optimizer()
    scheduler = Scheduler(stepped, CYCLE)
    go(stepped, scheduler, 2)
    state, groups = scheduler.state_dict(), copy.deepcopy(stepped.state_dict())
    rest = go(stepped, scheduler, 3)
    assert all(isinstance(value, int | float | list | bool) for value in state.values())
    again = optimizer()
    resumed = Scheduler(again, CYCLE)
    again.load_state_dict(groups)
    resumed.load_state_dict(state)
    assert go(again, resumed, 3) == rest


@pytest.mark.parametrize("decoupled", [True, False])
def test_an_optimizer_is_torch_s_own_with_the_settings(decoupled):
    settings = OptimizerSettings(lr=0.25, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.125, decoupled=decoupled)
    found = build_optimizer([nn.Parameter(torch.ones(2))], settings)
    assert type(found) is (torch.optim.AdamW if decoupled else torch.optim.Adam)
    group = found.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.25, (0.5, 0.75), 1e-3, 0.125)
