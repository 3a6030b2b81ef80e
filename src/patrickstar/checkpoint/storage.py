"""Writing a checkpoint so that, whenever the machine stops, a complete one can be loaded.

    directory/latest                 the name of the newest checkpoint: a line of text, replaced by renaming
    directory/step-00000012/         one checkpoint; it comes by renaming, so it is complete or not there
    directory/.tmp-*                 being written, or being deleted; swept when the next one is written
    directory/.old-step-00000012     the one of the same step that is being replaced; see (3)

The order of things, each synced before the next begins:

(1) All files of the step are written to a temporary directory: tensors, then the index.
(2) That directory is renamed to its name.
(3) Where the name is taken, the old one is renamed aside first. Until the new one has the name, readers take the one
    aside (`reader.py`), and so does the next writer, which puts it back.
(4) `latest` is moved. Only now is anything older deleted: the one aside, and what retention does not keep.

An error up to the moving of `latest` leaves a complete checkpoint under it, the one of before unless the same step is
being replaced. An error in deleting is a warning: the checkpoint stands.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from patrickstar.checkpoint.contents import OLD_PREFIX
from patrickstar.checkpoint.directories import (
    TEMPORARY_PREFIX,
    check_space,
    locked,
    make_directories,
    remove,
    sync_directory,
)
from patrickstar.checkpoint.extra import encode_tree
from patrickstar.checkpoint.files import BLOCK_BYTES, Blocks, Files, writing
from patrickstar.checkpoint.find import LATEST_NAME, step_directories
from patrickstar.checkpoint.format import INDEX_NAME, FileRecord, Index, Stored, encode_index
from patrickstar.checkpoint.reader import StepReader
from patrickstar.checkpoint.shards import plan_shards, write_shard
from patrickstar.checkpoint.tensors import TensorEntry
from patrickstar.checkpoint.writer import write_file
from patrickstar.errors import CheckpointError, ConfigError
from patrickstar.units import GIB

__all__ = ["SHARD_BYTES", "write_step"]

SHARD_BYTES = 4 * GIB
_EXTRA_STEM = "extra"

_log = logging.getLogger("patrickstar")


def write_step(
    directory: Path,
    step: int,
    *,
    entries: Sequence[TensorEntry],
    read: Callable[[str], Iterable[torch.Tensor]],
    parameters: Mapping[str, Sequence[int]],
    layout: Mapping[str, int | str] | None = None,
    state: object = None,
    extra: object = None,
    keep: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    block_bytes: int = BLOCK_BYTES,
    files: Files | None = None,
) -> Path:
    """Write one checkpoint, move `latest` to it, and return its directory, `directory/step-00000012`.

    Memory: one piece of `read`, two blocks of 4 MiB, and what `extra` and `state` refer to anyway.

    Args:
        entries: the tensors, in the order in which they are best read (wider types of a stem come first, whatever the
            order); names are the user's, stems choose the files.
        read: a tensor's elements in order, as contiguous 1-D tensors on the CPU, each free to be reused when the next
            is asked for. Closed when done or given up, where it is a generator.
        parameters: names and shapes of the model, by which `StepReader.require_model` knows it again.
        layout: what to note about how the data was laid out.
        state, extra: what the session and its user need to go on; what they may hold is said in `extra.py`.
        keep: how many of the newest complete checkpoints stay, this one included; None: all.
        shard_bytes: bytes of tensors in one file, unless one tensor is larger.
        block_bytes: bytes of one write, a multiple of 4096.
    Raises:
        ConfigError: an argument, or something in `extra` that cannot be saved; nothing was touched.
        DeviceError: what could not be written, with file, offset and bytes; what `latest` names is complete, as before.
    """
    if type(step) is not int or step < 0:
        raise ConfigError(f"step={step!r}: expected a whole number of steps")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(f"keep={keep!r}: expected the number of checkpoints to keep, 1 or more, or None for all")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes={shard_bytes}: expected a size in bytes")
    if taken := [entry.name for entry in entries if entry.stem == _EXTRA_STEM]:
        raise ConfigError(f"checkpoint: tensor {taken[0]!r}: the stem {_EXTRA_STEM!r} is for what extra holds")
    encoded_state, encoded_extra = encode_tree(state, name="state"), encode_tree(extra, name="extra")
    extra_tensors = {**encoded_state.tensors, **encoded_extra.tensors}
    extra_entries = [
        TensorEntry(name, tensor.dtype, tuple(tensor.shape), _EXTRA_STEM) for name, tensor in extra_tensors.items()
    ]
    shards = plan_shards(entries, shard_bytes=shard_bytes)
    extra_shards = plan_shards(extra_entries, shard_bytes=shard_bytes)

    def read_extra(name: str) -> Iterator[torch.Tensor]:
        yield extra_tensors[name].reshape(-1)

    def write_files(temporary: Path, lane: ThreadPoolExecutor) -> None:
        blocks = Blocks(block_bytes)
        records: dict[str, FileRecord] = {}
        tables: tuple[dict[str, Stored], dict[str, Stored]] = ({}, {})
        for table, group, source in zip(tables, (shards, extra_shards), (read, read_extra), strict=True):
            for shard in group:
                records[shard.file], stored = write_shard(
                    temporary, shard, read=source, files=disk, lane=lane, blocks=blocks
                )
                table.update(stored)
        index = Index(
            step=step,
            parameters={name: tuple(shape) for name, shape in parameters.items()},
            layout=dict(layout or {}),
            files=records,
            tensors={entry.name: tables[0][entry.name] for entry in entries},
            extra_tensors=tables[1],
            state=encoded_state.tree,
            extra=encoded_extra.tree,
        )
        write_file(temporary / INDEX_NAME, encode_index(index), files=disk, lane=lane, blocks=blocks)

    disk = files or Files()
    final = directory / f"step-{step:08d}"
    make_directories(directory, disk)
    with (
        locked(directory, disk, what="a checkpoint"),
        ThreadPoolExecutor(1, thread_name_prefix="patrickstar-checkpoint") as lane,
    ):
        _sweep(directory, disk)
        nbytes = sum(entry.nbytes for entry in [*entries, *extra_entries])
        check_space(directory, nbytes, disk, what="a checkpoint", intact="checkpoints taken before are intact")
        temporary = directory / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            with writing(f"{temporary}: cannot make the directory"):
                disk.make_directory(temporary)
            write_files(temporary, lane)
            sync_directory(temporary, disk)
            _publish(temporary, final, disk)
            _move_latest(directory, final.name, disk, lane)
        except BaseException:
            # What cannot be removed now (the disk may have gone) is swept when the next one is written.
            with contextlib.suppress(OSError):
                remove(temporary, disk)
            raise
        _retain(directory, final, keep, disk)
    return final


def _sweep(directory: Path, disk: Files) -> None:
    """Remove what a crash left behind, and put back what the crash left aside."""
    with writing(f"{directory}: cannot remove what an interrupted checkpoint left"):
        for name in disk.names(directory):
            path = directory / name
            if name.startswith(TEMPORARY_PREFIX):
                remove(path, disk)
            elif name.startswith(OLD_PREFIX):
                original = directory / name.removeprefix(OLD_PREFIX)
                if disk.status(original) is None:
                    disk.rename(path, original)
                    disk.sync_directory(directory)
                else:
                    remove(path, disk)


def _publish(temporary: Path, final: Path, disk: Files) -> None:
    aside = final.with_name(f"{OLD_PREFIX}{final.name}")
    with writing(f"{final}: cannot rename {temporary.name} to it"):
        replaces = disk.status(final) is not None
        if replaces:
            disk.rename(final, aside)
        try:
            disk.rename(temporary, final)
        except OSError:
            if replaces:
                # If this fails too, readers and the next writer find it aside.
                with contextlib.suppress(OSError):
                    disk.rename(aside, final)
            raise
    sync_directory(final.parent, disk)


def _move_latest(directory: Path, name: str, disk: Files, lane: ThreadPoolExecutor) -> None:
    temporary = directory / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    try:
        write_file(temporary, f"{name}\n".encode("ascii"), files=disk, lane=lane, blocks=Blocks(4096))
        with writing(f"{directory / LATEST_NAME}: cannot move it to {name}"):
            disk.replace(temporary, directory / LATEST_NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temporary, disk)
        raise
    sync_directory(directory, disk)


def _retain(directory: Path, written: Path, keep: int | None, disk: Files) -> None:
    """Delete the one replaced, and all but the newest `keep`. Incomplete ones are left alone, uncounted."""
    doomed = [directory / f"{OLD_PREFIX}{written.name}"]
    try:
        if keep is not None:
            complete = [
                path for path in step_directories(directory, disk) if path != written and _is_complete(path, disk)
            ]
            doomed += complete[keep - 1 :]
        # Renamed first, and that synced: a name `step-...` never stands for a checkpoint that is half deleted.
        trash = [directory / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}" for _ in doomed]
        for path, target in zip(doomed, trash, strict=True):
            if disk.status(path) is not None:
                disk.rename(path, target)
        disk.sync_directory(directory)
        for target in trash:
            remove(target, disk)
    except (OSError, CheckpointError) as problem:
        _log.warning("%s is written, but an older checkpoint could not be deleted: %s", written, problem)


def _is_complete(path: Path, disk: Files) -> bool:
    try:
        StepReader(path, files=disk).close()
    except CheckpointError:
        return False
    return True
