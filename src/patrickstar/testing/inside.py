"""Sessions in which a part of the library is exchanged for another that keeps the same contract: no bit may depend on which."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from patrickstar.config.arguments import check_arguments
from patrickstar.memory.links import MakeLane
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.manage import assemble
from patrickstar.session.session import Session


def manage_inside(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    make_lane: MakeLane | None = None,
    choice: UpdateChoice = UpdateChoice(),  # noqa: B008  (frozen)
    **arguments: Any,
) -> Session:
    """Does what `patrickstar.manage(model, optimizer, **arguments)` does, with these lanes, and with chunks updated when this says.

    Raises what that raises.
    """
    return assemble(model, optimizer, check_arguments(**arguments), make_lane=make_lane, choice=choice)
