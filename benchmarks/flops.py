"""Floating-point operations of a training step, counted by torch as it runs the step on tensors without values.

A multiplication with an addition is two operations, and only matrix products count, attention's included: no norms, no activations, no
optimizer. Attention is counted in full, without the half that a causal mask leaves out.

- `model`: three times what a forward takes, as each product of a forward needs two in backward. What has to be computed, however it is done.
  For a GPT-2 of L layers of width h with a vocabulary V, on b sequences of s tokens, 72 b s L h^2 (1 + s/6h + V/12Lh): the formula of Narayanan
  et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC 2021, appendix), less the fourth that
  recomputing adds there.
- `executed`: what forward and backward really run: blocks that are computed again, and the scores that attention's backward computes again.

Source of the count: `torch.utils.flop_counter.FlopCounterMode`. It lacks the attention kernel of CPUs, which is added here by torch's own rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["StepFlops", "count_step"]

_BACKWARD_OF_A_FORWARD: Final = 2


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Of forward and backward of one step."""

    model: int
    executed: int


def count_step(build: Callable[[], Any], *, batch_size: int, seq_len: int) -> StepFlops:
    """Of one step of the causal language model that `build` makes, in training mode, its checkpointing switched on or not."""
    with FakeTensorMode():
        model = build()
        batch = torch.zeros(batch_size, seq_len, dtype=torch.int64)
        with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
            loss = model(input_ids=batch, labels=batch).loss
            forward = counter.get_total_flops()
            loss.backward()
            executed = counter.get_total_flops()
    return StepFlops((1 + _BACKWARD_OF_A_FORWARD) * forward, executed)


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _backward(grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad_out, query, key, value))


_CPU_ATTENTION: Final = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
