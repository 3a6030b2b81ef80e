"""`patrickstar.manage`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar.config.arguments import check_arguments
from patrickstar.config.options import Options
from patrickstar.session.assemble import assemble
from patrickstar.session.session import Session


def manage(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: str | None = None,
    precision: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: str | Path | None = None,
    disk_memory: int | str | None = None,
    states: str = "exact",
    step: str = "deferred",
    max_grad_norm: float | None = None,
    weights: str | Path | None = None,
    activations: str = "model",
    mesh: object | None = None,
    options: Options | None = None,
    **unknown: Any,
) -> Session:
    """Puts a model's parameters, gradients and optimizer states into chunks that move between tiers of memory.

    The training loop stays as it is, with `session.optimizer` in place of the optimizer. No budget changes a bit of any result.

    Args:
        model: any module with dense floating parameters on the CPU. A master starts from the value a parameter has now, or gets from
            the initialisation that `deferred_init` has recorded.
        optimizer: torch's or patrickstar's Adam or AdamW over parameters of the model, whose groups and state are taken over. None: weights
            only are managed, for evaluation.
        device: "cpu"; "cuda", or "cuda:1"; "emulated": a bounded arena of host memory plays a device. None: CUDA where there is one, else "cpu".
        precision: "bf16": the weight is the upper half of an fp32 master. "fp16": it is rounded from one, and `session.scaler` scales the loss.
            None: the type that most elements of the model's parameters have.
        device_memory: budget of the device: chunks and activations. Sizes are bytes, or text such as "512MiB", "1.5GB", "70%". None: 90 % of the
            free memory of a GPU, less a reserve for its libraries; of the emulated device as much as the host's.
        host_memory: how much the process may grow, not counting the weights taken over. None: 80 % of the available memory.
        disk, disk_memory: directory and budget of the disk tier. None: no disk tier; 90 % of the free space.
        step: "deferred", at `optimizer.step()`, or "in_backward", as gradients arrive.
        max_grad_norm: clips the global norm at every step.
        options: see `Options`; nobody should need it.
        weights: safetensors file, or directory as `save_pretrained` leaves it: values that replace the model's, one tensor at a time.
        states, activations: their default only, until a later version.
        mesh: `DeviceMesh` with a dimension "dp": the ranks that share the model. None: those of the default process group, if there is one.
    Raises:
        ConfigError, LayoutError, StateError, BudgetError, CheckpointError, DeviceError: model and optimizer are then as before.
    """
    known = {name: value for name, value in locals().items() if name not in ("model", "optimizer", "unknown")}
    return assemble(model, optimizer, check_arguments(**known, **unknown))
