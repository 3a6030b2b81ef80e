"""Safetensors files that others wrote, to take weights from: one file, or a directory as `save_pretrained` leaves it.

What a path stands for, in the order in which `from_pretrained` looks:

    PATH, a file                         that file; an index too
    PATH/model.safetensors               that file, whatever else lies there
    PATH/model.safetensors.index.json    the files it names, which lie beside it

Headers and index are checked before memory is taken for a tensor. Links are followed: the hub's cache of downloads is made of them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from patrickstar.checkpoint.format import INDEX_NAME, LATEST_NAME, MOST_INDEX_BYTES
from patrickstar.checkpoint.tensor_files import Identity, TensorFiles, read_small
from patrickstar.config.json_file import parse_json
from patrickstar.config.kinds import OBJECT, Kind
from patrickstar.errors import CheckpointError
from patrickstar.memory.fileio import FileIO, reported

STEM = "model"
WEIGHTS_FILE = f"{STEM}.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD = Kind(
    "the name of a safetensors file",
    lambda v: isinstance(v, str) and Path(v).name == v and v.endswith(".safetensors"),
)


class WeightFiles(TensorFiles):
    """The tensors at a path, by name; checked but for their bytes."""

    def __init__(self, path: Path, *, io: FileIO = FileIO()) -> None:  # noqa: B008  (frozen)
        """Opens the files. Raises CheckpointError: there are no files, or they are not what their headers and their index say."""
        super().__init__(path, io=io, changed="changed while weights were read from it")
        weight_map, paths = _find(path, io)
        for file in paths:
            self.add(file)
        for name, shard in weight_map.items():
            if name not in self.file_of or self.file_of[name].name != shard:
                raise CheckpointError(
                    f"{path}: the index has tensor {name!r} in {shard}, which does not hold it: files of different models"
                )

    def opened(self, path: Path) -> tuple[int, Identity]:
        return super().opened(_real(path))


def _find(path: Path, io: FileIO) -> tuple[Mapping[str, str], list[Path]]:
    """The entries of an index (nothing where there is none), and the files."""
    with reported(f"{path}: cannot look there", CheckpointError):
        status = io.status(_real(path))
        if status is None:
            raise CheckpointError(f"{path}: no such file or directory, to load weights from")
        if stat.S_ISDIR(status.st_mode):
            if io.status(_real(path / WEIGHTS_FILE)) is not None:
                return {}, [path / WEIGHTS_FILE]
            if io.status(_real(path / INDEX_FILE)) is None:
                raise CheckpointError(_nothing_there(path, io.names(_real(path))))
            path = path / INDEX_FILE
        elif not path.name.endswith(".json"):
            return {}, [path]
    weight_map = _read_index(path, io)
    shards = [path.with_name(name) for name in dict.fromkeys(weight_map.values())]
    for shard in shards:
        with reported(f"{shard}: cannot look there", CheckpointError):
            if io.status(_real(shard)) is None:
                raise CheckpointError(f"{shard}: the file is missing, which {path.name} names")
    return weight_map, shards


def _read_index(path: Path, io: FileIO) -> dict[str, str]:
    fields = parse_json(read_small(_real(path), MOST_INDEX_BYTES, io), where=str(path), damaged=CheckpointError)
    found: dict[str, str] = OBJECT.read(fields.get("weight_map"), f"{path}: weight_map", CheckpointError)
    for name, shard in found.items():
        _SHARD.read(shard, f"{path}: weight_map[{name[:80]!r}]", CheckpointError)
    if not found:
        raise CheckpointError(f"{path}: weight_map: names no tensor")
    return found


def _nothing_there(path: Path, names: list[str]) -> str:
    told = f"{path}: holds neither {WEIGHTS_FILE} nor {INDEX_FILE}"
    if LATEST_NAME in names or INDEX_NAME in names:
        return f"{told}; it is a checkpoint of this library: session.load_checkpoint takes it"
    if tensors := [name for name in names if name.endswith(".safetensors")]:
        return f"{told}, but {tensors[0]}: name that file itself" + (
            f", or bring the index of the {len(tensors)} files" if len(tensors) > 1 else ""
        )
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        return f"{told}, but {pickles[0]}: pickles are not read; save the model with safetensors"
    return told


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
