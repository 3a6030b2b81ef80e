"""timm's training script: its optimizer by groups of layers, stochastic depth, mixup, clipping by norm or by unit, its averages and its schedule.

`make test-full` installs it. It asks for a torchvision, whose builds belong to one build of torch each, and uses it for pictures only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy
import pytest
import torch
from torch import Tensor

from tests.loops.runs import SLOT, Run, budgets, expect_same, manage, rows
from tests.parity.compare import compare_mappings

pytestmark = [pytest.mark.campaign, pytest.mark.filterwarnings("default")]

CLASSES, STEPS = 16, 4


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional"):
        monkeypatch.setitem(sys.modules, f"torchvision{name}", MagicMock())


def build(name: str) -> Any:
    timm = importlib.import_module("timm")
    torch.manual_seed(0)
    if name == "vit":
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
        return timm.models.VisionTransformer(**sizes, num_classes=CLASSES, drop_path_rate=0.1)
    return timm.models.ConvNeXt(
        num_classes=CLASSES, depths=(1, 2, 1, 1), dims=(16, 32, 32, 32), drop_path_rate=0.1, ls_init_value=0.1
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, 3, 32, 32, generator=generator), torch.randint(CLASSES, (2,), generator=generator))
        for _ in range(STEPS)
    ]


def train(memory: Mapping[str, Any] | None, name: str, *, clip: str, recomputes: bool) -> tuple[Run, dict[str, Tensor]]:
    for part in ("data.mixup", "loss", "optim", "scheduler", "utils"):
        importlib.import_module(f"timm.{part}")
    timm: Any = sys.modules["timm"]
    model, run = build(name), Run()
    model.set_grad_checkpointing(recomputes)
    optimizer = timm.optim.create_optimizer_v2(
        model, opt="adamw", lr=1e-2, weight_decay=0.05, layer_decay=0.75, fused=True
    )
    session = None if memory is None else manage(model, optimizer, memory)
    if session is not None:
        optimizer = session.optimizer
    average = timm.utils.ModelEmaV3(model, decay=0.9, use_warmup=True)
    schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=1, warmup_lr_init=1e-4)
    mixup = timm.data.mixup.Mixup(mixup_alpha=0.2, num_classes=CLASSES)
    numpy.random.seed(0)  # by which it draws
    loss_of = timm.loss.SoftTargetCrossEntropy()
    for number, batch in enumerate(batches()):
        images, targets = mixup(*batch)
        model.train()
        loss = loss_of(model(images), targets)
        loss.backward()
        timm.utils.dispatch_clip_grad(timm.models.model_parameters(model, exclude_head="agc" in clip), 0.1, mode=clip)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model, step=number)
        schedule.step(number + 1)
        model.eval()
        with torch.no_grad():
            run.losses += [loss.detach(), *(each(images).sum() for each in (model, average.module))]
    averages = {key: value.clone() for key, value in average.module.state_dict().items()}
    return run.finish(model, optimizer, session), averages


@rows
@pytest.mark.parametrize(
    ("name", "clip", "recomputes"), [("vit", "norm", False), ("vit", "agc", True), ("convnext", "value", False)]
)
def test_timms_loop_has_the_bits_of_the_same_program_without_us(
    name: str, clip: str, recomputes: bool, memory: str, tmp_path: Path
) -> None:
    want, wanted_averages = train(None, name, clip=clip, recomputes=recomputes)
    got, averages = train(budgets(tmp_path / "disk", tight=24 * SLOT)[memory], name, clip=clip, recomputes=recomputes)
    expect_same(want, got, memory)
    assert not compare_mappings("average", wanted_averages, averages)
