"""The end of a session, after which the model is an ordinary one again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property

import torch
from torch import Tensor

from patrickstar.core.planes import REST, WEIGHT, PlaneRef
from patrickstar.errors import StateError
from patrickstar.optim.managed import ManagedOptimizer
from patrickstar.optim.user_optimizer import begin_anew, return_state
from patrickstar.parameters.bound import BoundParameter
from patrickstar.session.buffers import Kind, put_on_meta, restore_buffers
from patrickstar.session.optimizer_target import states_of
from patrickstar.session.parts import Parts

_log = logging.getLogger("patrickstar")


class Closing:
    """Gives back what was taken, stage by stage: where a disk fails in the middle, what is left can be given back by another try.

    Args:
        hooks: those on the model. dtypes, buffers: what its parameters were, and those buffers that have been cast or moved.
        optimizer: of a session that trains.
        keep_weights: whether the model keeps them; otherwise its parameters become meta tensors.
    """

    def __init__(
        self,
        parts: Parts,
        hooks: ExitStack,
        dtypes: Mapping[str, torch.dtype],
        buffers: Mapping[str, Kind],
        *,
        optimizer: ManagedOptimizer | None,
        keep_weights: bool,
    ) -> None:
        self._parts = parts
        self._hooks = hooks
        self._dtypes = dtypes
        self._buffers = buffers
        self._optimizer = optimizer
        lost = next((one.failure for one in parts.all_collectives if one.failure is not None), None)
        if keep_weights and lost is not None:
            _log.warning(
                "the weights that other ranks had are lost (%s): parameters are on the meta device now", lost.reason
            )
            keep_weights = False
        self._wanted = keep_weights
        self._keeps = keep_weights and self._fits(self._weight_bytes())

        self._gradients: dict[str, Tensor] = {}
        self._stages = [self._finish, self._return_gradients, self._return_optimizer_state, self._return_weights]
        if keep_weights and not self._keeps:
            _log.warning(
                "the weights do not fit the host budget as ordinary tensors: the model's parameters are on the meta device now. "
                "Call session.export(dir) or session.save_checkpoint(dir) before close() to keep them"
            )

    def give_up(self) -> None:
        """Wants no weights any more, where they could not be read."""
        self._wanted = self._keeps = False
        self._gradients.clear()
        self._parts.executor.store.land_all()

    def run(self) -> None:
        """Does all that is left to do. DeviceError where weights cannot be read: another call goes on from there."""
        while self._stages:
            self._stages[0]()
            del self._stages[0]
        parts = self._parts
        self._hooks.close()
        if not self._keeps:
            put_on_meta(parts.model, self._dtypes)
        for name, gradient in self._gradients.items():
            parts.named[name].grad = gradient
        restore_buffers(parts.model, self._buffers)
        if self._optimizer is not None:
            self._optimizer.detach()
        parts.executor.store.close()
        for one in parts.all_collectives:
            one.close()

    def _finish(self) -> None:
        if not self._wanted:
            self._parts.executor.pending = None
            self._parts.executor.store.land_all()
        else:
            self._parts.training.finish()
            if self._parts.mesh is not None:  # who leaves before others have all their panels is missed by them
                self._parts.mesh.ranks.collectives.agree(b"", "close()")
        self._parts.binding.access.close()  # a block may be open, of a backward that an exception has ended
        self._parts.stretches.end()

    def _return_gradients(self) -> None:
        """Leaves gradients that nobody has used, where they fit as whole tensors beside the weights."""
        training, stretch = self._parts.training, self._parts.executor.pilot.stretch
        if not self._keeps or training.in_backward:
            return
        reserved = stretch.reserve_bytes
        try:
            gradients = training.gradients()
        except StateError as problem:
            _log.warning("the gradients are dropped: %s", problem)
            return
        for name, gradient in gradients:
            if gradient.layout is not torch.strided:
                continue  # the user's own, which no step takes
            stretch.reserve(gradient.nbytes)
            if not self._fits(self._weight_bytes() + stretch.reserve_bytes - reserved):
                _log.warning(
                    "the gradients do not fit the host budget as whole tensors together with the weights: they are dropped"
                )
                self._gradients.clear()
                stretch.reserve(reserved - stretch.reserve_bytes)
                return
            self._gradients[name] = gradient.to("cpu", self._dtypes[name])  # where weights come back

    def _return_optimizer_state(self) -> None:
        """Gives the optimizer that was passed in its state, where that fits as whole tensors beside the weights."""
        parts, steps = self._parts, self._parts.steps
        if not self._keeps or self._optimizer is None or not steps:
            return
        needed = sum(2 * 4 * bound.shape_only.numel() for bound in parts.binding if bound.name in steps)
        if not self._fits(
            needed + self._weight_bytes() + sum(gradient.nbytes for gradient in self._gradients.values())
        ):
            begin_anew(self._optimizer.original)
            return
        parts.executor.pilot.stretch.reserve(needed)  # chunks make room
        return_state(self._optimizer.original, parts.binding.names, states_of(parts))

    def _return_weights(self) -> None:
        # Gradients and moments are no longer wanted: weights may take their room as ordinary tensors.
        store = self._parts.executor.store
        for ref in sorted({ref for refs in store.state.taken.values() for ref in refs}):
            if ref.plane not in (WEIGHT, REST):
                store.release(ref)
        self._parts.binding.release(self._taken_back if self._keeps else lambda _: None)

    def _taken_back(self, bound: BoundParameter) -> Tensor:
        parts = self._parts
        value = parts.weights.read(bound.name).to(self._dtypes[bound.name])
        parts.executor.pilot.stretch.reserve(value.nbytes)
        state = parts.executor.store.state
        held = parts.binding.leases.held()  # by what outlives the session: it keeps its memory
        for ref in self._masters_units(bound):
            if self._last_of[ref] == bound.name and ref in state.taken[state.compute] and ref not in held:
                parts.executor.store.release(ref)  # its slots' pages go before the next parameter is read
        return value

    @cached_property
    def _last_of(self) -> dict[PlaneRef, str]:
        """The last parameter in each unit of masters, in registration order, with which the unit has been read whole."""
        return {ref: bound.name for bound in self._parts.binding for ref in self._masters_units(bound)}

    def _masters_units(self, bound: BoundParameter) -> list[PlaneRef]:
        """The units that a parameter's master lies in."""
        home = self._parts.executor.store.state.home
        rests = [PlaneRef(part.chunk, REST) for part in self._parts.layout.parts(bound.name)]
        return [*bound.refs, *(ref for ref in rests if ref in home)]

    def _weight_bytes(self) -> int:
        return sum(4 * bound.shape_only.numel() for bound in self._parts.binding)

    def _fits(self, nbytes: int) -> bool:
        budget, state = self._parts.host_budget_bytes, self._parts.executor.store.state
        return budget is None or nbytes + 2 * max(state.unit_bytes(ref) for ref in state.home) <= budget
