"""Whatever happens to a checkpoint's files, by accident or by intent: a CheckpointError that names the file.

Before that error nothing is executed, written, or taken memory for; after it the checkpoint beside it still loads.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patrickstar.checkpoint import open_step
from patrickstar.checkpoint.format import checksum_of
from patrickstar.checkpoint.header import encode_header
from patrickstar.errors import CheckpointError
from tests.checkpoint.samples import contents, forge, same_bits, sample, write

STEP = "step-00000002"


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """Steps 1 and 2; step 2 is the latest."""
    directory = tmp_path_factory.mktemp("clean")
    for step in (1, 2):
        write(directory, step)
    return directory


@pytest.fixture
def runs(clean, tmp_path) -> Path:
    """A copy to spoil, with the times of the original."""
    shutil.copytree(clean, tmp_path / "runs")
    return tmp_path / "runs"


def snapshot(directory: Path) -> dict[str, tuple[Any, ...]]:
    return {
        str(path.relative_to(directory)): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.lstat().st_size)
        for path in [directory, *directory.rglob("*")]
    }


def refusal(runs: Path) -> str:
    """How step 2 is refused; nothing is changed by it, and step 1 is named and loads."""
    before = snapshot(runs.parent)
    with pytest.raises(CheckpointError) as refused, open_step(runs) as reader:
        reader.verify()
    assert snapshot(runs.parent) == before
    text = str(refused.value)
    assert text.endswith(f"; the newest intact checkpoint is {runs / 'step-00000001'}: load that path"), text
    return text


def assert_refused(runs: Path, file: str) -> None:
    assert refusal(runs).startswith(f"{runs / STEP / file}: ")


FILES = [
    *("extra.safetensors", "index.json", "moments.safetensors"),
    *("weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors"),
]


def test_the_sample_has_the_files_that_are_spoiled_here(clean):
    assert sorted(path.name for path in (clean / STEP).iterdir()) == FILES


def test_one_flipped_bit_anywhere_is_found_and_its_file_named(runs):
    draw = random.Random(7)
    places = [(file, at) for file in FILES for at in range((runs / STEP / file).stat().st_size)]
    for file, at in draw.sample(places, 100):
        path = runs / STEP / file
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << draw.randrange(8)
        kept = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=f"^{path}: "), open_step(runs / STEP) as reader:
            reader.verify()
        path.write_bytes(kept)
    with open_step(runs) as reader:
        reader.verify()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("left", [0.0, 0.01, 0.5, 0.999, 1.001, 2.0])
def test_a_file_cut_short_or_grown_is_refused(runs, file, left):
    os.truncate(runs / STEP / file, int((runs / STEP / file).stat().st_size * left) + (left > 1))
    assert_refused(runs, file)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_refused(runs, file):
    (runs / STEP / file).unlink()
    assert_refused(runs, file)


@pytest.mark.parametrize("file", ["more.safetensors", "notes.txt", ".hidden", "deep/file"])
def test_a_file_that_does_not_belong_there_is_refused(runs, file):
    (runs / STEP / file).parent.mkdir(exist_ok=True)
    (runs / STEP / file).write_bytes(b"x")
    assert_refused(runs, file.split("/")[0])


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_step_is_refused(runs, file):
    shutil.copyfile(runs / "step-00000001" / file, runs / STEP / file)
    assert_refused(runs, file)


def test_two_files_that_have_changed_places_are_refused(runs):
    first, second = (runs / STEP / file for file in FILES[3:])
    first.rename(runs / "aside")
    second.rename(first)
    (runs / "aside").rename(second)
    assert_refused(runs, FILES[3])


def test_a_step_under_another_step_s_name_is_refused(runs):
    shutil.rmtree(runs / STEP)
    shutil.copytree(runs / "step-00000001", runs / STEP)
    assert "step: 1, in a directory named step-00000002" in refusal(runs)


def test_the_index_of_another_model_is_refused(runs, tmp_path):
    other = write(tmp_path / "other", 2, {"wte.weight": torch.zeros(40, 64), "ln.bias": torch.zeros(8)})
    shutil.copyfile(other / "index.json", runs / STEP / "index.json")
    assert "the file is missing" in refusal(runs) or "no part of this checkpoint" in refusal(runs)


@pytest.mark.parametrize("file", FILES)
def test_a_link_is_refused_even_to_the_right_bytes(runs, file):
    (runs / STEP / file).rename(runs / "moved")
    (runs / STEP / file).symlink_to(runs / "moved")
    assert "symbolic link" in refusal(runs)
    assert_refused(runs, file)


@pytest.mark.parametrize("file", FILES)
def test_a_pipe_or_directory_in_place_of_a_file_is_refused_and_not_waited_for(runs, file):
    (runs / STEP / file).unlink()
    os.mkfifo(runs / STEP / file)
    assert_refused(runs, file)
    (runs / STEP / file).unlink()
    (runs / STEP / file).mkdir()
    assert_refused(runs, file)


def test_a_path_that_climbs_out_is_refused_though_the_file_is_there(runs):
    for name in ("../outside.safetensors", f"{runs}/outside.safetensors", "./moments.safetensors"):
        shutil.copyfile(runs / STEP / "moments.safetensors", runs / "outside.safetensors")

        def climb(index: dict[str, Any], name: str = name) -> None:
            index["files"][name] = index["files"].pop("moments.safetensors")
            index["tensors"]["exp_avg/wte.weight"]["file"] = name

        original = (runs / STEP / "index.json").read_bytes()
        forge(runs / STEP, climb)
        assert "not a plain file name" in refusal(runs)
        (runs / STEP / "index.json").write_bytes(original)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def adopt(runs: Path, file: str, data: bytes, header_nbytes: int) -> None:
    """Put bytes in a file's place, and make the index say what one would have to."""
    (runs / STEP / file).write_bytes(data)

    def claim(index: dict[str, Any]) -> None:
        index["files"][file] = {
            "nbytes": len(data),
            "header_nbytes": header_nbytes,
            "header_checksum": checksum_of(data[:header_nbytes]),
        }
        offset = header_nbytes
        for row in (row for row in index["tensors"].values() if row["file"] == file):
            row |= {"dtype": "U8", "shape": [len(data) - offset], "offset": offset, "nbytes": len(data) - offset}
            row["checksum"] = checksum_of(data[offset:])

    forge(runs / STEP, claim)


