"""The index of a checkpoint: `index.json` beside the files of one step.

A step's directory holds `index.json` and the files it names, nothing else: safetensors files, which can be read without this library, and
`values.pt`, which `torch.load(weights_only=True)` reads. The index adds what is needed to trust them.

What every index we accept satisfies (`decode_index` refuses all others, and names the key):

(1) Its own checksum holds: SHA-256 of the file with the checksum's 64 digits replaced by zeros.
(2) It is of this format and of the version this library knows, with exactly the keys of that version.
(3) Every file it names is `values.pt` or a plain file name ending in `.safetensors`: no path, nothing hidden, nothing above.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from patrickstar.config.json_file import parse_json
from patrickstar.config.kinds import OBJECT, WHOLE, Kind
from patrickstar.errors import CheckpointError

INDEX_NAME = "index.json"
VALUES_NAME = "values.pt"
LATEST_NAME = "latest"
STEP_NAME = re.compile(r"step-([0-9]{8,20})")
OLD_PREFIX = ".old-"
MOST_INDEX_BYTES = 128 << 20
_FORMAT, _VERSION = "patrickstar checkpoint", 2
_KEYS = ("checksum", "format", "version", "step", "files", "parameters")
_DIGITS = 64
_PREFIX = b'{"checksum": "'
_FILE_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,200}}\.safetensors|{re.escape(VALUES_NAME)}")
_SHAPE = Kind("a list of whole numbers", lambda v: isinstance(v, list) and all(map(WHOLE.takes, v)), tuple)
_HEX = re.compile(rf"[0-9a-f]{{{_DIGITS}}}")
_SHA256 = Kind(f"{_DIGITS} hexadecimal digits", lambda v: isinstance(v, str) and bool(_HEX.fullmatch(v)))


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: its size and the checksum of its bytes, SHA-256 as `sha256sum` prints it."""

    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Index:
    """Step, names and shapes of the parameters of the model that a checkpoint was taken of, and the checkpoint's files."""

    step: int
    parameters: Mapping[str, tuple[int, ...]]
    files: Mapping[str, FileRecord]


def encode_index(index: Index) -> bytes:
    """The index as the bytes of its file: one line a file and parameter, sealed with its own checksum."""
    members = [
        f'"format": {json.dumps(_FORMAT)}, "version": {_VERSION}, "step": {index.step}',
        f'"files": {_lines({name: asdict(file) for name, file in index.files.items()})}',
        f'"parameters": {_lines(index.parameters)}',
    ]
    return seal(_PREFIX + b"0" * _DIGITS + b'",\n' + ",\n".join(members).encode("ascii") + b"}\n")


def _lines(rows: Mapping[str, object]) -> str:
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()) + "\n}"


def seal(data: bytes) -> bytes:
    """The bytes of an index with the checksum that belongs to them."""
    start, end = len(_PREFIX), len(_PREFIX) + _DIGITS
    digits = hashlib.sha256(data[:start] + b"0" * _DIGITS + data[end:]).hexdigest()
    return data[:start] + digits.encode("ascii") + data[end:]


def decode_index(data: bytes, *, where: str) -> Index:
    """The index that some bytes spell, by the rules at the top of this file. CheckpointError: naming `where` and the key."""
    if not data.startswith(_PREFIX):
        raise CheckpointError(f"{where}: not the index of a checkpoint of this library")
    if seal(data) != data:
        raise CheckpointError(f"{where}: the file's checksum does not match its content: it is damaged")
    fields = parse_json(data, where=where, damaged=CheckpointError)
    if fields.get("format") != _FORMAT:
        raise CheckpointError(f"{where}: format: expected {_FORMAT!r}, found {str(fields.get('format'))[:60]!r}")
    version = _read(WHOLE, fields.get("version"), f"{where}: version")
    if version != _VERSION:
        instead = "load and export it with the release that wrote it" if version < _VERSION else "update it"
        raise CheckpointError(f"{where}: version {version} of the format; this library reads {_VERSION}: {instead}")
    _expect_keys(fields, where, _KEYS)
    files = _read(OBJECT, fields["files"], f"{where}: files")
    if VALUES_NAME not in files:
        raise CheckpointError(f"{where}: files: {VALUES_NAME} is missing")
    parameters = _read(OBJECT, fields["parameters"], f"{where}: parameters")
    return Index(
        step=_read(WHOLE, fields["step"], f"{where}: step"),
        parameters={
            name: _read(_SHAPE, shape, f"{where}: parameters[{json.dumps(name)}]") for name, shape in parameters.items()
        },
        files={name: _file_record(name, row, f"{where}: files[{json.dumps(name)}]") for name, row in files.items()},
    )


def _file_record(name: str, row: object, where: str) -> FileRecord:
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"{where}: not a plain file name of a checkpoint")
    fields = _read(OBJECT, row, where)
    _expect_keys(fields, where, ("nbytes", "sha256"))
    nbytes, sha256 = fields["nbytes"], fields["sha256"]
    return FileRecord(_read(WHOLE, nbytes, f"{where}.nbytes"), _read(_SHA256, sha256, f"{where}.sha256"))


def _read(kind: Kind, value: object, where: str) -> Any:
    return kind.read(value, where, CheckpointError)


def _expect_keys(found: Mapping[str, object], where: str, keys: Iterable[str]) -> None:
    if odd := sorted(found.keys() ^ set(keys)):
        raise CheckpointError(f"{where}: key {odd[0]!r} is {'unknown' if odd[0] in found else 'missing'}")
