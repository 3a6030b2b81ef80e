"""The random number generators of a process, as a tree that `extra.py` encodes: torch on the CPU, Python, NumPy."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from patrickstar.errors import CheckpointError

__all__ = ["capture", "restore"]

_NUMPY_KINDS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def capture() -> dict[str, Any]:
    """The state of the global generators now; drawing nothing. NumPy's only where NumPy is imported."""
    version, words, gauss = random.getstate()
    tree: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        # 625 numbers: as a tensor, they do not fill the index.
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        tree["numpy"] = numpy.random.get_state(legacy=False)
    return tree


def restore(tree: object) -> None:
    """Set the global generators to what `capture` found. A generator that the tree does not have keeps its state.

    Raises:
        CheckpointError: it is no such tree; no generator was changed.
    """
    if not isinstance(tree, dict) or not {"torch", "python"} <= tree.keys() <= {"torch", "python", "numpy"}:
        raise CheckpointError("rng: expected the states of torch, python and numpy")
    try:
        # Each is tried on a generator of its own first, so that all are set or none.
        torch.Generator().set_state(tree["torch"])
        python = tree["python"]
        state = (python["version"], tuple(python["words"].tolist()), python["gauss"])
        random.Random().setstate(state)  # noqa: S311 - what is restored is what the user drew from
        _require(state[2] is None or isinstance(state[2], float), "python: gauss is no number")
        if "numpy" in tree:
            import numpy as np  # noqa: PLC0415 - only for those who had it when they saved

            kind = tree["numpy"]["bit_generator"]
            _require(kind in _NUMPY_KINDS, "numpy: unknown generator")
            np.random.RandomState(getattr(np.random, kind)()).set_state(tree["numpy"])
            np.random.set_state(tree["numpy"])  # noqa: NPY002 - the global generator is what is meant
    except (KeyError, AttributeError, OverflowError, RuntimeError, TypeError, ValueError) as problem:
        raise CheckpointError(f"rng: not the state of a random number generator: {problem}") from problem
    torch.set_rng_state(tree["torch"])
    random.setstate(state)


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
