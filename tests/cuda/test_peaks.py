"""What a device holds: as foreseen from the first step on, within the budget, and told where it is more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from patrickstar.tracing.live_bytes import LiveBytes
from tests.cuda.twins import WIDTH, batch, mlp, twins

if TYPE_CHECKING:
    from tests.accelerator.cuda import Accelerator


class Masked(nn.Module):
    """Looks at its inputs' values, as models with masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > -100).to(torch.bool)
        return self.layers(x if mask.all() else x * mask)


def test_a_forecast_knows_the_values_of_inputs_on_the_device(accelerator: Accelerator) -> None:
    accelerator.configure(0.3, 1)
    with twins(Masked) as pair:
        pair.train(2)
        assert pair.session.stats().planned_steps == 2
        pair.expect_same()


def test_bytes_are_counted_in_whole_grains_as_the_allocator_gives_them() -> None:
    before = torch.accelerator.memory_allocated()
    with LiveBytes(lambda _: False, grain_bytes=512) as meter:
        kept = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for nbytes in (1, 512, 513, 5 * WIDTH)]
        assert meter.live == 512 * 5 == torch.accelerator.memory_allocated() - before
        del kept
    assert torch.accelerator.memory_allocated() == before


def test_a_forecast_is_what_the_allocator_then_gives_out(accelerator: Accelerator) -> None:
    accelerator.configure(0.3, 1)
    with twins() as pair:
        inputs = batch()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        pair.model(inputs).square().mean().backward()
        took = torch.accelerator.max_memory_allocated() - before
        foreseen = pair.session.trace.peak
        assert took <= foreseen <= 1.5 * took  # more is reserved for a loss outside of the model than this one takes
