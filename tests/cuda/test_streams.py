"""Streams: whoever uses a slot, and wherever, comes after what brings its bytes and before what takes its place."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patrickstar import Options
from patrickstar.core.machine import Tier
from patrickstar.errors import DeviceError
from patrickstar.plan.update_choice import UpdateChoice
from tests.composed import Composed
from tests.cuda.schedules import FEW_SCHEDULES, Accelerator, under
from tests.cuda.twins import CHUNK, TIGHT, WIDTH, batch, mlp, step, twins

accelerator = under(FEW_SCHEDULES)


WAYS: dict[str, dict[str, Any]] = {
    "deferred": {},
    "in_backward": {"step": "in_backward"},
    "clipped": {"max_grad_norm": 1e9},
    "updated on the device": {"choice": UpdateChoice(tier=lambda chunk: Tier.DEVICE)},
}


@pytest.mark.parametrize("way", WAYS)
def test_training_in_less_memory_has_the_bits_of_plain_pytorch(way: str, accelerator: Accelerator) -> None:
    before = accelerator.driver_bytes()
    with twins(**WAYS[way]) as pair:
        pair.train(4)
        pair.expect_same()
        moved = pair.session.stats().moved
        assert moved["H>D"] > 0
        assert moved["D>H"] > 0
    assert accelerator.driver_bytes() == before


def test_a_forward_on_a_stream_of_the_users_waits_and_is_waited_for(accelerator: Accelerator) -> None:
    side = torch.cuda.Stream()

    def on_the_side(model: nn.Module, inputs: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss: Tensor = model(inputs).square().mean()
        inputs.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        return loss

    with twins() as pair:
        # Plain PyTorch's gradients are of the side stream's memory, and the optimizer has used them on the other.
        pair.train(3, loss_of=on_the_side, before_zero=lambda: side.wait_stream(torch.cuda.current_stream()))
        pair.train(1, first=3)
        pair.expect_same()


def on_streams(side: Callable[[], Any] = torch.cuda.Stream) -> nn.Module:
    """Its layers run on this stream and the current one in turn, and each weight on both."""

    def run(model: Any, x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        for layer in model.layers:
            model.side.wait_stream(main)
            with torch.cuda.stream(model.side):
                beside = layer(x).tanh()
            x.record_stream(model.side)
            here = layer(x).tanh()
            main.wait_stream(model.side)
            beside.record_stream(main)
            x = here + beside
        return x

    torch.manual_seed(0)
    return Composed(run, layers=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5)), side=side())


PRECISIONS = [
    pytest.param({"precision": precision, "options": Options(chunk_size=CHUNK, poison=True, compute=compute)}, id=name)
    for name, precision, compute in (
        ("fp32", "fp32", None),
        ("bf16", "bf16", "bf16"),
        ("bf16 in fp32", "bf16", "fp32"),
        ("fp16", "fp16", "fp16"),
        ("fp16 in fp32", "fp16", "fp32"),
    )
]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_that_two_streams_use_have_the_same_bits_in_all_precisions(
    precision: dict[str, Any], accelerator: Accelerator
) -> None:
    def train(side: Callable[[], Any]) -> dict[str, Tensor]:
        with twins(partial(on_streams, side), device_memory=2 * TIGHT, **precision) as pair:
            session = pair.session
            for number in range(3):
                with torch.no_grad():
                    pair.model(batch(number))
                step(pair.model, session, batch(number))
            return {name: value.cpu() for name, value in session.state_dict().items()}

    beside = train(torch.cuda.Stream)
    for name, value in train(torch.cuda.current_stream).items():
        assert torch.equal(value, beside[name]), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_view_of_a_weight_from_another_stream_is_ready(precision: dict[str, Any], accelerator: Accelerator) -> None:
    """A view takes no kernel in plain PyTorch, so that nobody has to wait for the stream on which it is made."""
    side = torch.cuda.Stream()
    with twins(**precision) as pair, torch.no_grad():
        expected = pair.model(batch()).cpu()
        with torch.cuda.stream(side):
            view = pair.model[0].weight.t()
        assert torch.equal(pair.model(batch()).cpu(), expected)
        inputs = batch().to(view.dtype)
        product = inputs @ view
        del view
        with torch.cuda.stream(side):
            torch.empty(CHUNK, device="cuda").fill_(float("nan"))
        assert torch.equal(product.cpu(), (inputs @ pair.model[0].weight.t()).cpu())


def test_a_weight_that_two_streams_use_is_ready_on_both(accelerator: Accelerator) -> None:
    with twins(on_streams) as pair:
        with torch.no_grad():
            for number in range(3):
                assert torch.equal(pair.model(batch(number)), pair.plain(batch(number)))
        pair.expect_same()


def test_a_weight_may_be_used_from_another_thread(accelerator: Accelerator) -> None:
    with twins() as pair:
        pair.train(2)
        wrong = list[bool]()

        def use() -> None:
            with torch.no_grad():
                wrong.append(not torch.equal(pair.model(batch(7)), pair.plain(batch(7))))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert wrong == [False]
        pair.train(1, first=2)
        pair.expect_same()


def test_gradients_are_read_and_changed_on_the_device(accelerator: Accelerator) -> None:
    with twins() as pair:
        for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.model, pair.session.optimizer)):
            model(batch()).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.device.type == "cuda"
                parameter.grad.mul_(0.5)
            optimizer.step()
        pair.expect_same()


def test_a_failure_of_the_device_is_told_and_closing_does_not_hang(accelerator: Accelerator) -> None:
    with pytest.raises((DeviceError, RuntimeError), match="illegal memory access"), twins() as pair:
        pair.train(1)
        accelerator.fail("copy_", after=3)
        pair.train(3, first=1)
        torch.cuda.synchronize()
    accelerator.finish()


@pytest.mark.parametrize("chunks", [0, 7])
def test_where_no_more_memory_can_be_pinned_the_bits_are_the_same(
    chunks: int, accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()
    accelerator.configure(0.3, 3, most_pinned=accelerator.pinned_bytes() + chunks * 4 * CHUNK)
    with twins() as pair:
        pair.train(3)
        pair.expect_same()
    assert any("pins no more than" in record.getMessage() for record in caplog.records)


def test_pinned_memory_is_of_the_size_that_was_asked_for(accelerator: Accelerator) -> None:
    gc.collect()
    before = accelerator.pinned_bytes()
    with twins() as pair:
        pair.train(2)
        host = pair.session.stats().peak["host"]
        assert 0 < accelerator.pinned_bytes() - before <= 1.02 * host
    assert accelerator.pinned_bytes() == before


def test_a_session_that_is_closed_waits_for_what_uses_its_slots(accelerator: Accelerator) -> None:
    with twins() as pair:
        pair.train(1)
        with torch.no_grad():
            pair.model(batch())
        pair.session.close(keep_weights=False)


def test_weights_stay_the_models_after_close(accelerator: Accelerator) -> None:
    with twins(mlp, device_memory=TIGHT) as pair:
        pair.train(2)
    for ours, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        assert ours.device.type == "cpu"
        assert torch.equal(ours.detach(), plain.detach().cpu())
