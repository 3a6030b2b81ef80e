"""The index of a checkpoint: `index.json` beside the safetensors files of one step.

A step's directory holds `index.json` and the files it names, nothing else. The tensors can be read without this library
(each file is an ordinary safetensors file); the index adds what is needed to trust them and to go on.

What every index we accept satisfies (`decode_index` refuses all others, and names the key):

(1) Its own checksum holds: SHA-256 of the file with the checksum's 64 digits replaced by zeros.
(2) It is of this format and of a version this library knows, with exactly the keys of that version.
(3) Every file it names is a plain file name ending in `.safetensors`: no path, nothing hidden, nothing above.
(4) Every tensor has a known type, a shape of sizes that exist, and the bytes that type and shape take, inside its file.
(5) The tensors of a file lie back to back from its header's end to its own: all bytes stand under some checksum.
(6) The fingerprint is that of the parameters it lists.

One part of a later format, several files for one tensor (shards of several ranks), gets a version of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from patrickstar.checkpoint.fields import LARGEST, as_int, as_object, as_shape, as_str, exact_keys, parse_object
from patrickstar.checkpoint.header import ITEMSIZE, LENGTH_BYTES, MOST_HEADER_BYTES, Span
from patrickstar.errors import CheckpointError, ConfigError

__all__ = [
    "CHECKSUM_DIGITS",
    "INDEX_NAME",
    "MOST_INDEX_BYTES",
    "FileRecord",
    "Index",
    "Stored",
    "checksum_of",
    "decode_index",
    "encode_index",
    "fingerprint",
    "new_checksum",
    "seal",
]

INDEX_NAME = "index.json"
MOST_INDEX_BYTES = 128 << 20  # 100,000 tensors with both moments take half of it
CHECKSUM_DIGITS = 64
FORMAT, VERSION, ALGORITHM = "patrickstar checkpoint", 1, "sha256"
_KEYS = (
    *("checksum", "format", "version", "algorithm", "step", "fingerprint", "layout"),
    *("files", "parameters", "tensors", "extra_tensors", "state", "extra"),
)
_PREFIX = b'{"checksum": "'
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
_HEX = re.compile(rf"[0-9a-f]{{{CHECKSUM_DIGITS}}}")

# SHA-256: 1,355 MB/s a core with the SHA instructions that current CPUs have, against 837 for BLAKE2b (same machine),
# and `sha256sum` is everywhere.
new_checksum = hashlib.sha256


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """The checksum of some bytes, as the index spells it."""
    return new_checksum(data).hexdigest()


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One safetensors file: its size, and the size and checksum of what lies in front of the tensors."""

    nbytes: int
    header_nbytes: int
    header_checksum: str


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor: its file, its place in the file, and the checksum of its bytes."""

    file: str
    span: Span
    checksum: str


@dataclass(frozen=True, slots=True)
class Index:
    """Everything a checkpoint holds, as its index lists it.

    `parameters`: names and shapes of the model it was taken of. `layout`: how its model data was laid out then, for
    information; any layout can load it. `state` and `extra` are trees as `checkpoint.extra` encodes them; their tensors
    are listed under `extra_tensors`.
    """

    step: int
    parameters: Mapping[str, tuple[int, ...]]
    layout: Mapping[str, int | str]
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, Stored]
    extra_tensors: Mapping[str, Stored]
    state: object
    extra: object

    @property
    def fingerprint(self) -> str:
        """Digest of the names and shapes of the model's parameters."""
        return fingerprint(self.parameters)

    def tensors_by_file(self) -> dict[str, list[tuple[str, Stored]]]:
        """Tensors by file: (name, where), in the order of their bytes."""
        return _by_file([*self.tensors.items(), *self.extra_tensors.items()])


def fingerprint(parameters: Mapping[str, Iterable[int]]) -> str:
    """A digest of a model's parameter names and shapes, whatever their order."""
    text = json.dumps(sorted((name, list(shape)) for name, shape in parameters.items()), separators=(",", ":"))
    return checksum_of(text.encode("ascii"))[:32]


