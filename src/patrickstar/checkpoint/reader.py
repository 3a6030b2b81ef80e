"""Reading a checkpoint that may have been damaged, cut, mixed up, or made to deceive.

Opening one reads its index and the headers of its files and holds them against each other and against the real sizes;
`verify()` reads every byte and holds it against its checksum. Nothing is executed, nothing written, no memory is taken
on the word of a file, and no link is followed. Files are read, not mapped: a mapped file counts as resident memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, TracebackType

import torch

from patrickstar.checkpoint.contents import check_files, read_index
from patrickstar.checkpoint.decode import decode_tree
from patrickstar.checkpoint.files import Files
from patrickstar.checkpoint.format import INDEX_NAME, Stored, checksum_of, fingerprint, new_checksum
from patrickstar.checkpoint.source import OneSource, Source
from patrickstar.checkpoint.tensors import DTYPES, TensorEntry, bytes_of, empty
from patrickstar.errors import CheckpointError, some

__all__ = ["StepReader"]


class StepReader:
    """One checkpoint, opened and checked but for the tensors' bytes; `verify()` checks those. Use from one thread.

    What has not passed `verify()` is checked as it is read, where it is read whole (`read`, `pieces`).
    """

    def __init__(self, path: Path, *, files: Files | None = None, advice: Callable[[], str] = str) -> None:
        """Opens the directory of one step; `find.open_step` also finds it.

        Args:
            advice: what to add to the error when the step turns out to be damaged.
        Raises:
            CheckpointError: one of the rules of `contents.py` does not hold.
        """
        self.path = path
        self._files = files or Files()
        self._advice = advice
        self._index = index = read_index(path, self._files)
        self._identities = check_files(path, self._index, self._files)

        self._verified = False
        self._sources = OneSource(
            self._files,
            largest_bytes=lambda: max(record.nbytes for record in index.files.values()),
            changed="changed while the checkpoint was open",
        )
        self._state: list[object] = []
        self._extra: list[object] = []

    @property
    def step(self) -> int:
        """Number of the step that the checkpoint is of."""
        return self._index.step

    @property
    def fingerprint(self) -> str:
        """Digest of the names and shapes of the model's parameters, as `format.fingerprint` gives it."""
        return self._index.fingerprint

    @property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the parameters of the model that the checkpoint was taken of."""
        return MappingProxyType(dict(self._index.parameters))

    @property
    def layout(self) -> Mapping[str, int | str]:
        """The notes about the layout when the checkpoint was written."""
        return MappingProxyType(dict(self._index.layout))

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """The tensors, in the order in which they were given."""
        return MappingProxyType({name: _entry(name, stored) for name, stored in self._index.tensors.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all safetensors files of the checkpoint."""
        return sum(record.nbytes for record in self._index.files.values())

    @property
    def state(self) -> object:
        """The state that the session saved beside the tensors; read on first use."""
        return self._tree(self._state, self._index.state, "state")

    @property
    def extra(self) -> object:
        """The extra that the user saved, as plain values (`extra.py`); read on first use."""
        return self._tree(self._extra, self._index.extra, "extra")

    def require_model(self, parameters: Mapping[str, Sequence[int]]) -> None:
        """Return if this checkpoint is of a model with the given parameters, names and shapes.

        Raises:
            CheckpointError: of another one; says what differs.
        """
        if fingerprint(parameters) == self.fingerprint:
            return
        wanted = {name: tuple(shape) for name, shape in parameters.items()}
        saved = self._index.parameters
        differences = [
            ("in the checkpoint only", [name for name in saved if name not in wanted]),
            ("in the model only", [name for name in wanted if name not in saved]),
            (
                "of other shapes",
                [
                    f"{name} {list(saved[name])} in the checkpoint, {list(shape)} in the model"
                    for name, shape in wanted.items()
                    if name in saved and saved[name] != shape
                ],
            ),
        ]
        said = "; ".join(f"{what}: {some(names, most=3)}" for what, names in differences if names)
        raise CheckpointError(f"{self.path}: a checkpoint of another model: {said}")

    def verify(self) -> None:
        """Read every byte and hold it against its checksum.

        Raises:
            CheckpointError: names the file and the tensor that are damaged, and the newest intact checkpoint beside it.
        """
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="patrickstar-checkpoint") as lane:
                for file, rows in self._index.tensors_by_file().items():
                    self._verify_file(file, rows, lane)
        except CheckpointError as problem:
            raise CheckpointError(f"{problem}{self._advice()}") from problem
        self._verified = True

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, on the CPU."""
        return self._read(name, self._stored(name))

    def read_into(self, name: str, out: torch.Tensor, *, start: int = 0) -> None:
        """Fill `out`, contiguous and on the CPU, with the tensor's elements from number `start` on.

        Part of a tensor has no checksum of its own: `verify()` first.
        """
        stored = self._stored(name)
        numel = stored.span.numel
        assert out.dtype == DTYPES[stored.span.dtype], f"{name}: read into {out.dtype}, saved as {stored.span.dtype}"
        assert 0 <= start <= numel - out.numel(), f"{name}: elements {start} to {start + out.numel()} of {numel}"
        offset = stored.span.offset + start * out.element_size()
        self._source(stored.file).read_into(bytes_of(out), offset)

    def pieces(self, name: str, numel: int) -> Iterator[torch.Tensor]:
        """The tensor's elements in order, in new 1-D tensors of `numel` elements, the last one shorter.

        Raises:
            CheckpointError: after the last piece, where the tensor is damaged and was not verified before.
        """
        assert numel > 0
        stored = self._stored(name)
        checksum = new_checksum()
        for start in range(0, stored.span.numel, numel):
            piece = empty((min(numel, stored.span.numel - start),), DTYPES[stored.span.dtype])
            self.read_into(name, piece, start=start)
            if not self._verified:
                checksum.update(bytes_of(piece))
            yield piece
            del piece  # not to hold two while the next is read
        if not self._verified:
            self._compare(name, stored, checksum.hexdigest())

    def close(self) -> None:
        """Close the file that is open, if one is, and let go of the blocks. Reading again takes them again."""
        self._sources.close()

    def __enter__(self) -> StepReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tree(self, known: list[object], tree: object, name: str) -> object:
        if not known:

            def fetch(tensor: str) -> torch.Tensor:
                return self._read(tensor, self._index.extra_tensors[tensor])

            names = self._index.extra_tensors.keys()
            known.append(decode_tree(tree, fetch=fetch, names=names, where=f"{self.path / INDEX_NAME}: {name}"))
        return known[0]

    def _stored(self, name: str) -> Stored:
        try:
            return self._index.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: holds no tensor {name!r}") from None

    def _read(self, name: str, stored: Stored) -> torch.Tensor:
        tensor = empty(stored.span.shape, DTYPES[stored.span.dtype])
        data = bytes_of(tensor)
        self._source(stored.file).read_into(data, stored.span.offset)
        if not self._verified:
            self._compare(name, stored, checksum_of(data))
        return tensor

    def _verify_file(self, file: str, rows: list[tuple[str, Stored]], lane: Executor) -> None:
        """Walk a file once, whose tensors lie back to back."""
        start, end = self._index.files[file].header_nbytes, self._index.files[file].nbytes
        stream = self._source(file).stream(start, end - start, lane=lane)
        view, at = memoryview(b""), 0
        for name, stored in rows:
            checksum, left = new_checksum(), stored.span.nbytes
            while left:
                if at == len(view):
                    view, at = next(stream), 0
                part = view[at : at + left]
                checksum.update(part)
                at += len(part)
                left -= len(part)
            self._compare(name, stored, checksum.hexdigest())

    def _compare(self, name: str, stored: Stored, found: str) -> None:
        if found != stored.checksum:
            raise CheckpointError(
                f"{self.path / stored.file}: damaged: tensor {name!r}, bytes {stored.span.offset} to {stored.span.end}"
                f", has checksum {found[:16]}..., was written with {stored.checksum[:16]}..."
            )

    def _source(self, file: str) -> Source:
        return self._sources.at(self.path / file, self._identities[file])


def _entry(name: str, stored: Stored) -> TensorEntry:
    stem = re.sub(r"(-\d+-of-\d+)?\.safetensors$", "", stored.file)
    return TensorEntry(name, DTYPES[stored.span.dtype], stored.span.shape, stem)
