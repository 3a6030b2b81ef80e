"""`Session.export`: the model as its own library reads it, streamed out a piece of a tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from patrickstar.checkpoint.export import write_model
from patrickstar.checkpoint.naming import describe, own_keys
from patrickstar.checkpoint.tensors import TensorEntry
from patrickstar.session.loading import tensors_of
from patrickstar.session.parts import Parts


def export_model(parts: Parts, directory: Path, *, shard_bytes: int) -> None:
    """Writes parameters in fp32, persistent buffers in the type they have, and the configuration. DeviceError: it cannot be written."""
    model, executor = parts.model, parts.executor
    tensors = tensors_of(model)
    kept = own_keys(model, tensors)
    names = parts.binding.names
    found = {key: (tensor, names.get(id(tensor))) for keys, tensor in tensors.items() if (key := kept.get(keys))}

    def pieces(key: str) -> Iterator[Tensor]:
        tensor, name = found[key]
        return iter([tensor.detach().contiguous().reshape(-1)]) if name is None else parts.weights.elements(name)

    with executor.lock, executor.quiet():
        write_model(
            directory,
            [
                TensorEntry(key, tensor.dtype if name is None else torch.float32, tuple(tensor.shape))
                for key, (tensor, name) in found.items()
            ],
            read=pieces,
            describe=lambda to: describe(model, torch.float32, to),
            shard_bytes=shard_bytes,
        )
