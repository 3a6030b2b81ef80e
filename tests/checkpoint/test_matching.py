"""What of some files goes where in a model, by names, shapes and types."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from patrickstar.checkpoint.matching import Match, match
from patrickstar.checkpoint.naming import Naming
from patrickstar.checkpoint.weight_files import WeightFiles
from patrickstar.errors import CheckpointError

Wanted = dict[tuple[str, ...], Tensor]


class Stacking(Naming):
    """A library that keeps the rows of `stack` as `row.0`, `row.1`, and is not surprised by `old`."""

    def __init__(self) -> None:
        super().__init__()
        self.missing = self.unexpected = re.compile("^old$")

    def renamed(self, names: Iterable[str], keys: Collection[str]) -> Iterator[tuple[str, str, str | None]]:
        for name in sorted(names):
            yield (name, "stack", "row.*") if name.startswith("row.") else (name, name, None)

    def convert(self, key: str, parts: Sequence[tuple[str, str, Tensor]]) -> dict[str, Tensor]:
        return {key: torch.stack([tensor for _, _, tensor in parts])}


def files_of(path: Path, tensors: Mapping[str, Tensor]) -> WeightFiles:
    safetensors.torch.save_file(dict(tensors), path / "file")
    return WeightFiles(path / "file")


def wanted(*keys: str, shape: tuple[int, ...] = (4,), dtype: torch.dtype = torch.float32) -> Wanted:
    return {keys: torch.empty(shape, dtype=dtype, device="meta")}


def matched(path: Path, tensors: Mapping[str, Tensor], *tensors_wanted: Wanted, naming: Any = None) -> Match:
    by_keys = {keys: tensor for one in tensors_wanted for keys, tensor in one.items()}
    return match(files_of(path, tensors), by_keys, naming or Naming())


def test_what_either_side_lacks_is_told_and_the_rest_is_taken(tmp_path):
    found = matched(tmp_path, {"a": torch.ones(4), "c": torch.ones(1)}, wanted("a"), wanted("b"))
    assert found.origins.keys() == {"a"}
    assert found.missing == ("b",)
    assert found.unexpected == ("c",)


@pytest.mark.parametrize(("in_file", "in_model"), [
    *[(one, other) for one in (torch.float64, torch.float16, torch.bfloat16) for other in (torch.float32, torch.bfloat16)],
    (torch.uint8, torch.int64), (torch.int32, torch.int64), (torch.bool, torch.bool), (torch.int64, torch.int64),
])  # fmt: skip
def test_types_that_become_the_model_s_are_taken(tmp_path, in_file, in_model):
    found = matched(tmp_path, {"a": torch.ones(4).to(in_file)}, wanted("a", dtype=in_model))
    assert found.origins.keys() == {"a"}


@pytest.mark.parametrize(("in_file", "in_model"), [
    (torch.int8, torch.float32), (torch.uint8, torch.float32), (torch.float8_e4m3fn, torch.float32), (torch.bool, torch.float32),
    (torch.complex64, torch.float32), (torch.float32, torch.int64), (torch.int64, torch.int32), (torch.bool, torch.int64),
])  # fmt: skip
def test_other_types_are_refused(tmp_path, in_file, in_model):
    with pytest.raises(CheckpointError, match=f"a is {in_file} in the files, {in_model} in the model"):
        matched(tmp_path, {"a": torch.ones(4).to(in_file)}, wanted("a", dtype=in_model))


@pytest.mark.parametrize("shape", [(), (1, 4), (2, 2), (4, 1), (5,), (0,)])
def test_another_shape_is_refused_however_many_elements_it_has(tmp_path, shape):
    with pytest.raises(CheckpointError) as refused:
        matched(tmp_path, {"a": torch.ones(shape), "b": torch.ones(4)}, wanted("a"), wanted("b"))
    assert f"a has shape {list(shape)} in the files, [4] in the model" in str(refused.value)


def test_files_of_which_nothing_fits_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="none of its 1 tensors is one of the model's: it has x, the model a, b"):
        matched(tmp_path, {"x": torch.ones(4)}, wanted("a", "b"))


@pytest.mark.parametrize("given", [["a"], ["b"], ["a", "b"]])
def test_a_tied_tensor_is_found_under_any_of_its_names(tmp_path, given):
    found = matched(tmp_path, dict.fromkeys(given, torch.ones(4).clone()) if len(given) == 1 else
                    {name: torch.ones(4) for name in given}, wanted("a", "b"))  # fmt: skip
    assert found.origins.keys() == {"a"}
    assert not found.missing
    assert not found.unexpected


def test_tied_tensors_that_differ_are_refused(tmp_path):
    tensors = {"a": torch.zeros(2_000_000), "b": torch.zeros(2_000_000, dtype=torch.float64)}
    tied = wanted("a", "b", shape=(2_000_000,))
    assert matched(tmp_path, tensors, tied).origins
    tensors["b"][1_999_999] = -0.0
    with pytest.raises(CheckpointError, match="a and b differ, but are one tied tensor"):
        matched(tmp_path, tensors, tied)


def test_a_conversion_is_checked_by_what_it_gives(tmp_path):
    rows = {f"row.{number}": torch.full((4,), float(number)) for number in range(3)}
    files = files_of(tmp_path, rows | {"old": torch.ones(1)})
    naming = Stacking()
    found = match(files, wanted("stack", shape=(3, 4)), naming)
    assert found.origins["stack"].read(files, naming)[:, 0].tolist() == [0, 1, 2]
    assert not found.unexpected
    with pytest.raises(CheckpointError, match=r"stack \(from row.0, row.1, row.2\) has shape \[3, 4\] in the files"):
        match(files, wanted("stack", shape=(4, 4)), naming)
    tensors = wanted("stack", shape=(3, 4)) | wanted("old", shape=(1,)) | wanted("new")
    assert match(files, tensors, naming).missing == ("new",)


def test_a_conversion_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="row.0, row.1 do not make stack"):
        matched(tmp_path, {"row.0": torch.ones(4), "row.1": torch.ones(3)}, wanted("stack"), naming=Stacking())


def test_two_tensors_for_one_place_are_refused(tmp_path):
    tensors = {"row.0": torch.ones(4), "stack": torch.ones(1, 4)}
    with pytest.raises(CheckpointError, match="'stack' and 'row.0' are both stack"):
        matched(tmp_path, tensors, wanted("stack", shape=(1, 4)), naming=Stacking())
