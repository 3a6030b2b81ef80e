"""The same program without us, in a roomy budget and in a tight one.

All tensors are multiples of 16 elements long: there our update has the bits of `torch.optim.AdamW(fused=True)` (`docs/bits.md`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import patrickstar
from tests.parity.compare import compare_mappings
from tests.session.masters import SCALE

CHUNK = 4096
SLOT = 4 * CHUNK
VOCABULARY = 64

BINDING = {
    "roomy": r"whole$|\d+ blocks, .*16-bit weights",
    "by block": r"\d+ blocks, ",
    "tight": "by use: ",
    "tight, on disk": "by use: ",
}
"""How parameters are bound in each memory, as statistics say it."""

rows = pytest.mark.parametrize(
    "memory",
    [
        pytest.param("roomy", marks=pytest.mark.whole),
        pytest.param("by block", marks=pytest.mark.blocks),
        pytest.param("tight", marks=pytest.mark.campaign),
        "tight, on disk",
    ],
)


@dataclass
class Run:
    """What a program has computed. `moved`: bytes, `binding`: of the parameters, where it ran under a session."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    moved: int = 0
    binding: str = ""

    def finish(self, model: nn.Module, optimizer: Any, session: patrickstar.Session | None) -> Run:
        """Notes what is there at the end, and closes the session."""
        for number, parameter in enumerate(
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ):
            for key, value in optimizer.state.get(parameter, {}).items():
                self.state[f"{number}.{key}"] = value.clone()
        if session is not None:
            stats = session.stats()
            self.moved, self.binding = sum(stats.moved.values()), stats.binding
            session.close()
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        return self


def expect_same(want: Run, got: Run, memory: str) -> None:
    """Every loss, norm, weight and moment has the same bits; parameters were bound as they are to be, and something moved but in a roomy memory."""
    assert want.losses, "a program that computes nothing proves nothing"
    for what in ("losses", "norms"):
        pairs = [{str(n): torch.as_tensor(v) for n, v in enumerate(getattr(run, what))} for run in (want, got)]
        assert not (found := compare_mappings(what, *pairs)), "\n".join(found)
    found = compare_mappings("weight", want.weights, got.weights) + compare_mappings("state", want.state, got.state)
    assert not found, "\n".join(found)
    assert want.state
    assert bool(got.moved) == (memory != "roomy"), f"{got.moved} bytes moved"
    assert re.match(BINDING[memory], got.binding), got.binding


def budgets(disk: Path, *, tight: int | str = 20 * SLOT) -> Mapping[str, dict[str, Any]]:
    """Memory of a session: roomy, and so tight that model states must move."""
    return {
        "roomy": {"device": "emulated", "device_memory": "64MiB"},
        "by block": {"device": "emulated", "device_memory": tight},
        "tight": {"device": "emulated", "device_memory": tight},
        "tight, on disk": {"device": "cpu", "host_memory": tight, "disk": disk},
    }


def manage(model: nn.Module, optimizer: Any, memory: Mapping[str, Any], *, kind: str = "fp32") -> patrickstar.Session:
    """A session whose slots are poisoned as they are given back. `kind`: a precision, with the type that computes where it is another."""
    kept, _, compute = kind.partition("-")
    options = patrickstar.Options(
        chunk_size=CHUNK,
        poison=True,
        compute=compute or kept,  # type: ignore[arg-type]
        loss_scale=patrickstar.LossScale(initial=SCALE, dynamic=False),
    )
    return patrickstar.manage(model, optimizer, precision=kept, options=options, **memory)  # type: ignore[arg-type]


def optimize(
    model: nn.Module, memory: Mapping[str, Any] | None, *, weight_decay: float = 0.1
) -> tuple[Any, patrickstar.Session | None]:
    """torch's fused optimizer; with `memory` that of a session over it, and the session."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=weight_decay, fused=True)
    session = None if memory is None else manage(model, optimizer, memory)
    return (optimizer if session is None else session.optimizer), session


def trainer_arguments(output: Path) -> dict[str, Any]:
    """Three steps of transformers' trainer, clipped and accumulated."""
    batches = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    quiet = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    return {**batches, **quiet, "output_dir": str(output), "use_cpu": True, "seed": 0}


def run_trainer(trainer: Any, optimizer: Any, session: patrickstar.Session | None) -> Run:
    """Trains, and notes what the trainer has logged."""
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    run = Run([torch.tensor(entry["loss"]) for entry in logs], [torch.tensor(float(e["grad_norm"])) for e in logs])
    return run.finish(trainer.model, optimizer, session)


def llama(*, width: int = 32, layers: int = 4) -> LlamaForCausalLM:
    """A decoder of the transformers library; the same bits at each call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


def sentences(n: int, *, length: int = 8) -> list[dict[str, Tensor]]:
    """Examples for a language model."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (n, length), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]
