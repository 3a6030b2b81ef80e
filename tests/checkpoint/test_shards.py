"""Which tensor goes to which file."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.checkpoint.shards import plan_shards
from patrickstar.checkpoint.tensors import TensorEntry
from patrickstar.errors import ConfigError
from tests.checkpoint.samples import ENTRIES


@given(entries=ENTRIES, shard_bytes=st.integers(1, 800))
def test_every_tensor_lies_in_one_file_of_its_stem_that_is_not_too_large(entries, shard_bytes):
    shards = plan_shards(entries, shard_bytes=shard_bytes)
    placed = [entry for shard in shards for entry in shard.entries]
    assert sorted(entry.name for entry in placed) == sorted(entry.name for entry in entries)
    assert len({shard.file for shard in shards}) == len(shards)
    for shard in shards:
        assert {entry.stem for entry in shard.entries} == {shard.file.split("-")[0].removesuffix(".safetensors")}
        assert (
            sum(entry.nbytes for entry in shard.entries) <= shard_bytes
            or len([entry for entry in shard.entries if entry.nbytes]) == 1
        )
        offset = 0
        for entry in shard.entries:
            assert offset % entry.dtype.itemsize == 0  # else a mapped file cannot be viewed as that type
            offset += entry.nbytes


def test_order_is_kept_and_files_are_numbered_as_others_number_them():
    entries = [TensorEntry(f"w{number}", torch.float32, (100,), "model") for number in range(5)]
    shards = plan_shards(entries, shard_bytes=800)
    assert [shard.file for shard in shards] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [entry.name for shard in shards for entry in shard.entries] == [entry.name for entry in entries]
    assert [shard.file for shard in plan_shards(entries, shard_bytes=2000)] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (TensorEntry("__metadata__", torch.float32, (2,)), "keeps that name"),
        (TensorEntry("v", torch.complex128, (2,)), "safetensors has no torch.complex128"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(entry, problem):
    with pytest.raises(ConfigError, match=problem):
        plan_shards([TensorEntry("w", torch.float32, (3,)), entry], shard_bytes=100)
