"""Storages over slots that are in use, and copies of parameters in the type that computes.

Note [Leases]
    Every time a unit is asked for, its slot is wrapped in a *fresh* storage, and the slot may move or be reused only when every storage over
    it has died. So whatever keeps a weight alive (a view handed to a child module, a tensor that autograd saved, a buffer protocol export)
    keeps the slot where it is, without anybody having to know about it. The worst outcome of a forgotten reference is "no slot free", never
    a wrong number.

Note [Copies]
    Where weights are kept in another type than the one that computes (16-bit weights on a processor that is slow in 16 bits; the fp32 master of
    an fp16 weight), a use sees a copy of its parameter, converted when it is asked for. A copy is leased under the parameter's name; as long as
    anything holds it, it is the same one for everybody, so that a change made through one view is seen through all. It pins no slot, and its
    bytes count as any tensor's. On a device it is made on the stream of its first use, where a user believes that the weight has always been:
    other streams come after that (`CopyStreams`).
    Gradients and the optimizer's state are seen so too (Note [Assembled tensors] in `parameters/assembled.py`), leased under an `AssembledKey`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

import torch

from patrickstar.core.cuda_blocks import block_bytes
from patrickstar.core.planes import PlaneRef
from patrickstar.memory.stream_lane import StreamTicket
from patrickstar.torch_private import NotInference


class AssembledKey(NamedTuple):
    """The key of something kept of one parameter beside its weight: its part of a plane, or the count of its updates (`STEP`)."""

    name: str
    plane: str


WeightKey = PlaneRef | str
"""The key of a lease on weights: a unit, whose slot is leased, or the name of a parameter, whose copy is."""

CopyKey = str | AssembledKey
"""The key of a tensor that is leased in the stead of a slot: a parameter's copy, or what was put together."""

Key = WeightKey | AssembledKey
"""The key of any lease: on weights, or on what was put together for a use."""


class Located(NamedTuple):
    """The place of a tensor in what is leased: the unit or copy, and the bytes from the start of that to the tensor's first element."""

    key: Key
    offset_bytes: int


