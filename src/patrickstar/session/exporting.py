"""`Session.export`: the model as its own library reads it, streamed out a piece of a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from patrickstar.checkpoint.export import write_model
from patrickstar.checkpoint.naming import describe, own_keys
from patrickstar.checkpoint.tensors import TensorEntry
from patrickstar.session.loading import tensors_of
from patrickstar.session.parts import Parts

__all__ = ["export_model"]


def export_model(parts: Parts, directory: Path, *, shard_bytes: int) -> None:
    """Writes parameters in fp32, persistent buffers in the type they have, and the configuration.

    Raises:
        DeviceError: it cannot be written.
    """
    model, executor = parts.model, parts.executor
    tensors = tensors_of(model)
    kept = own_keys(model, tensors)
    entries: list[TensorEntry] = []
    pieces: dict[str, Callable[[], Iterator[Tensor]]] = {}
    for keys, tensor in tensors.items():
        if keys not in kept:
            continue
        name = parts.binding.names.get(id(tensor))
        dtype = tensor.dtype if name is None else torch.float32
        entries.append(TensorEntry(kept[keys], dtype, tuple(tensor.shape)))
        pieces[kept[keys]] = _of_buffer(tensor) if name is None else _of_parameter(parts, name)
    with executor.lock, executor.quiet():
        write_model(
            directory,
            entries,
            read=lambda key: pieces[key](),
            describe=lambda to: describe(model, torch.float32, to),
            shard_bytes=shard_bytes,
        )


def _of_parameter(parts: Parts, name: str) -> Callable[[], Iterator[Tensor]]:
    def pieces() -> Iterator[Tensor]:
        if parts.binding.by_name[name].shape_only.is_contiguous():
            yield from parts.weights.master_pieces(name)
        else:
            yield parts.weights.read(name).contiguous().reshape(-1)

    return pieces


def _of_buffer(buffer: Tensor) -> Callable[[], Iterator[Tensor]]:
    return lambda: iter([buffer.detach().contiguous().reshape(-1)])
