"""Each operator of the search for schedules on an example by hand, and layouts against all that there are."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.cluster.policies.evolution import capped, count, crossover, fill, mutate, reorder, scores


class Drawn:
    """A generator whose draws are given beforehand."""

    def __init__(self, *, order=(), coins=()):
        self.order, self.coins = order, coins

    def permutation(self, n):
        assert n == len(self.order)
        return np.array(self.order)

    def random(self, shape):
        coins = np.array(self.coins, dtype=float)
        assert coins.shape == tuple(shape)
        return coins


def test_entries_above_a_limit_are_dropped_from_the_right():
    schedules = np.array([[0, 1, 0, -1, 0, 1], [1, 1, 1, 1, -1, 0]])
    assert capped(schedules, np.array([2, 1])).tolist() == [[0, 1, 0, -1, -1, -1], [1, -1, -1, -1, -1, 0]]


def test_crossover_swaps_entries_where_the_coin_says_so_within_limits():
    schedules = np.array([[0, 0, 1, 1], [2, 2, 2, -1]])
    drawn = Drawn(order=[1, 0], coins=[[0.1, 0.9, 0.1, 0.9]])
    # The pair is (second, first): at GPUs 0 and 2 they swap. Job 2 would then have one and two, job 0 one each.
    assert crossover(schedules, np.array([2, 2, 2]), drawn).tolist() == [[0, 2, 1, -1], [2, 0, 2, 1]]
    assert crossover(schedules, np.array([2, 2, 1]), drawn).tolist() == [[0, 2, 1, -1], [2, 0, -1, 1]]


def test_of_an_odd_number_of_schedules_one_has_no_children():
    assert crossover(np.zeros((3, 2), dtype=int), np.array([2]), np.random.default_rng(0)).shape == (2, 2)


def test_mutation_throws_a_job_out_of_all_its_gpus_unless_it_is_young():
    schedules = np.array([[0, 1, 0, 2], [2, 2, 1, -1]])
    drawn = Drawn(coins=[[0.2, 0.9, 0.2], [0.9, 0.29, 0.31]])
    young = np.array([False, False, True])
    assert mutate(schedules, young, 0.3, drawn).tolist() == [[-1, 1, -1, 2], [2, 2, -1, -1]]


def test_gpus_are_counted_by_job():
    assert count(np.array([[0, 2, 0, -1], [1, 1, 1, 1]]), 3).tolist() == [[2, 0, 1], [0, 4, 0]]


def test_filling_goes_to_new_jobs_then_to_short_ones_up_to_two_limits():
    counts = np.array([[0, 0, 1, 0], [0, 3, 0, 2]])
    new, shortest = [0], [2, 1, 3]
    passes = [(new, np.ones(4, int)), (shortest, np.array([1, 2, 2, 2])), (shortest, np.array([1, 4, 4, 2]))]
    # First schedule, 8 GPUs, 1 taken: job 0 one; jobs 2, 1, 3 up to two each: one, two, two more; then job 2 one more.
    # Second, 5 taken: job 0 one, job 2 two, and nothing is left.
    assert fill(counts, passes, np.ones(4, int), 8).tolist() == [[1, 2, 3, 2], [1, 3, 2, 2]]


def test_filling_gives_no_job_less_than_it_needs():
    least = np.array([4, 1])
    assert fill(np.array([[2, 0]]), [([0, 1], np.array([4, 3]))], least, 3).tolist() == [[0, 3]]


def test_scores_are_sums_of_gpu_seconds_at_each_size():
    seconds = {(0, 1): 10.0, (0, 2): 12.0, (1, 3): 5.0}
    assert scores(np.array([[1, 3], [2, 0], [0, 0]]), lambda *key: seconds[key]).tolist() == [15.0, 12.0, 0.0]


def test_a_layout_leaves_those_who_stay_where_they_are():
    present = np.array([0, 0, 1, 1, 2, -1])
    # Job 1 ends and 2 grows: onto one GPU of its own and one that changes anyway, rather than onto the empty one.
    assert reorder(np.array([[2, 0, 2, 0]]), present).tolist() == [[0, 0, -1, 2, 2, -1]]
    assert reorder(np.array([[0, 2, 0, 0], [1, 0, 0, 5]]), present).tolist() == [
        [-1, -1, 1, 1, -1, -1],
        [0, 3, 3, 3, 3, 3],
    ]


@st.composite
def layouts(draw):
    gpus, jobs = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    present = draw(st.lists(st.integers(-1, jobs - 1), min_size=gpus, max_size=gpus))
    sizes, free = [], gpus
    for _ in range(jobs):
        sizes.append(draw(st.integers(0, free)))
        free -= sizes[-1]
    return np.array(present), sizes


@given(layouts())
@settings(max_examples=100)
def test_no_other_contiguous_layout_in_that_order_changes_fewer_gpus(case):
    present, sizes = case
    (found,) = reorder(np.array([sizes]), present)
    assert [int((found == job).sum()) for job in range(len(sizes))] == sizes
    here = present.tolist()
    order = sorted(
        (job for job, size in enumerate(sizes) if size), key=lambda job: (here.index(job) if job in here else 99, job)
    )
    gaps = itertools.product(range(len(here) - sum(sizes) + 1), repeat=len(order))
    changed = []
    for gap in gaps:
        line = [one for empty, job in zip(gap, order) for one in [-1] * empty + [job] * sizes[job]]
        if len(line) <= len(here):
            changed.append(sum(a != b for a, b in zip(line + [-1] * (len(here) - len(line)), here)))
    assert (found != present).sum() == min(changed)
