"""DeepSpeed's schedules against their curves, worked out by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import ConfigError
from patrickstar.config.settings import REQUIRED, SCHEDULES, Schedule
from patrickstar.optim.schedules import rates_of

ONE_TO_FIVE = {"warmup_min_lr": 1.0, "warmup_max_lr": 5.0}
CYCLE = {"cycle_min_lr": 1.0, "cycle_max_lr": 5.0}


def scheduled(name, **given):
    return rates_of(Schedule(name, given))


def rates(schedule, steps, base=0.5):
    return [schedule.lr(done, base) for done in range(steps)]


def test_every_schedule_has_a_formula_and_defaults_for_what_need_not_be_given():
    for name, parameters in SCHEDULES.items():
        required = [param for param, value in parameters.items() if value is REQUIRED]
        assert set(required) <= {"cycle_min_lr", "cycle_max_lr", "total_num_steps"}
        assert scheduled(name, **dict.fromkeys(required, 10)).lr(3, 0.5) >= 0


@pytest.mark.parametrize(
    ("name", "given", "follows"),
    [
        ("LRRangeTest", {}, False),
        ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0}, False),
        ("WarmupLR", {}, True),
        ("WarmupLR", {"warmup_max_lr": 1.0}, False),
        ("WarmupDecayLR", {"total_num_steps": 6}, False),
        ("WarmupDecayLR", {"total_num_steps": 6, "warmup_max_lr": None}, True),
        ("WarmupCosineLR", {"total_num_steps": 6}, True),
    ],
)
def test_a_schedule_knows_whether_it_follows_the_optimizer(name, given, follows):
    assert Schedule(name, given).follows_optimizer is follows
    steps = range(2000)
    one, two = ([rates_of(Schedule(name, given)).lr(done, base) for done in steps] for base in (1.0, 2.0))
    assert (one != two) is follows


def test_the_range_test_rises_evenly_or_in_stairs():
    given = {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    assert rates(scheduled("LRRangeTest", **given), 9) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0]
    assert rates(scheduled("LRRangeTest", **given, lr_range_test_staircase=True), 9) == [1.0] * 4 + [3.0] * 4 + [5.0]


def test_a_warm_up_begins_twice_at_its_low_end_and_stays_at_its_high_one():
    linear = scheduled("WarmupLR", **ONE_TO_FIVE, warmup_num_steps=4, warmup_type="linear")
    assert rates(linear, 8) == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0]
    log = scheduled("WarmupLR", **ONE_TO_FIVE, warmup_num_steps=4)
    between = [1 + 4 * math.log(step) / math.log(4) for step in (2, 3)]
    assert rates(log, 7) == pytest.approx([1.0, 1.0, *between, 5.0, 5.0, 5.0], rel=1e-15)


def test_a_warm_up_without_an_end_follows_the_optimizer():
    schedule = scheduled("WarmupLR", warmup_num_steps=1, warmup_type="linear")
    assert rates(schedule, 5) == [0.0, 0.0, 0.25, 0.5, 0.5]  # two steps are the least


def test_a_decay_ends_at_the_low_end_and_goes_no_further():
    schedule = scheduled("WarmupDecayLR", total_num_steps=6, **ONE_TO_FIVE, warmup_num_steps=2, warmup_type="linear")
    assert rates(schedule, 10) == [1.0, 1.0, 3.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0]
    assert max(rates(scheduled("WarmupDecayLR", total_num_steps=9, warmup_num_steps=2), 9)) == 1e-3
    short = scheduled("WarmupDecayLR", total_num_steps=2, warmup_max_lr=4.0, warmup_num_steps=4, warmup_type="linear")
    assert rates(short, 8) == [0.0, 0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0]


def test_a_cosine_is_a_share_of_the_optimizer_s_rate():
    ends = {"warmup_min_ratio": 0.5, "cos_min_ratio": 0.2}
    schedule = scheduled("WarmupCosineLR", total_num_steps=6, warmup_num_steps=2, warmup_type="linear", **ends)
    found = rates(schedule, 10, base=10.0)
    assert found[:3] == [0.0, 5.0, 7.5]
    quarters = [0.2 + 0.8 * (1 + math.cos(math.pi * share)) / 2 for share in (0.25, 0.5, 0.75)]
    assert found[3:6] == pytest.approx([10 * share for share in quarters])
    assert found[6:] == [2.0] * 4


def test_one_cycle_goes_up_down_and_then_decays():
    sizes = {"cycle_first_step_size": 4, "cycle_second_step_size": 2, "decay_step_size": 2}
    schedule = scheduled("OneCycle", **CYCLE, **sizes, decay_lr_rate=1.0)
    assert rates(schedule, 7) == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 3.0, 1.0], rel=1e-15)
    assert rates(schedule, 11)[7:] == [1 / 1.5, 1 / 2, 1 / 2.5, 1 / 3]
    flat = scheduled("OneCycle", **CYCLE, cycle_first_step_size=2)
    assert rates(flat, 8)[4:] == [1.0] * 4


def test_the_first_beta_cycles_against_the_rate_and_the_second_is_fixed():
    momenta = {"cycle_min_mom": 0.5, "cycle_max_mom": 0.75, "decay_mom_rate": 0.1}
    schedule = scheduled("OneCycle", **CYCLE, cycle_first_step_size=2, decay_step_size=1, **momenta)
    betas = [schedule.betas(done) for done in range(7)]
    assert [second for _, second in betas] == [0.99] * 7
    assert [first for first, _ in betas[:5]] == [0.5, 0.625, 0.5, 0.625, 0.75]
    assert [first for first, _ in betas[5:]] == pytest.approx([0.75 * 1.1, 0.75 * 1.2])
    with pytest.raises(ConfigError, match="decay_mom_rate"):
        schedule.betas(9)
    assert scheduled("OneCycle", **CYCLE, cycle_momentum=False).betas(3) is None
    assert scheduled("WarmupLR").betas(3) is None


@settings(max_examples=100, deadline=None)
@given(first=st.integers(1, 40), second=st.integers(1, 40), up=st.integers(1, 12), down=st.integers(1, 12))
def test_stairs_are_as_many_as_asked_for(first, second, up, down):
    sizes = {"cycle_first_step_size": first, "cycle_second_step_size": second}
    stairs = {"cycle_first_stair_count": up, "cycle_second_stair_count": down}
    schedule = scheduled("OneCycle", cycle_min_lr=0.0, cycle_max_lr=1.0, **sizes, **stairs)
    found = rates(schedule, first + second + 1)
    assert found[first] == 1.0
    assert found[0] == found[-1] == 0.0
    assert set(found[: first + 1]) <= {stair / up for stair in range(up + 1)}
    assert set(found[first:]) <= {stair / down for stair in range(down + 1)}
    assert sorted(found[: first + 1]) == found[: first + 1]


@settings(max_examples=100, deadline=None)
@given(warmup=st.integers(1, 60), total=st.integers(1, 120), kind=st.sampled_from(["log", "linear"]))
def test_rates_stay_between_their_ends_and_rise_before_they_fall(warmup, total, kind):
    common = {"warmup_num_steps": warmup, "warmup_type": kind, "total_num_steps": total}
    for schedule, low, high in (
        (scheduled("WarmupDecayLR", warmup_min_lr=0.25, warmup_max_lr=0.5, **common), 0.25, 0.5),
        (scheduled("WarmupCosineLR", cos_min_ratio=0.125, **common), 0.0, 1.0),
    ):
        found = rates(schedule, warmup + total + 5, base=1.0)
        assert min(found) >= low - 1e-12
        assert max(found) <= high + 1e-12
        rise = max(2, warmup) + 1
        assert sorted(found[:rise]) == found[:rise]
        assert sorted(found[rise:], reverse=True) == found[rise:]
