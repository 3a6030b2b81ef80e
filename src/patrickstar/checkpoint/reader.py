"""Reading a checkpoint that may have been damaged, cut, mixed up, or made to deceive; finding the one that is meant, and the newest that is intact.

What every step's directory satisfies, or is refused:

(1) `index.json` is an index in the sense of `format.py`, of the step that the directory's name says.
(2) The directory holds the files the index names and no others, as regular files of the sizes it says, and safetensors files have headers that
    describe them.
(3) Every byte of a file is under the checksum that the index has of it. Asked before anything of the file is given away, by `verify()` of all.

Nothing is executed, nothing written, no memory is taken on the word of a file, and no link is followed. Files are read, not mapped: a mapped file
counts as resident memory.
"""

from __future__ import annotations

import hashlib
import logging
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from patrickstar.checkpoint.extra import read_values
from patrickstar.checkpoint.format import (
    INDEX_NAME,
    LATEST_NAME,
    MOST_INDEX_BYTES,
    OLD_PREFIX,
    STEP_NAME,
    VALUES_NAME,
    decode_index,
)
from patrickstar.checkpoint.tensor_files import Source, TensorFiles, read_small
from patrickstar.comm.all_ranks import AllRanks, share_out
from patrickstar.errors import CheckpointError, some
from patrickstar.memory.fileio import FileIO, reported


class StepReader(TensorFiles):
    """One checkpoint. `step`: the step that it is of."""

    def __init__(self, path: Path, *, io: FileIO = FileIO(), advice: Callable[[], str] = str) -> None:  # noqa: B008  (frozen)
        """Opens the directory of one step; `open_step` also finds it. CheckpointError: rule (1) or (2) does not hold.

        `advice`: what to add to the error when the step turns out to be damaged.
        """
        super().__init__(path, io=io, changed="changed while the checkpoint was open")
        self._advice = advice
        self._verified: set[Path] = set()
        where = path / INDEX_NAME
        data = read_small(where, MOST_INDEX_BYTES, io)
        self._index = index = decode_index(data, where=str(where))
        self._checksum = hashlib.sha256(data).hexdigest()
        named = STEP_NAME.fullmatch(path.name.removeprefix(OLD_PREFIX))
        if named and int(named[1]) != index.step:
            raise CheckpointError(f"{where}: step: {index.step}, in a directory named {path.name}")
        with reported(f"{path}: cannot list the directory", CheckpointError):
            names = set(io.names(path))
        if missing := sorted(index.files.keys() - names):
            raise CheckpointError(f"{path / missing[0]}: the file is missing")
        if unknown := sorted(names - index.files.keys() - {INDEX_NAME}):
            raise CheckpointError(f"{path / unknown[0]}: no part of this checkpoint; move it elsewhere")
        for file, record in index.files.items():
            self.add(path / file, nbytes=record.nbytes, has_tensors=file != VALUES_NAME)
        self.step = index.step

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """`state`: what the session saved beside the tensors; `extra`: what the user did. Read on first use."""
        path = self.path / VALUES_NAME
        found = read_values(self.source(path))
        if not isinstance(found, dict) or found.keys() != {"state", "extra"}:
            raise CheckpointError(f"{path}: expected the values that a checkpoint has beside its tensors")
        return found

    def require_model(self, parameters: Mapping[str, Sequence[int]]) -> None:
        """Return if this checkpoint is of a model with the given parameters, names and shapes. CheckpointError: of another one; says what differs."""
        wanted, saved = {name: tuple(shape) for name, shape in parameters.items()}, self._index.parameters
        odd = sorted({name for name, _ in wanted.items() ^ saved.items()})
        if odd:
            both = [(name, *(shapes.get(name, "not there") for shapes in (saved, wanted))) for name in odd]
            told = [f"{name} is {here} in the checkpoint, {there} in the model" for name, here, there in both]
            raise CheckpointError(f"{self.path}: a checkpoint of another model: {some(told, most=3, separator='; ')}")

    def verify(self, all_ranks: AllRanks = AllRanks()) -> None:  # noqa: B008  (frozen)
        """Read every byte and hold it against its checksum. Ranks that see the same files share them, each of which is read by one.

        Raises:
            CheckpointError: names the file that is damaged, and the newest intact checkpoint beside it. Or ranks see different checkpoints.
        """
        files = list(self._identities)
        of_all = all_ranks.tell("a checkpoint: which it is", lambda: (self.step, self._checksum, self.known))
        for rank, (step, checksum, _) in enumerate(of_all):
            if checksum != of_all[0][1]:
                raise CheckpointError(
                    f"{self.path}: rank 0 sees a checkpoint of step {of_all[0][0]} there, rank {rank} another one, of step {step}: "
                    "give a directory that all ranks see"
                )
        is_shared = all(theirs == of_all[0] for theirs in of_all)  # and each has no copy of its own
        owners = share_out([nbytes for _, _, nbytes, _ in self._identities.values()], all_ranks.size)
        own = [file for file, owner in zip(files, owners, strict=True) if owner == all_ranks.rank or not is_shared]
        all_ranks.do("a checkpoint: its checksums", lambda: self._expect_intact(own))
        self._verified.update(files)

    def _expect_intact(self, files: Iterable[Path]) -> None:
        try:
            for path in files:
                self.source(path)
        except CheckpointError as problem:
            raise CheckpointError(f"{problem}{self._advice()}") from problem

    def source(self, path: Path) -> Source:
        found = super().source(path)
        if path not in self._verified:
            record, checksum = self._index.files[path.name], hashlib.sha256()
            for view in found.stream(record.nbytes):
                checksum.update(view)
            if checksum.hexdigest() != record.sha256:
                raise CheckpointError(
                    f"{path}: damaged: its bytes have checksum {checksum.hexdigest()[:16]}..., were written with {record.sha256[:16]}..."
                )
            self._verified.add(path)
        return found