def encode_index(index: Index) -> bytes:
    """The index as the bytes of its file: one line a file and tensor, sealed with its own checksum.

    Raises:
        ConfigError: longer than an index may be; what is too long is `extra`, or `state`.
    """
    plain: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "algorithm": ALGORITHM,
        "step": index.step,
        "fingerprint": index.fingerprint,
        "layout": dict(index.layout),
    }
    tables: dict[str, dict[str, object]] = {
        "files": {
            name: {"nbytes": file.nbytes, "header_nbytes": file.header_nbytes, "header_checksum": file.header_checksum}
            for name, file in index.files.items()
        },
        "parameters": {name: list(shape) for name, shape in index.parameters.items()},
        "tensors": {name: _stored_fields(stored) for name, stored in index.tensors.items()},
        "extra_tensors": {name: _stored_fields(stored) for name, stored in index.extra_tensors.items()},
    }
    members = [f"{json.dumps(key)}: {_compact(value)}" for key, value in plain.items()]
    for key, rows in tables.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {_compact(row)}" for name, row in rows.items())
        members.append(f"{json.dumps(key)}: {{\n{lines}\n}}" if lines else f"{json.dumps(key)}: {{}}")
    members += [f'"state": {_compact(index.state)}', f'"extra": {_compact(index.extra)}']
    body = ",\n".join(members).encode("ascii")
    if len(body) > MOST_INDEX_BYTES - 1024:
        raise ConfigError(
            f"extra takes {len(body)} bytes as JSON, more than the {MOST_INDEX_BYTES} an index may have: "
            "give long lists of numbers as tensors"
        )
    return seal(_PREFIX + b"0" * CHECKSUM_DIGITS + b'",\n' + body + b"}\n")


def seal(data: bytes) -> bytes:
    """The bytes of an index with the checksum that belongs to them."""
    start, end = len(_PREFIX), len(_PREFIX) + CHECKSUM_DIGITS
    digits = checksum_of(data[:start] + b"0" * CHECKSUM_DIGITS + data[end:])
    return data[:start] + digits.encode("ascii") + data[end:]


def decode_index(data: bytes, *, where: str) -> Index:
    """The index that some bytes spell, by the rules at the top of this file.

    Raises:
        CheckpointError: naming `where` and the key.
    """
    if not data.startswith(_PREFIX):
        raise CheckpointError(f"{where}: not the index of a checkpoint of this library")
    if seal(data) != data:
        raise CheckpointError(f"{where}: the file's checksum does not match its content: it is damaged")
    fields = parse_object(data, where=where)
    if fields.get("format") != FORMAT:
        raise CheckpointError(f"{where}: format: expected {FORMAT!r}, found {str(fields.get('format'))[:60]!r}")
    version = as_int(fields.get("version"), f"{where}: version")
    if version != VERSION:
        raise CheckpointError(f"{where}: version {version} of the format; this library reads {VERSION}: update it")
    exact_keys(fields, where, _KEYS)
    if fields["algorithm"] != ALGORITHM:
        raise CheckpointError(f"{where}: algorithm: expected {ALGORITHM!r}, found {str(fields['algorithm'])[:60]!r}")

    parameters = {
        name: as_shape(shape, f"{where}: parameters[{json.dumps(name)}]")
        for name, shape in as_object(fields["parameters"], f"{where}: parameters").items()
    }
    files = {
        name: _file_record(name, record, where=f"{where}: files[{json.dumps(name)}]")
        for name, record in as_object(fields["files"], f"{where}: files").items()
    }
    tensors = _stored_table(fields["tensors"], files, where=f"{where}: tensors")
    extra_tensors = _stored_table(fields["extra_tensors"], files, where=f"{where}: extra_tensors")
    _check_cover([*tensors.items(), *extra_tensors.items()], files, where=where)
    index = Index(
        step=as_int(fields["step"], f"{where}: step"),
        parameters=parameters,
        layout=_layout(fields["layout"], where=f"{where}: layout"),
        files=files,
        tensors=tensors,
        extra_tensors=extra_tensors,
        state=fields["state"],
        extra=fields["extra"],
    )
    if fields["fingerprint"] != index.fingerprint:
        raise CheckpointError(f"{where}: fingerprint: not that of the parameters listed, {index.fingerprint}")
    return index


