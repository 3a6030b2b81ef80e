"""Names under which a model's own library keeps its tensors in files: for models of transformers, as that library has it.

The prefix of the base model, older names, and tensors that are several in one of the two are the library's to match: by its own code, a tensor of
the model at a time. This file alone knows transformers from inside; `tests/checkpoint/test_naming.py` has a test of each thing relied upon.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patrickstar.errors import ConfigError


class Naming:
    """The way from names in files to names of a model of transformers; None: of one that belongs to no library, where a name is a name.

    `missing`: in keys that no file need have. `unexpected`: in names of files for which the model need have no use. Nobody need be told of them.
    """

    def __init__(self, model: Any | None = None) -> None:
        self._model = model
        self._loading: Any = None  # the module of the library that renames and converts
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        unexpected = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        if model is not None:
            names = [name for name, _ in model.named_buffers()]  # of older ones the library knows by itself
            former = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
            unexpected |= {is_old for end, is_old in former.items() if any(name.endswith(end) for name in names)}
            with suppress(ImportError, AttributeError):
                # In a release whose inside is another, what keeps its name loads all the same, and what does not is told to be missing.
                mapping = importlib.import_module("transformers.conversion_mapping")
                loading = importlib.import_module("transformers.core_model_loading")
                transforms = mapping.get_model_conversion_mapping(model)
                self._renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
                self._converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
                self._loading = loading
        self._of_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}
        self.missing = _pattern_of(getattr(model, "_keys_to_ignore_on_load_missing", None))
        self.unexpected = _pattern_of(unexpected)

    def renamed(self, names: Iterable[str], keys: Collection[str]) -> Iterator[tuple[str, str, str | None]]:
        """(name, key, pattern): the key a tensor goes to, if among `keys`; with a pattern it is converted on the way, with all others of that key."""
        loading = self._loading
        # In the library's order: parts of a conversion are put together in it.
        for name in names if loading is None else sorted(names, key=loading.dot_natural_key):
            key, pattern = name, None
            if loading is not None:
                key, pattern = loading.rename_source_key(name, self._renamings, self._converters)
            key = self._prefixed(key, keys)
            if key not in keys and (plain := self._prefixed(name, keys)) in keys:
                key, pattern = plain, None
            yield name, key, pattern

    def convert(self, key: str, parts: Sequence[tuple[str, str, Tensor]]) -> dict[str, Tensor]:
        """Tensors by key, from (name, pattern, tensor)."""
        assert self._model is not None, f"{key}: nothing was to be converted of {len(parts)}"
        converter = copy.deepcopy(self._of_pattern[parts[0][1]])
        for name, pattern, tensor in parts:
            converter.add_tensor(key, name, pattern, tensor)
        made = converter.convert(key, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _prefixed(self, name: str, keys: Collection[str]) -> str:
        """The name with or without the base model's prefix, whichever the model has."""
        if self._model is None:
            return name
        prefix = f"{self._model.base_model_prefix}."
        if name.startswith(prefix) and name.removeprefix(prefix) in keys:
            return name.removeprefix(prefix)
        return f"{prefix}{name}" if f"{prefix}{name}" in keys else name


def naming_of(model: nn.Module) -> Naming:
    """The naming of the library that the model's class comes from."""
    return Naming(model if _is_of_transformers(model) else None)


def own_keys(model: nn.Module, tensors: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """The key that each tensor has in files: of tied ones the key that the library ties the others to. Not there: what the library leaves out."""
    ours = _is_of_transformers(model)
    tied = getattr(model, "all_tied_weights_keys", None) or {} if ours else {}
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ()) if ours else set()
    kept = {keys: [key for key in keys if key not in left_out] for keys in tensors}
    return {keys: next((key for key in own if key not in tied), own[0]) for keys, own in kept.items() if own}


def describe(model: Any, dtype: torch.dtype, directory: Path) -> None:
    """Writes what `from_pretrained` needs beside weights of type `dtype`; nothing for a model of no library. ConfigError: the library refuses to."""
    if not _is_of_transformers(model):
        return
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    try:
        config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
    except OSError:
        raise
    except Exception as problem:  # the library's own code, over what users set: anything
        raise ConfigError(f"export: transformers does not save the model's configuration: {problem}") from problem


def _is_of_transformers(model: nn.Module) -> bool:
    """Tells whether a model is one of transformers, which is not imported to find out: who has such a model has imported it."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _pattern_of(patterns: Collection[str] | None) -> re.Pattern[str]:
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns or ("(?!)",))))  # which is never found