class Leases:
    """The living storages over slots, by unit, and the living copies, by parameter.

    Args:
        wrap: gives a 1-D tensor over a fresh storage of the slot that holds this unit now, which must be resident. wrap_part: of some elements.

    Attributes:
        unit_of: keys of leases, by the address of the storage; those of storages that are `dead` until `settle`.
        making_bytes: of what is being put together now.
    """

    def __init__(
        self,
        wrap: Callable[[PlaneRef], torch.Tensor],
        wrap_part: Callable[[PlaneRef, slice], torch.Tensor] = lambda *_: torch.empty(0),
    ) -> None:
        self._wrap = wrap
        self._wrap_part = wrap_part

        self._tensor: dict[Key, weakref.ref[torch.Tensor]] = {}
        self.unit_of: dict[int, Key] = {}
        self._starts: dict[int, int] = {}  # in bytes, of storages over a part of a unit
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._held: set[PlaneRef] = set()
        self._copies: dict[Key, tuple[weakref.ref[torch.UntypedStorage], torch.dtype, torch.device]] = {}
        self._assembled: dict[Key, int] = {}
        self.making_bytes = 0
        self._count: dict[Key, int] = {}
        self._streams = CopyStreams()
        # A storage dies wherever its last reference is dropped: inside a collection, on another thread, in the middle of our own
        # bookkeeping. The callback only notes it; `settle` draws the consequences at a time of our choosing.
        self.dead: deque[int] = deque()

    def take(self, ref: PlaneRef) -> torch.Tensor:
        """A 1-D tensor over the unit's slot. The unit stays in that slot while this tensor, or any view of it, lives."""
        if (known := self._tensor.get(ref)) is not None and (tensor := known()) is not None:
            return tensor
        with NotInference():  # made there it could neither be saved for backward nor written later
            return self._note(ref, self._wrap(ref))

    def take_copy(self, key: CopyKey, make: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The 1-D tensor that is held in the stead of a parameter's slot, or made now. There is no other while a view of this tensor lives."""
        known = self._tensor.get(key)
        tensor = known() if known is not None else None
        if tensor is None:
            tensor = self.living_copy(key)
        if tensor is not None:
            self._streams.use(key, tensor)
        else:
            tensor = self._note(key, make(key))
            self._streams.made(key, tensor)
            # Not the storage's device: that of a fake tensor is on meta.
            self._copies[key] = weakref.ref(tensor.untyped_storage()), tensor.dtype, tensor.device
            if isinstance(key, AssembledKey):
                self._assembled[key] = block_bytes(tensor.nbytes, tensor.device.type)
        return tensor

    def take_part(self, ref: PlaneRef, part: slice) -> torch.Tensor:
        """A 1-D tensor over some elements of the unit's slot, with a storage of its own. Leases the unit as `take` does."""
        with NotInference():
            tensor = self._wrap_part(ref, part)
        return self._note(ref, tensor, start_bytes=tensor.element_size() * part.start)

    def _note(self, ref: Key, tensor: torch.Tensor, start_bytes: int | None = None) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.unit_of:  # the address of a storage that died, whose death has not been settled yet
            self.settle()
        self.unit_of[key] = ref
        self._deaths[key] = weakref.ref(storage, lambda _, key=key, dead=self.dead: dead.append(key))  # type: ignore[misc]
        self._count[ref] = self._count.get(ref, 0) + 1
        if isinstance(ref, PlaneRef):
            self._held.add(ref)
        if start_bytes is None:
            self._tensor[ref] = weakref.ref(tensor)
        else:
            self._starts[key] = start_bytes
        return tensor

    def living_copy(self, ref: CopyKey) -> torch.Tensor | None:
        """The copy that something still has a view of: there is never a second one."""
        kept, dtype, device = self._copies.get(ref, (None, None, None))
        storage = kept() if kept is not None else None
        if storage is None or dtype is None:
            return None
        with NotInference():
            numel = storage.nbytes() // dtype.itemsize
            return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))

    def copy_written(self, key: CopyKey, tensor: torch.Tensor) -> None:
        """Notes that what is held in the stead of a slot has been written on the current stream: uses on others come after that."""
        self._streams.written(key, tensor)

    def forget(self, name: str) -> None:
        """Forgets the copy of this parameter: what is asked for next is a new one."""
        self._tensor.pop(name, None)
        self._copies.pop(name, None)

    def locate(self, tensor: torch.Tensor) -> Located | None:
        """The place of a tensor that is over what is leased, else None."""
        if self.dead:
            self.settle()  # an ordinary tensor may have got the address of a lease that has died: it must not be taken for a slot
        key = tensor.untyped_storage()._cdata
        ref = self.unit_of.get(key)
        if ref is None:
            return None
        return Located(ref, self._starts.get(key, 0) + int(tensor.storage_offset()) * tensor.element_size())

    def settle(self) -> None:
        """Ends the leases of storages that have died."""
        while self.dead:
            key = self.dead.popleft()
            ref = self.unit_of.pop(key)
            del self._deaths[key]
            self._starts.pop(key, None)
            self._count[ref] -= 1
            if not self._count[ref]:
                self._forget(ref)

    def _forget(self, ref: Key) -> None:
        del self._count[ref]
        self._tensor.pop(ref, None)
        self._held.discard(ref)
        if not isinstance(ref, PlaneRef):
            self._copies.pop(ref, None)
            self._streams.forget(ref)
            self._assembled.pop(ref, None)

    def disown(self, ref: Key) -> None:
        """Ends the leases under a key: whoever still holds the tensor keeps it as ordinary memory."""
        self.settle()
        if ref not in self._count:
            return
        for key in [key for key, leased in self.unit_of.items() if leased == ref]:
            del self.unit_of[key], self._deaths[key]
            self._starts.pop(key, None)
        self._forget(ref)

    def assembled_bytes(self) -> int:
        """Bytes of what was put together for uses and is still held, or is being put together."""
        if not self._assembled:
            return self.making_bytes
        self.settle()
        return sum(self._assembled.values()) + self.making_bytes

    def is_counted(self, tensor: torch.Tensor) -> bool:
        """Tells whether the tensor's bytes count elsewhere: those of a slot, or of what was put together for a use."""
        place = self.locate(tensor)
        return place is not None and not isinstance(place.key, str)

    def living(self) -> Collection[Key]:
        """Keys of all that is leased now."""
        self.settle()
        return self._count.keys()

    def storages(self) -> list[torch.UntypedStorage]:
        """The storages over slots that somebody has now."""
        self.settle()
        keys = [key for key, ref in self.unit_of.items() if isinstance(ref, PlaneRef)]
        living = (self._deaths[key]() for key in keys)
        return [storage for storage in living if storage is not None]

    def held(self) -> Collection[PlaneRef]:
        """The units that may not move now."""
        if self.dead:
            self.settle()
        return self._held.copy()  # another thread may take leases meanwhile


class CopyStreams:
    """The last writing of each copy of a weight, or gradient, on a device, and the streams that come after it: each keeps its memory from whoever
    comes next."""

    def __init__(self) -> None:
        self._written: dict[Hashable, StreamTicket] = {}
        self._seen: dict[Hashable, set[int]] = {}

    def written(self, key: Hashable, copy: torch.Tensor) -> None:
        """Notes that a copy has been written on the current stream of this thread."""
        if copy.is_cuda:
            stream = torch.accelerator.current_stream(copy.device)
            copy.record_stream(stream)  # which is perhaps not the one whose memory it is
            self._written[key] = StreamTicket(stream)
            self._seen[key] = {stream.stream_id}

    def made(self, key: Hashable, copy: torch.Tensor) -> None:
        """Notes that the current stream is about to use a copy for the first time, and has written it where nobody has said who has."""
        (self.use if key in self._written else self.written)(key, copy)

    def use(self, key: Hashable, copy: torch.Tensor) -> None:
        """Has the current stream of this thread, which is about to use a copy, come after its writing."""
        ticket = self._written.get(key)
        if ticket is None:
            return
        stream = torch.accelerator.current_stream(copy.device)
        if stream.stream_id not in self._seen[key]:
            ticket.wait_on_device()
            copy.record_stream(stream)
            self._seen[key].add(stream.stream_id)

    def forget(self, key: Hashable) -> None:
        """Forgets a copy that is let go."""
        self._written.pop(key, None)
        self._seen.pop(key, None)
