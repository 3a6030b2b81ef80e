"""Trains a causal language model of transformers with Accelerate, on several ranks, which share its model states.

    torchrun --nproc-per-node 4 examples/accelerate_on_ranks.py MODEL_DIRECTORY TEXT... --out trained

`accelerator.prepare` is given all but the model: it would put `DistributedDataParallel` around it, which keeps a whole copy on each rank. The
session gathers weights and averages gradients instead. All else of Accelerate stays as it is: the loader gives each rank its batches, and
`backward`, `accumulate` and `clip_grad_norm_` work on what the session has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import patrickstar


def main() -> None:
    asked = arguments()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)  # makes the process group that `manage` finds

    set_seed(0)  # all ranks begin with the same weights
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr)
    session = patrickstar.manage(model, optimizer, device="cpu", host_memory=asked.host_memory)

    loader = DataLoader(read(asked.model, asked.text, asked.seq_len), batch_size=asked.batch_size, drop_last=True)
    optimizer, loader = accelerator.prepare(session.optimizer, loader)  # and not the model
    for number, inputs in enumerate(loader, 1):
        with accelerator.accumulate():
            loss = model(input_ids=inputs, labels=inputs).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")  # on all ranks, as all that communicates
        accelerator.print(f"batch {number}: loss {mean.item():.4f}", flush=True)
        if number == asked.batches:
            break

    session.close()  # on all ranks: the model has whole weights again
    if accelerator.is_main_process:
        model.save_pretrained(asked.out)
    accelerator.end_training()


def read(model: Path, files: list[Path], seq_len: int) -> torch.Tensor:
    """The text of all files, one after the other, as windows of tokens: [windows, seq_len]."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = torch.cat([tokenizer(file.read_text(), return_tensors="pt", verbose=False).input_ids[0] for file in files])
    return tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a causal language model with Accelerate under torchrun.")
    parser.add_argument("model", type=Path, help="directory with config.json, a tokenizer and safetensors weights")
    parser.add_argument("text", type=Path, nargs="+", help="text files")
    parser.add_argument("--out", type=Path, default=Path("trained"))
    parser.add_argument("--host-memory", help="of the machine, such as 48GiB; its ranks share it")
    parser.add_argument("--batches", type=int, default=100, help="of each rank, two for a step")
    parser.add_argument("--batch-size", type=int, default=4, help="of each rank")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
