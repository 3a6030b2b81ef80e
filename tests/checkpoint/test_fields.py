"""Strict JSON: what is not plainly meant is refused with its place."""

from __future__ import annotations

import pytest

from patrickstar.checkpoint.fields import as_shape, parse_object
from patrickstar.errors import CheckpointError


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1]",
        b"{",
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": "\xff"}',
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": 1}{"b": 2}',
    ],
)
def test_json_that_says_more_or_less_than_one_plain_object_is_refused(text):
    with pytest.raises(CheckpointError, match=r"^some/index\.json: "):
        parse_object(text, where="some/index.json")


def test_plain_json_is_read():
    assert parse_object(b' {"a": [1, -2.5, null, true, "\\u00e9"]} ', where="x") == {"a": [1, -2.5, None, True, "é"]}


@pytest.mark.parametrize(
    "shape", [3, [3, -1], [3, True], [2**40, 2**40], [0, 2**62, 2**62], [1] * 65, [1.5], [[1]], {"0": 1}]
)
def test_a_shape_is_one_that_memory_could_hold(shape):
    with pytest.raises(CheckpointError, match=r"^x"):
        as_shape(shape, "x")
