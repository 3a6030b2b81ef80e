"""Trains a causal language model of transformers on several ranks, which share its model states.

    torchrun --nproc-per-node 4 examples/train_on_ranks.py MODEL_DIRECTORY TEXT... --disk scratch --out trained

It is a loop for one process with three lines about ranks: a process group before `manage`, a `DistributedSampler`, and output from rank 0 alone.
Each rank keeps a share of weights, gradients and optimizer states, within a share of its machine's `host_memory` and `disk_memory`; what is
computed, saved and printed is what one process would that adds the gradients of all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

import patrickstar


def main() -> None:
    asked = arguments()
    dist.init_process_group("gloo")  # 1 of 3: `manage` finds it
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # all ranks begin with the same weights; `manage` compares them
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr)
    session = patrickstar.manage(model, optimizer, device="cpu", host_memory=asked.host_memory, disk=asked.disk)
    optimizer = session.optimizer

    windows = read(asked.model, asked.text, asked.seq_len)
    sampler = DistributedSampler(windows, shuffle=True, seed=0, drop_last=True)  # 2 of 3: each rank has rows of its own
    loader = DataLoader(windows, batch_size=asked.batch_size // ranks, sampler=sampler, drop_last=True)
    step, epoch = 0, 0
    while step < asked.steps:
        sampler.set_epoch(epoch)
        for inputs in loader:
            loss = model(input_ids=inputs, labels=inputs).loss
            loss.backward()  # ends with the mean of all ranks' gradients
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0:  # 3 of 3: one voice. Nothing in here may use the model: all ranks call it alike
                print(f"step {step} of {asked.steps}: loss of rank 0 {loss.item():.4f}", flush=True)
            if step == asked.steps:
                break
        epoch += 1

    session.close()  # on all ranks: the model has whole weights again
    if rank == 0:
        model.save_pretrained(asked.out)
    dist.destroy_process_group()


def read(model: Path, files: list[Path], seq_len: int) -> torch.Tensor:
    """The text of all files, one after the other, as windows of tokens: [windows, seq_len]."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = torch.cat([tokenizer(file.read_text(), return_tensors="pt", verbose=False).input_ids[0] for file in files])
    return tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a causal language model of transformers under torchrun.")
    parser.add_argument("model", type=Path, help="directory with config.json, a tokenizer and safetensors weights")
    parser.add_argument("text", type=Path, nargs="+", help="text files")
    parser.add_argument("--out", type=Path, default=Path("trained"))
    parser.add_argument("--disk", type=Path, help="directory for what the memory does not hold")
    parser.add_argument("--host-memory", help="of the machine, such as 48GiB; its ranks share it")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="of all ranks together")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
