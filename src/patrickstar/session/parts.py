"""Parts of a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from patrickstar.comm.collectives import Collectives
from patrickstar.core.layout import Layout
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, STEP
from patrickstar.errors import StateError
from patrickstar.memory.leases import AssembledKey
from patrickstar.optim.user_optimizer import State
from patrickstar.parallel.group import MeshGroup
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.session.mesh_tensors import MeshTensors
from patrickstar.step.events import Events, expect_own_parameters
from patrickstar.step.executor import Executor
from patrickstar.step.stretches import Stretches
from patrickstar.step.training import Training
from patrickstar.step.values import Weights
from patrickstar.step.whole import Whole


@dataclass(slots=True, eq=False)
class StepBytes:
    """Counts bytes that are handed to process groups, from one step of the optimizer to the next.

    Attributes:
        groups: those that the model works together with, by mesh dimension. shared: the collectives of the ranks that share it, "dp".
        last: bytes of the last step, by mesh dimension.
    """

    groups: Mapping[str, MeshGroup]
    shared: Collectives | None
    last: dict[str, int] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)

    def step_ended(self) -> None:
        """Notes the end of a step."""
        now = {name: group.sent_bytes() for name, group in self.groups.items()}
        if self.shared is not None:
            now["dp"] = self.shared.sent_bytes
        self.last = {name: total - self._before.get(name, 0) for name, total in now.items()}
        self._before = now


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a session that take steps. The store, which has all memory, is the executor's.

    Attributes:
        whole: the parameters as long as they keep their bytes.
        collectives: of the ranks that share the model, where there are several. mesh: of a model whose parameters are blocks.
        sent: what is handed to process groups, step by step.
        host_budget_bytes: what chunks and tensors may take of the host, where the user gave a bound, or None.
    """

    model: nn.Module
    named: Mapping[str, nn.Parameter]
    layout: Layout
    binding: Binding
    executor: Executor
    stretches: Stretches
    events: Events
    weights: Weights
    training: Training
    whole: Whole
    host_budget_bytes: int | None
    collectives: Collectives | None
    mesh: MeshTensors | None
    sent: StepBytes

    @property
    def everyone(self) -> Collectives | None:
        """The collectives of all ranks that take part, where there are several."""
        return self.collectives if self.mesh is None else self.mesh.ranks.collectives

    @property
    def all_collectives(self) -> list[Collectives]:
        """The collectives of this session, each once."""
        return [one for one in (self.collectives, None if self.mesh is None else self.everyone) if one is not None]

    def shape(self, bound: BoundParameter) -> tuple[int, ...]:
        """The shape of a parameter in the model's own layout."""
        return tuple(bound.shape_only.shape) if self.mesh is None else self.mesh.shape(bound.name)

    @property
    def steps(self) -> dict[str, int]:
        """Updates so far, by parameter."""
        return self.training.updates.steps

    def expect_open(self) -> None:
        """Raises StateError where the session is closed."""
        if self.events.is_closed:
            raise StateError(
                f"{self.events.session_name} is closed: the model has ordinary parameters; manage it again"
            )

    def begin_access(self) -> None:
        """Prepares for reading or writing state: does what is pending, and ends a stretch that is complete. StateError: the session is closed."""
        self.expect_open()
        self.events.forget_abandoned_backward()
        self.executor.settle()
        self.events.check_watch()
        self.binding.whole.take_back()
        self.stretches.pause()

    def end_step(self) -> None:
        """Ends what is under way, an update too, and lets gradients go: states are about to be loaded anew, or to move to other ranks."""
        self.executor.settle()
        self.stretches.end()
        self.training.zero_grad(set_to_none=True)
        self.training.forget_unfinished()

    def take_states(self, states: Mapping[str, State]) -> None:
        """Sets the optimizer's state of these parameters."""
        for name, state in states.items():
            self.weights.write_average(name, EXP_AVG, state.exp_avg)
            self.weights.write_average(name, EXP_AVG_SQ, state.exp_avg_sq)
            self.steps[name] = state.step
            self.binding.assembled.changed(AssembledKey(name, STEP))

    def expect_whole_model(self) -> None:
        """Raises StateError where the weights are of no one step, or not those that are managed."""
        self.training.expect_whole()
        expect_own_parameters(self.model, self.named, self.binding.is_managed)
