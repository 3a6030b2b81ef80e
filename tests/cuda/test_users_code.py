"""What users do beside a step on a device: torch's own clipping, several threads, streams of their own used as they must not be."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.cuda.schedules import FEW_SCHEDULES, Accelerator
from tests.cuda.twins import TIGHT, batch, twins


@pytest.mark.parametrize("accelerator", FEW_SCHEDULES, indirect=True, ids=str)
def test_torchs_own_clipping_goes_through_gradients_one_by_one(accelerator: Accelerator) -> None:
    """`foreach=False` is its oracle: gradients that lie in chunks are no plain tensors of one device and type."""
    with twins() as pair:
        for number in range(3):
            norms = []
            for model, optimizer, foreach in (
                (pair.plain, pair.plain_optimizer, False),
                (pair.model, pair.session.optimizer, None),
            ):
                model(batch(number)).square().mean().backward()
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach))
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*norms)
        pair.expect_same()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_master_that_is_written_comes_back_whole(precision: str, accelerator: Accelerator) -> None:
    """Where the device holds everything, both parts of a master go up to it, and come down again."""
    with twins(precision=precision, device_memory=64 * TIGHT) as pair:
        pair.session.scaler.scale(pair.model(batch()).float().square().mean()).backward()
        pair.session.scaler.step(pair.session.optimizer)
        generator = torch.Generator("cpu").manual_seed(1)
        value = torch.randn(pair.plain[0].weight.shape, generator=generator, device="cpu") * 1e-3
        pair.session.write("0.weight", value)
        assert torch.equal(pair.session.state_dict()["0.weight"].cpu(), value)
        assert torch.equal(pair.model[0].weight.detach().cpu(), narrowed(value, precision))


def narrowed(value: torch.Tensor, precision: str) -> torch.Tensor:
    """Masters as weights: bf16 rounds ties away from zero, of which a random number has none."""
    return value.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision])


@pytest.mark.parametrize("own_streams", [False, True])
@pytest.mark.parametrize("accelerator", FEW_SCHEDULES, indirect=True, ids=str)
def test_threads_evaluate_at_once(own_streams: bool, accelerator: Accelerator) -> None:
    with twins() as pair:
        pair.train(1)
        with torch.no_grad():
            want = [pair.plain(batch(number)).cpu() for number in range(4)]
        found: dict[int, torch.Tensor] = {}
        begin = threading.Barrier(len(want))

        def evaluate(number: int) -> None:
            stream = torch.Stream(device="cuda") if own_streams else torch.accelerator.current_stream()
            with stream, torch.no_grad():
                inputs = batch(number)
                begin.wait()
                found[number] = pair.model(inputs).cpu()

        threads = [threading.Thread(target=evaluate, args=(number,)) for number in range(len(want))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(found[number], expected) for number, expected in enumerate(want))
        pair.train(2, first=1)
        pair.expect_same()


def test_a_tensor_over_a_slot_that_another_stream_writes_without_waiting_is_reported(accelerator: Accelerator) -> None:
    """What plain PyTorch leaves to the user is left to the user: nobody can wait for a stream that he does not know of."""
    accelerator.configure(0.0)
    with twins() as pair:
        pair.train(1)
        held = pair.model[0].weight.detach()  # ready for the stream that takes it
        with torch.Stream(device="cuda"):
            held.mul_(2)
        pair.model(batch(1)).sum().item()
        assert accelerator.races()
        del held