def pickled(target: Path) -> bytes:
    return pickle.dumps(Bomb(target))


def torch_saved(target: Path) -> bytes:
    path = target.with_name("saved.pt")
    torch.save({"w": Bomb(target)}, path)
    data = path.read_bytes()
    path.unlink()
    return data


@pytest.mark.parametrize("make", [pickled, torch_saved])
@pytest.mark.parametrize("agreeing", [False, True])
def test_a_pickle_named_safetensors_is_refused_and_not_executed(runs, make, agreeing):
    target = runs.parent / "executed"
    data = make(target)
    if agreeing:
        adopt(runs, "moments.safetensors", data, 16)
        assert "it begins like a pickle" in refusal(runs)
    else:
        (runs / STEP / "moments.safetensors").write_bytes(data)
        assert_refused(runs, "moments.safetensors")
    assert not target.exists()


def test_the_pickle_would_have_done_something(tmp_path):
    pickle.loads(pickled(tmp_path / "executed"))
    assert (tmp_path / "executed").exists()


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a shape without end": lambda index: index["tensors"]["wte.weight"].update(shape=[2**40], nbytes=2**42),
    "dims that multiply beyond counting": lambda index: index["tensors"]["wte.weight"].update(shape=[2**62, 2**62]),
    "a file larger than it is": lambda index: index["files"]["moments.safetensors"].update(nbytes=2**50),
    "a header as large as the file": lambda index: index["files"]["moments.safetensors"].update(header_nbytes=20_000),
    "overlapping tensors": lambda index: index["tensors"]["counts"].update(offset=index["tensors"]["steps"]["offset"]),
    "one tensor in two tables": lambda index: index["extra_tensors"].update(steps=index["tensors"]["steps"]),
    "a tensor that the file does not have": lambda index: index["tensors"].update(
        ghost={**index["tensors"]["none"], "checksum": checksum_of(b"")}
    ),
    "another type of the same size": lambda index: index["tensors"]["steps"].update(dtype="F64"),
    "another shape of the same size": lambda index: index["tensors"]["wte.weight"].update(shape=[64, 40]),
    "names exchanged": lambda index: index["tensors"].update(
        {"wte.weight": index["tensors"]["exp_avg/wte.weight"], "exp_avg/wte.weight": index["tensors"]["wte.weight"]}
    ),
    "another checksum": lambda index: index["tensors"]["flags"].update(checksum="0" * 64),
    "another step": lambda index: index.update(step=3),
    "other parameters": lambda index: index.update(parameters={}),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_an_index_that_lies_under_a_right_checksum_is_refused_without_memory(runs, forgery):
    forge(runs / STEP, FORGERIES[forgery])
    tracemalloc.start()
    text = refusal(runs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(runs / STEP) in text
    assert peak < 2 << 20


def test_a_header_that_lies_is_refused_whatever_the_index_says(runs):
    path = runs / STEP / "moments.safetensors"
    data = path.read_bytes()
    nbytes = len(data) - 128
    for entries in (
        [("exp_avg/wte.weight", "F32", (nbytes // 4 + 16,))],
        [("exp_avg/wte.weight", "U8", (nbytes,)), ("more", "F32", (2**40,))],
        [("other", "F64", (40, 64))],
    ):
        header, _ = encode_header(entries)
        adopt(runs, "moments.safetensors", header + data[len(header) :], len(header))
        assert_refused(runs, "moments.safetensors")


def test_a_header_length_without_end_takes_no_memory(runs):
    data = (99_000_000).to_bytes(8, "little") + b"{}" * 100
    adopt(runs, "moments.safetensors", data, len(data))
    tracemalloc.start()
    assert "header length 99000000" in refusal(runs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


def test_an_index_larger_than_any_is_not_read(runs):
    os.truncate(runs / STEP / "index.json", 1 << 40)  # sparse
    assert "such a file has at most" in refusal(runs)


@pytest.mark.parametrize(
    "tree",
    [
        {"$pickle": "x"},
        {"$tensor": "wte.weight"},
        {"$array": {"tensor": 'extra["order"]', "dtype": "|O", "shape": [5]}},
        {"$dtype": "torch.load"},
    ],
)
def test_an_extra_that_lies_is_refused_when_it_is_read(runs, tree):
    forge(runs / STEP, lambda index: index.update(extra={"a": tree}))
    with open_step(runs) as reader:
        reader.verify()
        with pytest.raises(CheckpointError, match=r'index\.json: extra\["a"\]'):
            _ = reader.extra


def test_random_mutations_are_refused_or_change_nothing(runs, clean):
    """A campaign in small: bytes overwritten, files cut, swapped, renamed, removed, linked."""
    draw = random.Random(11)
    unchanged = refused = 0
    for _ in range(40):
        shutil.rmtree(runs)
        shutil.copytree(clean, runs)
        path = runs / STEP / draw.choice(FILES)
        match draw.randrange(5):
            case 0:
                data = bytearray(path.read_bytes())
                at = draw.randrange(len(data))
                data[at : at + draw.randrange(1, 40)] = draw.randbytes(draw.randrange(40))
                path.write_bytes(data)
            case 1:
                os.truncate(path, draw.randrange(path.stat().st_size + 100))
            case 2:
                shutil.copyfile(runs / STEP / draw.choice(FILES), path.with_name(draw.choice(FILES)))
            case 3:
                path.rename(path.with_name(draw.choice([*FILES, "renamed.safetensors", "..x"])))
            case 4:
                path.unlink()
                path.symlink_to(draw.choice(["/dev/zero", "/etc/passwd", str(clean / STEP / path.name), "missing"]))
        try:
            with open_step(runs) as reader:
                reader.verify()
                found = contents(reader)
        except CheckpointError as problem:
            refused += str(runs / STEP) in str(problem)
        else:
            unchanged += same_bits(found, sample(2))
    assert unchanged + refused == 40
    assert refused > 25


def test_what_is_read_by_others_is_json(clean):
    assert json.loads((clean / STEP / "index.json").read_text())["step"] == 2
