"""Writing a model as its own library reads it: safetensors files, an index where there are several, its configuration.

The order of things, so that the directory never holds a mix of two models that somebody could take for one:

(1) Everything is written aside, in a directory inside, and synced. Until then an error leaves what was there before.
(2) Where files of before have the names of new shards, their index goes first: a crash then leaves no model to load.
(3) Files get their names by renaming; when those are synced, the one that readers begin with: `model.safetensors` or the index.
(4) What is left of an earlier model is removed. Other files (a tokenizer's) stay.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from patrickstar.checkpoint.directories import (
    TEMPORARY_PREFIX,
    check_space,
    locked,
    make_directories,
    remove,
    sync_directory,
)
from patrickstar.checkpoint.files import BLOCK_BYTES, Blocks, Files, writing
from patrickstar.checkpoint.shards import Shard, plan_shards, write_shard
from patrickstar.checkpoint.tensors import TensorEntry
from patrickstar.checkpoint.weight_files import INDEX_FILE, STEM, WEIGHTS_FILE
from patrickstar.checkpoint.writer import write_file

__all__ = ["write_model"]

_SHARD_NAME = re.compile(rf"{STEM}-\d{{5}}-of-\d{{5}}\.safetensors")


def write_model(
    directory: Path,
    entries: Sequence[TensorEntry],
    *,
    read: Callable[[str], Iterable[torch.Tensor]],
    describe: Callable[[Path], None],
    shard_bytes: int,
    files: Files | None = None,
) -> None:
    """Write the tensors to `directory`, in files of at most `shard_bytes` each, unless one tensor is larger.

    Args:
        read: a tensor's elements, as in `shards.write_shard`.
        describe: puts the model's configuration into the directory that it is given.
    Raises:
        DeviceError: it cannot be written; with file, offset and bytes. ConfigError: a tensor the format does not have.
    """
    disk = files or Files()
    shards = plan_shards(
        [TensorEntry(one.name, one.dtype, one.shape, STEM) for one in entries], shard_bytes=shard_bytes
    )
    nbytes = sum(entry.nbytes for entry in entries)
    make_directories(directory, disk)
    with (
        locked(directory, disk, what="a model or a checkpoint"),
        ThreadPoolExecutor(1, thread_name_prefix="patrickstar-export") as lane,
    ):
        with writing(f"{directory}: cannot remove what an interrupted export left"):
            for name in disk.names(directory):
                if name.startswith(TEMPORARY_PREFIX):
                    remove(directory / name, disk)
        check_space(directory, nbytes, disk, what="a model", intact="what was there is as before")
        temporary = directory / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            with writing(f"{temporary}: cannot make the directory"):
                disk.make_directory(temporary)
            with writing(f"{temporary}: cannot write the model's configuration"):
                describe(temporary)
                _sync_files(temporary, disk)
            blocks = Blocks(BLOCK_BYTES)
            for shard in shards:
                write_shard(temporary, shard, read=read, files=disk, lane=lane, blocks=blocks)
            if len(shards) > 1:
                write_file(temporary / INDEX_FILE, _index(shards, nbytes), files=disk, lane=lane, blocks=blocks)
            sync_directory(temporary, disk)
            _publish(temporary, directory, {shard.file for shard in shards}, disk)
        finally:
            # What cannot be removed now (the disk may have gone) is swept when the next one is written.
            with contextlib.suppress(OSError):
                remove(temporary, disk)


def _index(shards: Sequence[Shard], nbytes: int) -> bytes:
    weight_map = {entry.name: shard.file for shard in shards for entry in shard.entries}
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode("utf-8")


def _sync_files(directory: Path, disk: Files) -> None:
    """Syncs the files that the library has written, which syncs none."""
    for name in disk.names(directory):
        descriptor, _ = disk.open(directory / name)
        try:
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)


def _publish(temporary: Path, directory: Path, shards: set[str], disk: Files) -> None:
    entry = WEIGHTS_FILE if WEIGHTS_FILE in shards else INDEX_FILE
    with writing(f"{directory}: cannot move the model's files there"):
        before = set(disk.names(directory))
        if INDEX_FILE in before and entry == INDEX_FILE and shards & before:
            disk.remove_file(directory / INDEX_FILE)
            disk.sync_directory(directory)
            before.remove(INDEX_FILE)
        written = disk.names(temporary)
        for name in written:
            if name != entry:
                disk.replace(temporary / name, directory / name)
        disk.sync_directory(directory)
        disk.replace(temporary / entry, directory / entry)
        disk.sync_directory(directory)
        former = {name for name in before if _SHARD_NAME.fullmatch(name) or name in (WEIGHTS_FILE, INDEX_FILE)}
        for name in sorted(former - set(written)):
            disk.remove_file(directory / name)
        disk.sync_directory(directory)
