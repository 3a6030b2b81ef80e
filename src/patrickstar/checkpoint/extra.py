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

from patrickstar.checkpoint.staged_files import FileWriter, StagedFiles
from patrickstar.checkpoint.tensor_files import Source
from patrickstar.errors import CheckpointError

Saved = dict[int, tuple[object, torch.Tensor]]
"""Tensors by id: each, kept alive so, and what is saved of it."""


def take_values(value: object, name: str, tensors: Saved) -> object:
    """The value as it will come back, ready for `torch.save`; places in it are called `name["key"][0]`.

    An object with `state_dict` is what that gives, a tensor on the CPU without what hangs on it.

    Args:
        tensors: gets those in the value.
    Raises:
        CheckpointError: it could not be read back; says what and where.
    """
    try:
        return _take(value, name, tensors)
    except RecursionError:
        raise CheckpointError(f"{name} contains itself, or is nested too deep to be saved") from None


def _take(value: Any, path: str, tensors: Saved) -> Any:
    kind = type(value)
    if kind in (type(None), bool, float, str) or (kind is int and value.bit_length() < 64):
        return value
    if isinstance(value, torch.Tensor):
        if id(value) not in tensors:
            tensors[id(value)] = value, _alone(value, path)
        return tensors[id(value)][1]
    if kind in (list, tuple):
        return kind(_take(item, f"{path}[{at}]", tensors) for at, item in enumerate(value))
    if kind in (dict, OrderedDict, Counter):
        taken: Any = kind()
        for key, item in value.items():
            place = f"{path}[{json.dumps(key) if type(key) is str else ascii(key)}]"
            taken[_take(key, f"key {place}", tensors)] = _take(item, place, tensors)
        return taken
    # Of a class, state_dict is a function without its object.
    if callable(getattr(kind, "state_dict", None)) and not isinstance(value, type):
        return _take(value.state_dict(), f"{path}.state_dict()", tensors)
    if isinstance(value, np.generic):  # a learning rate that was computed, say
        value = value.item()
    _expect_readable(value, path)
    return value


def _alone(value: torch.Tensor, path: str) -> torch.Tensor:
    """A tensor's elements on the CPU, and no others in its storage: all of that would be saved."""
    ordinary = type(value) in (torch.Tensor, torch.nn.Parameter)
    if not ordinary or value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise CheckpointError(
            f"{path} is a tensor without plain elements ({type(value).__qualname__}, {value.layout}, on "
            f"{value.device}): sparse, quantised, meta and managed tensors cannot be saved here; give a dense copy"
        )
    saved = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return saved if saved.untyped_storage().nbytes() == saved.nbytes else saved.clone()


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
    """A new file with what `take_values` gives; passed on as it is serialised, so that no second copy is held."""
    with staging.new_file(path) as writer:
        sink = _Sink(writer)
        torch.save(value, sink)  # type: ignore[arg-type]
        if sink.problem is not None:
            raise sink.problem


def read_values(source: Source) -> object:
    """The value in such a file, through the reader that runs no code. CheckpointError: the reader does not take it."""
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
