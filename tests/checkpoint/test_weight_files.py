"""Weights that others wrote: what a path stands for, what is read, and what is refused before memory is taken for it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.checkpoint.storage import write_step
from patrickstar.checkpoint.weight_files import INDEX_FILE, WEIGHTS_FILE, WeightFiles
from patrickstar.errors import CheckpointError
from tests.checkpoint.faults import FaultyFiles
from tests.checkpoint.samples import LIES, same_tensor, sample

TENSORS = {name.replace("/", "."): tensor for name, tensor in sample().items()}


def write_file(path: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(TENSORS if tensors is None else tensors, path, metadata={"format": "pt"})
    return path


def write_shards(directory: Path) -> Path:
    """Three files and their index."""
    weight_map = {}
    for number in range(3):
        shard = f"model-{number + 1:05d}-of-00003.safetensors"
        names = list(TENSORS)[number::3]
        write_file(directory / shard, {name: TENSORS[name] for name in names})
        weight_map |= dict.fromkeys(names, shard)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return directory


def expect_all(files: WeightFiles) -> None:
    with files:
        assert files.spans.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert same_tensor(files.read(name), tensor)
            pieces = list(files.pieces(name, 100))
            assert all(piece.numel() <= 100 for piece in pieces)
            assert same_tensor(torch.cat([torch.empty(0, dtype=tensor.dtype), *pieces]), tensor.reshape(-1))


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as refusal:
        WeightFiles(path)
    return str(refusal.value)


def test_a_file_a_directory_shards_and_an_index_are_read(tmp_path):
    expect_all(WeightFiles(write_file(tmp_path / "any name")))
    expect_all(WeightFiles(write_file(tmp_path / "one" / WEIGHTS_FILE).parent))
    expect_all(WeightFiles(write_shards(tmp_path / "three")))
    expect_all(WeightFiles(tmp_path / "three" / INDEX_FILE))


def test_links_are_followed_as_in_the_hub_s_cache(tmp_path):
    blobs = write_shards(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in blobs.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(Path("..") / "blobs" / path.name)
    expect_all(WeightFiles(tmp_path / "snapshot"))
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic link" in refused(tmp_path / "loop")


def test_one_file_goes_before_an_index_as_from_pretrained_has_it(tmp_path):
    write_shards(tmp_path)
    write_file(tmp_path / WEIGHTS_FILE, {"only": torch.ones(1)})
    assert list(WeightFiles(tmp_path).spans) == ["only"]


def test_what_is_not_there_is_told_with_what_is(tmp_path):
    assert "no such file or directory" in refused(tmp_path / "nowhere")
    assert refused(tmp_path).endswith(f"holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin: pickles are not read" in refused(tmp_path)
    write_file(tmp_path / "weights.safetensors")
    assert "weights.safetensors: name that file itself" in refused(tmp_path)
    step = write_step(tmp_path / "run", 1, entries=[], read=lambda _: [], parameters={})
    assert "session.load_checkpoint" in refused(step)
    assert "session.load_checkpoint" in refused(step.parent)


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({"flags": "model-00001-of-00003.safetensors"}, "which does not hold it"),
        ({"more": "model-00001-of-00003.safetensors"}, "which does not hold it"),
        ({"flags": "model-00009-of-00009.safetensors"}, "the file is missing"),
        ({"flags": "../model.safetensors"}, "expected the name of a safetensors file"),
        ({"flags": "/etc/passwd"}, "expected the name of a safetensors file"),
        ({"flags": "pytorch_model.bin"}, "expected the name of a safetensors file"),
        ({"flags": 7}, "expected the name of"),
        ({}, "names no tensor"),
        ([], "expected an object"),
        (None, "expected an object"),
    ],
)
def test_an_index_that_is_not_of_its_files_is_refused(tmp_path, weight_map, problem):
    write_shards(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    message = refused(tmp_path)
    assert problem in message
    assert str(tmp_path) in message


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_shards(tmp_path)
    twice = {"flags": TENSORS["flags"], "ln.bias": TENSORS["ln.bias"]}
    write_file(tmp_path / "model-00001-of-00003.safetensors", twice)
    assert "as well" in refused(tmp_path)


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize("save", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
def test_a_pickle_is_refused_and_nothing_of_it_runs(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / WEIGHTS_FILE
    with path.open("wb") as file:
        save({"weight": [1.0] * 300, "bomb": Bomb()}, file)
    for offered in (path, tmp_path):
        assert "begins like a pickle" in refused(offered)
    assert not Path("exploded").exists()


@pytest.mark.parametrize("lie", sorted(LIES.keys() - {"a tensor of another file"}))
def test_a_file_that_is_not_what_it_says_is_refused_before_memory_is_taken(tmp_path, monkeypatch, lie):
    def taken(*_):
        raise AssertionError("memory was taken")

    monkeypatch.setattr("patrickstar.checkpoint.tensor_files.empty", taken)
    path = tmp_path / WEIGHTS_FILE
    data, says = LIES[lie]
    path.write_bytes(data)
    assert says in refused(path)


ORIGINAL = safetensors.torch.save({"b": torch.arange(6.0).reshape(2, 3), "a": torch.arange(5).short()})


@given(
    changes=st.lists(st.tuples(st.integers(0, len(ORIGINAL) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, len(ORIGINAL)) | st.just(len(ORIGINAL)),
)
def test_what_is_accepted_the_format_s_own_library_reads_alike(tmp_path_factory, changes, cut):
    data = bytearray(ORIGINAL)
    for at, byte in changes:
        data[at] = byte
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(data[:cut])
    try:
        files = WeightFiles(path)
    except CheckpointError:
        return
    with files:
        want = safetensors.torch.load(bytes(data[:cut]))
        assert files.spans.keys() == want.keys()
        assert all(same_tensor(files.read(name), tensor) for name, tensor in want.items())


def test_a_file_that_changes_under_way_is_refused(tmp_path):
    path = write_file(tmp_path / WEIGHTS_FILE)
    files = WeightFiles(path)
    write_file(
        path, {name: tensor + 1 if tensor.dtype is torch.float32 else tensor for name, tensor in TENSORS.items()}
    )
    with pytest.raises(CheckpointError, match="changed while weights were read"):
        files.read("ln.bias")


def test_every_failing_read_is_told(tmp_path):
    path = write_shards(tmp_path)

    def read_all(io: FaultyFiles) -> None:
        with WeightFiles(path, io=io) as files:
            assert all(same_tensor(files.read(name), tensor) for name, tensor in TENSORS.items())

    read_all(watched := FaultyFiles())
    asked = [at for at, operation in enumerate(watched.log) if operation.split()[0] in ("status", "open", "preadv")]
    assert len(asked) > 12
    for at in asked:
        with pytest.raises(CheckpointError, match="Input/output error"):
            read_all(FaultyFiles(at=at, kind="EIO"))
    for at in asked:
        read_all(FaultyFiles(at=at, kind="short"))
