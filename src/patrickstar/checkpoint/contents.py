"""Contents of a step's directory, held against what its index says.

What every step's directory satisfies, or is refused:

(1) `index.json` is an index in the sense of `format.py`, of the step that the directory's name says.
(2) The directory holds the files the index names and no others, as regular files of the sizes it says.
(3) The header of each is the one the index has the checksum of, and describes the tensors as the index does.

Sizes are compared with the real ones before memory is taken for what they describe.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from patrickstar.checkpoint.files import Files, reading
from patrickstar.checkpoint.format import (
    INDEX_NAME,
    MOST_INDEX_BYTES,
    FileRecord,
    Index,
    Stored,
    checksum_of,
    decode_index,
)
from patrickstar.checkpoint.header import LENGTH_BYTES, decode_header, header_length
from patrickstar.errors import CheckpointError

__all__ = ["OLD_PREFIX", "STEP_NAME", "Identity", "check_files", "identity", "read_index", "read_small"]

OLD_PREFIX = ".old-"
STEP_NAME = re.compile(r"step-([0-9]{8,20})")

Identity = tuple[int, int, int, int]


def read_index(path: Path, disk: Files) -> Index:
    """Rule (1)."""
    where = path / INDEX_NAME
    index = decode_index(read_small(where, MOST_INDEX_BYTES, disk), where=str(where))
    named = STEP_NAME.fullmatch(path.name.removeprefix(OLD_PREFIX))
    if named and int(named[1]) != index.step:
        raise CheckpointError(f"{where}: step: {index.step}, in a directory named {path.name}")
    return index


def check_files(path: Path, index: Index, disk: Files) -> dict[str, Identity]:
    """Checks rules (2) and (3); gives each file's identity, to know the file again."""
    with reading(f"{path}: cannot list the directory"):
        names = set(disk.names(path))
    if missing := sorted(index.files.keys() - names):
        raise CheckpointError(f"{path / missing[0]}: the file is missing")
    if unknown := sorted(names - index.files.keys() - {INDEX_NAME}):
        raise CheckpointError(f"{path / unknown[0]}: no part of this checkpoint; move it elsewhere")
    rows = index.tensors_by_file()
    return {
        file: _check_file(path / file, record, rows.get(file, []), disk) for file, record in sorted(index.files.items())
    }


def _check_file(path: Path, record: FileRecord, rows: list[tuple[str, Stored]], disk: Files) -> Identity:
    with reading(f"{path}: cannot open the file"):
        descriptor, status = disk.open(path)
    try:
        if status.st_size != record.nbytes:
            raise CheckpointError(f"{path}: {status.st_size} bytes, was written with {record.nbytes}")
        header = bytearray(record.header_nbytes)
        _fill(disk, descriptor, memoryview(header), 0, path)
    finally:
        disk.close(descriptor)
    length = header_length(bytes(header[:LENGTH_BYTES]), file_nbytes=status.st_size, where=str(path))
    if length != record.header_nbytes - LENGTH_BYTES or checksum_of(header) != record.header_checksum:
        raise CheckpointError(f"{path}: damaged: its header is not the one that was written")
    spans = decode_header(header[LENGTH_BYTES:], file_nbytes=status.st_size, where=str(path))
    if spans != {name: stored.span for name, stored in rows} or len(spans) != len(rows):
        raise CheckpointError(f"{path}: its header describes other tensors than {INDEX_NAME} does")
    return identity(status)


def read_small(path: Path, most: int, disk: Files) -> bytes:
    """The bytes of a file of at most `most` bytes. CheckpointError where it has more, or cannot be read."""
    with reading(f"{path}: cannot open the file"):
        descriptor, status = disk.open(path)
    try:
        if status.st_size > most:
            raise CheckpointError(f"{path}: {status.st_size} bytes; such a file has at most {most}")
        data = bytearray(status.st_size)
        _fill(disk, descriptor, memoryview(data), 0, path)
    finally:
        disk.close(descriptor)
    return bytes(data)


def _fill(disk: Files, descriptor: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Read until the buffer is full."""
    at = 0
    while at < len(buffer):
        with reading(f"{path}: cannot read {len(buffer) - at} bytes at offset {offset + at}"):
            taken = disk.read(descriptor, buffer[at:], offset + at)
            if taken <= 0:
                raise OSError(errno.ENODATA, "the file ends before that")
        at += taken


def identity(status: os.stat_result) -> Identity:
    """The numbers by which an opened file is known again: another file at its path, or other contents, have others."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
