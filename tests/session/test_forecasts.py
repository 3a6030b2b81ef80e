"""Which models have no forecast before their first step, and why: of the parity matrix, and of the architectures beyond it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import patrickstar
from patrickstar.core.formats import FP32
from patrickstar.core.trace import Trace
from patrickstar.plan.fit import minimum_bytes
from tests.composed import Composed
from tests.parity.architectures import ARCHITECTURES
from tests.parity.zoo import CASES, micro_seed
from tests.sampling import only
from tests.session.builders import adamw, finish

NO_FORECAST: dict[str, str] = {"penalised": "it differentiates a gradient (create_graph=True), which no forward shows"}
"""What has no forecast of its first step, with what the session says of it."""

LARGER_FORECAST: dict[str, str] = {
    "convnext": "the loss does not use the pooled output",
    "longformer": "the loss does not use the pooled output",
    "roberta": "the loss does not use the pooled output",
}
"""What does less than its forecast in its first step, which therefore departs from its plan, and why. The forecast's bound holds."""


def built(name: str) -> tuple[Any, Callable[[nn.Module], Tensor], Any]:
    """A model of the matrix or of the architectures, what gives its loss, and the groups of its optimizer."""
    torch.manual_seed(0)
    if name in CASES:
        case = CASES[name]
        model, drawn = case.build(), case.batches(seed=0, count=1)[0]
        torch.manual_seed(micro_seed(1, 0))
        return model, lambda model: case.loss_of(model, drawn), case.groups(model)
    make, loss_of = ARCHITECTURES[name]()
    model = make().train()
    torch.manual_seed(0)  # of what is drawn then, wav2vec2 keeps all of its layers
    return model, loss_of, model.parameters()


IN_THE_SUITE = ("longformer", "opt", "roberta", "wav2vec2")
"""Architectures of which it is asked in every run of the tests: a branch on the input, none, an output that is not used, a branch by chance."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *only([*list(CASES)[::3], *NO_FORECAST, *LARGER_FORECAST], CASES),
        *IN_THE_SUITE,
        *(pytest.param(name, marks=pytest.mark.campaign) for name in ARCHITECTURES if name not in IN_THE_SUITE),
    ],
)
def test_the_first_step_is_foreseen_or_known_not_to_be(name: str) -> None:
    """On a device with room for everything."""
    model, loss_of, groups = built(name)
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    with patrickstar.manage(model, optimizer, device="emulated", device_memory="256MiB", precision="fp32") as session:
        finish(loss_of(model), session.optimizer)
        stats, layout = session.stats(), session.layout
        (known,) = session._parts.stretches.known.kinds.values()
    measured = known.measured if known.twice is None else known.twice.measured
    assert measured is not None
    assert (stats.steps, stats.planned_steps) == (1, name not in NO_FORECAST | LARGER_FORECAST), stats.reason
    if name in NO_FORECAST:
        assert NO_FORECAST[name] in stats.reason
        return
    assert known.offline is not None, stats.reason
    foreseen, needed = (minimum_bytes(trace, layout=layout, formats=FP32) for trace in (known.offline, measured))
    assert name not in LARGER_FORECAST or needed <= foreseen


def forecasts(name: str) -> list[Trace | None]:
    """Traces of the forwards of a first step's loss."""
    model, loss_of, _ = built(name)
    with patrickstar.manage(
        model, adamw(model), device="emulated", device_memory="256MiB", precision="fp32"
    ) as session:
        _ = loss_of(model)
        return [known.offline for known in session._parts.stretches.known.kinds.values()]


@pytest.mark.parametrize(
    "loss",
    [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss, F.l1_loss, F.huber_loss],
    ids=lambda loss: loss.__name__,
)
def test_a_loss_is_foreseen_with_the_memory_that_it_keeps(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """It is one number while the rest of the forward runs."""
    reconstruct = lambda model, x: loss(model.first(x).sigmoid(), x) + model.rest(x).square().mean()
    model = Composed(reconstruct, first=nn.Linear(16, 16), rest=nn.Linear(16, 16))
    x = torch.rand(8, 16)
    with patrickstar.manage(model, adamw(model), device="emulated", device_memory="1MiB", precision="fp32") as session:
        model(x).backward()
        session.optimizer.step()
        (known,) = session._parts.stretches.known.kinds.values()
        assert known.offline == known.measured


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "lstm" else pytest.mark.campaign) for name in [*CASES, *ARCHITECTURES]],
)
def test_a_forecast_is_the_same_whatever_was_traced_before(name: str) -> None:
    """torch keeps results of fake operations, and gives copies of them from then on."""
    FakeTensorMode.cache_clear()
    first = forecasts(name)
    assert forecasts(name) == first


def test_no_more_than_three_models_have_no_forecast() -> None:
    assert len(NO_FORECAST) <= 3
    assert not CASES.keys() & ARCHITECTURES.keys()
    assert NO_FORECAST.keys() | LARGER_FORECAST.keys() <= CASES.keys() | ARCHITECTURES.keys()
