"""Fine-tunes all parameters of a 7B-class model on one card of 24 GB: weights from a `from_pretrained` directory, text from files.

    python examples/finetune_7b.py MODEL_DIRECTORY TEXT... --disk scratch --out fine-tuned

The model is built without memory for its weights, which go from its files into chunks one at a time. Every gradient is used as it arrives
(`step="in_backward"`), so that 12 bytes a parameter are all there is: what the card and the host do not hold lies in files below `--disk`.
Activations are recomputed, block by block. What that comes to, before anything is downloaded:

    patrickstar plan --machine gpu-24g --model examples/llama-2-7b.json --step in_backward --batch-size 1 --seq-len 2048 --disk scratch

Without a GPU the CPU computes, with the same bits in every budget.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import patrickstar


def main() -> None:
    asked = arguments()
    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    print(f"computes on {torch.cuda.get_device_name(device) if device.startswith('cuda') else device}")

    config = AutoConfig.from_pretrained(asked.model)
    config.use_cache = False  # of keys and values, which serves generation
    with patrickstar.deferred_init():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.gradient_checkpointing_enable()
    model.train()

    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr, weight_decay=0.01)
    session = patrickstar.manage(
        model,
        optimizer,
        weights=asked.model,
        device=device,
        precision="bf16",
        step="in_backward",
        device_memory=asked.device_memory,
        host_memory=asked.host_memory,
        disk=asked.disk,
    )
    optimizer = session.optimizer
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=asked.steps)

    place = "cuda" if device.startswith("cuda") else "cpu"  # of inputs; an emulated device is in host memory
    tokens = read(asked.model, asked.text)
    for step, windows in enumerate(batches(tokens, asked.batch_size, asked.seq_len, asked.steps), 1):
        inputs = windows.to(place)
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()  # parameters are updated in here
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"step {step} of {asked.steps}: loss {loss.item():.4f}", flush=True)

    print(session.stats())
    session.export(asked.out)
    session.close(keep_weights=False)
    print(f"{asked.out}: weights and configuration, for from_pretrained")


def read(model: Path, files: list[Path]) -> torch.Tensor:
    """The tokens of all files, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer(file.read_text(), return_tensors="pt", verbose=False).input_ids[0] for file in files]
    return torch.cat(texts)


def batches(tokens: torch.Tensor, batch_size: int, seq_len: int, count: int) -> Iterator[torch.Tensor]:
    """So many batches of windows, [batch_size, seq_len], drawn anew from all that there are in every round through the text."""
    windows = tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)
    if len(windows) < batch_size:
        raise SystemExit(f"the text has {len(tokens)} tokens, less than {batch_size} windows of {seq_len}")
    order = torch.Generator().manual_seed(0)
    while True:
        for rows in torch.randperm(len(windows), generator=order).split(batch_size):
            if len(rows) == batch_size:
                if not count:
                    return
                yield windows[rows]
                count -= 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tunes a causal language model of transformers.")
    parser.add_argument("model", type=Path, help="directory with config.json, a tokenizer and safetensors weights")
    parser.add_argument("text", type=Path, nargs="+", help="text files")
    parser.add_argument("--out", type=Path, default=Path("fine-tuned"))
    parser.add_argument("--disk", type=Path, help="directory for what the memory does not hold")
    parser.add_argument("--device", help="cuda, cpu or emulated; the GPU where there is one")
    parser.add_argument("--device-memory", help="such as 20GiB; most of what is free where left out")
    parser.add_argument("--host-memory", help="such as 48GiB; most of what is free where left out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1e-5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
