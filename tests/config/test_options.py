import copy
import dataclasses
import pickle

import pytest

from patrickstar.config.options import Options
from patrickstar.errors import ConfigError


def test_the_defaults_are_what_nobody_needs_to_set():
    assert dataclasses.asdict(Options()) == {
        "chunk_size": None,
        "eviction": "next-use",
        "prefetch": None,
        "compute": None,
        "loss_scale": None,
        "accumulate": None,
        "keep_fp32": (),
        "tile_rows": None,
        "chunked_loss": None,
        "poison": False,
        "emulated_link": None,
        "stress_seed": None,
        "collective_timeout": 600,
    }


@pytest.mark.parametrize(
    "good",
    [
        {"chunk_size": 1024},
        {"chunk_size": 1 << 22},
        {"eviction": "lru"},
        {"accumulate": 4},
        {"poison": True},
        {"compute": "fp32"},
        {"emulated_link": "2GiB/s"},
        {"emulated_link": 1},
        {"stress_seed": 0},
        {"prefetch": 0},
        {"prefetch": 7},
    ],
)
def test_what_this_version_knows_is_taken(good):
    options = Options(**good)
    assert {name: getattr(options, name) for name in good} == good


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"chunk_size": 1000}, "chunk_size=1000: expected a multiple of 1024, 1024 or more, or None"),
        ({"chunk_size": 3000}, "or None, such as 2048"),
        ({"chunk_size": 0}, "chunk_size=0: expected a multiple of 1024, 1024 or more"),
        ({"chunk_size": True}, "chunk_size=True"),
        ({"chunk_size": "1MiB"}, "chunk_size='1MiB'"),
        ({"eviction": "belady"}, "eviction='belady': expected 'next-use' or 'lru'"),
        ({"eviction": "LRU"}, 'did you mean "lru"'),
        ({"eviction": ["lru"]}, "eviction="),
        ({"compute": "bf61"}, 'did you mean "bf16"'),
        ({"accumulate": 0}, "accumulate=0: expected a whole number, 1 or more, or None"),
        ({"tile_rows": 0}, "tile_rows=0: expected a whole number, 1 or more"),
        ({"embedding_rows": True}, "no argument 'embedding_rows'; did you mean \"tile_rows\"?"),
        ({"poison": 1}, "poison=1: expected true or false"),
        ({"emulated_link": "2GiB"}, "emulated_link='2GiB': expected bytes a second, or text such as"),
        ({"emulated_link": "50%/s"}, "emulated_link='50%/s'"),
        ({"emulated_link": 0}, "and more than 0"),
        ({"emulated_link": 2.5}, "emulated_link=2.5"),
        ({"prefetch": -1}, "prefetch=-1: expected a whole number, 0 or more, or None"),
        ({"prefetch": True}, "prefetch=True"),
        ({"stress_seed": 1.0}, "stress_seed=1.0"),
    ],
)
def test_a_value_that_is_not_taken_is_told_with_what_is(bad, why):
    with pytest.raises(ConfigError) as refusal:
        Options(**bad)
    assert why in str(refusal.value)
    assert len(refusal.value.problems) == 1


@pytest.mark.parametrize("early", [{"chunked_loss": True}, {"chunked_loss": False}])
def test_an_option_of_a_later_version_takes_its_default_only(early):
    with pytest.raises(ConfigError, match="arrives in a later version"):
        Options(**early)
    (name,) = early
    assert Options(**{name: getattr(Options(), name)}) == Options()


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as refusal:
        Options(chunk_size=7, eviction="lur", poison=None, prefetch=-1)
    assert "4 problems" in str(refusal.value)
    assert [problem.partition("=")[0] for problem in refusal.value.problems] == [
        *("chunk_size", "eviction", "prefetch", "poison")
    ]
    assert all(problem in str(refusal.value) for problem in refusal.value.problems)


def test_an_option_that_does_not_exist_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match="no argument 'chunksize'; did you mean \"chunk_size\""):
        Options(chunksize=2048)


def test_options_are_given_by_name_only():
    with pytest.raises(TypeError):
        Options(2048)


def test_options_are_frozen_and_can_be_copied_replaced_and_pickled():
    options = Options(chunk_size=2048)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.chunk_size = 4096
    assert copy.deepcopy(options) == pickle.loads(pickle.dumps(options)) == options
    assert dataclasses.replace(options, poison=True) == Options(chunk_size=2048, poison=True)
    with pytest.raises(ConfigError):
        dataclasses.replace(options, chunk_size=5)
