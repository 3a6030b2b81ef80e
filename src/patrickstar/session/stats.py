"""Statistics of what a session has done so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.session.parts import Parts
from patrickstar.units import format_bytes


@dataclass(frozen=True, slots=True)
class Stats:
    """Numbers of a session. Tiers are "device", "host" and "disk"; links "H>D", "D>H", "H>K" and "K>H" (K: disk), and "ranks" to all others."""

    peak: Mapping[str, int]
    """Peak bytes of each tier, model states and activations together; 0 where a tier is not used."""

    moved: Mapping[str, int]
    """Bytes transferred over each link; "ranks": weights and gradients handed to other ranks."""

    sent: Mapping[str, int]
    """Bytes handed to process groups in the last step, by mesh dimension; "dp": weights and gradients, and what ranks agree on is left out."""

    model_data: Mapping[str, int]
    """Bytes of model states by plane, on whichever tier, each counted once."""

    steps: int
    """Optimizer steps."""

    planned_steps: int
    """Steps that followed their plans."""

    reactive_steps: int
    """Steps that ran unplanned, in part at least."""

    reason: str
    """The plan miss of the last of these."""

    seconds: Mapping[str, float]
    """Seconds of the last step, by phase: forward, backward, step."""

    bytes_per_parameter: float
    """Bytes of model states per parameter."""

    binding: str
    """How parameters have their bytes: "whole", ordinary ones for the whole session; else in how many blocks, or "by use", and why."""

    def __str__(self) -> str:
        """A table of peaks and transfers by tier, and lines about model states, steps and seconds."""
        tiers = ("device", "host", "disk")
        # To a tier from below, from it to below.
        links = {"fetched": ("H>D", "K>H", ""), "offloaded": ("D>H", "H>K", "")}
        rows: dict[str, list[int | None]] = {"peak": [self.peak[tier] for tier in tiers]}
        rows |= {name: [self.moved.get(link) for link in found] for name, found in links.items()}
        planes = ", ".join(f"{plane} {format_bytes(nbytes)}" for plane, nbytes in self.model_data.items())
        seconds = ", ".join(f"{phase} {spent:.3f} s" for phase, spent in self.seconds.items())
        lines = [_row("", tiers)]
        lines += [_row(name, ["-" if n is None else format_bytes(n) for n in sizes]) for name, sizes in rows.items()]
        total = format_bytes(sum(self.model_data.values()))
        data = f"{total}, {self.bytes_per_parameter:.2f} bytes per parameter{f': {planes}' if planes else ''}"
        other = f", {self.reactive_steps} not ({self.reason})" if self.reactive_steps else ""
        steps = f"{self.steps}, {self.planned_steps} as planned{other}"
        lines += [_line("model states", data), _line("steps", steps), _line("last step", seconds or "-")]
        lines.append(_line("parameters", self.binding))
        return "\n".join(lines)


def _row(name: str, cells: Sequence[str]) -> str:
    return _line(name, "".join(f"{cell:>13}" for cell in cells))


def _line(name: str, text: str) -> str:
    return f"{name:14}{text}"


def gather_stats(parts: Parts) -> Stats:
    """The numbers as they are now. What a step that is called and not over will have made counts as model data, and what it lets go of does not."""
    store, counts, blocks = parts.executor.store, parts.stretches.counts, len(parts.stretches.blocks.bound)
    state, ledger, pending = store.state, store.ledger, parts.executor.pending
    gradient_bytes = sum(gradient.nbytes for _, gradient in parts.binding.gradients.owned())
    made, freed = pending.leaves() if pending is not None else (frozenset[PlaneRef](), frozenset[PlaneRef]())
    model_data: dict[str, int] = {}
    for ref in state.home:
        if (ref in made or not state.is_free(ref)) and ref not in freed:
            model_data[ref.plane] = model_data.get(ref.plane, 0) + state.unit_bytes(ref)
    if gradient_bytes:
        model_data[GRAD] = model_data.get(GRAD, 0) + gradient_bytes
    return Stats(
        peak={tier.label: nbytes for tier, nbytes in ledger.peak.items()},
        moved={**ledger.moved, "ranks": 0 if parts.collectives is None else parts.collectives.sent_bytes},
        sent=dict(parts.sent.last),
        model_data=model_data,
        steps=counts.steps,
        planned_steps=counts.planned,
        reactive_steps=counts.reactive,
        reason=counts.reason,
        seconds={**parts.events.seconds, "step": parts.training.updates.seconds},
        binding=f"{f'{blocks} blocks, the rest ' if blocks else ''}by use: {parts.whole.why}"
        if parts.whole.why
        else "whole",
        bytes_per_parameter=sum(model_data.values()) / max(1, parts.layout.model_numel),
    )
