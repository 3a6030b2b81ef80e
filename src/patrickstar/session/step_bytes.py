"""Bytes handed to process groups in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from patrickstar.comm.collectives import Collectives
from patrickstar.parallel.group import MeshGroup


@dataclass(slots=True, eq=False)
class StepBytes:
    """Counts bytes from one step of the optimizer to the next.

    Attributes:
        groups: those that the model works together with, by mesh dimension. shared: the collectives of the ranks that share it, "dp".
        last: bytes of the last step, by mesh dimension.
    """

    groups: Mapping[str, MeshGroup] = field(default_factory=dict)
    shared: Collectives | None = None
    last: dict[str, int] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)

    def step_ended(self) -> None:
        """Notes the end of a step."""
        now = {name: group.sent_bytes() for name, group in self.groups.items()}
        if self.shared is not None:
            now["dp"] = self.shared.sent_bytes
        self.last = {name: total - self._before.get(name, 0) for name, total in now.items()}
        self._before = now
