"""The random number generators of a process, as values that `extra.py` takes: torch on the CPU and on one device, Python, NumPy."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

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


def check(tree: object, device: torch.device | None = None) -> None:
    """Return if `restore` will take this tree; changes no generator. CheckpointError: it is not what `capture` gives."""
    if not isinstance(tree, dict) or not {"torch", "python"} <= tree.keys() <= {"torch", "python", "numpy", "device"}:
        raise CheckpointError("rng: expected the states of torch, python, numpy and a device")
    try:
        # Each is tried on a generator of its own.
        torch.Generator().set_state(tree["torch"])
        random.Random().setstate(_python_state(tree))  # noqa: S311 - what is restored is what the user drew from
        gauss = tree["python"]["gauss"]
        _require(gauss is None or isinstance(gauss, float), "python: gauss is no number")
        if "device" in tree and device is not None:
            torch.Generator(device).set_state(tree["device"])
        if "numpy" in tree:
            kind = tree["numpy"]["bit_generator"]
            current = np.random.get_state(legacy=False)["bit_generator"]  # noqa: NPY002 - the global one is meant
            _require(kind == current, f"numpy: of a {kind}, and the global generator is a {current}")
            np.random.RandomState(getattr(np.random, kind)()).set_state(_numpy_state(tree))
    except (KeyError, AttributeError, OverflowError, RuntimeError, TypeError, ValueError) as problem:
        raise CheckpointError(f"rng: not the state of a random number generator: {problem}") from problem


def restore(tree: object, device: torch.device | None = None) -> None:
    """Set the global generators to what `capture` found. A generator that the tree does not have keeps its state.

    The state of a device's generator goes to that of `device`; without one it is left, which a warning says.

    Raises:
        CheckpointError: it is no such tree; no generator was changed.
    """
    check(tree, device)
    assert isinstance(tree, dict)
    torch.set_rng_state(tree["torch"])
    random.setstate(_python_state(tree))
    if "numpy" in tree:
        np.random.set_state(_numpy_state(tree))  # noqa: NPY002 - the global one is meant

    if "device" in tree and device is not None:
        torch.get_device_module(device).set_rng_state(tree["device"], device)
    elif "device" in tree:
        _log.warning(
            "the checkpoint has the state of a device's random numbers, and this session computes on none: from here on others are drawn"
        )


def _python_state(tree: dict[str, Any]) -> tuple[Any, ...]:
    python = tree["python"]
    return (python["version"], tuple(python["words"].tolist()), python["gauss"])


def _numpy_state(tree: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = _pytree.tree_map_only(torch.Tensor, torch.Tensor.numpy, tree["numpy"])
    return state


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
