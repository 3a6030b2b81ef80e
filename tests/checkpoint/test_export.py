"""A model written for its own library: what lies there afterwards, and what a crash leaves."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from patrickstar.checkpoint.export import write_model
from patrickstar.checkpoint.tensors import TensorEntry
from patrickstar.checkpoint.weight_files import INDEX_FILE, WEIGHTS_FILE, WeightFiles
from patrickstar.errors import CheckpointError, DeviceError
from patrickstar.memory.fileio import FileIO
from tests.checkpoint.faults import FaultyFiles, Killed
from tests.checkpoint.samples import in_pieces, same_tensor


def tensors_of(model: int) -> dict[str, torch.Tensor]:
    return {f"layer.{number}": torch.full((50,), float(10 * model + number)) for number in range(4)}


def export(directory: Path, model: int = 0, *, shard_bytes: int = 1 << 30, io: FileIO = FileIO()) -> None:  # noqa: B008  (frozen)
    tensors = tensors_of(model)
    write_model(
        directory,
        [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()],
        read=lambda name: in_pieces(tensors[name], 30),
        describe=lambda to: (to / "config.json").write_text(f'{{"model": {model}}}') and None,
        shard_bytes=shard_bytes,
        io=io,
    )


def found(directory: Path) -> dict[str, torch.Tensor]:
    with WeightFiles(directory) as files:
        return {name: files.read(name) for name in files.spans}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_tensor(tensor, other[name]) for name, tensor in one.items())


def test_one_file_where_it_fits_else_shards_and_an_index(tmp_path):
    export(tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", WEIGHTS_FILE]
    assert same(safetensors.torch.load_file(tmp_path / "one" / WEIGHTS_FILE), tensors_of(0))

    export(tmp_path / "deep" / "two", shard_bytes=400)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(path.name for path in (tmp_path / "deep" / "two").iterdir()) == ["config.json", *shards, INDEX_FILE]
    index = json.loads((tmp_path / "deep" / "two" / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 800}
    for shard in shards:
        names = [name for name, file in index["weight_map"].items() if file == shard]
        assert safetensors.torch.load_file(tmp_path / "deep" / "two" / shard).keys() == set(names)


@pytest.mark.parametrize("before", [400, 200, 1 << 30])
@pytest.mark.parametrize("after", [400, 200, 1 << 30])
def test_an_earlier_model_is_replaced_and_other_files_stay(tmp_path, before, after):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-of-mine.safetensors").write_bytes(b"not ours")
    export(tmp_path, 1, shard_bytes=before)
    export(tmp_path, 2, shard_bytes=after)
    assert same(found(tmp_path), tensors_of(2))
    assert json.loads((tmp_path / "config.json").read_text()) == {"model": 2}
    names = {path.name for path in tmp_path.iterdir()} - {"config.json", "tokenizer.json", "model-of-mine.safetensors"}
    assert names == ({WEIGHTS_FILE} if after == 1 << 30 else {INDEX_FILE} | {
        f"model-{n + 1:05d}-of-{800 // after:05d}.safetensors" for n in range(800 // after)})  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["kill", "torn cut", "ENOSPC"])
@pytest.mark.parametrize(("before", "after"), [(400, 400), (1 << 30, 400), (400, 1 << 30)])
def test_an_interruption_never_leaves_a_mix(tmp_path, kind, before, after):
    export(tmp_path / "before", 1, shard_bytes=before, io=FaultyFiles())  # which syncs nothing
    shutil.copytree(tmp_path / "before", tmp_path / "watched")
    export(tmp_path / "watched", 2, shard_bytes=after, io=(watched := FaultyFiles()))
    outcomes = set()
    for at in range(len(watched.log)):
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "before", path)
        faulty = FaultyFiles(at=at, kind=kind)
        with contextlib.suppress(Killed, DeviceError, OSError):
            export(path, 2, shard_bytes=after, io=faulty)
        try:
            left = found(path)
        except CheckpointError:
            assert before == after == 400, "names that did not clash: one of the two is there at any time"
            outcomes.add("none")
            continue
        assert same(left, tensors_of(1)) or same(left, tensors_of(2)), faulty.log
        outcomes.add("old" if same(left, tensors_of(1)) else "new")
        export(path, 3, io=FaultyFiles())
        assert same(found(path), tensors_of(3))
        assert {entry.name for entry in path.iterdir()} == {"config.json", WEIGHTS_FILE}  # nothing is left behind
    assert {"old", "new"} <= outcomes


def test_names_are_synced_before_the_one_that_readers_begin_with(tmp_path):
    class Ordered(FileIO):
        log: list[str] = []  # noqa: RUF012 - of this test alone

        def rename(self, source: Path, target: Path) -> None:
            self.log.append(target.name)
            super().rename(source, target)

        def sync_directory(self, path: Path) -> None:
            self.log.append("sync")
            super().sync_directory(path)

    export(tmp_path, shard_bytes=400, io=Ordered())
    moved = Ordered.log[Ordered.log.index("config.json") :]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert moved[:5] == ["config.json", *shards, "sync", INDEX_FILE]
    assert "sync" in moved[5:]


def test_what_cannot_be_written_is_told_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="file"):
        export(tmp_path / "file")

    class Full(FileIO):
        def free_bytes(self, directory: Path) -> int:
            return 100

    with pytest.raises(DeviceError, match="a model of 800 bytes .* 100 bytes"):
        export(tmp_path / "full", io=Full())
    export(tmp_path / "there", 1)
    export(tmp_path / "watched", 2, io=(watched := FaultyFiles()))
    writes = [
        at for at, operation in enumerate(watched.log) if operation.split()[0] in ("create", "pwritev", "truncate")
    ]
    assert writes
    for at in writes:
        with pytest.raises(DeviceError, match="No space left"):
            export(tmp_path / "there", 2, io=FaultyFiles(at=at, kind="ENOSPC"))
        assert same(found(tmp_path / "there"), tensors_of(1))
        assert {path.name for path in (tmp_path / "there").iterdir()} == {"config.json", WEIGHTS_FILE}


def test_a_description_that_fails_leaves_what_was_there(tmp_path):
    export(tmp_path, 1)

    def describe(_: Path) -> None:
        raise ValueError("no configuration")

    with pytest.raises(ValueError, match="no configuration"):
        write_model(tmp_path, [], read=lambda _: [], describe=describe, shard_bytes=1)
    assert same(found(tmp_path), tensors_of(1))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", WEIGHTS_FILE}