def _stored_fields(stored: Stored) -> dict[str, object]:
    span = stored.span
    place = {"file": stored.file, "dtype": span.dtype, "shape": list(span.shape)}
    return {**place, "offset": span.offset, "nbytes": span.nbytes, "checksum": stored.checksum}


def _compact(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _by_file(tensors: Iterable[tuple[str, Stored]]) -> dict[str, list[tuple[str, Stored]]]:
    found: defaultdict[str, list[tuple[str, Stored]]] = defaultdict(list)
    for name, stored in tensors:
        found[stored.file].append((name, stored))
    return {file: sorted(rows, key=lambda row: (row[1].span.offset, row[1].span.end)) for file, rows in found.items()}


def _layout(value: object, *, where: str) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for key, item in as_object(value, where).items():
        found[key] = item if isinstance(item, str) else as_int(item, f"{where}[{json.dumps(key)}]")
    return found


def _file_record(name: str, record: object, *, where: str) -> FileRecord:
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"{where}: not a plain file name ending in .safetensors")
    fields = exact_keys(record, where, ("nbytes", "header_nbytes", "header_checksum"))
    nbytes = as_int(fields["nbytes"], f"{where}.nbytes")
    most = min(nbytes, LENGTH_BYTES + MOST_HEADER_BYTES)
    header_nbytes = as_int(fields["header_nbytes"], f"{where}.header_nbytes", most=most)
    return FileRecord(nbytes, header_nbytes, _checksum(fields["header_checksum"], f"{where}.header_checksum"))


def _stored_table(value: object, files: Mapping[str, FileRecord], *, where: str) -> dict[str, Stored]:
    return {
        name: _stored(row, files, where=f"{where}[{json.dumps(name)}]") for name, row in as_object(value, where).items()
    }


def _stored(row: object, files: Mapping[str, FileRecord], *, where: str) -> Stored:
    fields = exact_keys(row, where, ("file", "dtype", "shape", "offset", "nbytes", "checksum"))
    file = as_str(fields["file"], f"{where}.file")
    if file not in files:
        raise CheckpointError(f"{where}.file: {file[:80]!r} is not among the files listed")
    dtype = as_str(fields["dtype"], f"{where}.dtype")
    if dtype not in ITEMSIZE:
        raise CheckpointError(f"{where}.dtype: unknown type {dtype[:40]!r}")
    shape = as_shape(fields["shape"], f"{where}.shape")
    nbytes = as_int(fields["nbytes"], f"{where}.nbytes")
    if nbytes != ITEMSIZE[dtype] * math.prod(shape):
        raise CheckpointError(f"{where}.nbytes: {nbytes} is not what {dtype} {list(shape)} takes")
    offset = as_int(fields["offset"], f"{where}.offset", most=LARGEST - nbytes)
    return Stored(file, Span(dtype, shape, offset, nbytes), _checksum(fields["checksum"], f"{where}.checksum"))


def _check_cover(tensors: Iterable[tuple[str, Stored]], files: Mapping[str, FileRecord], *, where: str) -> None:
    rows_of = _by_file(tensors)
    for file, record in files.items():
        at, before = record.header_nbytes, "the header"
        for name, stored in rows_of.get(file, []):
            if stored.span.offset != at:
                how = "overlaps" if stored.span.offset < at else "leaves a hole after"
                place = f"{where}: tensor {name!r} in {file} at byte {stored.span.offset}"
                raise CheckpointError(f"{place} {how} {before}, which ends at {at}")
            at, before = stored.span.end, f"tensor {name!r}"
        if at != record.nbytes:
            raise CheckpointError(f"{where}: tensors of {file} end at byte {at}, the file at {record.nbytes}")


def _checksum(value: object, where: str) -> str:
    text = as_str(value, where)
    if not _HEX.fullmatch(text):
        raise CheckpointError(f"{where}: not a checksum of {CHECKSUM_DIGITS} hexadecimal digits")
    return text
