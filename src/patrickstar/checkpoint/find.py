"""Finding the checkpoint that is meant, and the newest one that is intact."""

from __future__ import annotations

import logging
import stat
from contextlib import suppress
from pathlib import Path

from patrickstar.checkpoint.format import INDEX_NAME, LATEST_NAME, OLD_PREFIX, STEP_NAME
from patrickstar.checkpoint.reader import StepReader
from patrickstar.checkpoint.tensor_files import read_small
from patrickstar.errors import CheckpointError
from patrickstar.memory.fileio import FileIO, reported

_log = logging.getLogger("patrickstar")


def open_step(path: Path, *, io: FileIO | None = None) -> StepReader:
    """The checkpoint at `path`: the directory that holds `latest`, or the directory of one step.

    Raises:
        CheckpointError: none is there, or it is not what the rules of `reader.py` say. The message names the file,
            and the newest checkpoint beside it that is intact (those beside it are read until one is found).
    """
    io = io or FileIO()
    found = _resolve(path, io)
    try:
        return StepReader(found, io=io, advice=lambda: _advice(found, io))
    except CheckpointError as problem:
        raise CheckpointError(f"{problem}{_advice(found, io)}") from problem


def newest_intact(directory: Path, *, io: FileIO | None = None, but: Path | None = None) -> Path | None:
    """The directory of the newest step whose every byte is what was written, other than `but`; None where there is none.

    The one that `latest` names is the newest, then those written last. Reads whole checkpoints until one passes.
    """
    io = io or FileIO()
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
