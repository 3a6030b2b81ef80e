"""The state of a tensor, and the only moves between states.

                 contents arrive               leased                    lease ends
        FREE ───────────────────> HOLD ─────────────────> COMPUTE ──┬──────────────────> HOLD
         ^                                                   ^      ├─ by a forward ───> HOLD_AFTER_FWD
         │ contents are given up                             │      └─ its gradient ───> HOLD_AFTER_BWD
         └─────────── any HOLD ──────────────────────────────┘

    HOLD_AFTER_FWD ── its gradient arrives without a use (an embedding's does) ──> HOLD_AFTER_BWD
    HOLD_AFTER_BWD ── another part of its gradient arrives ──> HOLD_AFTER_BWD
    HOLD_AFTER_FWD, HOLD_AFTER_BWD ── the next step begins ──> HOLD

| state          | occupies memory | what may be trusted                        | may move |
|----------------|-----------------|--------------------------------------------|----------|
| FREE           | no              | there are no contents                      | -        |
| HOLD           | yes             | contents are valid on some tier            | yes      |
| COMPUTE        | yes             | an operation reads its address right now   | no       |
| HOLD_AFTER_FWD | yes             | as HOLD; a backward of this step wants it  | yes      |
| HOLD_AFTER_BWD | yes             | as HOLD; its gradient of this step is here | yes      |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from patrickstar.errors import StateError


class TensorState(Enum):
    """What is true of a tensor's contents now; see the table at the top of this file."""

    FREE = "FREE"
    COMPUTE = "COMPUTE"
    HOLD = "HOLD"
    HOLD_AFTER_FWD = "HOLD_AFTER_FWD"
    HOLD_AFTER_BWD = "HOLD_AFTER_BWD"

    def __str__(self) -> str:
        return self.value


FREE, COMPUTE, HOLD = TensorState.FREE, TensorState.COMPUTE, TensorState.HOLD
HOLD_AFTER_FWD, HOLD_AFTER_BWD = TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD

MOVES: Final[Mapping[TensorState, frozenset[TensorState]]] = MappingProxyType(
    {
        FREE: frozenset({HOLD}),
        HOLD: frozenset({COMPUTE, FREE}),
        COMPUTE: frozenset({HOLD, HOLD_AFTER_FWD, HOLD_AFTER_BWD}),
        HOLD_AFTER_FWD: frozenset({COMPUTE, HOLD, HOLD_AFTER_BWD, FREE}),
        HOLD_AFTER_BWD: frozenset({COMPUTE, HOLD, HOLD_AFTER_BWD, FREE}),
    }
)


def move(now: TensorState, to: TensorState) -> TensorState:
    """`to`, where the table allows it after `now`.

    Raises:
        StateError: it does not; the message names both states, and where `now` may lead.
    """
    if to not in MOVES[now]:
        allowed = ", ".join(state.value for state in TensorState if state in MOVES[now])
        raise StateError(f"a tensor in {now} cannot become {to}; from {now} it may become {allowed}")
    return to


def next_step(now: TensorState) -> TensorState:
    """The state in which a tensor begins the next step.

    Raises:
        StateError: it is in COMPUTE; a step ends only when every lease has.
    """
    if now in (FREE, HOLD):
        return now
    if now is COMPUTE:
        raise StateError(f"a tensor is still in {now} where a step begins: end its use first")
    return move(now, HOLD)


def chunk_state(states: Iterable[TensorState]) -> TensorState:
    """The state of a chunk: COMPUTE if any of its tensors is, FREE if all are, else what the others agree on, or HOLD.

    So a chunk is pinned while any of its tensors is in use, and is free to be reused only when none has contents.
    """
    present = set(states)
    if COMPUTE in present:
        return COMPUTE
    present.discard(FREE)
    if not present:
        return FREE
    return present.pop() if len(present) == 1 else HOLD
