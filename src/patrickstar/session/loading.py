"""`manage(..., weights=)`: values that come from files, a tensor at a time, in the place of those the model has."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from patrickstar.checkpoint.matching import match
from patrickstar.checkpoint.naming import naming_of
from patrickstar.checkpoint.tensors import bytes_of
from patrickstar.checkpoint.weight_files import WeightFiles
from patrickstar.comm.all_ranks import AllRanks
from patrickstar.core.machine import Tier
from patrickstar.core.planes import WEIGHT
from patrickstar.deferred.deferred_init import present_and_absent_bytes
from patrickstar.errors import CheckpointError, some
from patrickstar.parameters.bound import names_by_id
from patrickstar.plan.residency import Residency
from patrickstar.session.buffers import persistent_buffers
from patrickstar.step.budgets import Budgets

_log = logging.getLogger("patrickstar")
_PIECE_NUMEL = 1 << 20
_SHOWN = 5


class Loading:
    """Weights of a model from files, of which `take_over` asks first.

    `names`: parameters whose values the files have. `keep`: whether those hold their own values until nothing can fail any more; where not, they
    have the new ones after an error, which is told.
    """

    def __init__(self, model: nn.Module, named: Mapping[str, nn.Parameter], path: Path) -> None:
        """Opens the files, holds them against the model, and tells what either side has not. CheckpointError: damaged, or of another model."""
        tensors = tensors_of(model)
        parameters = names_by_id(named)
        self._model = model
        self._naming = naming_of(model)
        self._files = WeightFiles(path)
        found = match(self._files, tensors, self._naming)
        origins = {id(tensor): found.origins[keys[0]] for keys, tensor in tensors.items() if keys[0] in found.origins}
        self._origins = {parameters[tensor]: origin for tensor, origin in origins.items() if tensor in parameters}
        self._buffers = {
            path: origins[id(buffer)] for path, buffer in persistent_buffers(model).items() if id(buffer) in origins
        }
        self.names = frozenset(self._origins)

        self.keep = True
        self._values: dict[str, Tensor] = {}
        _tell(path, "of the model are not in the files and keep the values they have", found.missing)
        _tell(path, "in the files are none of the model's and are not used", found.unexpected)
        _log.info("%s: %d of %d tensors of the model", path, len(found.origins), len(tensors))

    def read(self, name: str) -> Tensor:
        """A parameter's value, of the type it has in its file."""
        return self._origins[name].read(self._files, self._naming)

    def prepare(
        self, named: Mapping[str, nn.Parameter], state: Residency, budgets: Budgets, all_ranks: AllRanks
    ) -> None:
        """Does what can be done before anything changes. CheckpointError: something cannot be read, or ranks see other values."""
        self.keep = _fit_twice(named, state, budgets)
        is_shared = len(set(all_ranks.tell("manage(weights=): which files", lambda: self._files.known))) == 1

        def look() -> str:
            found = hashlib.sha256()
            for origin in () if self.keep and is_shared else self._origins.values():  # every byte that will be wanted
                for part in origin.parts:
                    for piece in self._files.pieces(part, _PIECE_NUMEL):
                        if not is_shared:
                            found.update(bytes_of(piece))
                        del piece
            self._values = {name: origin.read(self._files, self._naming) for name, origin in self._buffers.items()}
            return found.hexdigest()

        if len(set(all_ranks.tell("manage(weights=): their values", look))) > 1:
            raise CheckpointError(
                f"{self._files.path}: ranks see files with other values there: give all the same ones"
            )

    def finish(self) -> None:
        """Gives the model's buffers their values, in place, and closes the files."""
        present = persistent_buffers(self._model)
        for name, value in self._values.items():
            present[name].detach().copy_(value)
        self._values.clear()
        self._files.close()


def tensors_of(model: nn.Module) -> dict[tuple[str, ...], Tensor]:
    """Parameters and persistent buffers, each once, by all the keys that it has in the model's state dict."""
    tensors = {id(tensor): tensor for tensor in persistent_buffers(model).values()}
    tensors |= {id(tensor): tensor for tensor in model.parameters()}
    keys: dict[int, tuple[str, ...]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) in tensors:
            keys[id(value)] = (*keys.get(id(value), ()), key)
    for name, parameter in model.named_parameters():  # a hook may have left it out, or put a copy there
        keys.setdefault(id(parameter), (name,))
    return {aliases: tensors[tensor] for tensor, aliases in keys.items()}


def _fit_twice(named: Mapping[str, nn.Parameter], state: Residency, budgets: Budgets) -> bool:
    """Tells whether the model can keep its own values until the files' have come: chunks rest on the disk, or the budget has room for both."""
    if all(tier is Tier.DISK for ref, tier in state.home.items() if ref.plane == WEIGHT):
        return True
    own, _ = present_and_absent_bytes(named.values())
    chunks = sum(state.unit_bytes(ref) for ref in state.home if ref.plane == WEIGHT)
    return own + chunks <= budgets.machine.budget[Tier.HOST]


def _tell(path: Path, what: str, names: Sequence[str]) -> None:
    if names:
        _log.warning("%s: %d tensors %s: %s", path, len(names), what, some(names, most=_SHOWN))
