"""The index: it reads back as written, and what breaks one of its rules is refused with the key."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.checkpoint.format import (
    FileRecord,
    Index,
    Stored,
    checksum_of,
    decode_index,
    encode_index,
    fingerprint,
    seal,
)
from patrickstar.checkpoint.header import Span
from patrickstar.errors import CheckpointError, ConfigError

SUM = checksum_of(b"")
INDEX = Index(
    step=12,
    parameters={"w": (2, 3), "b": ()},
    layout={"chunk_numel": 2048, "digest": "ab"},
    files={"weights.safetensors": FileRecord(100, 72, SUM), "extra.safetensors": FileRecord(72, 64, SUM)},
    tensors={
        "w": Stored("weights.safetensors", Span("F32", (2, 3), 72, 24), SUM),
        "b": Stored("weights.safetensors", Span("F32", (), 96, 4), SUM),
    },
    extra_tensors={'extra["a"]': Stored("extra.safetensors", Span("I64", (1,), 64, 8), SUM)},
    state={"lr": 0.1},
    extra=None,
)


def refused(change: Any) -> str:
    """The error for an index that was changed so and sealed again."""
    fields = json.loads(encode_index(INDEX))
    change(fields)
    digits = fields.pop("checksum")
    with pytest.raises(CheckpointError, match=r"^d/index\.json: ") as error:
        decode_index(seal(json.dumps({"checksum": digits, **fields}).encode()), where="d/index.json")
    return str(error.value)


def test_an_index_reads_back_as_written():
    assert decode_index(encode_index(INDEX), where="i") == INDEX
    assert json.loads(encode_index(INDEX))["tensors"]["w"]["offset"] == 72  # plain JSON, for others to read


@given(at=st.integers(0, len(encode_index(INDEX)) - 1), bit=st.integers(0, 7))
def test_one_flipped_bit_is_found_wherever_it_is(at, bit):
    data = bytearray(encode_index(INDEX))
    data[at] ^= 1 << bit
    with pytest.raises(CheckpointError, match=r"^d/index\.json: "):
        decode_index(bytes(data), where="d/index.json")


@given(end=st.integers(0, len(encode_index(INDEX)) - 1))
def test_an_index_cut_short_is_found(end):
    with pytest.raises(CheckpointError):
        decode_index(encode_index(INDEX)[:end], where="i")


def test_a_bad_file_name_is_refused_by_name():
    names = (
        "../up.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        ".hidden.safetensors",
        "w.bin",
        "",
        "-w.safetensors",
    )
    for name in names:

        def rename(fields: dict[str, Any], name: str = name) -> None:
            fields["files"][name] = fields["files"].pop("weights.safetensors")
            for row in fields["tensors"].values():
                row["file"] = name

        assert "not a plain file name" in refused(rename)


CHANGES = [
    (("version",), 2, "version 2 of the format"),
    (("version",), "1", "version: expected a whole number"),
    (("format",), "zip", "format: expected"),
    (("algorithm",), "crc32", "algorithm: expected 'sha256'"),
    (("step",), -1, "step: expected"),
    (("step",), 1.0, "step: expected"),
    (("fingerprint",), "0" * 32, "fingerprint: not that"),
    (("layout",), [], "layout: expected an object"),
    (("layout", "chunk_numel"), 1.5, "layout"),
    (("parameters", "w"), [2, 4], "fingerprint"),
    (("parameters", "w"), [2**63], 'parameters["w"][0]'),
    (("files",), {}, "is not among the files listed"),
    (("files", "weights.safetensors", "nbytes"), 2**80, "a number of 25 digits"),
    (("files", "weights.safetensors", "nbytes"), 101, "end at byte 100, the file at 101"),
    (("files", "weights.safetensors", "header_nbytes"), 73, "overlaps the header"),
    (("files", "weights.safetensors", "header_nbytes"), 71, "leaves a hole"),
    (("files", "weights.safetensors", "header_nbytes"), 101, "expected a whole number from 0 to 100"),
    (("files", "weights.safetensors", "header_checksum"), "f" * 63, "not a checksum"),
    (("files", "more.safetensors"), {"nbytes": 9, "header_nbytes": 8, "header_checksum": SUM}, "end at byte 8"),
    (("tensors", "w", "offset"), 95, "leaves a hole"),
    (("tensors", "b", "offset"), 95, "overlaps tensor 'w'"),
    (("tensors", "w", "offset"), 2**63 - 1, 'tensors["w"].offset'),
    (("tensors", "w", "nbytes"), 28, 'tensors["w"].nbytes'),
    (("tensors", "w", "shape"), [2, -3], 'tensors["w"].shape[1]'),
    (("tensors", "w", "shape"), [10**18, 10**18], 'tensors["w"].shape'),
    (("tensors", "w", "dtype"), "F33", "unknown type"),
    (("tensors", "w", "dtype"), ["F32"], "expected a string"),
    (("tensors", "w", "file"), "extra.safetensors", "leaves a hole"),
    (("tensors", "w", "file"), "../weights.safetensors", "is not among the files listed"),
    (("tensors", "w", "checksum"), 7, "expected a string"),
    (("tensors", "w", "checksum"), "G" * 64, "not a checksum"),
    (("tensors", "w"), None, "expected an object"),
    (("tensors",), "all", "expected an object"),
    (("surplus",), 1, "unknown key 'surplus'"),
]


@pytest.mark.parametrize(("path", "value", "problem"), CHANGES)
def test_a_rule_that_is_broken_is_named_even_under_a_right_checksum(path, value, problem):
    def change(fields: dict[str, Any]) -> None:
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = value

    assert problem in refused(change)


@pytest.mark.parametrize("key", ["step", "files", "tensors", "extra", "fingerprint", "algorithm"])
def test_a_missing_key_is_named(key):
    assert f"key {key!r} is missing" in refused(lambda fields: fields.pop(key))


def test_a_file_that_is_no_index_is_refused():
    for data in (b"", b"{}", b"\x80\x04K\x01.", json.dumps({"tensors": {}}).encode()):
        with pytest.raises(CheckpointError, match="not the index"):
            decode_index(data, where="i")


def test_the_fingerprint_is_of_names_and_shapes_and_not_of_their_order():
    one = fingerprint({"a": (1, 2), "b": (3,)})
    assert one == fingerprint({"b": [3], "a": [1, 2]})
    assert one != fingerprint({"a": (2, 1), "b": (3,)})
    assert one != fingerprint({"a": (1, 2), "c": (3,)})
    assert one != fingerprint({"a": (1, 2)})


def test_an_index_without_bounds_is_refused_when_it_is_written(monkeypatch):
    monkeypatch.setattr("patrickstar.checkpoint.format.MOST_INDEX_BYTES", 5000)
    with pytest.raises(ConfigError, match=r"extra takes .* bytes as JSON"):
        encode_index(replace(INDEX, extra=["a long list"] * 1000))
    assert encode_index(copy.copy(INDEX))
