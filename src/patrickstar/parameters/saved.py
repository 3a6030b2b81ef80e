"""Tensors that autograd saves for backward while a managed parameter is in use.

Note [Saved tensors]
    Autograd saves an alias of a weight (`nn.Linear` saves its transpose), not the leaf. With slots that move, an alias read in backward would
    be another chunk's bytes. So an alias of a slot is packed as *where it lies*, and resolved when backward unpacks it.
    Saved-tensor hooks do not nest: torch calls the topmost pair only. Pushed for a whole session ours would miss every weight saved during a
    non-re-entrant recomputation (checkpoint's own pair is on top there); pushed around a module they would switch the user's checkpointing
    off. So our hooks are pushed around each *use* of a parameter, and whatever is not a slot is handed to the pair underneath.
    A backward that makes a graph (`create_graph=True`) saves the weights that it unpacks once more, for its own backward, and no use surrounds
    it. There our hooks are pushed as a weight is unpacked, for as long as its node runs: before each node torch sets its thread's state, hooks
    included, to what it was when the backward was called. Not in the backward of a `torch.autograd.Function`, which may have contexts of its
    own open around what it unpacks; nor where hooks are forbidden: there the alias is kept, and holds its slot.
    Hooks of the user's are given weights too, as torch gives them. What they give back of one is packed as where it lies if it is an alias still.
    Under hooks torch does not check that a saved tensor is unchanged: both kinds carry the version they had, and unpacking checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from patrickstar.errors import StateError
from patrickstar.memory.leases import WeightKey
from patrickstar.parameters.transforms import expect_no_transform
from patrickstar.parameters.weight_access import WeightAccess
from patrickstar.torch_private import (
    Plain,
    Seen,
    are_saved_tensors_hooks_allowed,
    backward_makes_graph,
    inside_node_of_torch,
    is_checkpoints,
    saves_on_cpu,
    top_saved_tensors_hooks,
    transform_level,
)


class SavedSlice(NamedTuple):
    """An alias of a managed parameter, as autograd saved it.

    `is_recomputed`: True where the forward that saved it runs again before it is read, as gradient checkpointing does.
    """

    key: WeightKey
    view: SlotView
    owner: torch.nn.Parameter
    version: int
    is_recomputed: bool


class SlotView(NamedTuple):
    """A view of what is leased, with every trait that a view can have: strides in elements of its own type, the offset in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int
    is_conjugated: bool
    is_negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, offset_bytes: int) -> SlotView:
        """The view that a tensor is."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset_bytes, tensor.is_conj(), tensor.is_neg())

    def over(self, leased: torch.Tensor) -> torch.Tensor:
        """Gives the same view of what is leased now, a 1-D tensor."""
        size = self.dtype.itemsize
        if self.dtype is leased.dtype:
            alias = torch.as_strided(leased, self.shape, self.stride, self.offset_bytes // size)
        else:  # a weight read as another type (`view_as_complex`): its bytes, of which each element takes `size`
            stride = (*(step * size for step in self.stride), 1)
            flat = torch.as_strided(leased.view(torch.uint8), (*self.shape, size), stride, self.offset_bytes)
            alias = flat.view(self.dtype).squeeze(-1)
        if self.is_conjugated:
            alias = torch._conj(alias)
        return torch._neg_view(alias) if self.is_negated else alias


SavedTensor = tuple[torch.Tensor, int]
"""A saved tensor that is no alias of a managed parameter, with no hooks underneath ours, and its version."""


class SavedUnderneath(NamedTuple):
    """A saved tensor, packed by the hooks underneath ours. `alias`: what it is, where they are only to have the forward run again."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]
    alias: SavedSlice | None = None


Saved = SavedSlice | SavedTensor | SavedUnderneath


