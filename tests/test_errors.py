import pytest

from patrickstar import errors
from patrickstar.errors import BudgetError, ConfigError, Error, nearest, some


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