_log = logging.getLogger("patrickstar")


def open_step(path: Path, *, io: FileIO = FileIO()) -> StepReader:  # noqa: B008  (frozen)
    """The checkpoint at `path`: the directory that holds `latest`, or the directory of one step.

    Raises:
        CheckpointError: none is there, or it is not what the rules above say. The message names the file,
            and the newest checkpoint beside it that is intact (those beside it are read until one is found).
    """
    found = _resolve(path, io)
    try:
        return StepReader(found, io=io, advice=lambda: _advice(found, io))
    except CheckpointError as problem:
        raise CheckpointError(f"{problem}{_advice(found, io)}") from problem


def newest_intact(directory: Path, *, io: FileIO = FileIO(), but: Path | None = None) -> Path | None:  # noqa: B008  (frozen)
    """The directory of the newest step whose every byte is what was written, other than `but`; None where there is none.

    The one that `latest` names is the newest, then those written last. Reads whole checkpoints until one passes.
    """
    latest = directory  # nothing that a candidate could be
    with suppress(CheckpointError):
        latest = _latest(directory, io)
    with suppress(CheckpointError):
        for path in sorted(step_directories(directory, io), key=lambda path: path != latest):
            if path != but and is_complete(path, io, bytes_too=True):
                return path
    return None


def saved_steps(directory: Path | None) -> list[Path]:
    """The directories of steps in a directory that may not be there."""
    return step_directories(directory, FileIO()) if directory is not None and directory.is_dir() else []


def step_directories(directory: Path, io: FileIO) -> list[Path]:
    """Directories of steps, those written last first, intact or not. One left aside by a crash counts as itself."""
    with reported(f"{directory}: cannot list the directory", CheckpointError):
        names = set(io.names(directory))
        found: list[tuple[int, int, Path]] = []
        for name in names:
            matched = STEP_NAME.fullmatch(name.removeprefix(OLD_PREFIX))
            if not matched or (name.startswith(OLD_PREFIX) and name.removeprefix(OLD_PREFIX) in names):
                continue
            if not _is_directory(directory / name, io):
                continue
            # By the time of writing: after going back to step 10, step 12 is newer than the step 20 of before.
            index = io.status(directory / name / INDEX_NAME)
            found.append((index.st_mtime_ns if index else 0, int(matched[1]), directory / name))
    return [path for *_, path in sorted(found, reverse=True)]


def _resolve(path: Path, io: FileIO) -> Path:
    """The directory of the step meant by `path`, there or not."""
    with reported(f"{path}: cannot look there", CheckpointError):
        if io.status(path / INDEX_NAME) is not None:
            return path
        if STEP_NAME.fullmatch(path.name):
            return _or_aside(path, io)
        if io.status(path) is None:
            raise CheckpointError(f"{path}: no such directory")
        if io.status(path / LATEST_NAME) is not None:
            return _follow_latest(path, io)
    if steps := step_directories(path, io):
        # The first checkpoint of all was complete when the machine stopped; only `latest` was not yet there.
        _log.warning("%s: no file %r; taking the checkpoint written last, %s", path, LATEST_NAME, steps[0].name)
        return steps[0]
    raise CheckpointError(f"{path}: no checkpoint there (neither {LATEST_NAME!r} nor {INDEX_NAME!r})")


def _follow_latest(directory: Path, io: FileIO) -> Path:
    latest = directory / LATEST_NAME
    try:
        found = _latest(directory, io)
    except CheckpointError as problem:
        raise CheckpointError(f"{problem}{_advice(latest, io)}") from problem
    if not _is_directory(found, io):
        there = "is no directory (a link is not followed)" if io.status(found) else "is not there"
        raise CheckpointError(f"{latest}: names {found.name}, which {there}{_advice(found, io)}")
    return found


def _latest(directory: Path, io: FileIO) -> Path:
    """The directory that `latest` names, whether it exists or not."""
    name = read_small(directory / LATEST_NAME, 64, io).decode("ascii", errors="replace").removesuffix("\n")
    if not STEP_NAME.fullmatch(name):
        raise CheckpointError(
            f"{directory / LATEST_NAME}: expected the name of a step's directory, as step-00000012, found {name!r}"
        )
    return _or_aside(directory / name, io)


def _or_aside(path: Path, io: FileIO) -> Path:
    """The directory of a step: at the step's name, or aside where a crash stopped its replacement."""
    aside = path.with_name(f"{OLD_PREFIX}{path.name}")
    with reported(f"{path}: cannot look there", CheckpointError):
        return aside if io.status(path) is None and io.status(aside) is not None else path


def _is_directory(path: Path, io: FileIO) -> bool:
    status = io.status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_complete(path: Path, io: FileIO, *, bytes_too: bool = False) -> bool:
    """Tells whether a step's directory has what its index says. `bytes_too`: every byte as it was written."""
    try:
        with StepReader(path, io=io) as reader:
            if bytes_too:
                reader.verify()
    except CheckpointError:
        return False
    return True


def _advice(damaged: Path, io: FileIO) -> str:
    """Advice what to load instead of what is damaged: the newest intact checkpoint beside it."""
    directory = damaged.parent
    found = newest_intact(directory, io=io, but=damaged)
    return (
        f"; the newest intact checkpoint is {found}: load that path" if found else f"; no intact one is in {directory}"
    )
