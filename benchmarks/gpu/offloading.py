"""Peers that keep parameters and the optimizer's states on the host, each set up as its own documentation does it, on one rank."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.decoder import Decoder
from benchmarks.gpu.side import RATE, NotMeasuredError, Side, Step
from torch import Tensor

__all__ = ["deepspeed", "fsdp2"]


@contextmanager
def _meeting() -> Iterator[str]:
    """Where one rank meets itself; no port is taken."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield f"file://{Path(folder) / 'meeting'}"
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


@contextmanager
def fsdp2(side: Side) -> Iterator[tuple[Step, None]]:
    """`fully_shard` with `CPUOffloadPolicy`, on one rank: exact as it comes with torch, the update by torch's fused kernel on the host."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    if side.step == "in_backward":
        raise NotMeasuredError("FSDP2 updates after backward")
    with _meeting() as meeting:
        backend = "cpu:gloo,cuda:nccl" if side.device == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
        mesh = torch.distributed.device_mesh.init_device_mesh(side.place.type, (1,))
        with torch.device("meta"):
            model = Decoder(side.shape)
        policies: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
        if side.device == "cuda":
            policies["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
        for block in model.blocks:
            fully_shard(block, **policies)
        fully_shard(model, **policies)
        model.to_empty(device="cpu")
        with torch.no_grad():
            pattern = torch.randn(1 << 20) * 0.02
            for parameter in model.parameters():
                local: Any = parameter
                local = local.to_local() if hasattr(local, "to_local") else local
                flat = local.view(-1)
                for start in range(0, flat.numel(), pattern.numel()):
                    flat[start : start + pattern.numel()].copy_(pattern[: flat.numel() - start])
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

        def step(tokens: Tensor) -> Tensor:
            loss: Tensor = model(tokens, tokens.roll(-1, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        yield step, None


@contextmanager
def deepspeed(side: Side) -> Iterator[tuple[Step, None]]:
    """ZeRO-3 with the optimizer and the parameters on the host, the update by its own kernel there, which it compiles when it is first used."""
    if side.step == "in_backward":
        raise NotMeasuredError("DeepSpeed updates after backward")
    if importlib.util.find_spec("deepspeed") is None:
        raise NotMeasuredError("deepspeed is not installed")
    import deepspeed as library  # noqa: PLC0415

    host = {"device": "cpu", "pin_memory": side.device == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": 1,  # no sampler and no throughput of its own are used
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": host,
            "offload_param": host,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }
    with _meeting() as meeting:
        os.environ["LOCAL_RANK"] = "0"
        backend = "nccl" if side.device == "cuda" else "gloo"
        library.init_distributed(backend, auto_mpi_discovery=False, init_method=meeting, rank=0, world_size=1)
        with library.zero.Init(config_dict_or_path=config):
            model = Decoder(side.shape)
        engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)

        def step(tokens: Tensor) -> Tensor:
            loss: Tensor = engine(tokens, tokens.roll(-1, 1))
            engine.backward(loss)
            engine.step()
            return loss

        yield step, None
