"""A loop like `train_unconditional.py` of diffusers: a U-Net predicts the noise that was added to pictures; averages of its weights are kept.

`make test-full` installs diffusers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.loops.runs import Run, budgets, expect_same, optimize, rows
from tests.parity.compare import compare_mappings

pytestmark = [pytest.mark.campaign, pytest.mark.filterwarnings("default")]

STEPS, CHANNELS, WORDS = 4, 16, 32


def build() -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        layers_per_block=1,
        block_out_channels=(32, 32),
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WORDS,
        attention_head_dim=16,
    )


def train(memory: Mapping[str, Any] | None) -> tuple[Run, list[Tensor]]:
    from diffusers import DDPMScheduler
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    model, run = build(), Run()
    optimizer, session = optimize(model, memory)
    average = EMAModel(
        model.parameters(), decay=0.9, use_ema_warmup=True, model_cls=type(model), model_config=model.config
    )
    noising = DDPMScheduler(num_train_timesteps=1000)
    schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=STEPS)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        clean = torch.randn(1, CHANNELS, 8, 8, generator=generator)
        words = torch.randn(1, 4, WORDS, generator=generator)
        noise = torch.randn(clean.shape, generator=generator)
        timesteps = torch.randint(1000, (1,), generator=generator)
        prediction = model(noising.add_noise(clean, noise, timesteps), timesteps, words).sample
        loss = F.mse_loss(prediction, noise)
        loss.backward()
        run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        run.losses.append(loss.detach())
    average.store(model.parameters())
    average.copy_to(model.parameters())  # as it is sampled
    model.eval()
    with torch.no_grad():
        run.losses.append(model(clean, timesteps, words).sample.sum())
    average.restore(model.parameters())
    return run.finish(model, optimizer, session), average.shadow_params


TIGHT = "2MiB"
"""Half of the model states, or less."""


@rows
def test_a_diffusion_loop_has_the_bits_of_the_same_program_without_us(memory: str, tmp_path: Path) -> None:
    want, wanted_averages = train(None)
    got, averages = train(budgets(tmp_path / "disk", tight=TIGHT)[memory])
    expect_same(want, got, memory)
    pairs = [{str(number): tensor for number, tensor in enumerate(each)} for each in (wanted_averages, averages)]
    assert not compare_mappings("average", *pairs)
