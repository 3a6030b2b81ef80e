import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from patrickstar import errors
from patrickstar.cli.corpus import DataError
from patrickstar.cli.machines import MachineError
from patrickstar.cli.models import ModelError
from patrickstar.cluster.job_view import PolicyError
from patrickstar.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DeviceError,
    Error,
    LayoutError,
    RankError,
    RankLost,
    StateError,
    nearest,
    some,
)
from patrickstar.memory.device_failure import DeviceFailureError
from patrickstar.parameters.blocks import NotInBlocksError
from patrickstar.parameters.changes import UnseenChangeError
from patrickstar.parameters.saved import WeightChangedError
from patrickstar.plan.residency import InvariantError

SHORT = BudgetError("short", tier="host", moment="3 step", needed_bytes=5, available_bytes=4, smallest_bytes=6)


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"Error"}))
def test_every_error_is_one_of_ours_and_stands_in_the_tree(name):
    assert issubclass(getattr(errors, name), Error)
    assert name in errors.__doc__


def test_a_budget_error_carries_its_numbers():
    error = BudgetError("short", tier="host", moment="3 step", needed_bytes=5, available_bytes=4, smallest_bytes=6)
    assert (str(error), error.tier, error.moment) == ("short", "host", "3 step")
    assert (error.needed_bytes, error.available_bytes, error.smallest_bytes) == (5, 4, 6)


def test_a_config_error_always_has_its_problems_apart():
    assert ConfigError("one").problems == ("one",)
    assert ConfigError("all", problems=["a", "b"]).problems == ("a", "b")


def kinds_of(kind):
    return {kind}.union(*map(kinds_of, kind.__subclasses__()))


ERRORS = [
    Error("what"),
    SHORT,
    RankError("gone", ranks=[1, 2], action="gather block 3", reason="killed"),
    RankLost("gone", ranks=[1, 2], action="gather block 3", reason="killed"),
    ConfigError("all", problems=["a", "b"]),
    *(kind("what") for kind in (LayoutError, StateError, CheckpointError, DeviceError, DataError)),
    *(kind("what") for kind in (PolicyError, DeviceFailureError, MachineError, ModelError)),
    *(kind("what") for kind in (NotInBlocksError, UnseenChangeError, WeightChangedError)),
    InvariantError(4, "c0.weight H!: it is the last valid copy"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [copy.copy, *(lambda e, p=p: pickle.loads(pickle.dumps(e, p)) for p in range(6))])
def test_an_error_survives_pickling_with_all_it_tells(error, again):
    back = again(error)
    assert type(back) is type(error)
    assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))


def test_every_error_of_the_package_is_among_those():
    ours = {kind for kind in kinds_of(Error) if kind.__module__.startswith("patrickstar.")}
    assert ours <= {type(error) for error in ERRORS}


def raise_short():
    raise SHORT


def test_a_pool_of_processes_brings_an_error_back():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(BudgetError, match="short") as raised:
            pool.submit(raise_short).result()
    assert (raised.value.tier, raised.value.smallest_bytes) == ("host", 6)


@pytest.mark.parametrize(
    ("word", "found"),
    [("bf61", '; did you mean "bf16"?'), ("FP32", '; did you mean "fp32"?'), ("quantum", ""), ("", "")],
)
def test_the_nearest_word_is_offered_where_one_is_near(word, found):
    assert nearest(word, ["bf16", "fp32"]) == found


@pytest.mark.parametrize(
    ("texts", "told"), [([], ""), (["a"], "a"), (["a", "b"], "a, b"), (["a", "b", "c", "d"], "a, b and 2 more")]
)
def test_of_many_the_first_are_told_and_the_rest_counted(texts, told):
    assert some(texts, most=2) == told
    assert some(texts, most=2, separator="; ") == told.replace(",", ";")
