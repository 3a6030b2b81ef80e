"""Lightning's trainer, with its own clipping, accumulation and schedule."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import patrickstar
from tests.loops.runs import Run, budgets, expect_same, llama, optimize, rows, sentences

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


class Decoder(lightning.LightningModule):
    """The network is a module of its own: its calls are what a session sees of a step."""

    def __init__(self, memory: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.network = llama()
        self.memory = memory
        self.session: patrickstar.Session | None = None
        self.run = Run()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.network(**batch).loss
        self.run.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, _: Any) -> None:
        norms = [p.grad.norm() for p in self.network.parameters() if p.grad is not None]
        self.run.norms.append(torch.stack(norms).norm())

    def configure_optimizers(self) -> Any:
        optimizer, self.session = optimize(self.network, self.memory)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(memory: Mapping[str, Any] | None, root: Path) -> Run:
    module = Decoder(memory)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(root),
    )
    trainer.fit(module, DataLoader(sentences(12), batch_size=2))  # type: ignore[arg-type]
    optimizer: Any = trainer.optimizers[0] if module.session is None else module.session.optimizer
    return module.run.finish(module.network, optimizer, module.session)


@rows
def test_lightnings_loop_has_the_bits_of_the_same_program_without_us(memory: str, tmp_path: Path) -> None:
    got = train(budgets(tmp_path / "disk")[memory], tmp_path)
    expect_same(train(None, tmp_path), got, memory)
    assert max(float(norm) for norm in got.norms) > 0.5, "nothing was clipped"
