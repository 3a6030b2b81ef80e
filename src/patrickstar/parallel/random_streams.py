"""Random numbers of ranks whose activations are blocks of one tensor: masks of dropout must differ from block to block.

Outside of a forward all ranks have the same random state, with which they shuffle data alike. In it each has another, which follows from that one
and from the rank's place. So whoever saves random states, or restores them to run a block again, needs to know nothing of this.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from patrickstar.errors import StateError
from patrickstar.torch_private import without_modes


class RandomStreams:
    """Events of a model's forward, as `patrickstar.hooks.watch_root` takes them. `place`: this rank's number in its grid."""

    def __init__(self, place: int, device: torch.device) -> None:
        self._place, self._devices = place, [device] if device.type == "cuda" else []

        self._forward = ExitStack()
        self._began: list[bytes] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> RandomStreams:
        return self  # of a copied model, whose forwards are none within another's

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Switches to this rank's numbers."""
        if kwargs.get("past_key_values") is not None:
            raise StateError(
                "a 2D model does not generate: its logits are blocks. Gather its state_dict() into a whole model for that"
            )
        if not module.training:
            return
        seed = int.from_bytes(
            hashlib.sha256(b"".join([*self._states(), self._place.to_bytes(4, "little")])).digest()[:8], "little"
        )
        self._forward.enter_context(torch.random.fork_rng(self._devices))
        torch.manual_seed(seed)
        self._began = self._states()

    def after_forward(self, module: nn.Module) -> None:  # noqa: ARG002
        """Goes back to those of all; the next forward gets others, if this one has drawn any."""
        has_drawn = self._began and self._began != self._states()
        self._began = []
        self._forward.close()
        if has_drawn:
            torch.rand(())

    def _states(self) -> list[bytes]:
        with without_modes():  # fake tensors are none that can be read
            states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]
            return [state.numpy().tobytes() for state in states]
