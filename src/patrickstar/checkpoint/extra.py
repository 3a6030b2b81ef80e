"""Values beside the tensors of a model, such as `extra`: written by `torch.save`, read by `torch.load(weights_only=True)`.

What that restricted reader does not take is refused when it is saved, with the place where it stands: `extra["loader"]["rng"]`.
"""

from __future__ import annotations

import io
import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patrickstar.checkpoint.source import Source
from patrickstar.checkpoint.staged_files import StagedFiles
from patrickstar.checkpoint.tensors import is_plain
from patrickstar.checkpoint.writer import FileWriter
from patrickstar.errors import CheckpointError

__all__ = ["Values", "read_values", "write_values"]

_AS_THEY_ARE = (type(None), bool, float, str)


class Values:
    """Values as they will come back: an object with `state_dict` as what that gives, a tensor on the CPU without what hangs on it."""

    def __init__(self) -> None:
        # By id: the tensor, kept alive so, and what is saved of it.
        self._tensors: dict[int, tuple[object, torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors so far."""
        return sum(saved.nbytes for _, saved in self._tensors.values())

    def take(self, value: object, name: str) -> object:
        """`value`, ready for `torch.save`; places in it are called `name["key"][0]`.

        Raises:
            CheckpointError: it could not be read back; says what and where.
        """
        try:
            return self._take(value, name)
        except RecursionError:
            raise CheckpointError(f"{name} contains itself, or is nested too deep to be saved") from None

    def _take(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _AS_THEY_ARE or (kind is int and value.bit_length() < 64):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind in (list, tuple):
            return kind(self._take(item, f"{path}[{at}]") for at, item in enumerate(value))
        if kind in (dict, OrderedDict, Counter):
            taken: Any = kind()
            for key, item in value.items():
                place = f"{path}[{json.dumps(key) if type(key) is str else ascii(key)}]"
                taken[self._take(key, f"key {place}")] = self._take(item, place)
            return taken
        # Of a class, state_dict is a function without its object.
        if callable(getattr(kind, "state_dict", None)) and not isinstance(value, type):
            return self._take(value.state_dict(), f"{path}.state_dict()")
        if isinstance(value, np.generic):  # a learning rate that was computed, say
            value = value.item()
        _expect_readable(value, path)
        return value

    def _tensor(self, value: torch.Tensor, path: str) -> torch.Tensor:
        if id(value) not in self._tensors:
            if not is_plain(value):
                raise CheckpointError(
                    f"{path} is a tensor without plain elements ({type(value).__qualname__}, {value.layout}, on "
                    f"{value.device}): sparse, quantised, meta and managed tensors cannot be saved here; give a dense copy"
                )
            saved = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            if saved.untyped_storage().nbytes() != saved.nbytes:  # all of it would be saved
                saved = saved.clone()
            self._tensors[id(value)] = (value, saved)
        return self._tensors[id(value)][1]


def _expect_readable(value: object, path: str) -> None:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # whatever pickling it calls
        kind = type(value)
        raise CheckpointError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only=True) does not read back: "
            "give JSON values, tensors, or an object with state_dict()"
        ) from None  # torch's own text is advice to those who load


def write_values(staging: StagedFiles, path: Path, value: object) -> None:
    """A new file with what `Values` has taken; passed on as it is serialised, so that no second copy is held."""
    with staging.new_file(path) as writer:
        sink = _Sink(writer)
        torch.save(value, sink)  # type: ignore[arg-type]
        if sink.problem is not None:
            raise sink.problem


def read_values(source: Source) -> object:
    """The value in such a file, through the reader that runs no code.

    Raises:
        CheckpointError: the reader does not take it.
    """
    try:
        with torch.inference_mode(False):
            return torch.load(f"/proc/self/fd/{source.fd}", weights_only=True, map_location="cpu", mmap=False)
    except Exception as problem:  # whatever a file makes of torch's reader
        raise CheckpointError(
            f"{source.path}: torch.load(weights_only=True) refuses it: {type(problem).__name__}"
        ) from problem


class _Sink:
    """A writer as `torch.save` wants it: what goes wrong is kept, because it cannot pass through torch's own writer."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer
        self.problem: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self.problem is None:
            try:
                self._writer.append(memoryview(data))
            except BaseException as problem:
                self.problem = problem
        return len(data)

    def flush(self) -> None:
        """Nothing waits here."""
