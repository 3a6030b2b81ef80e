"""Writing a model as its own library reads it: safetensors files, an index where there are several, its configuration.

The order of things, so that the directory never holds a mix of two models that somebody could take for one:

(1) Everything is written aside, in a directory inside, and synced. Until then an error leaves what was there before.
(2) Where files of before have the names of new shards, their index goes first: a crash then leaves no model to load.
(3) Files get their names by renaming; when those are synced, the one that readers begin with: `model.safetensors` or the index.
(4) What is left of an earlier model is removed. Other files (a tokenizer's) stay.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from patrickstar.checkpoint.shards import Writers, plan_shards
from patrickstar.checkpoint.staged_files import staged, sync_directory
from patrickstar.checkpoint.tensors import TensorEntry
from patrickstar.checkpoint.weight_files import INDEX_FILE, STEM, WEIGHTS_FILE
from patrickstar.memory.fileio import FileIO, reported

_SHARD_NAME = re.compile(rf"{STEM}-\d{{5}}-of-\d{{5}}\.safetensors")


def write_model(
    directory: Path,
    entries: Sequence[TensorEntry],
    *,
    read: Callable[[str], Iterable[torch.Tensor]],
    describe: Callable[[Path], None],
    shard_bytes: int,
    io: FileIO = FileIO(),  # noqa: B008  (frozen)
    writers: Writers = Writers(),  # noqa: B008  (frozen)
) -> None:
    """Write the tensors to `directory`, in files of at most `shard_bytes` each, unless one tensor is larger.

    Args:
        read: a tensor's elements, as in `shards.write_shard`.
        describe: puts the model's configuration into the directory that it is given.
        writers: all ranks, where there are several.
    Raises:
        DeviceError: it cannot be written; with file, offset and bytes. ConfigError: a tensor the format does not have.
    """
    all_ranks = writers.all_ranks
    entries = [TensorEntry(one.name, one.dtype, one.shape, STEM) for one in entries]
    what, intact = "a model", "what was there is as before"
    shards = all_ranks.do("export(): files", lambda: plan_shards(entries, shard_bytes=shard_bytes))
    nbytes = sum(entry.nbytes for entry in entries)
    with staged(directory, nbytes, io=io, what=what, intact=intact, all_ranks=all_ranks) as staging:

        def begin() -> None:
            with reported(f"{staging.path}: cannot write the model's configuration"):
                describe(staging.path)
                for name in io.names(staging.path):  # the library syncs none of the files that it writes
                    fd = io.open(staging.path / name, os.O_RDONLY)
                    try:
                        io.fsync(fd)
                    finally:
                        io.close(fd)

        def finish() -> None:
            if len(shards) > 1:
                weight_map = {entry.name: shard.file for shard in shards for entry in shard.entries}
                index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
                staging.write(staging.path / INDEX_FILE, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
            sync_directory(staging.path, io)
            _publish(staging.path, directory, {shard.file for shard in shards}, io)

        all_ranks.lead(f"{what}: its configuration", begin)
        writers.write(staging, staging.path, shards, read=read, what=what)
        all_ranks.lead(f"{what}: its names", finish)


def _publish(temporary: Path, directory: Path, shards: set[str], io: FileIO) -> None:
    entry = WEIGHTS_FILE if WEIGHTS_FILE in shards else INDEX_FILE
    with reported(f"{directory}: cannot move the model's files there"):
        before = set(io.names(directory))
        if INDEX_FILE in before and entry == INDEX_FILE and shards & before:
            io.unlink(directory / INDEX_FILE)
            io.sync_directory(directory)
        written = io.names(temporary)
        for name in written:
            if name != entry:
                io.rename(temporary / name, directory / name)
        io.sync_directory(directory)
        io.rename(temporary / entry, directory / entry)
        io.sync_directory(directory)
        former = {name for name in before if _SHARD_NAME.fullmatch(name) or name in (WEIGHTS_FILE, INDEX_FILE)}
        for name in sorted(former - set(written)):
            io.unlink(directory / name)
        io.sync_directory(directory)
