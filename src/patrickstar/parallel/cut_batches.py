"""Batches of `transformers`, cut over ranks: padded, labels shifted before the cut, padding and packed documents as segments.

A segment is a number a token has; tokens see those with the same. Padding is a segment of its own, so that it changes nothing of others, and each
document of packed ones is one. They are handed on as a mask [B, 1, 1, c] of int32, which models pass to their attention as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from patrickstar.config.kinds import refuse
from patrickstar.errors import nearest

TOKENS: Final = ("input_ids", "inputs_embeds")
_PADS: Final[tuple[str, ...]] = ("position_ids", "token_type_ids", *TOKENS)
_KNOWN: Final[tuple[str, ...]] = (*_PADS, "attention_mask", "labels", "shift_labels")
IGNORED: Final = -100


def cut(batch: Mapping[str, Any], *, multiple: int, of_rank: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The part that a rank has of a batch: all that it had, `position_ids`, and a mask where there are segments. ConfigError: all that cannot be cut.

    `multiple`: what lengths are to be divisible by. `of_rank`: this rank's part of a tensor along its dimension 1.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    refuse(_problems(tensors), of="shard")
    tokens = next(tensors[name] for name in TOKENS if name in tensors)
    rows, length = tokens.shape[:2]
    pad = -length % multiple
    segments = _segments(tensors, rows, length, pad)

    whole: dict[str, Tensor] = {name: _padded(tensors[name], pad, 0) for name in _PADS if name in tensors}
    if "position_ids" not in whole:
        whole["position_ids"] = _padded(torch.arange(length, device=tokens.device).unsqueeze(0), pad, 0)
    if "labels" in tensors or "shift_labels" in tensors:
        shifted = tensors.get("shift_labels")
        if shifted is None:
            shifted = F.pad(tensors["labels"], (0, 1), value=IGNORED)[:, 1:]
        mask = tensors.get("attention_mask")
        if mask is not None and (odd := int(((shifted != IGNORED) & (mask == 0)).sum())):
            problem = f"{odd} tokens that attention_mask leaves out have labels; what they see is not defined: make those {IGNORED}"
            refuse([problem], of="shard")
        whole["shift_labels"] = _padded(shifted, pad, IGNORED)
        whole["labels"] = _padded(tensors.get("labels", shifted), pad, IGNORED)
    parts = {name: of_rank(tensor) for name, tensor in whole.items()}
    if segments is not None:
        parts["attention_mask"] = of_rank(segments)[:, None, None, :]
    return {name: value for name, value in batch.items() if name not in tensors} | parts


def _problems(tensors: Mapping[str, Tensor]) -> list[str]:
    problems = [f"{name} is not known here{nearest(name, _KNOWN)}" for name in tensors if name not in _KNOWN]
    tokens = next((tensors[name] for name in TOKENS if name in tensors), None)
    if tokens is None:
        return [*problems, f"no {' or '.join(TOKENS)} in it: a batch of transformers is expected, or a tensor"]
    for name, tensor in tensors.items():
        fits = tensor.shape[:2] == tokens.shape[:2] or (
            name == "position_ids" and tensor.shape[1:] == tokens.shape[1:2]
        )
        if name in _KNOWN and not (fits and tensor.ndim == 2 + (name == "inputs_embeds")):
            what = "a number a token" if name != "attention_mask" else "1 or 0 a token (masks of pairs: attention)"
            problems.append(f"{name} {list(tensor.shape)} for tokens {list(tokens.shape[:2])}: {what} is expected")
    return problems


def _segments(tensors: Mapping[str, Tensor], rows: int, length: int, pad: int) -> Tensor | None:
    """The segments [B, L + pad] of int32, where there is more than one: 0 is padding, documents are counted from 1."""
    mask, positions = tensors.get("attention_mask"), tensors.get("position_ids")
    if mask is not None:  # as in transformers: with a mask, positions say nothing of documents
        segments = mask.to(torch.bool).to(torch.int32)
    elif positions is not None:
        starts = torch.diff(positions, dim=1, prepend=positions[:, :1] - 1) != 1
        segments = starts.cumsum(1, dtype=torch.int32) + 1
        segments = segments.expand(rows, -1)
    else:
        segments = torch.ones(rows, length, dtype=torch.int32, device=next(iter(tensors.values())).device)
    segments = _padded(segments, pad, 0)
    return None if bool((segments == segments[:, :1]).all()) else segments


def _padded(tensor: Tensor, pad: int, value: int) -> Tensor:
    return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, pad), value=value) if pad else tensor
