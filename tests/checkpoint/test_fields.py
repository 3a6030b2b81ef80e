"""Strict JSON: what is not plainly meant is refused with its place."""

from __future__ import annotations

import pytest

from patrickstar.checkpoint.fields import as_shape
from patrickstar.config.json_file import parse_json
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
        parse_json(text, where="some/index.json", damaged=CheckpointError)


def test_plain_json_is_read():
    plain = b' {"a": [1, -2.5, null, true, "\\u00e9"]} '
    assert parse_json(plain, where="x", damaged=CheckpointError) == {"a": [1, -2.5, None, True, "é"]}


@pytest.mark.parametrize("shape", [3, [3, -1], [3, True], [2**63], [1.5], [[1]], {"0": 1}])
def test_a_shape_is_a_list_of_whole_numbers(shape):
    with pytest.raises(CheckpointError, match=r"^x"):
        as_shape(shape, "x")
