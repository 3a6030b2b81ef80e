"""The index: it reads back as written, and what breaks one of its rules is refused with the key."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.checkpoint.format import FileRecord, Index, decode_index, encode_index, seal
from patrickstar.errors import CheckpointError

SUM = hashlib.sha256(b"").hexdigest()
INDEX = Index(
    step=12,
    parameters={"w": (2, 3), "b": ()},
    files={"weights.safetensors": FileRecord(100, SUM), "values.pt": FileRecord(72, SUM)},
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
    assert json.loads(encode_index(INDEX))["parameters"]["w"] == [2, 3]  # plain JSON, for others to read


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


@pytest.mark.parametrize(
    "name",
    ["../up.safetensors", "/etc/x.safetensors", "a/b.safetensors", ".h.safetensors", "w.bin", "", "-w.safetensors"],
)
def test_a_bad_file_name_is_refused_by_name(name):
    def rename(fields: dict[str, Any]) -> None:
        fields["files"][name] = fields["files"].pop("weights.safetensors")

    assert "not a plain file name" in refused(rename)


CHANGES = [
    (("version",), 1, "version 1 of the format; this library reads 2: load and export it with the release that"),
    (("version",), 3, "version 3 of the format; this library reads 2: update it"),
    (("version",), "1", "version: expected a whole number"),
    (("format",), "zip", "format: expected"),
    (("step",), -1, "step: expected"),
    *((("step",), value, "step: expected a whole number") for value in (1.5, True, None, float("nan"))),
    (("parameters", "w"), [3, -1], 'parameters["w"]: expected a list'),
    (("parameters", "w"), 6, 'parameters["w"]: expected a list'),
    (("parameters",), "all", "parameters: expected an object"),
    (("files",), {}, "values.pt is missing"),
    (("files",), [], "files: expected an object"),
    (("files", "values.pt", "nbytes"), -1, "nbytes: expected a whole number"),
    (("files", "values.pt", "sha256"), "f" * 63, "sha256: expected 64 hexadecimal digits"),
    (("files", "values.pt", "sha256"), "G" * 64, "sha256: expected"),
    (("files", "values.pt", "sha256"), 7, "sha256: expected"),
    (("files", "values.pt", "crc"), 7, "key 'crc' is unknown"),
    (("files", "values.pt"), None, "expected an object"),
    (("surplus",), 1, "key 'surplus' is unknown"),
]


@pytest.mark.parametrize(("path", "value", "problem"), CHANGES)
def test_a_rule_that_is_broken_is_named_even_under_a_right_checksum(path, value, problem):
    def change(fields: dict[str, Any]) -> None:
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = value

    assert problem in refused(change)


@pytest.mark.parametrize("key", ["step", "files", "parameters"])
def test_a_missing_key_is_named(key):
    assert f"key {key!r} is missing" in refused(lambda fields: fields.pop(key))


def test_a_file_that_is_no_index_is_refused():
    for data in (b"", b"{}", b"\x80\x04K\x01.", json.dumps({"tensors": {}}).encode()):
        with pytest.raises(CheckpointError, match="not the index"):
            decode_index(data, where="i")
