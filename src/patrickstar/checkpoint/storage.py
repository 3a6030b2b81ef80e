"""Writing a checkpoint so that, whenever the machine stops, a complete one can be loaded.

    directory/latest                 the name of the newest checkpoint: a line of text, replaced by renaming
    directory/step-00000012/         one checkpoint; it comes by renaming, so it is complete or not there
    directory/.tmp-*                 being written, or being deleted; swept when the next one is written
    directory/.old-step-00000012     the one of the same step that is being replaced; see (3)

The order of things, each synced before the next begins:

(1) All files of the step are written to a temporary directory: values, tensors, then the index; and the new `latest`.
(2) The step's directory is renamed to its name.
(3) Where the name is taken, the old one is renamed aside first. Until the new one has the name, readers take the one
    aside (`reader.py`), and so does the next writer, which puts it back.
(4) `latest` is moved. Only now is anything older deleted: the one aside, and what retention does not keep.

An error up to the moving of `latest` leaves a complete checkpoint under it, the one of before unless the same step is
being replaced. An error in deleting is a warning: the checkpoint stands.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from patrickstar.checkpoint.extra import Saved, take_values, write_values
from patrickstar.checkpoint.format import INDEX_NAME, LATEST_NAME, OLD_PREFIX, VALUES_NAME, Index, encode_index
from patrickstar.checkpoint.reader import is_complete, step_directories
from patrickstar.checkpoint.shards import Shard, Writers, plan_shards
from patrickstar.checkpoint.staged_files import aside, remove, staged, sync_directory
from patrickstar.checkpoint.tensors import TensorEntry
from patrickstar.errors import CheckpointError, ConfigError
from patrickstar.memory.fileio import FileIO, reported
from patrickstar.units import GIB

SHARD_BYTES = 4 * GIB  # of tensors in one file, unless one tensor is larger

_log = logging.getLogger("patrickstar")


def write_step(
    directory: Path,
    step: int,
    *,
    entries: Sequence[TensorEntry],
    read: Callable[[str], Iterable[torch.Tensor]],
    parameters: Mapping[str, Sequence[int]],
    state: object = None,
    extra: object = None,
    keep: int | None = None,
    io: FileIO | None = None,
    writers: Writers = Writers(),  # noqa: B008  (frozen)
) -> Path:
    """Write one checkpoint, move `latest` to it, and return its directory, `directory/step-00000012`.

    Memory: one piece of `read`, two blocks of 4 MiB, and what `extra` and `state` refer to anyway.

    Args:
        entries: the tensors, in the order in which they are best read (wider types of a stem come first, whatever the
            order); names are the user's, stems choose the files.
        read: a tensor's elements in order, as contiguous 1-D tensors on the CPU, each free to be reused when the next
            is asked for. Closed when done or given up, where it is a generator.
        parameters: names and shapes of the model, by which `StepReader.require_model` knows it again.
        state, extra: what the session and its user need to go on; what they may hold is said in `extra.py`.
        keep: how many of the newest complete checkpoints stay, this one included; None: all.
        writers: all ranks, where there are several: each writes files of its own, in which tensors are whole; values are rank 0's.
    Raises:
        ConfigError: an argument; nothing was touched. CheckpointError: something in `extra` could not be read back; nothing was touched.
        DeviceError: what could not be written, with file, offset and bytes; what `latest` names is complete, as before.
    """
    all_ranks, io = writers.all_ranks, io or FileIO()
    final = directory / f"step-{step:08d}"
    shared_bytes = -(-sum(entry.nbytes for entry in entries) // all_ranks.size)  # so that there is a file for each rank

    def prepare() -> tuple[Sequence[Shard], object, int]:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep={keep!r}: expected the number of checkpoints to keep, 1 or more, or None for all")
        shards = plan_shards(entries, shard_bytes=min(SHARD_BYTES, shared_bytes) if all_ranks.size > 1 else SHARD_BYTES)
        tensors: Saved = {}
        taken = {"state": take_values(state, "state", tensors), "extra": take_values(extra, "extra", tensors)}
        return shards, taken, sum(saved.nbytes for _, saved in tensors.values())

    what = "a checkpoint"
    shards, taken, values_bytes = all_ranks.do("save_checkpoint(): values and files", prepare)
    nbytes = values_bytes + sum(shard.nbytes for shard in shards)
    intact = "checkpoints taken before are intact"
    with staged(directory, nbytes, io=io, what=what, intact=intact, all_ranks=all_ranks) as staging:
        path = staging.path / final.name

        def begin() -> int:
            with reported(f"{path}: cannot make the directory"):
                io.make_directory(path)
            write_values(staging, path / VALUES_NAME, taken)
            return staging.records[VALUES_NAME].nbytes

        def finish() -> None:
            index = Index(step, {name: tuple(shape) for name, shape in parameters.items()}, dict(staging.records))
            staging.write(path / INDEX_NAME, encode_index(index))
            sync_directory(path, io)
            staging.write(staging.path / LATEST_NAME, f"{final.name}\n".encode("ascii"))
            _publish(path, final, io)
            with reported(f"{directory / LATEST_NAME}: cannot move it to {final.name}"):
                io.rename(staging.path / LATEST_NAME, directory / LATEST_NAME)
            sync_directory(directory, io)
            _retain(directory, final, keep, io)

        first_has = all_ranks.lead(f"{what}: its values", begin)
        writers.write(staging, path, shards, read=read, what=what, first_has=first_has)
        all_ranks.lead(f"{what}: its index", finish)
    return final


def _publish(written: Path, final: Path, io: FileIO) -> None:
    former = final.with_name(f"{OLD_PREFIX}{final.name}")
    with reported(f"{final}: cannot rename {written} to it"):
        replaces = io.status(final) is not None
        if replaces:
            io.rename(final, former)
        try:
            io.rename(written, final)
        except OSError:
            if replaces:
                # If this fails too, readers and the next writer find it aside.
                with contextlib.suppress(OSError):
                    io.rename(former, final)
            raise
    sync_directory(final.parent, io)


def _retain(directory: Path, written: Path, keep: int | None, io: FileIO) -> None:
    """Delete the one replaced, and all but the newest `keep`. Incomplete ones are left alone, uncounted."""
    doomed = [directory / f"{OLD_PREFIX}{written.name}"]
    try:
        if keep is not None:
            complete = [path for path in step_directories(directory, io) if path != written and is_complete(path, io)]
            doomed += complete[keep - 1 :]
        # Renamed first, and that synced: a name `step-...` never stands for a checkpoint that is half deleted.
        trash = [aside(directory) for _ in doomed]
        for path, target in zip(doomed, trash, strict=True):
            if io.status(path) is not None:
                io.rename(path, target)
        io.sync_directory(directory)
        for target in trash:
            remove(target, io)
    except (OSError, CheckpointError) as problem:
        _log.warning("%s is written, but an older checkpoint could not be deleted: %s", written, problem)
