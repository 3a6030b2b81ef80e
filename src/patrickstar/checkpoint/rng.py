"""The random number generators of a process, as values that `extra.py` takes: torch on the CPU and on one device, Python, NumPy."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from patrickstar.comm.all_ranks import AllRanks
from patrickstar.errors import CheckpointError

_log = logging.getLogger("patrickstar")


def capture(device: torch.device | None = None) -> dict[str, Any]:
    """The state of the global generators now; drawing nothing. `device`: whose generator is one of them."""
    version, words, gauss = random.getstate()
    tree: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        # 625 numbers, which are smaller as a tensor.
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    tree["numpy"] = _pytree.tree_map_only(np.ndarray, torch.from_numpy, np.random.get_state(legacy=False))  # noqa: NPY002 - the global one
    if device is not None:
        tree["device"] = torch.get_device_module(device).get_rng_state(device)
    return tree


def capture_all(all_ranks: AllRanks, device: torch.device | None = None) -> list[dict[str, Any]]:
    """The states of all ranks, in their order, each as `capture` gives it."""

    def states() -> dict[str, Any]:  # pickle by itself does not read tensors of uint32 back
        return _pytree.tree_map_only(torch.Tensor, torch.Tensor.numpy, capture(device))

    of_all = all_ranks.tell("save_checkpoint(): states of random number generators", states)
    return [_pytree.tree_map_only(np.ndarray, torch.from_numpy, own) for own in of_all]


def check(tree: object, device: torch.device | None = None) -> None:
    """Return if `restore` will take this tree; every generator is as before. CheckpointError: it is not what `capture` gives."""
    before = capture(device)
    try:
        _set(tree, device)
    except (KeyError, AttributeError, OverflowError, RuntimeError, TypeError, ValueError) as problem:
        raise CheckpointError(f"rng: not the state of a random number generator: {problem}") from problem
    finally:
        _set(before, device)


def restore(tree: object, device: torch.device | None = None) -> None:
    """Set the global generators to what `capture` found. A generator that the tree does not have keeps its state.

    The state of a device's generator goes to that of `device`; without one it is left, which a warning says.
    CheckpointError: it is no such tree; no generator was changed.
    """
    check(tree, device)
    if "device" in _set(tree, device) and device is None:
        _log.warning(
            "the checkpoint has the state of a device's random numbers, and this session computes on none: from here on others are drawn"
        )


def _set(tree: object, device: torch.device | None) -> dict[str, Any]:
    if not isinstance(tree, dict) or not {"torch", "python"} <= tree.keys() <= {"torch", "python", "numpy", "device"}:
        raise ValueError("expected the states of torch, python, numpy and a device")
    torch.set_rng_state(tree["torch"])
    version, words, gauss = (tree["python"][name] for name in ("version", "words", "gauss"))
    random.setstate((version, tuple(words.tolist()), None if gauss is None else float(gauss)))
    if "numpy" in tree:
        np.random.set_state(_pytree.tree_map_only(torch.Tensor, torch.Tensor.numpy, tree["numpy"]))  # noqa: NPY002 - the global one
    if "device" in tree and device is not None:
        torch.get_device_module(device).set_rng_state(tree["device"], device)
    return tree
