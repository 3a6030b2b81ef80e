"""Safetensors files that others wrote, to take weights from: one file, or a directory as `save_pretrained` leaves it.

What a path stands for, in the order in which `from_pretrained` looks:

    PATH, a file                         that file; an index too
    PATH/model.safetensors               that file, whatever else lies there
    PATH/model.safetensors.index.json    the files it names, which lie beside it

Opening reads every header and holds it against the file's real size (the rules in `header.py`), and the index against the
headers, before memory is taken for a tensor. Tensors are read one at a time, not mapped. Nothing is ever executed: a
pickle is refused for what it is. Links are followed, since the hub's cache of downloads is made of them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from patrickstar.checkpoint.contents import Identity, identity, read_small
from patrickstar.checkpoint.fields import as_object, as_str, parse_object
from patrickstar.checkpoint.files import Files, reading
from patrickstar.checkpoint.format import INDEX_NAME, MOST_INDEX_BYTES
from patrickstar.checkpoint.header import LENGTH_BYTES, Span, decode_header, header_length
from patrickstar.checkpoint.source import OneSource, Source
from patrickstar.checkpoint.tensors import DTYPES, bytes_of, empty
from patrickstar.errors import CheckpointError

__all__ = ["INDEX_FILE", "STEM", "WEIGHTS_FILE", "WeightFiles"]

STEM = "model"
WEIGHTS_FILE = f"{STEM}.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LATEST = "latest"


@dataclass(frozen=True, slots=True)
class _Opened:
    """A file whose header has been read, with the file's identity, to know it again."""

    path: Path
    identity: Identity
    nbytes: int


class WeightFiles:
    """The tensors at a path, by name; checked but for their bytes. Use from one thread.

    `spans`: what each is and where it lies in its file, in the order of files and of bytes.
    """

    def __init__(self, path: Path, *, files: Files | None = None) -> None:
        """Opens the files. Raises CheckpointError: there are no files, or they are not what their headers and their index say."""
        self.path = path
        self._disk = files or Files()
        self.spans: dict[str, Span] = {}
        self._file_of: dict[str, _Opened] = {}
        weight_map, paths = _find(path, self._disk)
        for file in paths:
            self._add(file)
        for name, shard in weight_map.items():
            if name not in self._file_of or self._file_of[name].path.name != shard:
                raise CheckpointError(
                    f"{path}: the index has tensor {name!r} in {shard}, which does not hold it: files of different models"
                )

        files_of = self._file_of
        self._sources = OneSource(
            self._disk,
            largest_bytes=lambda: max(file.nbytes for file in files_of.values()),
            changed="changed while weights were read from it",
            follows_links=True,
        )

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, of the type it has in its file."""
        span = self.spans[name]
        tensor = empty(span.shape, DTYPES[span.dtype])
        self._source(self._file_of[name]).read_into(bytes_of(tensor), span.offset)
        return tensor

    def pieces(self, name: str, numel: int) -> Iterator[torch.Tensor]:
        """The tensor's elements in order, in new 1-D tensors of `numel` elements, the last one shorter."""
        span, dtype = self.spans[name], DTYPES[self.spans[name].dtype]
        for start in range(0, span.numel, numel):
            piece = empty((min(numel, span.numel - start),), dtype)
            self._source(self._file_of[name]).read_into(bytes_of(piece), span.offset + start * dtype.itemsize)
            yield piece

    def close(self) -> None:
        """Close the file that is open, if one is, and let go of the blocks. Reading again takes them again."""
        self._sources.close()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, path: Path) -> None:
        real = _real(path)
        with reading(f"{path}: cannot open the file"):
            descriptor, status = self._disk.open(real)
        try:
            start = self._read_front(descriptor, min(LENGTH_BYTES, status.st_size), path)
            length = header_length(start, file_nbytes=status.st_size, where=str(path))
            text = self._read_front(descriptor, LENGTH_BYTES + length, path)[LENGTH_BYTES:]
        finally:
            self._disk.close(descriptor)
        opened = _Opened(path, identity(status), status.st_size)
        for name, span in decode_header(text, file_nbytes=status.st_size, where=str(path)).items():
            if name in self._file_of:
                raise CheckpointError(f"{path}: tensor {name!r} is in {self._file_of[name].path.name} as well")
            self.spans[name], self._file_of[name] = span, opened

    def _read_front(self, descriptor: int, nbytes: int, path: Path) -> bytes:
        data = bytearray(nbytes)
        at = 0
        while at < nbytes:
            with reading(f"{path}: cannot read {nbytes - at} bytes at offset {at}"):
                taken = self._disk.read(descriptor, memoryview(data)[at:], at)
                if taken <= 0:
                    raise OSError(errno.ENODATA, "the file ends before that")
            at += taken
        return bytes(data)

    def _source(self, opened: _Opened) -> Source:
        return self._sources.at(opened.path, opened.identity)


def _find(path: Path, disk: Files) -> tuple[Mapping[str, str], list[Path]]:
    """The entries of an index (nothing where there is none), and the files."""
    with reading(f"{path}: cannot look there"):
        status = disk.status(_real(path))
        if status is None:
            raise CheckpointError(f"{path}: no such file or directory, to load weights from")
        if stat.S_ISDIR(status.st_mode):
            if disk.status(_real(path / WEIGHTS_FILE)) is not None:
                return {}, [path / WEIGHTS_FILE]
            if disk.status(_real(path / INDEX_FILE)) is None:
                raise CheckpointError(_nothing_there(path, disk.names(_real(path))))
            path = path / INDEX_FILE
        elif not path.name.endswith(".json"):
            return {}, [path]
    weight_map = _read_index(path, disk)
    shards = [path.with_name(name) for name in dict.fromkeys(weight_map.values())]
    for shard in shards:
        with reading(f"{shard}: cannot look there"):
            if disk.status(_real(shard)) is None:
                raise CheckpointError(f"{shard}: the file is missing, which {path.name} names")
    return weight_map, shards


def _read_index(path: Path, disk: Files) -> dict[str, str]:
    fields = parse_object(read_small(_real(path), MOST_INDEX_BYTES, disk), where=str(path))
    found: dict[str, str] = {}
    for name, value in as_object(fields.get("weight_map"), f"{path}: weight_map").items():
        shard = as_str(value, f"{path}: weight_map[{name[:80]!r}]")
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path}: weight_map[{name[:80]!r}]: {shard[:80]!r} is no name of a safetensors file")
        found[name] = shard
    if not found:
        raise CheckpointError(f"{path}: weight_map: names no tensor")
    return found


def _nothing_there(path: Path, names: list[str]) -> str:
    told = f"{path}: holds neither {WEIGHTS_FILE} nor {INDEX_FILE}"

    if _LATEST in names or INDEX_NAME in names:
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
