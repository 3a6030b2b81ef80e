"""Reading a checkpoint that may have been damaged, cut, mixed up, or made to deceive.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from patrickstar.checkpoint.extra import read_values
from patrickstar.checkpoint.format import INDEX_NAME, MOST_INDEX_BYTES, OLD_PREFIX, STEP_NAME, VALUES_NAME, decode_index
from patrickstar.checkpoint.tensor_files import Source, TensorFiles, read_small
from patrickstar.comm.all_ranks import AllRanks, share_out
from patrickstar.errors import CheckpointError, some
from patrickstar.memory.fileio import FileIO, reported


class StepReader(TensorFiles):
    """One checkpoint. `step`: the step that it is of."""

    def __init__(self, path: Path, *, io: FileIO | None = None, advice: Callable[[], str] = str) -> None:
        """Opens the directory of one step; `find.open_step` also finds it.

        Args:
            advice: what to add to the error when the step turns out to be damaged.
        Raises:
            CheckpointError: rule (1) or (2) does not hold.
        """
        io = io or FileIO()
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
