"""One contender of `compare.py`, in a process of its own: builds its model, takes steps, prints one line of figures."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["MARK", "SIZES"]

MARK: Final = "compare: "
MIB: Final = 1 << 20
LR: Final = 1e-4
VOCABULARY: Final = 50_257
SIZES: Final = {"tiny": (2, 64, 2), "124M": (12, 768, 12), "355M": (24, 1024, 16), "774M": (36, 1280, 20)}
"""Layers, width and heads of each GPT-2."""

Job = dict[str, Any]
Step = Callable[[Tensor], Tensor]
"""From tokens to the loss."""


def main() -> None:
    job: Job = json.loads(sys.argv[1])
    side = SIDES[job["contender"].partition("-")[0]]
    step = side(job)
    seconds = []
    for number in range(job["steps"] + 1):
        tokens = torch.randint(VOCABULARY, (1, job["tokens"]), generator=torch.Generator().manual_seed(number))
        began = time.perf_counter()
        loss = step(tokens).item()
        seconds.append(time.perf_counter() - began)
    print("\n" + MARK + json.dumps({"seconds": seconds[1:], "loss": loss}), flush=True)
    os._exit(0)  # ends of libraries are no part of a step


def gpt2(job: Job) -> Any:
    """The model, ready to train, with activations recomputed."""
    layers, width, heads = SIZES[job["model"]]
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    model: Any = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=VOCABULARY, **off))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def loop(model: Any, optimizer: Any) -> Step:
    """A step as PyTorch has it."""

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def plain(job: Job) -> Step:
    model = gpt2(job)
    return loop(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))


def managed(job: Job) -> Step:
    import patrickstar  # noqa: PLC0415

    with patrickstar.deferred_init():
        model = gpt2(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    # The cap holds the interpreter and all libraries; 16 MiB are for what grows beside the session.
    fields = [row.split() for row in Path("/proc/self/status").read_text().splitlines()]
    held = 1024 * sum(int(row[1]) for row in fields if row[0] in ("RssAnon:", "RssShmem:"))
    host_memory = min(job["cap_bytes"] - held - 16 * MIB, 1 << 40)
    session = patrickstar.manage(
        model, optimizer, device="cpu", precision="fp32", host_memory=host_memory, disk=job["disk"]
    )
    return loop(model, session.optimizer)


def meet(job: Job) -> dict[str, Any]:
    """How one rank meets itself without a port."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    return {"init_method": f"file://{job['disk']}/meeting", "rank": 0, "world_size": 1}


def fsdp2(job: Job) -> Step:
    """Each block sharded and the rest as one, all offloaded: built on meta, as PyTorch recommends for models that do not fit."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: PLC0415

    torch.distributed.init_process_group("gloo", **meet(job))
    with torch.device("meta"):
        model = gpt2(job)
    for part in [*model.transformer.h, model]:
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0.0, 0.02)
    return loop(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))


def zero3(job: Job) -> Step:
    """Built under `zero.Init`; buckets, groups and buffers as small as the largest parameter lets them be."""
    meeting = meet(job)
    import deepspeed  # noqa: PLC0415

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, **meeting)
    config = zero3_config(job)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = gpt2(job)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def zero3_config(job: Job) -> dict[str, Any]:
    where = job["contender"].partition("-")[2]
    place: dict[str, Any] = {"device": where}
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": False, "contiguous_gradients": True}
    zero |= dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), int(1e7))
    buffers: dict[str, Any] = {}
    if where == "nvme":
        place["nvme_path"] = job["disk"]
        zero |= dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), int(1e7))
        zero["sub_group_size"] = int(2e7)
        table = VOCABULARY * SIZES[job["model"]][1]
        # With fewer than 5 buffers it stops: "Not enough buffers 0 for swapping 1".
        buffers = {"buffer_count": 5, "buffer_size": (table // 1024 + 1) * 1024, "max_in_cpu": 0}
    zero |= {"offload_optimizer": dict(place), "offload_param": place | buffers}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "aio": {"block_size": MIB, "queue_depth": 16, "single_submit": False, "overlap_events": True},
    }


SIDES: Final = {"plain": plain, "fsdp2": fsdp2, "deepspeed": zero3, "patrickstar": managed}


if __name__ == "__main__":
    main()