def changed_message(shape: tuple[int, ...], now: int, then: int) -> str:
    """The words PyTorch uses when a tensor needed for backward has been changed."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[torch.FloatTensor {list(shape)}] is at version {now}; expected version {then} instead. "
        "A weight was changed between forward and backward: change it before the forward or after the backward"
    )


class WeightChangedError(StateError, RuntimeError):
    """A weight was changed between forward and backward. Also a RuntimeError, as which PyTorch raises the same thing."""


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """The pair of saved-tensor hooks around uses.

    `lasting`: gives what may be kept of a tensor that lies elsewhere. `standin`: gives one of a parameter's shape and type that holds no slot.
    """

    access: WeightAccess
    lasting: Callable[[torch.Tensor], torch.Tensor]
    standin: Callable[[torch.nn.Parameter], torch.Tensor]

    def around_use(self, *, of_block: bool = False) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which saved aliases of parameters are packed here, and other tensors by the hooks that were on top before.

        `of_block`: whether it is a call of a block, not a use in one.
        """
        if not are_saved_tensors_hooks_allowed():
            raise StateError(
                "a use of a managed parameter where hooks of saved tensors are forbidden (torch.autograd.graph.disable_saved_tensors_hooks, which "
                "transforms of torch.func are, too): its saved tensor could not be found again. Use it outside of that context"
            )
        underneath = top_saved_tensors_hooks()
        is_recomputed = underneath is not None and is_checkpoints(underneath)
        takes_weights = underneath is not None and not is_recomputed and not saves_on_cpu(underneath)

        leases = self.access.leases

        def pack(tensor: torch.Tensor) -> Saved:
            if leases.dead:
                leases.settle()
            # Most of what is saved lies elsewhere.
            with Plain():  # a Function of the user's saves aliases as they are
                is_leased = tensor.layout is torch.strided and tensor.untyped_storage()._cdata in leases.unit_of
                saved = self._slice(tensor, is_recomputed=is_recomputed) if is_leased else None
            if saved is not None and underneath is not None and takes_weights:
                packed = underneath[0](tensor)
                saved = self._slice(packed, is_recomputed=False) if isinstance(packed, torch.Tensor) else None
                if saved is None:
                    return SavedUnderneath(packed, underneath[1])
                return SavedUnderneath(saved, lambda saved: underneath[1](self.unpack(saved)))
            if saved is not None and underneath is not None and is_recomputed:
                # It counts what is saved, and stops when all of it is there again. Kept by it, an alias would hold its slot. Inside of a block
                # it has seen weights as they are, and gives back what it sees again.
                is_inside = not of_block and id(saved.owner) in self.access.in_blocks
                if saved.owner.dtype is tensor.dtype and not is_inside:
                    tensor = torch.as_strided(self.standin(saved.owner), tensor.shape, [0] * tensor.dim())
                return SavedUnderneath(underneath[0](tensor), underneath[1], saved)
            if saved is not None:
                return saved
            tensor = tensor if type(tensor) is torch.Tensor else self.lasting(tensor)
            if underneath is not None:
                return SavedUnderneath(underneath[0](tensor), underneath[1])
            # An output holds the node that saves it, which would hold it.
            return tensor.detach() if tensor.grad_fn is not None else tensor, tensor._version

        return torch.autograd.graph.saved_tensors_hooks(pack, self.unpack)

    def _slice(self, tensor: torch.Tensor, *, is_recomputed: bool) -> SavedSlice | None:
        """A tensor as an alias of a managed parameter; None where it is none."""
        found = self.access.find(tensor)
        if found is None:
            return None
        key, offset_bytes, owner = found
        with Plain():
            return SavedSlice(key, SlotView.of(tensor, offset_bytes), owner, owner._version, is_recomputed)

    def unpack(self, saved: Saved) -> torch.Tensor:
        """The saved tensor again. RuntimeError where it has been changed since, with the text PyTorch would have used."""
        match saved:
            case SavedSlice():
                if transform_level() is not None:
                    expect_no_transform("a backward through a managed parameter")
                with Plain():
                    now = saved.owner._version
                # A forward that changes its weights does it again when it runs again, and autograd reads what that has left.
                is_again = saved.is_recomputed and self.access.recomputed.get(id(saved.owner)) == now
                if now != saved.version and not is_again:
                    raise WeightChangedError(changed_message(saved.view.shape, now, saved.version))
                alias = saved.view.over(self.access.unpack(saved.key))
                if backward_makes_graph() and inside_node_of_torch() and are_saved_tensors_hooks_allowed():
                    self.around_use().__enter__()  # torch takes them away
                return alias
            case (torch.Tensor() as tensor, int() as version):
                if tensor._version != version:
                    raise RuntimeError(changed_message(tuple(tensor.shape), tensor._version, version))
                return tensor
            case SavedUnderneath():
                with Seen():  # off where a loss of the user's class runs its backward, in which a forward runs again
                    found = saved.unpack(saved.packed)
                return found if saved.alias is None else self.unpack(saved.alias)
