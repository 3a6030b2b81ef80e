"""A state dict whose tensors are read one at a time, when they are asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch


class LazyStateDict(Mapping[str, torch.Tensor]):
    """Names that are known, tensors that are read when asked for: a mapping for models that do not fit memory at once.

    Length, order, `in` and `keys()` read nothing; `items()` and `values()` hold one tensor at a time if their user
    does. Each access reads anew. What wants all of it at once gets it, and needs the memory: `dict(mapping)`,
    `model.load_state_dict(mapping)`, `copy.copy`, and `torch.save(mapping, file)`, which writes an ordinary
    `OrderedDict` that `torch.load(file, weights_only=True)` reads.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], torch.Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} tensors, read when asked for>"

    # Tensors have no single truth value, and comparing would read everything twice.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        # An ordinary dict in a pickle: the reader belongs to a session that lives here.
        return (OrderedDict, (), None, None, iter(self.items()))
