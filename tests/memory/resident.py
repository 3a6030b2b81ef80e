"""A whole run under management in a process of its own, and how far that process grew in each part of it.

The high-water mark of the resident size is reset before each part, which only a process that is one's own may do.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patrickstar.memory.process import peak_resident_bytes, reset_peak, resident_bytes
from patrickstar.step.resources import KERNEL_VARIABLES

MIB = 1 << 20
FIXED_BYTES = 48 * MIB
PRELUDE = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from tests.memory.resident import main; main()"


def budgets(preload: Path | None, *, shares: Sequence[float], disk: str, **wanted: Any) -> list[int]:
    """Budgets between the smallest that fits (share 0) and one in which nothing has to move (1)."""
    known = in_child(preload, "foresee", disk=disk, host_memory="1TB", disk_memory="1TB", **wanted)
    least, most = known["minimum"], known["peak"] + 64 * MIB
    return [int(least + share * (most - least)) for share in shares]


def in_child(preload: Path | None, function: str, **wanted: Any) -> dict[str, Any]:
    """What `foresee` or `measure` gives, or `life` of `deferred_child.py`, in a process of its own, under glibc or the allocator to preload."""
    environment = {name: value for name, value in os.environ.items() if name not in KERNEL_VARIABLES}
    environment["LD_PRELOAD"] = "" if preload is None else str(preload)
    command = [sys.executable, "-W", "ignore", "-c", PRELUDE, function, json.dumps(wanted)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    result = json.loads(child.stdout.splitlines()[-1])
    result["said"] = child.stderr
    return result


def main() -> None:
    """The child."""
    from tests.session.deferred_child import life

    functions = {"foresee": foresee, "measure": measure, "vary": vary, "life": life}
    print(json.dumps(functions[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)


def build(
    config: Mapping[str, Any], batch: Sequence[int], *, checkpointing: bool, holes: bool = False
) -> tuple[Any, Any]:
    """A GPT-2 and a batch of tokens. `holes`: glibc puts the weights on the heap, where they leave holes when they are taken over."""
    import torch
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    if holes:
        torch.empty(
            30 * MIB, dtype=torch.uint8
        )  # freed at once: from now on blocks of up to its size come from the heap
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **config)).train()
    model.config.use_cache = False
    model.generation_config.pad_token_id = 0
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, torch.randint(0, model.config.vocab_size, tuple(batch))


def foresee(
    *,
    config: Mapping[str, Any],
    batch: Sequence[int],
    checkpointing: bool = False,
    clip: bool = False,
    precision: str = "fp32",
    **memory: Any,
) -> dict[str, Any]:
    """The forecast's figures."""
    from patrickstar.session.forecast import forecast

    model, tokens = build(config, batch, checkpointing=checkpointing)
    known = forecast(model, {"input_ids": tokens, "labels": tokens}, clip=clip, precision=precision, **memory)
    return {
        "minimum": known.minimum["host"],
        "peak": known.peak["host"],
        "growth": known.peak["host"] + known.beside_bytes,
    }


def vary(
    *, config: Mapping[str, Any], batch: Sequence[int], disk: str, budget: int, precision: str, lengths: int
) -> dict[str, Any]:
    """Trains and evaluates with batches of so many lengths: bytes of growth by part."""
    import torch

    model, tokens = build(config, batch, checkpointing=False)
    run = Run(model, tokens, budget=budget, disk=disk, clip=False, precision=precision)
    for length in range(tokens.shape[1], tokens.shape[1] - lengths, -1):
        run.tokens = tokens[:, :length]
        with run.part(f"step of {length}"):
            run.step()
        with run.part(f"evaluation of {length}"):
            run.evaluate()
    run.session.close()
    return {"allocator": "glibc", "threads": torch.get_num_threads(), "parts": run.parts}


class Run:
    """A session and how far the process has grown in each part of its life, above what `host_memory` is counted from."""

    def __init__(self, model: Any, tokens: Any, *, budget: int, disk: str, clip: bool, precision: str) -> None:
        import torch

        import patrickstar

        self.model = model
        self.tokens = tokens
        self.clip = clip
        self.parts: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        manage = patrickstar.manage  # all that it imports is there now
        gc.collect()
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._base = resident_bytes() - self.weight_bytes
        with self.part("manage"):
            self.session = manage(model, optimizer, precision=precision, host_memory=budget, disk=disk)
        # It begins with the weights, which the program has made: where the budget does not hold them beside the fixed costs, they count as found.
        self.parts["manage"] -= max(0, self.weight_bytes + FIXED_BYTES - budget)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside counts under this name."""
        assert reset_peak()
        began = time.perf_counter()
        yield
        self.parts[name] = peak_resident_bytes() - self._base
        self.seconds[name] = round(time.perf_counter() - began, 2)

    def step(self) -> None:
        """A training step."""
        optimizer = self.session.optimizer
        assert optimizer is not None
        scaler = self.session.scaler
        scaler.scale(self.model(input_ids=self.tokens, labels=self.tokens).loss).backward()  # type: ignore[no-untyped-call]
        if self.clip:
            self.session.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def generate(self) -> None:
        """Some tokens."""
        self.model.eval().generate(self.tokens[:1, :16], max_new_tokens=6, do_sample=False, use_cache=True)
        self.model.train()

    def evaluate(self) -> None:
        """The training batch, and another shape."""
        import torch

        self.model.eval()
        with torch.no_grad():
            self.model(input_ids=self.tokens, labels=self.tokens)
            self.model(input_ids=self.tokens[:1, : self.tokens.shape[1] // 2])
        self.model.train()

    def read(self) -> None:
        """Every tensor of the state dict, one at a time."""
        for name, value in self.session.state_dict().items():
            assert value.sum().isfinite(), name


def measure(
    *,
    config: Mapping[str, Any],
    batch: Sequence[int],
    disk: str,
    budget: int,
    checkpointing: bool = False,
    clip: bool = False,
    generate_first: bool = False,
    holes: bool = False,
    steps: int = 3,
    spoil: bool = False,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Trains, evaluates, generates, saves, loads, reads every weight, trains on, closes: bytes of growth by part.

    `spoil`: the allocator keeps what it likes, and nobody looks at the resident size.
    """
    import torch

    from patrickstar.memory.allocator import allocator

    if spoil:
        from patrickstar.step import room

        room.return_at_once = lambda: ""  # type: ignore[assignment]
        room.HostRoom.excess_bytes = lambda self, growth_bytes: 0  # type: ignore[method-assign]
    model, tokens = build(config, batch, checkpointing=checkpointing, holes=holes)
    run = Run(model, tokens, budget=budget, disk=disk, clip=clip, precision=precision)
    folder = Path(disk) / "checkpoints"
    if generate_first:
        with run.part("generate first"):
            run.generate()
    for number in range(steps):
        with run.part(f"step {number}"):
            run.step()
    with run.part("evaluate"):
        run.evaluate()
    with run.part("generate"):
        run.generate()
    with run.part("save"):
        run.session.save_checkpoint(folder)
    with run.part("load"):
        run.session.load_checkpoint(folder)
    with run.part("read"):
        run.read()
    with run.part("step after"):
        run.step()
    stats = run.session.stats()
    with run.part("close"):
        run.session.close()
    return {
        "allocator": allocator().name,
        "threads": torch.get_num_threads(),
        "weights": run.weight_bytes,
        "parts": run.parts,
        "seconds": run.seconds,
        "moved": dict(stats.moved),
        "reactive": f"{stats.reactive_steps} of {stats.steps}: {stats.reason}",
    }
