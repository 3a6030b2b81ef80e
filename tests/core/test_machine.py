import copy
import itertools
import pickle

import pytest

from patrickstar.core.machine import LINKS, Machine, Tier

CPU_WITH_DISK = Machine(Tier.HOST, {Tier.HOST: 1 << 30, Tier.DISK: 5 << 30})
DEVICE = Machine(Tier.DEVICE, {Tier.HOST: 2 << 30, Tier.DEVICE: 1 << 30})


def test_tiers_have_a_letter_and_a_word():
    assert [(str(tier), tier.value, tier.label) for tier in Tier] == [
        ("D", "D", "device"),
        ("H", "H", "host"),
        ("K", "K", "disk"),
    ]


def test_links_join_neighbours_both_ways():
    neighbours = [(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DISK)]
    assert sorted(LINKS) == sorted(itertools.chain(*((f"{a}>{b}", f"{b}>{a}") for a, b in neighbours)))


@pytest.mark.parametrize("machine", [CPU_WITH_DISK, DEVICE])
def test_a_machine_pickles_and_copies(machine):
    assert pickle.loads(pickle.dumps(machine)) == machine
    assert copy.deepcopy(machine) == machine


def test_a_machine_prints_budgets_from_the_top_down():
    assert str(DEVICE) == "D: D=1073741824 H=2147483648"


def test_budgets_cannot_be_changed_from_outside():
    budget = {Tier.HOST: 10}
    machine = Machine(Tier.HOST, budget)
    budget[Tier.HOST] = 20
    assert machine.budget[Tier.HOST] == 10
    with pytest.raises(TypeError):
        machine.budget[Tier.HOST] = 30


@pytest.mark.parametrize(
    ("compute", "budget", "why"),
    [
        (Tier.HOST, {Tier.DISK: 1}, "host computes but has no budget"),
        (Tier.DISK, {Tier.DISK: 1}, "disk does not compute"),
        (Tier.HOST, {Tier.HOST: 1, Tier.DEVICE: 1}, "there is no device"),
        (Tier.DEVICE, {Tier.DEVICE: 1}, "needs a host below"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(compute, budget, why):
    with pytest.raises(ValueError, match=why):
        Machine(compute, budget)
